"""Episodes of several turns in training: demonstrations, the warm start, two steps from a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from keel.base.types import Completion, Problem, Reward
from keel.config import load_config
from keel.envs import Episode, Task
from keel.envs.episode import SingleTurn
from keel.envs.judge import Judge
from keel.envs.mixture import mixture
from keel.envs.registry import build_task
from keel.rollout.collect import Collector
from keel.rollout.engine import Engine
from keel.rollout.render import Renderer
from keel.rollout.request import Request
from keel.rollout.sampling import SamplingParams
from keel.run.build import build_policy, build_run, build_warmstart
from keel.trainer.sft import episode_example, gold_examples, sft
from trainer.worlds import CONFIG, TASK, model

MODEL, TOKENIZER = model()


class Gold(Engine):
    """An engine that says the gold turns of the one problem it is given."""

    def __init__(self, turns: list[str]) -> None:
        self.turns = iter(turns)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        text = next(self.turns)
        ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
        return [[Completion(ids, (True,) * len(ids), (0.0,) * len(ids), (0.0,) * len(ids), text, "eos")]]


@pytest.mark.parametrize("chat_template", ["auto", "none"])
@pytest.mark.parametrize("retriever", ["golden", "lexical"])
def test_a_demonstration_is_the_rollout_in_which_the_model_says_it(chat_template: str, retriever: str) -> None:
    task: Any = build_task(**{**TASK, "retriever": retriever, "hops": [3]})
    renderer = Renderer(TOKENIZER, chat_template=chat_template)
    sampling = SamplingParams(num_generations=1, max_completion_length=400)
    for problem in task.sample(4, seed=0, step=0):
        turns = task.gold_turns(problem)
        shown = episode_example(task, problem, renderer.prompt(problem), TOKENIZER, renderer.reply)
        (sampled,) = Collector(Gold(turns), task, renderer, sampling, Judge.of(task), max_turns=9).collect([problem])
        assert shown.prompt_tokens == sampled.prompt_tokens
        assert shown.completions[0].tokens == sampled.completions[0].tokens
        assert shown.completions[0].action == sampled.completions[0].action
        assert TOKENIZER.unk_token_id not in shown.completions[0].tokens
        assert sampled.rewards[0].parts["correct"] == 1.0
        learned = [t for t, a in zip(shown.completions[0].tokens, shown.completions[0].action, strict=True) if a]
        assert "Document" not in TOKENIZER.decode(learned)  # what the tools say is read and never learned


def test_a_mixture_shows_whole_episodes_and_single_turns() -> None:
    task: Any = mixture([build_task(**TASK), build_task("arithmetic")])
    renderer = Renderer(TOKENIZER)
    examples = gold_examples(task, renderer.prompt, TOKENIZER, batch_size=8, seed=0, reply=renderer.reply)
    lengths = {len(group.completions[0].action) == sum(group.completions[0].action) for group in examples(0)}
    assert lengths == {True, False}


def test_a_gold_episode_that_ends_too_early_is_refused() -> None:
    class Early(Task):
        name = "early"

        def gold_turns(self, problem: Problem) -> list[str]:
            return ["12", "."]

        def start(self, problem: Problem) -> Episode:
            return SingleTurn(lambda turns: Reward(0.0))

    with pytest.raises(KeelError, match="ends after turn 1"):
        episode_example(Early(), Problem("p", "?"), (1,), TOKENIZER, Renderer(TOKENIZER).reply)


@pytest.mark.slow
def test_the_warm_start_learns_episodes() -> None:
    config = load_config(CONFIG, ["warmstart.steps=12", "warmstart.batch_size=8"])
    loaded = build_policy(config)
    start = build_warmstart(config, loaded)
    losses: list[float] = []
    sft(loaded, *start, lambda step, line: losses.append(line["loss/total"]))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["rollout.max_turns=1"], "rollout.max_turns is 1"),
        (["rollout.max_turns=2"], None),
    ],
)
def test_what_turns_deserve_a_note(options: list[str], said: str | None) -> None:
    config = load_config(CONFIG, options)
    notes = [note for note in build_run(config, build_policy(config)).notes if "rollout." in note]
    assert [said in note for note in notes] == [True] if said else notes == []


@pytest.mark.slow
def test_two_steps_from_a_configuration(tmp_path: Path) -> None:
    result = keel.train(load_config(CONFIG, [f"run.dir={tmp_path}"]))
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert {"tool/calls_mean", "tool/error_fraction", "tool/malformed", "turn/count_mean"} <= set(line)
        assert {f"reward/part/{name}" for name in ("exact_match", "f1", "retrieval_recall", "format")} <= set(line)
        assert 1.0 <= line["turn/count_mean"] <= 3.0
        assert line["kl/policy_ref/k3/mean"] >= 0.0
    assert lines[0]["kl/policy_ref/k3/mean"] < 1e-9
    record = json.loads((result.directory / "rollouts.jsonl").read_text().splitlines()[0])
    assert record["counts"]["turn/count"] >= 1.0
    evaluated = json.loads((result.directory / "eval.jsonl").read_text().splitlines()[-1])
    assert "retrieval_recall" in evaluated["extra"]


@pytest.mark.slow
def test_a_run_whose_tool_calls_all_fail_says_so_once_and_is_not_called_healthy(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **CONFIG,
        "run": {"name": "failing", "dir": str(tmp_path), "max_steps": 3},
        "model": {"name": "tiny", "device": "cpu"},
        "task": {"name": "trainer.failing:task"},
        "warmstart": None,
        "rollout": {**CONFIG["rollout"], "max_turns": 2, "max_turn_length": 8, "max_completion_length": 200},  # type: ignore[dict-item]
    }
    folder = keel.train(load_config(config)).directory
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "tool/errors"]
    assert event["step"] == 1
    assert event["error"] == "error: search raised KeyError: 'x'"
    assert "100 % of this step's tool calls" in event["message"]
    findings = {finding["code"]: finding for finding in json.loads((folder / "findings.json").read_text())}
    assert findings["tool/failing"]["severity"] == "error"
    assert "search raised KeyError" in findings["tool/failing"]["evidence"]
    page = (folder / "report.html").read_text()
    assert "tool/failing" in page
    assert "tool/errors" in page
