"""`keel verify --peers` on the installed TRL, and its page in the docs."""

import importlib.util
import json
from pathlib import Path

import pytest
from trl.experimental.gkd import GKDTrainer
from typer.testing import CliRunner

from keel.cli import app
from keel.integrations import formulas

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
    assert defaults["GMPOTrainer"] == "ref||policy"
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
    """Of every peer, by its number, before anything of it is imported."""
    monkeypatch.setattr(formulas, "version", lambda package: "9.9.0")
    result = CliRunner().invoke(app, ["verify", "--peers"])
    named = [line for line in result.output.splitlines() if "9.9.0" in line]
    assert [line.partition(" 9.9.0: ")[0] for line in named] == [peer[0] for peer in formulas.PEERS]
    assert "Traceback" not in result.output
    assert result.exit_code != 0


def test_a_function_that_is_called_otherwise_is_a_line(monkeypatch):
    """Of a version that is known, whose term takes other arguments."""
    monkeypatch.setattr(formulas, "PEERS", formulas.PEERS[:1])
    monkeypatch.setattr(GKDTrainer, "generalized_jsd_loss", staticmethod(lambda logits: logits))
    result = CliRunner().invoke(app, ["verify", "--peers"])
    (line,) = [line for line in result.output.splitlines() if "GKDTrainer" in line]
    assert "TRL 1.16.0" in line
    assert "Traceback" not in result.output
    assert result.exit_code != 0
