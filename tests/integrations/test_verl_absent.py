"""Where verl is not installed: one line, and the entry point by which verl finds the plugin."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.versions import VERL

ROOT = Path(__file__).parents[2]


def test_without_verl_the_plugin_says_what_it_needs(monkeypatch):
    def absent(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(KeelError, match=r"needs verl: pip install 'verl==0\.9\.\*' TransferQueue"):
        VERL.check_version()


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["verl.plugins"] == {"keel": "keel.integrations.verl.plugin"}
    package = import_module("keel.integrations.verl")
    assert (Path(package.__path__[0]) / "plugin.py").is_file()


def test_the_environment_of_the_tests_has_a_tested_version():
    pinned = (ROOT / "constraints-verl.txt").read_text(encoding="utf-8")
    assert any(f"verl=={minor}." in pinned for minor in VERL.tested)
