"""The check of import cycles: what it counts. `make lint` runs it on Keel."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from circles import circles, graph  # noqa: E402


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / "house" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for room in (folder / "house", *(p for p in (folder / "house").rglob("*") if p.is_dir())):
        (room / "__init__.py").touch()
    return folder / "house"


@pytest.mark.parametrize(
    "back",
    ["import house.a", "from house import a", "from . import a", "from house.a import x", "from .a import x"],
    ids=str,
)
@pytest.mark.parametrize("where", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"], ids=str)
def test_two_files_that_import_each_other(tmp_path, back, where):
    house = written(tmp_path, a="from house.b import y", b=where.format(back), c="import house.a")
    assert circles(graph(house)) == [["house.a", "house.b"]]


def test_a_package_that_an_import_loads(tmp_path):
    house = written(tmp_path, a="from house.room.part import x", room__part="x = 1", room__other="import house.a")
    assert circles(graph(house)) == []
    (house / "room" / "__init__.py").write_text("from house.room import other")
    assert circles(graph(house)) == [["house.a", "house.room", "house.room.other"]]


def test_a_file_may_use_its_neighbours_in_a_package_that_shows_both(tmp_path):
    house = written(tmp_path, room__one="x = 1", room__two="from house.room.one import x")
    (house / "room" / "__init__.py").write_text("from house.room.one import x\nfrom house.room.two import x as y")
    assert circles(graph(house)) == []


def test_circles_that_share_nothing_are_counted_apart(tmp_path):
    house = written(
        tmp_path, a="import house.b", b="import house.a", c="import house.d", d="import house.e", e="import house.c"
    )
    assert circles(graph(house)) == [["house.c", "house.d", "house.e"], ["house.a", "house.b"]]
