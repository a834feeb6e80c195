"""The engine against independent full forwards and transformers' own generation."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.rollout import Request, SamplingParams
from keel.rollout.engine import Interrupted
from keel.rollout.native.decode import UnsharedPrefixDecoder
from keel.rollout.native.engine import NativeEngine
from keel.rollout.request import StopStrings

from . import shapes


def engine_of(name: str, **options: Any) -> tuple[NativeEngine, Any]:
    model = shapes.model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return NativeEngine(model, shapes.tokenizer(), **options), model


def requests_of(count: int = 4) -> list[Request]:
    return [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(count))]


@pytest.mark.parametrize("name", shapes.SHARED)
def test_these_shapes_share_their_prompts(name: str) -> None:
    """Gemma's modules have Llama's names and compute otherwise: the probe keeps it off Llama's own step."""
    engine, model = engine_of(name)
    assert engine.fallback_reason is None
    assert (engine._decoder(model).own_step is not None) == (name in shapes.LLAMA_STEP)


@pytest.mark.parametrize("name", shapes.PLAIN)
def test_these_shapes_fall_back_with_a_message(name: str) -> None:
    with pytest.warns(RuntimeWarning, match="without shared prompts"):
        NativeEngine(shapes.model(name), shapes.tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "temperature"), list(zip([*shapes.SHARED, *shapes.PLAIN], itertools.cycle([0.5, 1.0, 1.3])))
)
def test_sample_logp_equals_a_full_forward(name: str, temperature: float) -> None:
    engine, model = engine_of(name)
    sampling = SamplingParams(temperature=temperature, num_generations=3, max_completion_length=20)
    requests = requests_of()
    lengths = set()
    for request, group in zip(requests, engine.generate(requests, sampling, seed=3), strict=True):
        assert len(group) == 3
        for completion in group:
            expected = shapes.full_logp(model, request.tokens, completion.tokens, temperature)
            torch.testing.assert_close(torch.tensor(completion.sample_logp), expected, atol=1e-4, rtol=0)
            assert completion.filtered_logp == completion.sample_logp
            lengths.add(len(completion.tokens))
    assert max(lengths) == 20


@pytest.mark.parametrize("name", [*shapes.SHARED, *shapes.PLAIN])
def test_greedy_equals_transformers_generate(name: str) -> None:
    engine, model = engine_of(name)
    sampling = SamplingParams(temperature=0, num_generations=1, max_completion_length=16)
    requests = requests_of()
    for request, (completion,) in zip(requests, engine.generate(requests, sampling), strict=True):
        ids = torch.tensor([request.tokens])
        found = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=257,
            pad_token_id=258,
        )[0, len(request.tokens) :]
        assert completion.tokens == tuple(found.tolist())
        expected = shapes.full_logp(model, request.tokens, completion.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(completion.sample_logp), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_same_seed_gives_the_same_text_at_any_batch_size(name: str) -> None:
    engine, _ = engine_of(name)
    sampling = SamplingParams(num_generations=4, max_completion_length=24)
    requests = requests_of()
    together = engine.generate(requests, sampling, seed=1, step=2)
    for size in (1, 3):
        waves = engine.generate(requests, replace(sampling, max_batch=size), seed=1, step=2)
        assert [[c.tokens for c in group] for group in waves] == [[c.tokens for c in group] for group in together]
    alone = engine.generate(requests[2:3], sampling, seed=1, step=2)
    assert [c.tokens for c in alone[0]] == [c.tokens for c in together[2]]
    for changed in ({"seed": 2}, {"seed": 1, "step": 3}, {"seed": 1, "step": 2, "attempt": 1}):
        assert engine.generate(requests, sampling, **changed) != together


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_rows_that_end_leave_without_disturbing_the_others(name: str) -> None:
    engine, model = engine_of(name)
    sampling = SamplingParams(temperature=1.3, num_generations=6, max_completion_length=48)
    requests = requests_of(4)
    engine.eos_ids = frozenset(range(200, 210))
    groups = engine.generate(requests, sampling, seed=5)
    reasons = {c.stop_reason for group in groups for c in group}
    assert reasons == {"eos", "length"}
    assert len({len(c.tokens) for group in groups for c in group}) > 10
    for request, group in zip(requests, groups, strict=True):
        for c in group:
            ends = [i for i, token in enumerate(c.tokens) if token in engine.eos_ids]
            assert ends == ([len(c.tokens) - 1] if c.stop_reason == "eos" else [])
            expected = shapes.full_logp(model, request.tokens, c.tokens, 1.3)
            torch.testing.assert_close(torch.tensor(c.sample_logp), expected, atol=1e-4, rtol=0)
    forced = engine.generate(requests, replace(sampling, ignore_eos=True), seed=5)
    assert {len(c.tokens) for group in forced for c in group} == {48}
    assert all(
        f.tokens[: len(c.tokens)] == c.tokens
        for full, group in zip(forced, groups, strict=True)
        for f, c in zip(full, group, strict=True)
    )


def test_generation_config_adds_end_tokens() -> None:
    model = shapes.model("llama")
    model.generation_config.eos_token_id = [257, 7, 9]
    assert NativeEngine(model, shapes.tokenizer()).eos_ids == {257, 7, 9}


def test_stop_strings_cut_the_text_and_keep_the_tokens() -> None:
    engine, _ = engine_of("llama")
    sampling = SamplingParams(num_generations=4, max_completion_length=60)
    requests = requests_of()
    free = engine.generate(requests, sampling, seed=4)
    longest = max((c for group in free for c in group), key=lambda c: len(c.tokens))
    wanted = longest.text[20:23]  # three characters, hence three tokens or more
    assert len(wanted) == 3
    cut = engine.generate(requests, replace(sampling, stop=(wanted, "never sampled")), seed=4)
    stopped = 0
    for before, after in zip(free, cut, strict=True):
        for c, d in zip(before, after, strict=True):
            assert d.tokens == c.tokens[: len(d.tokens)]
            if wanted not in c.text:
                assert (c.tokens, c.text, c.stop_reason) == (d.tokens, d.text, d.stop_reason)
                continue
            stopped += 1
            assert d.stop_reason == "stop"
            assert d.text == c.text[: c.text.index(wanted)]
            decode = engine.tokenizer.decode
            assert wanted in decode(list(d.tokens))
            assert wanted not in decode(list(d.tokens[:-1]))
    assert stopped


def with_special_tokens() -> NativeEngine:
    """Byte 259 is special too, and decoding leaves all of them out."""
    tokenizer = shapes.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 259
    return NativeEngine(shapes.model("llama"), tokenizer)


def test_a_special_token_is_a_stop_string() -> None:
    engine = with_special_tokens()
    sampling = SamplingParams(temperature=2.0, num_generations=8, max_completion_length=60, ignore_eos=True)
    requests = requests_of()
    free = [c for group in engine.generate(requests, sampling, seed=4) for c in group]
    stop = replace(sampling, stop=("<|im_end|>", "never sampled"))
    cut = [c for group in engine.generate(requests, stop, seed=4) for c in group]
    stopped = 0
    for c, d in zip(free, cut, strict=True):
        if 259 not in c.tokens:
            assert (c.tokens, c.text, c.stop_reason) == (d.tokens, d.text, d.stop_reason)
            continue
        stopped += 1
        end = c.tokens.index(259) + 1
        assert (d.tokens, d.stop_reason) == (c.tokens[:end], "stop")
        assert d.text == engine.tokenizer.decode(list(c.tokens[: end - 1]), skip_special_tokens=True)
    assert stopped > 2


def test_stop_strings_around_special_tokens() -> None:
    engine = with_special_tokens()
    cut = StopStrings(engine.tokenizer).cut
    encode = engine.tokenizer.encode
    tokens = encode("one<pad> two<|im_end|>\nthree")
    assert cut(tokens, ("<|im_end|>\n",)) == "one two"
    assert cut(tokens, ("o<|im_end|>",)) == "one tw"
    assert cut(tokens, ("three", "two<|im_end|>")) == "one "
    assert cut(tokens, ("e two",)) == "on"  # special tokens are no part of the text
    assert cut(tokens, ("<bos>", "four")) is None
    assert cut(encode("x" * 99 + "<|im_end|>"), ("<|im_end|>",)) == "x" * 99


def test_the_same_noise_is_not_drawn_twice() -> None:
    engine, model = engine_of("llama")
    sampling = SamplingParams(num_generations=2, max_completion_length=4)
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    for requests in (
        [Request("a", (1, 2), samples=(0, 0))],
        [Request("a", (1, 2)), Request("a", (3, 4))],
        [Request("a", (1, 2), samples=(1,), start=3), Request("a", (3, 4), samples=(1,), start=3)],
    ):
        with pytest.raises(KeelError, match="same noise") as caught:
            engine.generate(requests, sampling)
        assert "\n" not in str(caught.value)
    handle.remove()
    fine = [Request("a", (1, 2), samples=(0, 2)), Request("a", (1, 2), samples=(1,)), Request("a", (3,), start=3)]
    assert [len(group) for group in engine.generate(fine, sampling)] == [2, 1, 2]
    greedy = replace(sampling, temperature=0)
    assert len(engine.generate([Request("a", (1, 2)), Request("a", (3, 4))], greedy)) == 2  # draws no noise


def test_a_conversation_continues_from_its_tokens() -> None:
    """A second turn from the returned tokens goes on exactly where one long turn would."""
    engine, _ = engine_of("llama")
    sampling = SamplingParams(num_generations=2, max_completion_length=20, ignore_eos=True)
    (request,) = requests_of(1)
    (whole,) = engine.generate([request], sampling, seed=9)
    (first,) = engine.generate([replace(request, max_new=8)], sampling, seed=9)
    turns = [
        Request(request.key, request.tokens + c.tokens, samples=(i,), start=8, max_new=12) for i, c in enumerate(first)
    ]
    rest = engine.generate(turns, sampling, seed=9)
    assert [a.tokens + b.tokens for a, (b,) in zip(first, rest, strict=True)] == [c.tokens for c in whole]


def test_each_distinct_prompt_is_read_once() -> None:
    engine, model = engine_of("gpt2")
    widths: list[tuple[int, ...]] = []
    handle = model.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(tuple((*args, kwargs.get("input_ids"))[0].shape)), with_kwargs=True
    )
    requests = [Request("a", (1, 2, 3)), Request("b", (1, 2, 3)), Request("c", (4, 5))]
    engine.generate(requests, SamplingParams(num_generations=4, max_completion_length=3, ignore_eos=True))
    handle.remove()
    assert widths == [(2, 3), (12, 1), (12, 1)]


def test_the_model_is_left_as_it_was() -> None:
    engine, model = engine_of("llama")
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    before = [module.training for module in model.modules()]
    (group,) = engine.generate(requests_of(2)[1:], SamplingParams(num_generations=2, max_completion_length=4), seed=1)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    assert model.config.use_cache is False
    assert model.is_gradient_checkpointing
    assert not model.lm_head._forward_pre_hooks
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None
    assert len(group) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_generations": 0}, "num_generations"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"stop": ("",)}, "stop"),
        ({"stop": "\n"}, "stop"),
        ({"max_batch": 0}, "max_batch"),
    ],
)
def test_wrong_sampling_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        SamplingParams(**change)
    assert "\n" not in str(caught.value)


def test_wrong_prompts_are_refused_before_any_compute() -> None:
    engine, model = engine_of("llama")
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    sampling = SamplingParams(max_completion_length=10)
    fine = Request("fine", (1, 2))
    for request, message in (
        (Request("e", ()), "'e' has an empty prompt"),
        (Request("l", tuple(range(96))), "prompt of 96 tokens and the model's context is 96"),
        (Request("t", tuple(range(90))), "max_completion_length to 6 or less"),
        (Request("n", (1,), max_new=0), "max_new=0"),
        (Request("s", (1,), samples=()), "no samples"),
    ):
        with pytest.raises(KeelError, match=message):
            engine.generate([fine, request], sampling)
    handle.remove()
    assert engine.generate([], sampling) == []
    limit = engine.generate([Request("b", tuple(range(86)))], replace(sampling, ignore_eos=True, num_generations=1))
    assert len(limit[0][0].tokens) == 10


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = shapes.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(KeelError, match="end-of-sequence"):
        NativeEngine(shapes.model("llama"), tokenizer)


def test_sampling_that_is_interrupted_ends_at_the_next_token() -> None:
    engine, _ = engine_of(shapes.SHARED[0])
    ended: list[int] = []
    engine.on_finished = lambda count: (ended.append(count), engine.interrupt())[0]
    limits = [Request(f"p{i}", tokens, max_new=1 + 19 * i) for i, tokens in enumerate(shapes.prompts(2))]
    with pytest.raises(Interrupted):
        engine.generate(limits, SamplingParams(max_completion_length=20, num_generations=2, ignore_eos=True))
    assert ended == [2]


@pytest.mark.parametrize("name", shapes.PLAIN)
def test_a_prompt_whose_masked_attention_would_be_wrong_is_padded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where rows of 33, 65, … tokens must not be read with a mask (pytorch issue 191937)."""
    monkeypatch.setattr("keel.rollout.native.decode.padding_columns", lambda ids: int(ids.shape[1] % 32 == 1))
    model, lengths = shapes.model(name).eval(), list[int]()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompts = [
        shapes.prompts(6, seed)[4][:20] + shapes.prompts(6, seed)[2][:extra] for seed, extra in ((1, 13), (2, 12))
    ]
    decoder, tokens = UnsharedPrefixDecoder(model), torch.tensor([5, 6])
    with torch.no_grad():
        got = [decoder.prefill(prompts, [0, 1], 4), decoder.step(tokens)]
        assert name == "mamba" or lengths == [32, 34, 1, 34]  # transformers' mamba has no past_key_values
        for row, prompt in enumerate(prompts):
            whole = model(input_ids=torch.tensor([[*prompt, int(tokens[row])]]), use_cache=False).logits[0, -2:]
            torch.testing.assert_close(torch.stack([step[row] for step in got]), whole, atol=1e-3, rtol=1e-3)
