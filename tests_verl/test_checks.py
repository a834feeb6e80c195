"""Checks on verl's own batches, and on a sampler beside a policy."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto

from conftest import nested
from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.sync import Sampler
from keel.integrations.verl.checks import SyncCheck, traces
from keel.lab.traces import Trace, check_depth
from keel.rollout.engine import StaleWeights

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[1]


def batch(gap: float) -> DataProto:
    """Two completions behind left-padded prompts, one with a tool's answer in it; deep tokens are off by `gap`."""
    attention = torch.ones(2, 8 + 300, dtype=torch.int64)
    attention[1, :3] = 0
    attention[0, -10:] = 0
    mask = attention[:, 8:].clone()
    mask[0, 5:9] = 0
    old = torch.full((2, 300), -1.0)
    noise = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    sampler = old + torch.where(torch.arange(300) > 120, gap, 1e-4) * noise
    ids = torch.arange(308).repeat(2, 1)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :8],
            "responses": ids[:, 8:],
            "attention_mask": attention,
            "response_mask": mask,
            "old_log_probs": old,
            "rollout_log_probs": sampler,
        }
    )


def test_traces_of_a_batch_and_the_gap_by_depth():
    first, second = traces(batch(0.0), step=3)
    assert first.prompt_ids == tuple(range(8))
    assert second.prompt_ids == tuple(range(3, 8))
    assert first.completion_ids == tuple(range(8, 298))
    assert [first.action[at] for at in (4, 5, 8, 9)] == [True, False, False, True]
    assert (first.step, len(second.logp)) == (3, 300)
    assert check_depth(2 * traces(batch(0.0))).finding is None
    assert check_depth(2 * traces(batch(0.3))).finding.code == "sampler/depth"


def test_rows_of_the_transfer_queue():
    """verl's default trainer keeps rows without padding; before they are scored they have no old_log_probs."""
    columns = {
        "prompts": [[5], [6, 7]],
        "responses": [[1, 2, 3], [4]],
        "response_mask": [[1, 0, 1], [1]],
        "rollout_log_probs": [[-0.5, 0.0, -1.5], [-2.0]],
    }
    made = {name: nested([torch.tensor(row) for row in values]) for name, values in columns.items()}
    first, second = traces(TensorDict(made, 2), step=2)
    assert first == Trace((5,), (1, 2, 3), (True, False, True), (-0.5, 0.0, -1.5), step=2)
    assert (second.prompt_ids, second.completion_ids, second.sample_logp) == ((6, 7), (4,), (-2.0,))
    del made["prompts"]
    with pytest.raises(KeelError, match="prompts"):
        traces(TensorDict(made, 2))


def fused():
    """The tests' layout of vLLM, which lies beside those of TRL."""
    spec = importlib.util.spec_from_file_location("fused", ROOT / "tests" / "integrations" / "fused.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sync_that_is_omitted_and_one_that_is_not():
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    policy, layout = LlamaForCausalLM(config), fused()
    runner = SimpleNamespace(get_model=lambda: runner.model)
    runner.model = layout.Fused(policy, torch.bfloat16)
    worker = SimpleNamespace(model_runner=runner)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    check = SyncCheck(policy, Sampler.colocated(llm))
    check.updated(0)
    assert not check.check(0).wrong
    with torch.no_grad():
        policy.model.layers[1].mlp.up_proj.weight.add_(1)
    check.updated(1)
    with pytest.raises(StaleWeights, match=r"1 of 21 tensors.*mlp.up_proj"):
        check.check(1)
    runner.model = layout.Fused(policy, torch.bfloat16)
    assert not check.check(1).wrong
    with pytest.raises(KeelError, match="at step 7"):
        check.check(7)


def test_an_unknown_version_is_one_line(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "9.9.0")
    with pytest.raises(KeelError, match=r"verl 9\.9\.0") as error:
        traces(batch(0.0))
    assert "\n" not in str(error.value)
    assert "keel.integrations.verl.checks" in sys.modules
