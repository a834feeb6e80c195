"""Passes sized by a real GPU's memory: what small ones foretell is what the allocator gives out for a large one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.models import load
from keel.models.fingerprint import fingerprint
from keel.models.fuse import fuse_modules
from keel.models.logprobs import hidden_states
from keel.models.memory import free_bytes, measure_pass_bytes
from keel.models.pack import pack
from keel.run.build import build_policy, build_run
from keel.trainer import memory
from keel.trainer.batch import score_reference
from keel.trainer.state import State
from keel.trainer.step import train_step
from trainer.small import small_config

pytestmark = pytest.mark.gpu

SIXTEEN_GROUPS = ("model.device=cuda", "rollout.prompts_per_step=16", "rollout.num_generations=16")


def group(prompt: int, *lengths: int) -> Group:
    completions = tuple(Completion((1,) * n, (True,) * n, (0.0,) * n, (0.0,) * n, "", "length") for n in lengths)
    return Group(Problem("", ""), (1,) * prompt, completions)


def in_bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("autocast", [nullcontext, in_bfloat16])
def test_small_passes_foretell_the_allocators_peak(autocast: Any) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20_000, attn_implementation="sdpa", **shape)).eval().cuda()
    fuse_modules(model)
    counted = measure_pass_bytes(model, autocast, shared_prefix=True)
    assert all(p.grad is None for p in model.parameters())
    packed = pack([group(150, 95, 120, 80, 200), group(100, 150, 60, 33, 75)] * 12, 0).to("cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with autocast():
            hidden = hidden_states(model, packed)
        hidden.sum().backward()
        del hidden
    measured = torch.cuda.max_memory_allocated() - held
    assert counted.fixed + counted.per_token * packed.input_ids.numel() == pytest.approx(measured, rel=0.2)


def test_a_run_with_little_free_memory_makes_smaller_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(*SIXTEEN_GROUPS)
    loaded = build_policy(config)
    roomy = build_run(config, loaded).run
    assert roomy.microbatch_tokens == 8192
    assert free_bytes(loaded.device) > 0
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    built = build_run(config, loaded)
    assert built.run.microbatch_tokens == 256
    assert any("optim.microbatch_tokens is 8192, and 256 are used" in note for note in built.notes)
    step = train_step(built.run, State(kl=built.run.controller.init()))
    assert len(step.batch.micros) > 1
    assert step.batch.largest_pass <= 256


LEFT_OUT = ("nothing", "CUDA graphs", "fused modules", "fused attention", "several passes")


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_policy_and_reference_are_equal_bit_for_bit_in_fp32(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the size of the run above; each case leaves out one part, so that a difference can be traced to its part."""
    if left_out == "fused modules":
        monkeypatch.setattr(load, "fuse_modules", lambda model: 0)
    graphs = f"rollout.cuda_graphs={str(left_out != 'CUDA graphs').lower()}"
    config = small_config(*SIXTEEN_GROUPS, graphs, "guards.on_step0_kl=warn")
    loaded = build_policy(config)
    run = build_run(config, loaded).run
    run.fitting_tokens = None if left_out == "several passes" else 256
    before = fingerprint(loaded.model)
    with sdpa_kernel(SDPBackend.MATH) if left_out == "fused attention" else nullcontext():
        batch = train_step(run, State(kl=run.controller.init())).batch
        again = score_reference(batch, run).rows.ref_logp
    assert (len(batch.micros) == 1) == (left_out == "several passes")
    assert run.reference is not None
    assert run.reference.fingerprint() == before
    assert torch.equal(batch.rows.ref_logp, again)
    assert torch.equal(batch.rows.ref_logp, batch.rows.old_logp)


def test_memory_that_runs_out_is_one_line() -> None:
    config = small_config("model.device=cuda")
    run = build_run(config, build_policy(config)).run
    hungry = run.collect

    def collect(*args: Any, **options: Any) -> Any:
        torch.empty(2**50, device="cuda")
        return hungry(*args, **options)

    run.collect = collect  # type: ignore[assignment]
    with pytest.raises(KeelError, match=r"out of memory in the rollout of step 1 \(CUDA out of memory\. Tried"):
        train_step(run, State(kl=run.controller.init()))
