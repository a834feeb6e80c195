"""Decoding by CUDA graphs: the same tokens as without them, whatever leaves, joins or is trained in between."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_engine_room_cuda import PROMPTS, Tokens, model_on

from keel.rollout import NativeEngine, Request, SamplingParams
from keel.rollout.native.graph import GraphedStep

ENDS = frozenset(range(5))


def engine(model, *, graphs, kept_bytes=2**26):
    native = NativeEngine(model, Tokens(), graphs=graphs, kept_bytes=kept_bytes)
    native.eos_ids = ENDS
    return native


@pytest.fixture
def captured(monkeypatch):
    """The rows of each graph that was captured."""
    rows, capture = [], GraphedStep._capture

    def noted(self, tokens, cache):
        rows.append(len(tokens))
        return capture(self, tokens, cache)

    monkeypatch.setattr(GraphedStep, "_capture", noted)
    return rows


def assert_close(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert [c.tokens for c in mine] == [c.tokens for c in theirs]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a.sample_logp), torch.tensor(b.sample_logp), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("max_batch", [None, 7])
@pytest.mark.parametrize("lora", [False, True])
def test_the_same_tokens_as_without(name, max_batch, lora, captured):
    model = model_on("cuda", name)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    sampling = SamplingParams(max_completion_length=90, num_generations=8, max_batch=max_batch)
    with_graphs, without = engine(model, graphs=True), engine(model, graphs=False)
    assert captured
    assert with_graphs._new_decoder().traits.graphed
    captured.clear()
    sampled = with_graphs.generate(requests, sampling, seed=3)
    count = len(captured)
    assert count > 2
    assert_close(sampled, without.generate(requests, sampling, seed=3))
    assert len(captured) == count
    with torch.no_grad():  # weights move in place: the next rollout must see them
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert_close(with_graphs.generate(requests, sampling, seed=4), without.generate(requests, sampling, seed=4))
    assert with_graphs.generate(requests, sampling, seed=3) != sampled


def test_turns_that_join(captured):
    model, by_side = model_on("cuda", "llama"), {}

    def talk(side):
        episodes = by_side.setdefault(side, {})

        def answer(turns):
            requests = []
            for turn in turns:
                turns_so_far = episodes.setdefault((turn.request.key, turn.sample), [])
                turns_so_far.append(turn.completion)
                tokens = (*turn.request.tokens, *turn.completion.tokens, 11, 12, 13)
                if len(turns_so_far) < 3:
                    start = turn.request.start + len(turn.completion.tokens) + 3
                    limit = random.Random(f"{turn.request.key} {turn.sample} {len(turns_so_far)}").randint(4, 20)
                    requests.append(Request(turn.request.key, tokens, (turn.sample,), start, limit))
            return requests

        return answer

    sampling = SamplingParams(max_completion_length=20, num_generations=8)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    engine(model, graphs=True).converse(requests, sampling, talk("with"), seed=3)
    assert len(captured) > 3
    engine(model, graphs=False, kept_bytes=0).converse(requests, sampling, talk("without"), seed=3)
    assert by_side["with"].keys() == by_side["without"].keys()
    for key, turns in by_side["with"].items():
        assert_close([turns], [by_side["without"][key]])


def test_bf16_runs_by_graphs(captured):
    model = model_on("cuda", "llama", torch.bfloat16)
    sampling = SamplingParams(max_completion_length=70, num_generations=4, ignore_eos=True)
    (group,) = engine(model, graphs=True).generate([Request("p", PROMPTS[0])], sampling)
    assert captured
    assert all(len(c.tokens) == 70 for c in group)
    context = torch.tensor([(*PROMPTS[0], *group[0].tokens)], device="cuda")
    with torch.no_grad():
        logp = model(input_ids=context).logits[0, len(PROMPTS[0]) - 1 : -1].float().log_softmax(-1)
    expected = logp.gather(-1, context[0, len(PROMPTS[0]) :, None]).squeeze(-1).cpu()
    torch.testing.assert_close(torch.tensor(group[0].sample_logp), expected, atol=0.1, rtol=0)


class Looks(torch.nn.Module):
    """An activation that waits for the device, which no graph can hold."""

    def forward(self, x):
        return torch.nn.functional.silu(x) if float(x.sum()) < 1e30 else x


def test_a_model_that_no_graph_can_hold_decodes_without(captured):
    model = model_on("cuda", "llama")
    sampling = SamplingParams(max_completion_length=40, num_generations=4)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    expected = engine(model, graphs=False).generate(requests, sampling, seed=3)
    waits = model_on("cuda", "llama")
    for layer in waits.model.layers:
        layer.mlp.act_fn = Looks()
    tried = engine(waits, graphs=True)
    assert captured
    assert not tried._new_decoder().traits.graphed
    assert_close(tried.generate(requests, sampling, seed=3), expected)
    torch.randn(4, device="cuda")  # the device is left as it was
    captured.clear()
    assert_close(engine(model, graphs=True).generate(requests, sampling, seed=3), expected)
    assert len(captured) > 1


def test_two_engines_take_turns_and_memory_stays(captured):
    engines = [engine(model_on("cuda", name), graphs=True) for name in ("llama", "qwen3")]
    sampling = SamplingParams(max_completion_length=60, num_generations=8)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    first = [each.generate(requests, sampling, seed=3) for each in engines]
    for each in engines:
        each.release()
    held = torch.cuda.memory_allocated()
    captured.clear()
    for _ in range(4):
        for each, expected in zip(engines, first, strict=True):
            assert_close(each.generate(requests, sampling, seed=3), expected)
            each.release()
    assert len(captured) > 30
    assert torch.cuda.memory_allocated() <= held + 2**20
