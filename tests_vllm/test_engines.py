"""The engines' suite: what holds of the native engine holds of vLLM in the process and behind a server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from conftest import Servers, engine_for, llama
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.base import Reward, Task
from keel.envs.episode import Episode
from keel.envs.judge import Judge
from keel.models.tiny import tiny_tokenizer
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.render import Renderer
from keel.rollout.vllm import client, worker

pytestmark = pytest.mark.peers


TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPTS = [tuple(range(7 + i, 12 + 3 * i)) for i in range(6)]
REQUESTS = [Request(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)]
SAMPLING = SamplingParams(num_generations=4, max_completion_length=16)


def flat(groups: Any) -> list[Any]:
    return [completion for group in groups for completion in group]


def tokens(groups: Any) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in flat(groups)]


def native(model: Any, sampling: SamplingParams = SAMPLING, requests: Any = REQUESTS, **noise: int) -> Any:
    return NativeEngine(model, TOKENIZER).generate(requests, sampling, **noise)


def assert_same(one: Any, other: Any, atol: float = 1e-4) -> None:
    """The same completions, log-probabilities up to rounding."""
    for a, b in zip(flat(one), flat(other), strict=True):
        assert (a.tokens, a.text, a.stop_reason) == (b.tokens, b.text, b.stop_reason)
        for name in ("sample_logp", "filtered_logp"):
            torch.testing.assert_close(*(torch.tensor(getattr(c, name)) for c in (a, b)), atol=atol, rtol=0)


@contextmanager
def holding(engine: Engine, model: Any, policy: Any) -> Iterator[Any]:
    """The engine with another policy's weights for a while."""
    engine.sync(policy, 1)
    try:
        yield policy
    finally:
        engine.sync(model, 0)


def filtered(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities after transformers' own temperature and filters."""
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits.log_softmax(-1)


@torch.no_grad()
def logits_of(model: Any, context: tuple[int, ...]) -> torch.Tensor:
    return model(input_ids=torch.tensor([context]), use_cache=False).logits[0]


FILTERS = [
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 12},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("options", FILTERS)
def test_samples_follow_the_exact_distribution(engine: Engine, model: Any, options: dict[str, Any]) -> None:
    sampling = SamplingParams(num_generations=1500, max_completion_length=1, ignore_eos=True, **options)
    (group,) = engine.generate([Request("p", PROMPTS[1])], sampling, seed=5)
    probabilities = filtered(logits_of(model, PROMPTS[1])[-1:], sampling)[0].exp().double()
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in group]), minlength=len(probabilities)).double()
    expected = probabilities * len(group)
    assert counts[probabilities == 0].sum() == 0, "a token that the filters leave out"
    rare = expected < 5
    cells = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected)]
    observed, expected = (cell[cells[1] > 0] for cell in cells)
    assert len(expected) > 3
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, len(expected) - 1) > 1e-4


@pytest.mark.parametrize("options", [{}, *FILTERS])
def test_log_probabilities_are_transformers(engine: Engine, model: Any, options: dict[str, Any]) -> None:
    sampling = SamplingParams(num_generations=3, max_completion_length=12, **options)
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, sampling, seed=2), strict=True):
        for completion in group:
            chosen = torch.tensor(completion.tokens)[:, None]
            logits = logits_of(model, (*request.tokens, *completion.tokens))[len(request.tokens) - 1 : -1]
            before = (logits / sampling.temperature).log_softmax(-1).gather(-1, chosen)[:, 0]
            after = filtered(logits, sampling).gather(-1, chosen)[:, 0]
            torch.testing.assert_close(torch.tensor(completion.sample_logp), before, atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor(completion.filtered_logp), after, atol=1e-4, rtol=0)


def test_seeds(engine: Engine, model: Any) -> None:
    """The same seed, attempt and step: the same tokens as the native engine's; any other: others."""
    ours = engine.generate(REQUESTS, SAMPLING, seed=3)
    assert_same(ours, native(model, seed=3))
    assert tokens(engine.generate(REQUESTS, SAMPLING, seed=3)) == tokens(ours)
    for noise in ({"seed": 4}, {"seed": 3, "attempt": 1}, {"seed": 3, "step": 1}):
        assert tokens(engine.generate(REQUESTS, SAMPLING, **noise)) != tokens(ours)


def test_greedy_is_transformers_generate(engine: Engine, model: Any) -> None:
    sampling = SamplingParams(temperature=0, num_generations=1, max_completion_length=10)
    for request, (completion,) in zip(REQUESTS, engine.generate(REQUESTS, sampling), strict=True):
        generated = model.generate(torch.tensor([request.tokens]), max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert completion.tokens == tuple(generated[0, len(request.tokens) :].tolist())
        assert set(completion.filtered_logp) == {0.0}


def test_max_batch_changes_nothing(engine: Engine, model: Any) -> None:
    narrow = SamplingParams(num_generations=4, max_completion_length=16, max_batch=3)
    assert_same(engine.generate(REQUESTS, narrow, seed=3), native(model, seed=3))


def test_stop_strings(engine: Engine, model: Any) -> None:
    """A letter, several letters that are a token each, and a special token."""
    free = flat(native(model, seed=3))
    split = next(c.text[4:7] for c in free if len(c.text) > 8)
    special = next(
        TOKENIZER.decode([t]) for c in free for t in c.tokens[2:] if t in TOKENIZER.all_special_ids and t != EOS
    )
    for stop in ((free[0].text[3],), (split,), (special,), (special, split, free[1].text[2])):
        sampling = SamplingParams(num_generations=4, max_completion_length=16, stop=stop)
        ours = engine.generate(REQUESTS, sampling, seed=3)
        assert_same(ours, native(model, sampling, seed=3))
        assert "stop" in {completion.stop_reason for completion in flat(ours)}, stop


def eos_after(model: Any, prompt: tuple[int, ...]) -> Any:
    """A copy of the model that ends at once after a prompt."""
    ending = copy.deepcopy(model)
    with torch.no_grad():
        hidden = ending.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        ending.lm_head.weight[EOS] = 60 * hidden / hidden.norm() ** 2 + ending.lm_head.weight[EOS]
    return ending


def test_completions_that_end_at_once_and_ends_that_are_ignored(engine: Engine, model: Any) -> None:
    requests = [Request("p", PROMPTS[0])]
    with holding(engine, model, eos_after(model, PROMPTS[0])) as ending:
        (group,) = engine.generate(requests, SAMPLING, seed=1)
        assert {(c.tokens, c.text, c.stop_reason) for c in group} == {((EOS,), "", "eos")}
        whole = SamplingParams(num_generations=4, max_completion_length=16, ignore_eos=True)
        ours = engine.generate(requests, whole, seed=1)
        assert_same(ours, native(ending, whole, requests, seed=1), atol=1e-3)
        assert {(len(c.tokens), c.tokens[0], c.stop_reason) for c in flat(ours)} == {(16, EOS, "length")}


def test_the_context_is_used_to_its_end_and_not_beyond(engine: Engine, model: Any) -> None:
    assert engine.context == 128
    room = SamplingParams(num_generations=2, max_completion_length=128 - len(PROMPTS[0]), ignore_eos=True)
    requests = [Request("p", PROMPTS[0])]
    ours = engine.generate(requests, room, seed=1)
    assert {len(c.tokens) for c in flat(ours)} == {128 - len(PROMPTS[0])}
    assert tokens(ours) == tokens(native(model, room, requests, seed=1))
    wide = SamplingParams(num_generations=2, max_completion_length=129 - len(PROMPTS[0]))
    with pytest.raises(KeelError, match="exceed the model's context of 128"):
        engine.generate(requests, wide)


class Echo(Task):
    """Answers what the model says with some of it, three times."""

    name = "echo"

    def start(self, problem: Problem) -> Episode:
        return Echoing()


class Echoing(Episode):
    turns = 0

    def step(self, text: str) -> str | None:
        self.turns += 1
        return None if self.turns == 3 else "no" + text[:3]

    def reward(self) -> Reward:
        return Reward(float(self.turns))


def episodes(engine: Engine) -> list[Any]:
    problems = [Problem(f"p{i}", "abcdefgh"[: 2 + i]) for i in range(4)]
    sampling = SamplingParams(num_generations=3, max_completion_length=60, max_batch=7)
    options = {"seed": 7, "max_turns": 3, "max_turn_length": 12}
    groups = Collector(engine, Echo(), Renderer(TOKENIZER), sampling, Judge.of(Echo()), **options).collect(problems)
    return [group.completions for group in groups]


def test_several_turns(engine: Engine, model: Any) -> None:
    ours = episodes(engine)
    assert_same(ours, episodes(NativeEngine(model, TOKENIZER)))
    assert any(False in completion.action for completion in flat(ours))


def test_weights_are_those_of_the_last_sync(engine: Engine, model: Any) -> None:
    other = llama(seed=1)
    before = tokens(engine.generate(REQUESTS, SAMPLING, seed=3))
    with holding(engine, model, other):
        assert engine.version == 1
        assert_same(engine.generate(REQUESTS, SAMPLING, seed=3), native(other, seed=3))
    assert tokens(engine.generate(REQUESTS, SAMPLING, seed=3)) == before != tokens(native(other, seed=3))


@pytest.mark.parametrize("kind", ["process", "server"], indirect=True, scope="session")
def test_a_tensor_that_is_not_loaded_is_named(
    engine: Engine, kind: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, lost = llama(seed=1), "model.layers.1.mlp.down_proj.weight"
    if kind == "process":
        load = worker.KeelWorker.keel_load
        dropping = lambda self, named: load(self, ((n, t) for n, t in named if n != lost))  # noqa: E731
        monkeypatch.setattr(worker.KeelWorker, "keel_load", dropping)
    else:
        save = client.save_shards
        monkeypatch.setattr(client, "save_shards", lambda named, to: save(((n, t) for n, t in named if n != lost), to))
    with pytest.raises(KeelError, match=rf"1 of 21 tensors.*{lost}"):
        engine.sync(other, 1)
    monkeypatch.undo()
    engine.sync(model, 0)
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=3), native(model, seed=3))


def test_the_random_streams_of_the_training_are_left_alone(engine: Engine, model: Any) -> None:
    states = []
    for use in (lambda: None, lambda: engine.sync(model, 0), lambda: engine.generate(REQUESTS, SAMPLING)):
        torch.manual_seed(11)
        use()
        states.append(torch.rand(3))
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_sampling_goes_on_after_a_task_that_failed(engine: Engine, model: Any) -> None:
    def fails(turns: Any) -> Any:
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        engine.converse(REQUESTS, SAMPLING, fails, seed=1)
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=3), native(model, seed=3))


@pytest.mark.parametrize("kind", ["server"], indirect=True, scope="session")
def test_a_server_of_other_weights_gets_those_of_the_last_sync_again(engine: Engine, model: Any) -> None:
    """As after another training has used it: nothing is sampled from that one's policy."""
    url = engine.sampler.servers[0].url  # type: ignore[attr-defined]
    other = engine_for("server", llama(seed=1), url)
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=3), native(model, seed=3))
    assert [code for code, _ in engine.events()] == ["sampler/lost", "sampler/back"]
    other.close()


@pytest.mark.parametrize("kind", ["server"], indirect=True, scope="session")
def test_a_server_killed_in_a_rollout_and_started_again(engine: Engine, model: Any, servers: Servers) -> None:
    sampling = SamplingParams(num_generations=6, max_completion_length=40, max_batch=12)
    killed: list[int] = []

    def kill(ended: int) -> None:
        if not killed:
            killed.append(ended)
            server = servers.started[-1]
            server.kill()
            servers.start(model, port=server.port)

    engine.on_finished = kill
    try:
        assert_same(engine.generate(REQUESTS, sampling, seed=8), native(model, sampling, seed=8))
    finally:
        engine.on_finished = None
    assert killed
    assert [code for code, _ in engine.events()] == ["sampler/lost", "sampler/back"]
