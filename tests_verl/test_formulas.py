"""`keel verify --peers` on the installed verl and TRL, and their page in the docs."""

import importlib.util
from pathlib import Path

import pytest

from keel.integrations.formulas import peers

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_installed_trainers_give():
    spec = importlib.util.spec_from_file_location("peer_formulas", ROOT / "scripts" / "peer_formulas.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "peer-formulas.md").read_text()
    found = [peer for peer in peers() if peer.name in script.PAGED]
    assert [peer.name for peer in found if peer.rows] == ["TRL", "verl"]
    assert all(script.section(peer) in page for peer in found), "make peers"
    assert all(f"{peer.name} {peer.version}" in page for peer in found)


def test_defaults_of_verl():
    rows = next(peer for peer in peers() if peer.name == "verl").rows
    found = {(row.name, row.options.partition(":")[0]): row for row in rows if row.default}
    assert found["KL in the loss", "use_kl_loss=True, kl_loss_type=low_var_kl"].gradient == "ref||policy"
    assert found["KL in the reward", "use_kl_in_reward=True, kl_penalty=kl"].gradient == "policy||ref"
    assert found["distillation", "defaults of the YAML"].gradient == "ref||policy"
    assert found["distillation", "defaults of the dataclass"].gradient == "policy||ref - ref||policy"
    assert not any(row.gradient == "zero" for row in found.values())
