"""Trials of fast paths are judged by the rounding of the path they replace; broken variants are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keel.base.errors import KeelError
from keel.models import fuse, precision, prefix_attention
from keel.models.precision import Errors, in_dtype, judge, rounds
from keel.models.probe import probe_packing
from keel.rollout.native import choose, decode

TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}
SHAPES = [(8, 1), (9, 3), (14, 2), (16, 8), (28, 4), (32, 8)]  # heads and KV heads that people use


def llama(heads: int = 8, kv_heads: int = 2, layers: int = 6, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(heads)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        intermediate_size=32 * heads,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(4.0)  # at initialisation attention is nearly flat and hides every bug
    return model.to(dtype).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits
    return found


def test_fp32_is_that_of_a_model_that_was_widened_whole() -> None:
    model = llama()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    half = logits_of(model)
    with in_dtype(model, torch.float32):
        widened = logits_of(model)
    assert widened.dtype == torch.float32
    assert torch.equal(logits_of(model), half)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    torch.testing.assert_close(logits_of(model.float()), widened, atol=1e-6, rtol=1e-6)


def test_one_block_is_widened_at_a_time() -> None:
    model, wide = llama(), list[int]()

    def count(*_: Any) -> None:
        wide.append(sum(layer.mlp.up_proj.weight.dtype == torch.float32 for layer in model.model.layers))

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(count)
    with in_dtype(model, torch.float32):
        logits_of(model)
    assert wide == [1] * len(model.model.layers)


def test_autocast_is_off_inside_and_weights_come_back_after_an_error() -> None:
    model = llama(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert rounds(model)
        with in_dtype(model, torch.float32):
            assert not rounds(model)
    assert not rounds(model)
    model = llama()
    model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_dtype(model, torch.float32):
        logits_of(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def draws(make: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, list[int]]:
    seeds: list[int] = []

    def draw(seed: int) -> Errors:
        seeds.append(seed)
        return Errors(*make(torch.Generator().manual_seed(seed)))

    return draw, seeds


def noisy(generator: torch.Generator, size: float = 0.1) -> torch.Tensor:
    return size * torch.randn(14, 256, generator=generator).abs().amax(1)


def figures(fault: str | None) -> tuple[float, ...]:
    assert fault is not None
    return tuple(float(figure) for figure in re.findall(r"\d\.?\d*", fault))


@pytest.mark.parametrize("routed", [False, True])
def test_equal_noise_is_accepted_and_more_noise_refused_with_both_figures(routed: bool) -> None:
    for offset in range(20):
        draw, _ = draws(lambda g, offset=offset: (noisy(g.manual_seed(g.initial_seed() + 100 * offset)), noisy(g)))
        assert judge(draw, routed=routed) is None
    draw, seeds = draws(lambda g: (noisy(g, 0.2), noisy(g)))
    fast, plain = figures(judge(draw, routed=routed))
    assert len(seeds) == precision.DRAWS
    assert 1.5 < fast / plain < 3.0


def test_one_wrong_position_is_refused_with_its_own_figures() -> None:
    bug = torch.ones(40)
    bug[7] = 4.0
    draw, _ = draws(lambda _: (0.3 * bug, 0.3 * torch.ones(40)))
    assert figures(judge(draw)) == (1.2, 0.3)
    assert judge(draw, slack=10.0) is None


def test_what_is_clearly_wrong_is_refused_by_one_draw() -> None:
    draw, seeds = draws(lambda g: (noisy(g, 2.0), noisy(g)))
    assert judge(draw) is not None
    assert len(seeds) == 1


def test_errors_that_move_are_a_bug_but_where_a_router_sends_tokens_to_experts() -> None:
    def flips(g: torch.Generator) -> torch.Tensor:
        return noisy(g) + (torch.rand(14, generator=g) < 0.2) * 5.0

    draw, seeds = draws(lambda g: (flips(g), noisy(g)))
    assert judge(draw, routed=True) is None
    assert len(seeds) > 1
    assert judge(draw) is not None
    bug = torch.zeros(14)
    bug[3] = 5.0
    for routed in (False, True):
        assert judge(draws(lambda g: (noisy(g) + bug, noisy(g)))[0], routed=routed) is not None
    assert precision.has_experts(MixtralForCausalLM(MixtralConfig(**TINY)))
    assert not precision.has_experts(llama())


def test_an_exact_plain_path_allows_rounding_alone() -> None:
    zeros = torch.zeros(14)
    assert judge(draws(lambda g: (noisy(g, 1e-5), zeros))[0]) is None
    draw, seeds = draws(lambda g: (noisy(g, 1e-2), zeros))
    assert judge(draw) is not None
    assert seeds == [0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_are_never_accepted(dtype: torch.dtype) -> None:
    one, wrong = torch.ones(2, 3), torch.full((2, 3), torch.nan)
    for fast, plain in ((wrong, one), (one, wrong), (wrong, wrong), (one / 0, one / 0)):
        assert judge(lambda _, fast=fast, plain=plain: Errors.of(fast, plain, torch.randn(2, 3))) is not None
    model = llama(dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[10:290] = torch.nan
    assert not prefix_attention.try_prefix_attention(model.model)
    assert "not finite" in str(choose.choose_decoder(model).reason)
    with pytest.raises(KeelError, match="not finite"):
        probe_packing(model)


@pytest.mark.slow
def test_a_deep_model_whose_rounding_exceeds_a_fixed_tolerance_is_accepted() -> None:
    """Ten times the usual weights: bf16 moves its logits by half of their spread, whichever path computes them."""
    model = llama(layers=24)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4.0)
    plain = logits_of(model).float()
    with in_dtype(model, torch.float32):
        truth = logits_of(model)
    assert (plain - truth).abs().max() > 0.2 * truth.std()
    assert choose.choose_decoder(model).reason is None
    assert prefix_attention.try_prefix_attention(model.model)


@pytest.mark.slow
def test_attention_that_is_wrong_now_and_then_is_refused() -> None:
    """A race: other cells are wrong at each call."""
    own, generator = prefix_attention.attend_by_group, torch.Generator().manual_seed(0)

    def racing(*arguments: Any, **named: Any) -> torch.Tensor:
        out = own(*arguments, **named)
        wrong = torch.rand(out.shape, generator=generator) < 0.03
        return torch.where(wrong, out.roll(1, 1), out)

    for heads, kv_heads in SHAPES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_attention, "attend_by_group", racing)
            assert not prefix_attention.try_prefix_attention(llama(heads, kv_heads).model)


def test_a_model_that_refuses_fp32_is_judged_by_the_rounding_of_its_dtype() -> None:
    model = llama()

    def half_alone(*arguments: Any, **named: Any) -> Any:
        if arguments[1].dtype == torch.float32:
            raise RuntimeError("this kernel supports fp16 and bf16 alone")
        return sdpa_attention_forward(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", half_alone)
        with pytest.raises(RuntimeError), in_dtype(model, torch.float32):
            logits_of(model)
        assert probe_packing(model).ok
        assert choose.choose_decoder(model).reason is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_come_back_where_memory_ends_while_they_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, calls = llama(), torch.Tensor.to, list[int]()

    def to(self: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if arguments == (torch.float32,):
            calls.append(1)
            if len(calls) == 9:
                raise torch.OutOfMemoryError("no memory")
        return own(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        with pytest.raises(torch.OutOfMemoryError):
            prefix_attention.try_prefix_attention(model.model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits_of(model)


def test_blocks_that_are_lists_and_weights_that_are_shared_are_widened_too() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                for linear in block:
                    x = linear(x)
            return x

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last = nn.Linear(4, 4)
            self.last.weight = self.blocks[1].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    for model in (Nested().bfloat16(), Shared().bfloat16()):
        with in_dtype(model, torch.float32):
            assert model(torch.randn(2, 4)).dtype == torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(*shape, (torch.bfloat16, torch.float16)[i % 2]) for i, shape in enumerate(SHAPES)],
)
def test_right_paths_are_accepted_in_half_precision(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    model = llama(heads, kv_heads, dtype=dtype)
    assert choose.choose_decoder(model).reason is None
    assert probe_packing(model).ok
    assert prefix_attention.try_prefix_attention(model.model)


def by_group(change: Callable[..., dict[str, Any]]) -> Any:
    own = prefix_attention.attend_by_group

    def broken(query: Any, key: Any, value: Any, groups: Any, scale: float, dropout: float = 0.0) -> Any:
        arguments = {"query": query, "key": key, "value": value, "groups": groups, "scale": scale, "dropout": dropout}
        return own(**{**arguments, **change(**arguments)})

    return broken


def no_causal_mask(groups: Any, **_: Any) -> dict[str, Any]:
    return {"groups": [replace(g, mask=None if g.mask is None else torch.ones_like(g.mask)) for g in groups]}


BROKEN = {
    "mask": no_causal_mask,
    "scale": lambda **_: {"scale": 1.0},
    "positions": lambda query, **_: {"query": query.roll(1, 2)},
    "values": lambda value, **_: {"value": value.roll(1, 2)},
}


@pytest.mark.parametrize("bug", BROKEN)
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_broken_attention_is_refused_in_half_precision(bug: str, heads: int, kv_heads: int) -> None:
    model = llama(heads, kv_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_attention, "attend_by_group", by_group(BROKEN[bug]))
        assert not prefix_attention.try_prefix_attention(model.model)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES[1::2])
def test_a_decoder_whose_tokens_are_off_by_one_is_refused(heads: int, kv_heads: int) -> None:
    class Shifted(decode.SharedPrefixDecoder):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().step((tokens + 1) % 300)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "SharedPrefixDecoder", Shifted)
        reason = choose.choose_decoder(llama(heads, kv_heads)).reason
    assert reason is not None
    assert len(re.findall(r"\d\.\d+", reason)) == 2


def test_a_norm_with_another_eps_is_not_fused_in_half_precision() -> None:
    norm = llama(28, 4).model.norm
    assert fuse._matches(norm, fuse._rms_norm)
    right = norm.variance_epsilon

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, right + 0.1)

    assert not fuse._matches(norm, wrong)
