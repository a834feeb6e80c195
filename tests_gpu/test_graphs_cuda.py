"""Decoding by CUDA graphs: the same tokens as without them, whatever leaves, joins or is trained in between."""

import random
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_engine_room_cuda import PROMPTS, Tokens, model_on

import keel.run.build
from keel.rollout import EngineWrapper, Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.scheduler import buckets

pytestmark = pytest.mark.gpu


ENDS = frozenset(range(5))


def engine(model, *, graphs, kv_cache_bytes=2**26):
    native = NativeEngine(model, Tokens(), graphs=graphs, kv_cache_bytes=kv_cache_bytes)
    native.eos_ids = ENDS
    return native


def assert_close(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert [c.tokens for c in mine] == [c.tokens for c in theirs]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a.sample_logp), torch.tensor(b.sample_logp), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("max_batch", [None, 7])
@pytest.mark.parametrize("lora", [False, True])
def test_the_same_tokens_as_without(name, max_batch, lora):
    model = model_on("cuda", name)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    sampling = SamplingParams(max_completion_length=90, num_generations=8, max_batch=max_batch)
    with_graphs, without = engine(model, graphs=True), engine(model, graphs=False)
    assert with_graphs._new_decoder().traits.graphed
    assert with_graphs.notes == ()
    sampled = with_graphs.generate(requests, sampling, seed=3)
    captured = with_graphs.captured_graphs
    assert captured >= len(buckets(max_batch or 24))
    assert_close(sampled, without.generate(requests, sampling, seed=3))
    assert without.captured_graphs == 0
    with torch.no_grad():  # weights move in place: the next rollout must see them
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert_close(with_graphs.generate(requests, sampling, seed=4), without.generate(requests, sampling, seed=4))
    assert with_graphs.generate(requests, sampling, seed=3) != sampled
    assert with_graphs.captured_graphs == captured


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_every_way_to_draw(way):
    model = model_on("cuda", "llama")
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    sampling = SamplingParams(max_completion_length=30, num_generations=4, **way)
    mine, theirs = (engine(model, graphs=graphs).generate(requests, sampling, seed=3) for graphs in (True, False))
    assert_close(mine, theirs)


def test_turns_that_join():
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
    graphed = engine(model, graphs=True)
    graphed.converse(requests, sampling, talk("with"), seed=3)
    captured = graphed.captured_graphs
    graphed.converse(requests, sampling, talk("again"), seed=3)
    assert graphed.captured_graphs == captured
    engine(model, graphs=False, kv_cache_bytes=0).converse(requests, sampling, talk("without"), seed=3)
    assert by_side["with"].keys() == by_side["without"].keys()
    for key, turns in by_side["with"].items():
        assert_close([turns], [by_side["without"][key]])


def test_bf16_runs_by_graphs():
    model = model_on("cuda", "llama", torch.bfloat16)
    sampling = SamplingParams(max_completion_length=70, num_generations=4, ignore_eos=True)
    graphed = engine(model, graphs=True)
    (group,) = graphed.generate([Request("p", PROMPTS[0])], sampling)
    assert graphed.captured_graphs
    assert all(len(c.tokens) == 70 for c in group)
    context = torch.tensor([(*PROMPTS[0], *group[0].tokens)], device="cuda")
    with torch.no_grad():
        logp = model(input_ids=context).logits[0, len(PROMPTS[0]) - 1 : -1].float().log_softmax(-1)
    expected = logp.gather(-1, context[0, len(PROMPTS[0]) :, None]).squeeze(-1).cpu()
    torch.testing.assert_close(torch.tensor(group[0].sample_logp), expected, atol=0.1, rtol=0)


class Looks(torch.nn.Linear):
    """A projection that waits for the device, which no graph can hold."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) < 1e30 else -x)


def test_a_model_that_no_graph_can_hold_decodes_without():
    model = model_on("cuda", "llama")
    sampling = SamplingParams(max_completion_length=40, num_generations=4)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    expected = engine(model, graphs=False).generate(requests, sampling, seed=3)
    waits = model_on("cuda", "llama")
    for layer in waits.model.layers:
        layer.mlp.down_proj.__class__ = Looks
    tried = engine(waits, graphs=True)
    assert not tried._new_decoder().traits.graphed
    assert tried.notes[0].startswith("sampling without CUDA graphs: ")
    assert_close(tried.generate(requests, sampling, seed=3), expected)
    torch.randn(4, device="cuda")  # the device is left as it was
    graphed = engine(model, graphs=True)
    assert_close(graphed.generate(requests, sampling, seed=3), expected)
    assert graphed.captured_graphs > 1


def test_two_engines_take_turns_and_memory_stays():
    engines = [engine(model_on("cuda", name), graphs=True) for name in ("llama", "qwen3")]
    sampling = SamplingParams(max_completion_length=60, num_generations=8)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    first = [each.generate(requests, sampling, seed=3) for each in engines]
    for each in engines:
        each.release()
    held, captured = torch.cuda.memory_allocated(), [each.captured_graphs for each in engines]
    for _ in range(4):
        for each, expected in zip(engines, first, strict=True):
            assert_close(each.generate(requests, sampling, seed=3), expected)
            each.release()
    assert [each.captured_graphs for each in engines] == captured
    assert torch.cuda.memory_allocated() <= held + 2**20


class Lengths(EngineWrapper):
    """Completions of random lengths, others in every step; notes what was built by the end of each step's rollout."""

    def __init__(self, inner):
        super().__init__(inner)
        self.built = []

    def generate(self, requests, sampling, *, seed=0, attempt=0, step=0):
        rng = random.Random(step)
        singles = [
            replace(request, samples=(sample,), max_new=rng.randint(3, sampling.max_completion_length))
            for request in requests
            for sample in request.drawn(sampling)
        ]
        answers = iter(self.inner.generate(singles, sampling, seed=seed, attempt=attempt, step=step))
        groups = [[next(answers)[0] for _ in request.drawn(sampling)] for request in requests]
        dynamo = sum(sum(counter.values()) for counter in torch._dynamo.utils.counters.values())
        if sampling.num_generations == 4:  # an evaluation has other numbers
            self.built.append((self.inner.captured_graphs, dynamo))
        return groups


def test_nothing_is_built_after_the_second_step(tmp_path, monkeypatch):
    """A real run with random lengths: graphs and what Dynamo compiles are counted in every step."""
    made, build = [], keel.run.build.build_engine

    def wrapped(*arguments, **named):
        made.append(Lengths(build(*arguments, **named)))
        return made[-1]

    monkeypatch.setattr(keel.run.build, "build_engine", wrapped)
    options = ["model.name=tiny", "model.device=cuda", "rollout.prompts_per_step=6", "rollout.num_generations=4"]
    options += ["rollout.max_completion_length=24", "optim.precision=bfloat16", "run.max_steps=6", "eval.every=0"]
    keel.train({}, overrides=[*options, f"run.dir={tmp_path / 'run'}"])
    (lengths,) = made
    assert len(lengths.built) >= 6
    assert lengths.built[-1][0] >= len(buckets(24))
    assert len(set(lengths.built[2:])) == 1, lengths.built
    assert lengths.built[1][0] == lengths.built[-1][0], lengths.built
