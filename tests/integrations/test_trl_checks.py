"""Callbacks on GRPOTrainer with a sampler of its own weights: each fault of a sync is found, sound runs are silent."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

import keel.integrations.trl
from integrations.fused import FusedGeneration, with_sampler
from integrations.small_trl import build, keel_trainer, lines, lora
from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.trl import DrawnCheck, SyncCheck, TraceRecorder
from keel.lab.traces import check_depth, read_traces
from keel.rollout.engine import StaleWeights

pytestmark = pytest.mark.peers
FAST = {"beta": 0.0, "learning_rate": 0.1}


def trainer(out, dtype=torch.float32, cls=FusedGeneration, **more):
    return with_sampler(build(GRPOTrainer, out, **{**FAST, **more}), dtype, cls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_sampler_that_is_synced_is_silent(tmp_path, dtype, adapter):
    """Fused matrices, padded vocabularies, another type and a merged adapter are seen through."""
    own = trainer(tmp_path, dtype, keel={"peft_config": lora()} if adapter else {})
    own.add_callback(check := SyncCheck(own))
    own.train()
    assert own.vllm_generation.syncs == 4
    assert [result.step for result in check.results] == [0, 1, 2, 3]
    assert all(not result.wrong and result.compared == 21 for result in check.results)
    assert own.state.log_history[0]["sync/wrong_tensors"] == 0


class Never(FusedGeneration):
    def skips(self, name):
        return True


class OneLate(FusedGeneration):
    """The values' projection of one layer is taken over at the first two syncs alone."""

    def skips(self, name):
        return "layers.1.self_attn.v_proj" in name and self.syncs > 2


def test_a_sync_that_is_omitted_is_named_with_the_step_that_the_weights_are_of(tmp_path):
    own = trainer(tmp_path, cls=Never)
    own.add_callback(check := SyncCheck(own))
    with pytest.raises(StaleWeights, match=r"sampler/stale: .*since step 1.*of step 0"):
        own.train()
    assert check.results[-1].weights_of == 0
    assert len(check.results[-1].wrong) > 15


def test_a_partial_sync_names_the_tensor_and_since_when(tmp_path):
    own = trainer(tmp_path, cls=OneLate)
    own.add_callback(check := SyncCheck(own, on_mismatch="warn"))
    own.train()
    assert [result.wrong for result in check.results[:2]] == [(), ()]
    assert {result.wrong for result in check.results[2:]} == {("model.layers.1.self_attn.v_proj.weight",)}
    assert [result.sound_until for result in check.results[2:]] == [1, 1]
    assert [result.weights_of for result in check.results[2:]] == [1, 1]


class BaseAlone(FusedGeneration):
    """An adapter that never reaches the sampler."""

    def _take(self, takes):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with model.disable_adapter():
            merge, model.merge_adapter = model.merge_adapter, lambda: None
            unmerge, model.unmerge_adapter = model.unmerge_adapter, lambda: None
            super()._take(takes)
            model.merge_adapter, model.unmerge_adapter = merge, unmerge


def test_an_adapter_that_never_arrives(tmp_path):
    own = trainer(tmp_path, cls=BaseAlone, keel={"peft_config": lora()}, learning_rate=1.0)
    own.add_callback(check := SyncCheck(own, on_mismatch="warn"))
    own.train()
    assert not check.results[0].wrong  # an adapter begins with no effect
    late = [name for result in check.results[2:] for name in result.wrong]
    assert set(late) == {f"model.layers.{n}.self_attn.{m}_proj.weight" for n in (0, 1) for m in "qv"}


def test_a_second_sync_of_a_step_is_compared_too(tmp_path):
    """As after a sleep of vLLM, or once the best checkpoint has been loaded."""
    own = trainer(tmp_path, max_steps=1)
    own.add_callback(check := SyncCheck(own, on_mismatch="warn"))
    own.train()
    own.vllm_generation.sync_weights()
    own.vllm_generation.llm.generate([[1, 2]])
    assert [(result.step, len(result.wrong)) for result in check.results] == [(0, 0), (1, 0)]
    with torch.no_grad():
        own.model.model.norm.weight.add_(1)
    own.vllm_generation.sync_weights()
    own.vllm_generation.runner.model.get_submodule("model.norm").weight.data.zero_()
    own.vllm_generation.llm.generate([[1, 2]])
    assert check.results[-1].wrong == ("model.norm.weight",)


def test_weights_that_change_after_the_last_sync(tmp_path):
    own = trainer(tmp_path, max_steps=1)
    check = SyncCheck(own, on_mismatch="warn")
    own.train()
    own.vllm_generation.sync_weights()
    with torch.no_grad():  # load_best_model_at_end
        own.model.model.norm.weight.add_(1)
    check.on_train_end(None, own.state, None)
    own.vllm_generation.llm.generate([[1, 2]])
    assert check.results[-1].wrong == ("model.norm.weight",)


def test_a_process_that_asks_no_server_takes_part_in_gathering(tmp_path, monkeypatch):
    own = trainer(tmp_path, max_steps=1)
    own.vllm_generation.mode = "server"
    monkeypatch.setattr(type(own.accelerator), "is_main_process", False)
    own.add_callback(check := SyncCheck(own))
    own.train()
    assert check.results == []


def test_a_check_that_saw_no_generation_says_so(tmp_path, caplog, monkeypatch):
    own = trainer(tmp_path)
    check = SyncCheck(own)
    monkeypatch.setattr(logging.getLogger("keel"), "propagate", True)
    check.on_train_end(None, own.state, None)
    assert "compared nothing" in caplog.text


def test_shards_and_unknown_layouts_are_refused_by_name(tmp_path):
    own = trainer(tmp_path)
    own.vllm_generation.tensor_parallel_size = 2
    with pytest.raises(KeelError, match="vllm_tensor_parallel_size=2"):
        SyncCheck(own)
    own.vllm_generation.tensor_parallel_size = 1
    own.vllm_generation.runner.model.get_submodule("model.layers.0.mlp.gate_up_proj").tp_size = 2
    with pytest.raises(KeelError, match=r"shard of model\.layers\.0\.mlp\.gate_up_proj"):
        SyncCheck(own)
    own.vllm_generation.llm = SimpleNamespace(llm_engine=SimpleNamespace())
    with pytest.raises(KeelError, match=r"pip install 'vllm==") as error:
        SyncCheck(own)
    assert "\n" not in str(error.value)
    own.use_vllm = False
    with pytest.raises(KeelError, match="use_vllm=True"):
        SyncCheck(own)


@pytest.mark.parametrize("cls", [FusedGeneration, Never])
def test_drawn_tokens_name_the_weights_that_drew_them(tmp_path, cls):
    """Without a look at the sampler's weights, by the tokens alone."""
    more = {"max_steps": 8, "per_device_train_batch_size": 32, "num_generations": 8, "learning_rate": 1.0}
    own = trainer(tmp_path, cls=cls, max_completion_length=16, **more)
    own.add_callback(check := DrawnCheck(own, on_mismatch="warn"))
    start = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    own.train()
    assert any((own.model.state_dict()[name] - tensor).abs().max() > 0.01 for name, tensor in start.items())
    stale = [report for report in check.reports if report.stale]
    assert bool(stale) == (cls is Never)
    assert all(report.likeliest != "the policy" for report in stale)


def test_drawn_check_leaves_the_weights_alone(tmp_path):
    plain, checked = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    checked.add_callback(check := DrawnCheck(checked, on_mismatch="warn"))
    for own in (plain, checked):
        torch.manual_seed(3)
        own.train()
    assert len(check.reports) == 3
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, checked.model.state_dict()[name]), name


def test_drawn_check_sees_truncated_completions(tmp_path):
    """TRL masks them; without them, weights that truncate less would seem likelier."""
    own = trainer(tmp_path, mask_truncated_completions=True, max_completion_length=3, max_steps=2)
    own.add_callback(check := DrawnCheck(own, on_mismatch="warn"))
    seen = []
    score = check._score
    check._score = lambda drawn: seen.append((drawn, score(drawn))) or seen[-1][1]
    own.add_callback(TraceRecorder(own, tmp_path / "traces.jsonl"))
    own.train()
    drawn, logp = seen[0]
    masked = [row for row in range(8) if not drawn.inputs["completion_mask"][row].any()]
    assert masked
    assert all(logp[row] < -0.1 for row in masked)
    assert all(row.completion_ids for row in read_traces(tmp_path / "traces.jsonl"))


@pytest.mark.parametrize(
    "option", [{"top_k": 5}, {"repetition_penalty": 1.1}, {"generation_kwargs": {"typical_p": 0.9}}]
)
def test_options_that_change_what_is_drawn_are_refused(tmp_path, option):
    with pytest.raises(KeelError, match=next(iter(option))):
        DrawnCheck(build(GRPOTrainer, tmp_path, **FAST, **option))


def test_traces_are_the_batch(tmp_path):
    own = trainer(tmp_path)
    own.add_callback(TraceRecorder(own, tmp_path / "traces.jsonl"))
    own.train()
    rows = read_traces(tmp_path / "traces.jsonl")
    assert len(rows) == 4 * 8
    assert [row.step for row in rows[::8]] == [0, 1, 2, 3]
    assert all(len(row.prompt_ids) == 2 and 1 <= len(row.completion_ids) <= 5 for row in rows)
    gap = max(abs(x - y) for row in rows for x, y in zip(row.sample_logp, row.logp, strict=True))
    assert gap < 1e-4
    assert check_depth(rows).finding is None


def test_the_checks_refuse_an_unknown_trl_in_one_line(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "9.9.0")
    with pytest.raises(KeelError, match=r"TRL 9\.9\.0") as error:
        importlib.reload(keel.integrations.trl)
    assert "\n" not in str(error.value)


def test_keels_trainer_logs_the_gap_by_depth(tmp_path):
    """The numbers of check_depth on the recorded traces; the completions cross token 64."""
    own = with_sampler(keel_trainer(tmp_path, max_steps=1), torch.bfloat16)
    own.train_dataset = Dataset.from_dict({"prompt": [" ".join([f"w{row}"] * 62) for row in range(16)]})
    own.add_callback(TraceRecorder(own, tmp_path / "traces.jsonl"))
    own.train()
    (line,) = lines(tmp_path)
    bins = check_depth(read_traces(tmp_path / "traces.jsonl")).depth_bins
    assert list(bins) == [0, 64]
    for start, (mean, se) in bins.items():
        assert line[f"kl/sampler_policy/depth_{start}/mean"] == pytest.approx(mean, rel=1e-3)
        assert line[f"kl/sampler_policy/depth_{start}/se"] == pytest.approx(se, rel=1e-3)
