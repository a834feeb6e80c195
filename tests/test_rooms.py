"""The tests stand in the rooms of what they test."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "keel"
ACROSS = {"examples", "metamorphic", "scripts"}  # they test no one room


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
