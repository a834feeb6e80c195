"""verifiers itself: its traces become completions token by token, and what it cannot do here is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

import keel
from keel.base.errors import KeelError
from keel.base.types import Group, Problem
from keel.cli import main
from keel.config import load_config
from keel.envs import verifiers as adapter
from keel.envs.base import Task, play_turns
from keel.envs.registry import build_task
from keel.rollout import Request
from keel.run.build import Built, build_policy, build_run, build_warmstart

LARGEST = {"name": "verifiers:verifiers_largest", "player": "verifiers_largest:player"}
REWRITING = {"name": "verifiers:rewriting"}
ADDING = {"name": "verifiers:adding"}
FAULTY = {"name": "verifiers:faulty"}


def small(spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "run", "max_steps": 4},
        "model": {"name": "keel.models.tiny:half_model", "device": "cpu"},
        "task": spec,
        "rollout": {
            "prompts_per_step": 3,
            "num_generations": 2,
            "max_turns": 2,
            "max_turn_length": 6,
            "max_completion_length": 40,
        },
        "reward": {"timeout_s": 120.0},
        "optim": {"learning_rate": 1.0e-3},
        "eval": {"every": 0, "samples": 2, "k": [1]},
        "log": {"console": "none", "tensorboard": False},
        "checkpoint": {"every": 2},
        **more,
    }


def built(spec: dict[str, Any], *overrides: str, **more: Any) -> Built:
    config = load_config(small(spec, **more), overrides)
    return build_run(config, build_policy(config))


def collected(run: Built, step: int = 0) -> list[Group]:
    task = run.collector.task
    return run.collector.collect(task.sample(3, seed=0, step=step), step=step)


def first(task: Task) -> Problem:
    return task.sample(1, seed=0, step=0)[0]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], Any]:
    """The traces of all episodes, by prompt and reward of arrival."""
    seen: dict[tuple[str, int], Any] = {}
    run_episode = vf.Env.run_episode

    async def recorded(self: Any, task: Any, ctx: Any, **options: Any) -> Any:
        episode = await run_episode(self, task, ctx, **options)
        noise = ctx.sampling.model_dump()["keel"]
        seen[noise["problem"], noise["sample"]] = episode.traces[0]
        return episode

    monkeypatch.setattr(vf.Env, "run_episode", recorded)
    return seen


@pytest.mark.parametrize("overrides", [[], ["rollout.top_k=20", "rollout.temperature=0.8"]], ids=["plain", "filtered"])
def test_a_completion_is_its_trace_token_by_token(overrides: list[str], traces: dict[Any, Any]) -> None:
    run = built(LARGEST, *overrides)
    turns = set()
    for group in collected(run):
        assert len(group.completions) == 2
        assert group.prompt_tokens == run.collector.renderer.prompt(group.problem)
        for sample, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True)):
            trace = traces[group.problem.key, sample]
            (branch,) = trace.branches
            start = len(group.prompt_tokens)
            assert (*group.prompt_tokens, *completion.tokens) == tuple(branch.token_ids)
            assert completion.action == tuple(branch.sampled_mask[start:])
            assert completion.sample_logp == tuple(branch.logprobs[start:])
            assert reward.total == trace.reward
            assert reward.parts["tries"] == trace.rewards["tries"].score
            assert completion.counts["turn/count"] == trace.num_turns
            turns.add(trace.num_turns)
    assert turns == {2}, "a random model is wrong, and has a second try"


def test_first_turns_are_the_engines_own(traces: dict[Any, Any]) -> None:
    run = built(LARGEST)
    groups = collected(run, step=1)
    requests = [Request(g.problem.key, g.prompt_tokens, max_new=6) for g in groups]
    expected = run.run.engine.generate(requests, run.sampling, seed=0, step=1)
    for group, completions in zip(groups, expected, strict=True):
        for completion, own in zip(group.completions, completions, strict=True):
            assert completion.tokens[: len(own.tokens)] == own.tokens
            assert completion.sample_logp[: len(own.tokens)] == pytest.approx(own.sample_logp, abs=1e-5)


def test_equal_steps_give_equal_groups() -> None:
    one, other = collected(built(LARGEST)), collected(built(LARGEST))
    assert [(g.completions, g.rewards) for g in one] == [(g.completions, g.rewards) for g in other]


def test_a_rewritten_history_gives_branches_that_train_each_turn_once(traces: dict[Any, Any]) -> None:
    for group in collected(built(REWRITING, "rollout.max_turns=3")):
        for sample, completion in enumerate(group.completions):
            trace = traces[group.problem.key, sample]
            branches = (completion, *completion.branches)
            contexts = [(*group.prompt_tokens, *branch.tokens) for branch in branches]
            assert contexts == [tuple(branch.token_ids) for branch in reversed(trace.branches)]
            assert len(contexts) == 2
            sampled = sum(sum(node.mask) for node in trace.nodes)
            assert sum(sum(branch.action) for branch in branches) == sampled
            for branch, theirs in zip(branches, reversed(trace.branches), strict=True):
                logps = theirs.logprobs[len(group.prompt_tokens) :]
                own = [logp if action else 0.0 for logp, action in zip(logps, branch.action, strict=True)]
                assert list(branch.sample_logp) == own


def test_a_given_turn_is_answered_as_in_a_rollout(traces: dict[Any, Any]) -> None:
    """The warm start's tokens are those of a rollout with these turns."""
    task = build_task(**LARGEST)
    problem = first(task)
    right = task.gold(problem)
    with play_turns(task, problem, ["x", right]) as (episode, replies):
        assert replies == [[{"role": "user", "content": "again"}], None]
        assert episode.reward().total == 0.5
    with play_turns(task, problem, [right]) as (episode, replies):
        assert replies == [None]
        assert episode.reward().total == 1.0
    with play_turns(task, problem, ["x"]) as (episode, _):  # the second try is not given
        assert episode.reward().total == 0.0


def test_the_warm_start_learns_the_prompts_of_rollouts() -> None:
    config = load_config(small(LARGEST, warmstart={"steps": 1, "batch_size": 4, "learning_rate": 1.0e-3}))
    loaded = build_policy(config)
    run = build_run(config, loaded)
    rolled = {group.problem.key: group.prompt_tokens for group in collected(run)}
    for problem in run.collector.task.sample(3, seed=0, step=0):
        assert run.collector.renderer.prompt(problem) == rolled[problem.key]
    groups = build_warmstart(config, loaded, run.collector.task).examples(0)
    assert all(group.completions[0].text in "0123456789" for group in groups)


def test_a_tool_of_the_taskset_is_called() -> None:
    task = build_task(**ADDING)
    call = '<tool_call>{"name": "sums_add", "arguments": {"a": 5, "b": 7}}</tool_call>'
    with play_turns(task, first(task), [call, "the sum is 12"]) as (episode, replies):
        (reply,) = replies[0]
        assert (reply["role"], reply["content"]) == ("tool", "12")
        assert episode.reward().total == 1.0


def test_a_mixture_refuses_it_by_name() -> None:
    with pytest.raises(KeelError, match=LARGEST["name"]):
        build_task("mixture", tasks=[{"name": "arithmetic"}, LARGEST])


def test_check_task_runs_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-task", LARGEST["name"], f"player={LARGEST['player']}", "--samples", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_a_run_that_is_resumed_is_the_same(tmp_path: Path) -> None:
    def lines(folder: str, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (tmp_path / folder / "run" / name).read_text().splitlines()]
        timed = ("time/", "speed/", "memory/")
        records = [record for record in records if not record.get("tracked")]  # each run's end has its own
        return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records]

    for folder, steps in (("whole", 4), ("parts", 2)):
        config = small(LARGEST)
        config["run"] = {**config["run"], "dir": str(tmp_path / folder), "max_steps": steps}
        keel.train(config)
    keel.train(config, resume=True, overrides=["run.max_steps=4"])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert lines("parts", name) == lines("whole", name)


@pytest.mark.parametrize("fault", ["reward", "hang"])
def test_an_episode_that_fails_is_recorded_and_its_group_left_out(fault: str) -> None:
    seconds = 60.0 if fault == "reward" else 8.0
    run = built({**FAULTY, "fault": fault}, reward={"timeout_s": seconds, "on_error": "skip_group"})
    problems = run.collector.task.sample(25, seed=0, step=0)[:25]
    bad = [problem for problem in problems if problem.prompt[-1]["content"].endswith("1")][:1]
    good = [problem for problem in problems if not problem.prompt[-1]["content"].endswith("1")][:2]
    groups = run.collector.collect([*good, *bad])
    assert [group.problem.key for group in groups] == [problem.key for problem in good]
    failures = run.judge.drain()
    assert {(failure.problem, failure.sample) for failure in failures} == {(bad[0].key, 0), (bad[0].key, 1)}
    cause = "no such answer" if fault == "reward" else "reward.timeout_s"
    assert all(cause in failure.cause for failure in failures)


def test_an_agent_that_is_not_trained_may_use_the_model_too(traces: dict[Any, Any]) -> None:
    for group in collected(built({**FAULTY, "fault": "judged"})):
        for completion in group.completions:
            assert not completion.branches
            assert completion.counts["turn/count"] == 1


def test_two_trained_agents_are_refused() -> None:
    with pytest.raises(KeelError, match=r"agent, second.*trainable"):
        collected(built({**FAULTY, "fault": "two"}))


def test_equal_prompts_are_told_apart_by_their_keys() -> None:
    task = build_task(**FAULTY, fault="same")
    assert task.prompts_repeat
    keys = {problem.key for problem in task.sample(20, seed=0, step=0)}
    assert not keys & {problem.key for problem in task.held_out(5)}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"name": "verifiers:no_such_taskset"}, ("no_such_taskset", "not installed")),
        ({"name": "verifiers:json"}, ("verifiers:json",)),
        ({**FAULTY, "folt": "x"}, ("verifiers:faulty", "folt")),
        ({**FAULTY, "fault": "endless"}, ("task.take",)),
        ({**FAULTY, "fault": "load"}, ("verifiers:faulty", "the data are gone")),
        ({**FAULTY, "fault": "prompt"}, ("task 0", "prompt")),
        ({**FAULTY, "take": 1}, ("verifiers:faulty", "1 problem")),
        ({**FAULTY, "env": {"agent": {"harness": {"id": "bash"}}}}, ("bash", "task.env.agent.harness")),
        ({**FAULTY, "env": {"agent": {"harness": {"id": "null"}}}}, ("null", "task.env.agent.harness")),
        ({**FAULTY, "env": {"agent": {"harness": {"id": "codex"}}}}, ("codex", "task.env.agent.harness")),
        ({**FAULTY, "env": {"agent": {"harness": {"id": "no_harness"}}}}, ("no_harness",)),
        ({**FAULTY, "env": {"agnet": {}}}, ("agnet",)),
        ({**LARGEST, "player": "verifiers_largest:no_player"}, ("task.player", "no_player")),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_one_line(spec: dict[str, Any], names: Sequence[str]) -> None:
    with pytest.raises(KeelError) as refused:
        build_task(**spec)
    assert "\n" not in str(refused.value)
    assert all(name in str(refused.value) for name in names), refused.value


def test_without_a_player_it_has_no_gold_answer() -> None:
    task = build_task(LARGEST["name"])
    with pytest.raises(KeelError, match=r"task\.player"):
        task.gold(first(task))


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda name: "0.3.1")
    with pytest.raises(KeelError, match=r"0\.3\.1"):
        build_task(**FAULTY)


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(KeelError, match=r"needs verifiers: pip install 'keel-rl\[verifiers\]'"):
        build_task(**FAULTY)
