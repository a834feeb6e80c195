"""The tests stand in the rooms of what they test."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "keel"
ACROSS = {"docs", "examples", "metamorphic", "scripts"}  # they test no one room


def packages(folder: Path) -> set[str]:
    return {init.parent.name for init in folder.glob("*/__init__.py")}


def folders(folder: Path) -> set[str]:
    return {entry.relative_to(folder).parts[0] for entry in folder.rglob("*/*.py")}


@pytest.mark.parametrize("room", ["", "lab"])
def test_every_room_has_its_folder_and_every_folder_its_room(room):
    assert folders(TESTS / room) - ACROSS == packages(SOURCE / room)


def test_every_folder_holds_tests():
    for room in (*packages(SOURCE), *(f"lab/{part}" for part in packages(SOURCE / "lab"))):
        assert any((TESTS / room).rglob("test_*.py")), room


def test_the_map_names_every_room_and_only_files_that_exist():
    text = (TESTS.parent / "docs/architecture.md").read_text()
    rooms = text.partition("## The path of a step")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*?) ?\|$", rooms, re.MULTILINE))
    assert packages(SOURCE) <= set(rows)
    starts = [(room, name) for room, cell in rows.items() for name in re.findall(r"`([\w/]+\.py)`", cell)]
    assert len(starts) >= len(packages(SOURCE)) - 1
    missing = [f"{room}/{name}" for room, name in starts if not (SOURCE / room / name).is_file()]
    paths = re.findall(r"`(\w+(?:/\w+)+\.py)`", text)
    assert missing + [path for path in paths if not any((top / path).is_file() for top in (SOURCE, TESTS.parent))] == []
