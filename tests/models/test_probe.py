"""The probe passes what is computed rightly and catches what is not, without being told which is which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.models.head import head_of
from keel.models.pack import pack
from keel.models.probe import local_windows, position_switches, probe_packing
from keel.models.rope import LengthRegimes, length_regimes
from keel.models.scorer import score_tokens
from keel.models.tokenizer import context_length

from .architectures import Variant, build
from .packing_cases import make_groups, make_model, naive_logp


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "qwen2", "qwen3", "cohere", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_pack_rightly_pass(name: str, dtype: torch.dtype) -> None:
    result = probe_packing(make_model(name).to(dtype))
    assert result.ok, result.reason
    assert result.max_error < (1e-4 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("name", ["mistral-window", "llama-eager", "gemma2", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_do_not_are_caught(name: str, dtype: torch.dtype) -> None:
    result = probe_packing(make_model(name).to(dtype))
    assert not result.ok
    assert "one row per completion" in result.reason
    assert "\n" not in result.reason


def test_what_is_caught_would_have_been_wrong() -> None:
    """The probe is no formality: without it the window is lost in silence."""
    model, groups = make_model("mistral-window"), make_groups([(30, (5, 4))])
    packed = pack(groups, 0)
    found = score_tokens(model, packed).logp[packed.completion_mask]
    assert (found - naive_logp(model, groups)).abs().max() > 1e-2


def test_a_window_that_the_job_never_exceeds_does_not_matter() -> None:
    model = make_model("mistral-window")
    assert local_windows(model) == [16]
    assert local_windows(model, longest=16) == []
    assert probe_packing(model, longest=16).ok


def test_a_window_too_long_to_probe_is_refused() -> None:
    result = probe_packing(make_model("mistral-window"), max_length=20)
    assert not result.ok
    assert result.window == 16
    assert "too long to probe" in result.reason


def test_a_job_past_a_window_that_no_padded_row_could_exceed_is_refused() -> None:
    model = make_model("mistral-window")
    with pytest.raises(KeelError, match=r"local attention of 16 tokens, .*64: limit") as caught:
        probe_packing(model, longest=64, max_length=20)
    assert "\n" not in str(caught.value)
    assert probe_packing(model, longest=16, max_length=20).ok


def test_padded_rows_are_tried_where_shared_ones_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = make_model("mistral-window"), []
    monkeypatch.setattr("keel.models.probe.LONGEST_PROBE", 20)
    monkeypatch.setattr("keel.models.probe.longest_probe", lambda _: 40)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = probe_packing(model, longest=64, max_length=20)
    assert "too long to probe" in result.reason
    assert max(lengths) > 16


def test_rows_are_longer_than_the_window_and_within_the_context() -> None:
    model = make_model("mistral-window")
    assert context_length(model) == 128
    assert 16 < probe_packing(model).length <= 128


def test_the_vocabulary_of_the_tokenizer_bounds_the_tokens() -> None:
    assert probe_packing(make_model("llama"), 5).ok


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = make_model("llama").train()
    model.model.layers[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    probe_packing(model)
    assert model.training
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_head_that_changes_after_it_was_measured_is_caught() -> None:
    model = make_model("llama")
    head_of(model)
    own = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = shifted
    with pytest.raises(KeelError, match=r"padded rows.*model\.scorer"):
        probe_packing(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_no_logits_of_the_prompt_are_computed(name: str) -> None:
    """A probe past a window of thousands of tokens must not make [length, vocabulary] of them."""
    model, counts = make_model(name), []
    head_of(model)
    head_of(model).module.register_forward_hook(lambda _, __, out: counts.append(out.numel() // out.shape[-1]))
    probe_packing(model, max_length=100)
    assert max(counts) <= 27  # the 27 tokens of the completions, a chunk; a row of the model's own has 9


def test_positions_from_which_a_model_changes_are_read_from_its_rotary_settings() -> None:
    ministral = build("ministral3")
    assert position_switches(ministral) == [ministral.config.rope_parameters["original_max_position_embeddings"]]
    assert position_switches(ministral, longest=10) == []
    llama4 = build("llama4_text")
    assert llama4.config.floor_scale in position_switches(llama4)
    assert position_switches(make_model("llama")) == []


def test_the_probe_stands_where_a_model_changes() -> None:
    """Tokens at the switch, not as many tokens as there are positions before it."""
    model, seen, longest = build(Variant("phi3", "longrope")), set(), 0
    switch = model.config.rope_parameters["original_max_position_embeddings"]

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal longest
        positions = kwargs.get("position_ids")
        longest = max(longest, kwargs["input_ids"].shape[1])
        seen.update(() if positions is None else positions.flatten().tolist())

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    assert probe_packing(model).ok
    hook.remove()
    assert {switch - 1, switch, switch + 1} <= seen
    assert longest < 60


def test_the_lengths_at_which_all_positions_turn() -> None:
    assert length_regimes(make_model("llama")) is None
    assert length_regimes(build(Variant("llama", "yarn"))) is None
    model = build(Variant("llama", "longrope"))
    switch = model.config.rope_parameters["original_max_position_embeddings"]
    assert length_regimes(model) == LengthRegimes((switch,))
    regimes = LengthRegimes((4,), dynamic_after=6)
    assert [regimes.of(length) for length in (1, 4, 5, 6, 7, 8)] == [0, 0, 1, 1, 2, 3]
    assert list(regimes.spans(8)) == [(0, 4), (4, 6), (6, 7), (7, 8)]


def test_a_model_that_sees_later_tokens_is_refused_by_name() -> None:
    model = build("bert-generation")
    for module in model.modules():
        if hasattr(module, "is_decoder"):
            module.is_decoder = False
        if hasattr(module, "is_causal"):
            module.is_causal = False
    model.config.is_decoder = False
    with pytest.raises(KeelError, match="BertGenerationDecoder attends to later tokens") as caught:
        probe_packing(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["noise", "state"])
def test_a_model_that_answers_otherwise_when_asked_again_is_refused_as_such(fault: str) -> None:
    model, before = make_model("llama"), list[torch.Tensor]()

    def change(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        before.append(out[:, -1:].detach())
        return out + (torch.randn_like(out) if fault == "noise" else sum(before[:-1]))

    model.model.norm.register_forward_hook(change)
    with pytest.raises(KeelError, match="LlamaForCausalLM gives different logits for the same tokens"):
        probe_packing(model)
