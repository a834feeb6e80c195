"""Recipes are what a user could write: of Keel they import what the reference of the Python API lists, and no more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from circles import imported, modules  # noqa: E402
from pages.api import PAGES, lazy_attributes  # noqa: E402

RECIPES = {name: path for name, path in modules(ROOT / "src" / "keel").items() if name.startswith("keel.recipes.")}
PUBLIC = {
    f"{path}.{name}" for _, listed in PAGES.values() for path, names in map(lazy_attributes, listed) for name in names
}


@pytest.mark.parametrize("module", RECIPES)
def test_a_recipe_imports_public_names_and_its_own(module: str) -> None:
    own = ".".join(module.split(".")[:3])
    names = [name for name in imported(module, RECIPES[module]) if name.split(".")[0] == "keel"]
    assert [name for name in names if name not in PUBLIC and not f"{name}.".startswith(f"{own}.")] == []


def test_a_private_name_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("def load():\n    from keel.envs.calls import HungCalls\n    return HungCalls\n")
    assert list(imported("keel.recipes.chess.task", path)) == ["keel.envs.calls.HungCalls"]
    assert "keel.envs.calls.HungCalls" not in PUBLIC
    assert "keel.envs.Task" in PUBLIC
