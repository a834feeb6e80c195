"""Models that change with the length of their context are sampled from and scored as their own forward of it would."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.models.pack import pack
from keel.models.probe import local_windows, probe_packing
from keel.models.scorer import score_tokens
from keel.rollout import Request, SamplingParams
from keel.rollout.native.choose import _cases, _verified_length, choose_decoder
from keel.rollout.native.engine import NativeEngine
from models.architectures import VOCABULARY, Variant, build, small_config
from models.sweep import own_logp

from . import shapes


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (count,), generator=generator).tolist())


def engine_of(model: Any, **options: Any) -> NativeEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return NativeEngine(model, shapes.tokenizer(), **options)


def sampled(model: Any, lengths: tuple[int, ...], new: int, **options: Any) -> list[Group]:
    """Three completions each of prompts of these lengths; many tokens end a row, so that rows leave one by one."""
    engine = engine_of(model, **options)
    engine.eos_ids = frozenset(range(0, VOCABULARY, 12))
    requests = [Request(f"p{i}", tokens(n, i)) for i, n in enumerate(lengths)]
    answers = engine.generate(requests, SamplingParams(num_generations=3, max_completion_length=new), seed=2)
    assert len({len(c.tokens) for group in answers for c in group}) > 2
    return [Group(Problem(r.key, ""), r.tokens, tuple(found)) for r, found in zip(requests, answers, strict=True)]


def assert_own(model: Any, groups: list[Group]) -> None:
    """What the engine and the scorer say of each token is what the model says of it, given its context alone."""
    own = torch.cat([own_logp(model, g.prompt_tokens, c.tokens) for g in groups for c in g.completions])
    said = torch.tensor([logp for g in groups for c in g.completions for logp in c.sample_logp])
    torch.testing.assert_close(said, own, atol=1e-4, rtol=0)
    for shared in {False, probe_packing(model, VOCABULARY).ok}:
        packed = pack(groups, 0, shared_prefix=shared)
        with torch.no_grad():
            scored = score_tokens(model, packed).logp[packed.completion_mask]
        torch.testing.assert_close(scored, own, atol=1e-4, rtol=0)


def test_queries_that_are_scaled_past_a_position_are_scaled_in_a_decode_step() -> None:
    """Ministral3 has Llama's modules and scales its queries beyond `original_max_position_embeddings`."""
    model = build("ministral3")
    assert model.config.rope_parameters["original_max_position_embeddings"] < 30
    assert_own(model, sampled(model, (4, 12, 40), 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths"), [("phi3", (40, 35)), ("llama", (5, 12)), ("phimoe", (20, 40, 3)), ("llama", (20, 40, 3))]
)
def test_longrope_is_read_by_the_length_of_each_context(name: str, lengths: tuple[int, ...]) -> None:
    """Past the switch, across it, and rows on both sides of it at once."""
    model = build(Variant(name, "longrope"))
    assert model.config.rope_parameters["original_max_position_embeddings"] < 30
    assert_own(model, sampled(model, lengths, 24))


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_is_scored_alike_alone_and_beside_a_longer_one(shared: bool) -> None:
    model = build(Variant("phi3", "longrope"))

    def group(prompt: int, *lengths: int) -> Group:
        made = [Completion(tokens(n, n), (True,) * n, (0.0,) * n, (0.0,) * n, "", "length") for n in lengths]
        return Group(Problem(str(prompt), ""), tokens(prompt, prompt), tuple(made))

    short, long = group(6, 3, 8), group(50, 4, 9)
    with torch.no_grad():
        alone = score_tokens(model, pack([short], 0, shared_prefix=shared)).logp
        for row in (None, 200) if shared else (None,):
            packed = pack([short, long], 0, shared_prefix=shared, max_row_tokens=row)
            beside = score_tokens(model, packed).logp[:2, :8]
            torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


def test_dynamic_tables_are_those_of_each_context_whatever_was_computed_before() -> None:
    """Dynamic NTK turns otherwise with every token beyond the context it was made for, and keeps the longest tables."""
    config = small_config(Variant("llama", "dynamic"))
    config.max_position_embeddings = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    zeros = (0.0,) * 6
    completion = Completion(tokens(6, 1), (True,) * 6, zeros, zeros, "", "length")
    group = Group(Problem("a", ""), tokens(13, 2), (completion,))
    own = own_logp(model, group.prompt_tokens, completion.tokens)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens(60, 3)]))
        for shared in (True, False):
            found = score_tokens(model, pack([group], 0, shared_prefix=shared)).logp[0]
            torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    engine = engine_of(model)
    engine.context = None
    (answer,) = engine.generate(
        [Request("a", group.prompt_tokens)], SamplingParams(num_generations=2, max_completion_length=8), seed=1
    )
    for said in answer:
        own = own_logp(model, group.prompt_tokens, said.tokens)
        torch.testing.assert_close(torch.tensor(said.sample_logp), own, atol=1e-4, rtol=0)


def test_contexts_beyond_what_a_probe_could_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    monkeypatch.setattr("keel.rollout.native.choose.longest_probe", lambda _: 2)
    engine = engine_of(model)
    sampling = SamplingParams(num_generations=1, max_completion_length=3)
    assert engine.generate([Request("a", tokens(3, 1))], sampling)
    window = model.config.sliding_window
    assert engine.generate([Request("a", tokens(window - 3, 1))], sampling)
    with pytest.raises(KeelError, match=f"'a' may reach {window + 1} tokens.*MistralForCausalLM.* {window} ") as caught:
        engine.generate([Request("a", tokens(window - 2, 1))], sampling)
    assert "\n" not in str(caught.value)


def small_mistral(**settings: Any) -> Any:
    config = small_config(Variant("mistral"))
    for name, value in settings.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("window", "context", "reached", "verified_length"),
    [
        (80, 1000, 100, None),  # well past it
        (95, 1000, 100, None),  # as far past it as a probe may
        (120, 1000, 7, 120),  # not at all: the window itself is the limit, not the length of a probe
        (99, 100, 96, None),  # in the last tokens of the context
        (100, 100, 7, None),  # it never acts
    ],
)
def test_a_window_is_crossed_or_is_the_limit(
    window: int, context: int, reached: int, verified_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.rollout.native.choose.longest_probe", lambda _: 100)
    model = small_mistral(sliding_window=window, max_position_embeddings=context)
    assert _verified_length(model) == verified_length
    assert max(_cases(model, shared=False, own_step=False)[-1].prompts) == reached


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    """Phi-3's window of 262144 in a context of 131072 keeps nobody from sharing prompts."""
    model = small_mistral(sliding_window=160, max_position_embeddings=160)
    assert engine_of(model).fallback_reason is None
    assert_own(model, sampled(model, (4, 12, 40), 16))
    assert "DynamicSlidingWindowLayer" in str(engine_of(small_mistral(sliding_window=159)).fallback_reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "granitemoehybrid"])
def test_experts_in_half_precision_are_decoded_as_in_full(name: str) -> None:
    """Rounding sends tokens to other experts, which is no fault of a decoder."""
    for seed in range(10 if name == "mixtral" else 2):
        model = build(name, seed)
        with torch.no_grad():
            full = choose_decoder(model)
            half = choose_decoder(model.to(torch.bfloat16))
        assert (half.decoder, half.reason) == (full.decoder, full.reason), seed


@pytest.mark.parametrize("name", ["mixtral", "minimax"])
def test_a_wrong_cache_is_seen_in_half_precision(name: str) -> None:
    """Logits of the next word, as soon as there is a past; and a linear part that is not reordered (MiniMax)."""
    model = build(name).to(torch.bfloat16)
    if name == "mixtral":
        own = model.forward

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            out = own(*args, **kwargs)
            if kwargs.get("past_key_values") is not None:
                out.logits = out.logits.roll(1, -1)
            return out

        forgetful.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        model.forward = forgetful
    with torch.no_grad():
        chosen: Any = choose_decoder(model).decoder
    assert chosen.keywords == (
        {"drop": None, "cached": False} if name == "mixtral" else {"drop": "batch_select_indices"}
    )


@pytest.mark.slow
def test_sparse_attention_over_compressed_entries_is_tried_past_its_top_k() -> None:
    """DeepSeek V4's index_topk counts entries of several tokens each; past it no decoder gives its plain logits."""
    model = build("deepseek_v4")
    topk, rates = model.config.index_topk, model.config.compress_rates.values()
    assert {*rates, *(topk * rate for rate in rates)} <= set(local_windows(model))
    with pytest.raises(KeelError, match="DeepseekV4ForCausalLM cannot be sampled from: even without a cache"):
        engine_of(model)


def test_a_probe_out_of_memory_is_no_verdict_on_a_decoder() -> None:
    model = build("mistral")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.forward = full
    with pytest.raises(torch.OutOfMemoryError):
        choose_decoder(model)


def test_a_probe_of_decoders_computes_no_logits_of_the_prompt() -> None:
    model, counts = build("mistral"), []
    model.lm_head.register_forward_hook(lambda _, __, out: counts.append(out.shape[1]))
    engine_of(model)
    assert max(counts) <= 5


@pytest.mark.slow
def test_a_model_whose_cache_is_wrong_reads_its_contexts_again() -> None:
    """Whatever is wrong with a cache, the plain forward is left; what is used is said."""
    model = build("mistral")
    own = model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            out.logits = out.logits.roll(1, -1)
        return out

    forgetful.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = forgetful
    assert "at every step" in str(engine_of(model).fallback_reason)
    assert_own(model, sampled(model, (4, 12), 10))


def rolled(model: Any, by: Any) -> None:
    """Let the model's logits be shifted by so many places, a function of the number of rows it is given."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits.roll(by(len(out.logits)), -1)
        return out

    model.forward = forward


def test_a_model_that_no_decoder_computes_is_refused_by_name() -> None:
    model = build("mistral")
    rolled(model, lambda rows: rows)
    with pytest.raises(KeelError, match=r"MistralForCausalLM cannot be .* other rows") as caught:
        engine_of(model)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_unlike_itself_is_left_to_those_who_can_say_why() -> None:
    """No decoder can be held against it: its loading refuses it, and the doctor, who examines it, names the cause."""
    model = build("mistral")
    calls = iter(range(10_000))
    rolled(model, lambda rows: next(calls))
    assert "not deterministic" in str(engine_of(model).fallback_reason)


def test_scores_across_the_switch_have_gradients() -> None:
    """The rows are run twice, once for each side, and both runs reach the weights."""
    model = build(Variant("phi3", "longrope"))
    zeros = (0.0,) * 20
    completion = Completion(tokens(20, 1), (True,) * 20, zeros, zeros, "", "length")
    packed = pack([Group(Problem("a", ""), tokens(15, 2), (completion,))], 0)
    logp = score_tokens(model, packed).logp[0]
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    (early,) = torch.autograd.grad(logp[:5].sum(), weight, retain_graph=True)
    (late,) = torch.autograd.grad(logp[15:].sum(), weight, retain_graph=True)
    (both,) = torch.autograd.grad(logp.sum() - logp[5:15].sum(), weight)
    assert early.norm() > 0
    assert late.norm() > 0
    torch.testing.assert_close(early + late, both)


@pytest.mark.slow
def test_a_model_that_does_not_count_on_from_its_cache_is_given_positions() -> None:
    """Bamba begins at position 0 in every forward, cached or not."""
    model = build("bamba")
    assert_own(model, sampled(model, (4, 12, 40), 16))
    assert "again" not in str(engine_of(model).fallback_reason)


@pytest.mark.slow
def test_rows_leave_a_cache_whose_reordering_forgets_its_linear_part() -> None:
    """MiniMax keeps linear attention beside the layers that `reorder_cache` reorders."""
    model = build("minimax")
    assert_own(model, sampled(model, (9, 9, 20), 16))
    assert "again" not in str(engine_of(model).fallback_reason)


@pytest.mark.parametrize("variant", [Variant("phi3", "longrope"), Variant("ministral3"), Variant("bamba")])
def test_a_second_turn_goes_on_across_the_lengths(variant: Variant) -> None:
    model = build(variant)
    engine = engine_of(model, kv_cache_bytes=2**24)
    sampling = SamplingParams(num_generations=1, max_completion_length=6, ignore_eos=True)
    context = tokens(10, 0)
    for turn in range(5):
        request = Request("a", context, start=6 * turn)
        ((completion,),) = engine.generate([request], sampling, seed=3)
        own = own_logp(model, context, completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.sample_logp), own, atol=1e-4, rtol=0)
        context = (*context, *completion.tokens, 7)
