"""Environments as TRL's GRPOTrainer takes them; tests/integrations compares them with TRL itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import keel
from envs import trl_environments as envs
from envs.playing import lines, replies, short_run
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.cli import main
from keel.envs.base import Task, play_turns
from keel.envs.registry import build_task
from keel.envs.tool_calls import write_call
from keel.envs.validity import check

HERE = envs.__name__


def made(factory: str, **params: Any) -> Task:
    return build_task(f"trl:{HERE}:{factory}", **params)


def rows(folder: Path, *records: dict[str, Any]) -> dict[str, Any]:
    """The task of rows, each with a prompt; every third is held out."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"row {i}", **record}) + "\n" for i, record in enumerate(records)))
    return {"name": "dataset", "held_out": 0.3, "data": {"path": str(file), "columns": {"answer": None}}}


def every(task: Task, count: int) -> list[Problem]:
    return [*task.sample(count, seed=0, step=0), *task.held_out(count)]


def first(task: Task) -> Problem:
    return task.sample(1, seed=0, step=0)[0]


def call(name: str, **arguments: Any) -> str:
    return write_call(name, arguments, "json", [])


def contents(reply: Any) -> list[str]:
    return [message["content"] for message in reply]


@pytest.mark.slow
def test_it_is_a_sound_task_in_either_format() -> None:
    check(made("Digits", player=f"{HERE}:player"), count=2)
    check(made("Digits", player=f"{HERE}:tag_player", format="tags"), count=2)


def test_its_methods_are_the_tools_and_its_reset_ends_the_prompt(tmp_path: Path) -> None:
    task = made("Digits", task=rows(tmp_path, *({"digit": i} for i in range(10))))
    for problem in every(task, 7):
        digit = problem.info["digit"]
        assert problem.prompt == [{"role": "user", "content": f"{problem.info['asked']} Guess a digit."}]
        assert [tool["function"]["name"] for tool in problem.tools] == ["guess"]
        with play_turns(task, problem, [call("guess", digit=digit + 1), call("guess", digit=digit), "x"]) as played:
            episode, heard = played
            assert contents(heard[0]) == ["lower" if digit < 9 else "error: guess raised ValueError: no digit"]
            assert contents(heard[1]) == ["hit"]
            assert heard[2] is None
            assert episode.reward().total == 1.0
            assert episode.counts()["tool/calls"] == 2


def test_an_episode_that_is_cut_off_is_paid_as_it_is() -> None:
    task = made("Digits")
    problem = first(task)
    with play_turns(task, problem, []) as (episode, _):
        assert episode.reward().total == 0.0
    random.seed(1)
    for digit in range(10):
        with play_turns(task, problem, [call("guess", digit=digit)]) as (episode, _):
            assert episode.reward().total == float(episode.game.env.digit == digit)


def test_a_dict_mixes_environments_by_the_rows(tmp_path: Path) -> None:
    names = ["digits", "coins"] * 5
    task = made("MIXED", task=rows(tmp_path, *({"environment": name} for name in names)))
    for problem in every(task, 7):
        coins = problem.info["environment"] == "coins"
        assert [tool["function"]["name"] for tool in problem.tools] == ["toss" if coins else "guess"]
        if coins:
            assert contents(replies(task, [(problem, call("toss"))])[0]) == ["tails"]
            assert task.reward(problem, [call("toss"), call("toss"), "x"]).total == 1.0


def test_a_reward_function_gets_the_columns_and_the_environment(tmp_path: Path) -> None:
    words = ({"word": word, "seed": 7} for word in "abcabcabca")
    task = made("Unpaid", reward=f"{HERE}:both", task=rows(tmp_path, *words))
    problem = first(task)
    turns = [call("say", word=problem.info["word"]), call("say", word="z"), call("say", word=problem.info["word"]), "x"]
    assert task.reward(problem, turns).total == 2.0
    summed = made("Digits", reward=f"{HERE}:length")
    assert summed.reward(first(summed), [call("guess", digit=d) for d in range(10)]).total == 1.0 + 10.0


def test_its_randomness_is_the_episodes_own() -> None:
    task = made("Dice")
    problems = task.sample(3, seed=0, step=0)
    turns = [call("roll"), call("roll")]

    def rolled(order: list[int]) -> dict[int, list[str]]:
        heard = {i: [] for i in order}
        episodes = {i: task.start(problems[i]) for i in order}
        from keel.envs.episode import step_sync

        for turn in turns:
            for i in order:
                random.random()
                heard[i] += contents(step_sync(episodes[i], turn))
        return heard

    assert rolled([0, 1, 2]) == rolled([2, 0, 1]) == rolled([1, 2, 0])
    assert len({tuple(r) for r in rolled([0, 1, 2]).values()}) > 1
    random.seed(3)
    expected = random.Random(3).random()
    task.start(problems[0])
    assert random.random() == expected


def test_a_reset_gets_the_columns_that_it_names(tmp_path: Path) -> None:
    assert first(made("Deaf", task=rows(tmp_path, *({"digit": i} for i in range(10))))).prompt


@pytest.mark.parametrize(
    ("factory", "params", "names"),
    [
        ("rollout", {}, ("rollout", "prompts, trainer", "rollout_func", "environment_factory")),
        ("needs", {}, ("needs", "path")),
        ("needs_by_name", {}, ("needs_by_name", "path", "mode", "no arguments")),
        ("NOTHING", {}, ("NOTHING", "int")),
        ("MIXED", {}, ("MIXED", "task.task", "environment")),
        ("Bare", {}, ("reset",)),
        ("Unpaid", {}, ("get_reward", "task.reward")),
        ("Restless", {}, ("Restless", "same seed")),
        ("Odd", {}, ("Odd", "reset returned a list")),
        ("Missing", {}, ("Missing",)),
        ("Digits", {"format": "xml"}, ("xml",)),
        ("Digits", {"player": "nowhere:at_all"}, ("task.player",)),
        ("Digits", {"timeout_s": 0}, ("timeout_s",)),
        ("Digits", {"task": "gsm8k"}, ("task",)),
        ("Digits", {"guesses": 3}, ("guesses",)),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_one_line(factory: str, params: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(KeelError) as refused:
        made(factory, **params)
    assert "\n" not in str(refused.value)
    assert all(name in str(refused.value) for name in names), refused.value


def test_a_row_of_no_environment_is_one_line(tmp_path: Path) -> None:
    task = made("MIXED", task=rows(tmp_path, *({"environment": "dice"} for _ in range(5))))
    with pytest.raises(KeelError, match=r"'dice'.*digits, coins"):
        first(task)


def test_without_a_player_there_is_no_gold_answer() -> None:
    task = made("Digits")
    with pytest.raises(KeelError, match=r"task\.player"):
        task.gold(first(task))


@pytest.mark.slow
def test_check_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"task.player={HERE}:tag_player", "task.format=tags", "--samples", "4"]
    assert main(["check-task", f"trl:{HERE}:Digits", *options]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_is_the_run_in_one_go(tmp_path: Path) -> None:
    spec = {"name": f"trl:{HERE}:Digits", "player": f"{HERE}:tag_player", "format": "tags"}
    start = {"steps": 4, "batch_size": 4}
    whole = keel.train(short_run(tmp_path / "whole", spec, warmstart=start)).directory
    part = short_run(tmp_path / "part", spec, warmstart=start)
    keel.train(part, overrides=["run.max_steps=2"])
    random.seed(11)
    resumed = keel.train(part, resume=True).directory
    assert lines(resumed, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert lines(whole, "metrics.jsonl")[-1]["turn/count_mean"] >= 1


@pytest.mark.slow
def test_a_reward_that_fails_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    config = short_run(tmp_path, {"name": f"trl:{HERE}:Gone", "format": "tags"}, reward={"on_error": "skip_group"})
    config["run"]["max_steps"], config["rollout"]["prompts_per_step"] = 2, 8
    run = keel.train(config).directory
    assert len(lines(run, "metrics.jsonl")) == 2
    failed = [event["message"] for event in lines(run, "events.jsonl") if event["kind"] == "reward/failed"]
    assert failed
    assert all("ConnectionError: the server is gone" in message for message in failed)
