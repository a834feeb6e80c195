"""`keel verify --peers` on the installed TRL, and its page in the docs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keel.cli import app
from keel.integrations import formulas, versions

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peer-formulas.md"


def script():
    spec = importlib.util.spec_from_file_location("peer_formulas", ROOT / "scripts" / "peer_formulas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_installed_trl_gives():
    found = next(peer for peer in formulas.peers() if peer.name == "TRL")
    assert found.rows, found.reason
    assert script().section(found) in PAGE.read_text(), "make peers"
    defaults = {row.name: row.gradient for row in found.rows if row.default}
    assert defaults["GRPOTrainer, KL term of dapo"] == "policy||ref"
    assert defaults["GKDTrainer"] == "jsd"
    plain = next(row for row in found.rows if row.options == "use_bias_correction_kl=False")
    assert (plain.gradient, plain.off_policy) == ("ref||policy", "none")


def test_json_has_every_peer():
    result = CliRunner().invoke(app, ["verify", "--peers", "--json"])
    assert result.exit_code == 0, result.output
    found = {peer["name"]: peer for peer in json.loads(result.stdout)["peers"]}
    assert set(found) == {"TRL", "verl", "OpenRLHF", "AReaL", "tinker-cookbook", "prime-rl"}
    assert found["TRL"]["version"] == "1.16.0"
    assert all(peer["rows"] or peer["reason"] for peer in found.values())


def test_an_unknown_version_is_a_line(monkeypatch):
    """Of TRL, by its number; of one whose functions are called otherwise, by what happened."""
    monkeypatch.setattr(versions, "version", lambda package: "9.9.0")
    monkeypatch.setattr(formulas, "PEERS", (("TRL", "trl", "keel.integrations.trl.formulas:formulas"),))
    for module in [name for name in sys.modules if name.startswith("keel.integrations.trl")]:
        monkeypatch.delitem(sys.modules, module)
    result = CliRunner().invoke(app, ["verify", "--peers"])
    assert "9.9.0" in result.output
    assert "Traceback" not in result.output
    assert result.exit_code != 0
