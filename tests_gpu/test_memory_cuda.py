"""Passes sized by a real GPU's memory: what small ones foretell is what the allocator gives out for a large one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.models.fingerprint import fingerprint
from keel.models.fuse import fuse_modules
from keel.models.memory import free_bytes, measure_pass_bytes
from keel.models.pack import pack
from keel.models.scorer import hidden_states, score_tokens
from keel.run.build import build_policy, build_run
from keel.trainer import memory
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
    assert any("optim.microbatch_tokens is 8192" in note and "256" in note for note in built.notes)
    step = train_step(built.run, State(kl=built.run.controller.init()))
    assert len(step.batch.micros) > 1
    assert step.batch.largest_pass <= 256


def test_policy_and_reference_are_equal_bit_for_bit_in_several_passes_in_fp32() -> None:
    """The last pass has a row of 65 tokens, at which torch's masked attention over one KV head is wrong."""
    config = small_config(*SIXTEEN_GROUPS, "guards.on_step0_kl=warn")
    loaded = build_policy(config)
    run = build_run(config, loaded).run
    run.fitting_tokens = 256
    before = fingerprint(loaded.model)
    batch = train_step(run, State(kl=run.controller.init())).batch
    assert len(batch.micros) > 1
    assert batch.micros[-1].packed.input_ids.shape[1] % 32 == 1
    assert run.reference is not None
    assert run.reference.fingerprint() == before
    assert torch.equal(batch.rows.ref_logp, batch.rows.old_logp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_masked_rows_of_every_length_are_scored_rightly(kv_heads: int, dtype: torch.dtype, shared: bool) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    own = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=kv_heads, **shape)).eval()
    exact, model = own.double(), deepcopy(own).to("cuda", dtype)
    limit = 1e-4 if dtype == torch.float32 else 0.1
    for length in range(20, 140):
        tokens = torch.randint(3, 300, (length + 40,)).tolist()
        group = Group(Problem("", ""), tuple(tokens[:9]), (completion(tokens[9:40]), completion(tokens[40:length])))
        group = replace(group, completions=group.completions[: 1 + (length > 42)])
        packed = pack([group], 0, shared_prefix=shared)
        with torch.no_grad():
            expected = score_tokens(exact, packed).logp
            found = score_tokens(model, packed.to("cuda")).logp.cpu()
        assert float((found - expected).abs().max()) < limit, length


def completion(tokens: list[int]) -> Completion:
    zeros = (0.0,) * len(tokens)
    return Completion(tuple(tokens), (True,) * len(tokens), zeros, zeros, "", "length")


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
