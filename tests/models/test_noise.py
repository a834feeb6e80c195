"""Trials of fast paths are judged by the rounding of the path they replace; broken variants are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.models import fuse, noise, prefix_attention
from keel.models.noise import Errors, in_fp32, judge, rounds
from keel.models.probe import probe_packing
from keel.rollout.native import choose, decode, weights
from keel.rollout.native.engine import NativeEngine
from rollout import shapes

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
    with in_fp32(model):
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
    with in_fp32(model):
        logits_of(model)
    assert wide == [1] * len(model.model.layers)


def test_autocast_is_off_inside_and_weights_come_back_after_an_error() -> None:
    model = llama(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert rounds(model)
        with in_fp32(model):
            assert not rounds(model)
    assert not rounds(model)
    model = llama()
    model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_fp32(model):
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


def test_equal_noise_is_accepted_and_more_noise_refused_with_both_figures() -> None:
    for offset in range(20):
        draw, _ = draws(lambda g, offset=offset: (noisy(g.manual_seed(g.initial_seed() + 100 * offset)), noisy(g)))
        assert judge(draw) is None
    draw, seeds = draws(lambda g: (noisy(g, 0.2), noisy(g)))
    fault = judge(draw)
    assert fault is not None
    assert len(seeds) == noise.DRAWS
    fast, plain = (float(figure) for figure in re.findall(r"\d\.\d+", fault))
    assert 1.5 < fast / plain < 3.0


def test_what_is_clearly_wrong_is_refused_by_one_draw() -> None:
    draw, seeds = draws(lambda g: (noisy(g, 2.0), noisy(g)))
    assert judge(draw) is not None
    assert len(seeds) == 1


def test_another_expert_in_some_draws_is_noise_and_in_each_draw_a_bug() -> None:
    def flips(g: torch.Generator) -> torch.Tensor:
        return noisy(g) + (torch.rand(14, generator=g) < 0.2) * 5.0

    draw, seeds = draws(lambda g: (flips(g), noisy(g)))
    assert judge(draw) is None
    assert len(seeds) > 1
    bug = torch.zeros(14)
    bug[3] = 5.0
    draw, _ = draws(lambda g: (noisy(g) + bug, noisy(g)))
    assert judge(draw) is not None


def test_an_exact_plain_path_allows_rounding_alone_and_nan_nothing() -> None:
    zeros = torch.zeros(14)
    assert judge(draws(lambda g: (noisy(g, 1e-5), zeros))[0]) is None
    draw, seeds = draws(lambda g: (noisy(g, 1e-2), zeros))
    assert judge(draw) is not None
    assert seeds == [0]
    wrong = Errors.of(torch.full((2, 3), torch.nan), torch.zeros(2, 3), torch.randn(2, 3))
    assert judge(lambda _: wrong) is not None


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_a_decoder_whose_tokens_are_off_by_one_is_refused(heads: int, kv_heads: int) -> None:
    class Shifted(decode.SharedPrefixDecoder):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().step((tokens + 1) % 300)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "SharedPrefixDecoder", Shifted)
        reason = choose.choose_decoder(llama(heads, kv_heads)).reason
    assert reason is not None
    assert len(re.findall(r"\d\.\d+", reason)) == 2


@pytest.mark.parametrize("wrong", [False, True])
def test_merged_adapters_are_judged_by_what_rounding_does_to_unmerged_ones(wrong: bool) -> None:
    policy = get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear"))
    engine = NativeEngine(policy, shapes.tokenizer(), merge=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    with pytest.MonkeyPatch.context() as patch:
        if wrong:  # the factor of half of the layers is lost
            own = weights.merged_weights
            base = dict(policy.get_base_model().named_parameters())
            patch.setattr(
                weights,
                "merged_weights",
                lambda model: (
                    (n, base.get(n.replace(".weight", ".base_layer.weight"), t) if "up_proj" in n else t)
                    for n, t in own(model)
                ),
            )
            with pytest.raises(KeelError, match="cannot be merged"):
                engine.sync(policy)
        else:
            engine.sync(policy)
            assert not engine.is_stale(policy)


def test_a_norm_with_another_eps_is_not_fused_in_half_precision() -> None:
    norm = llama(28, 4).model.norm
    assert fuse._matches(norm, fuse._rms_norm)
    right = norm.variance_epsilon

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, right + 0.1)

    assert not fuse._matches(norm, wrong)
