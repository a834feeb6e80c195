"""gem, skyrl-gym and textarena themselves: what a rollout sees and earns is what the package gives."""

# ruff: noqa: NPY002  the global streams are what is tested

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gem
import numpy as np
import pytest
import skyrl_gym
import textarena
from short_runs import lines, small
from skyrl_gym.envs.base_text_env import BaseTextEnv

import keel
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.cli import main
from keel.envs.base import Task, play_turns
from keel.envs.episode import step_sync
from keel.envs.registry import build_task

ROOT = Path(__file__).resolve().parents[1]
PLAYERS = "keel.recipes.games"
GUESS = {"name": "gem:game:GuessTheNumber-v0-easy", "player": f"{PLAYERS}:bisect"}
NIM = {"name": "textarena:Nim-v0", "player": f"{PLAYERS}:nim", "opponent": f"{PLAYERS}:random_nim"}
LARGEST = {
    "name": "skyrl_gym:gsm8k_multi_turn",
    "task": {"name": "arithmetic", "skill": "max"},
    "extras": {"max_turns": 4},
    "player": f"{PLAYERS}:final_answer",
}
GAMES = [GUESS, NIM, LARGEST]
each_game = pytest.mark.parametrize("spec", GAMES, ids=lambda spec: spec["name"].partition(":")[0])


def first(task: Task) -> Problem:
    return task.sample(1, seed=0, step=0)[0]


def play(task: Task, problem: Problem, turns: Sequence[str]) -> tuple[list[Any], float]:
    """The environment's replies, and what the episode earned."""
    with play_turns(task, problem, turns) as (episode, replies):
        return replies, episode.reward().total


def test_gem_says_and_pays_what_gem_says_and_pays() -> None:
    task = build_task(**GUESS)
    turns = [f"\\boxed{{{number}}}" for number in (10, 1, 1, 7)]
    for problem in task.sample(4, seed=3, step=0):
        env = gem.make("game:GuessTheNumber-v0-easy")
        observation, info = env.reset(seed=problem.info["seed"])
        assert problem.prompt == [{"role": "user", "content": f"{observation}\n{info['suffix']}"}]
        expected, total = [], 0.0
        for turn in turns:
            observation, reward, terminated, truncated, info = env.step(turn)
            total += reward
            over = terminated or truncated
            expected.append(None if over else [{"role": "user", "content": f"{observation}\n{info['suffix']}"}])
            if over:
                break
        assert play(task, problem, turns) == (expected, pytest.approx(total))


def test_gem_leaves_the_log_of_the_process_alone() -> None:
    import logging

    handlers = list(logging.getLogger().handlers)
    build_task(**GUESS)
    assert logging.getLogger().handlers == handlers


def last_pile(env: Any, observation: str) -> str:
    """An opponent that takes one object of the last pile that has any."""
    piles = env.state.game_state["piles"]
    return f"[{max(index for index, pile in enumerate(piles) if pile)} 1]"


def test_textarena_plays_a_game_that_was_worked_out_by_hand() -> None:
    """Piles 2 and 2: after [0 2], the opponent's [1 1] and [1 1] the model has the last one; [0 1] twice loses."""
    task = build_task("textarena:Nim-v0", piles=[2, 2], opponent=f"{__name__}:last_pile", view=f"{PLAYERS}:piles")
    problem = first(task)
    assert problem.prompt == [{"role": "user", "content": "2 2"}]
    assert play(task, problem, ["[0 2]", "[1 1]"]) == ([[{"role": "user", "content": "0 1"}], None], 1.0)
    assert play(task, problem, ["[0 1]", "[0 1]"]) == ([[{"role": "user", "content": "1 1"}], None], -1.0)
    assert play(task, problem, ["[0 1]"])[1] == 0.0  # not over
    assert play(task, problem, ["x", "x"])[1] == -1.0  # the second invalid move loses


def test_textarena_tells_each_move_once_without_the_models_own() -> None:
    replies, _ = play(task := build_task(**NIM), first(task), ["[2 5]", "[0 1]"])
    (told,) = replies[0]
    assert told["content"].count("Player 1 removes") == 1
    assert "[2 5]" not in told["content"]
    assert "Welcome" not in told["content"]


def test_skyrl_gym_pays_each_turn() -> None:
    """Four turns: 0.2 / 4 for the form of a wrong answer, 1 for the right one, which ends the episode."""
    task = build_task(**LARGEST)
    problem = first(task)
    wrong = str(int(problem.answer) + 1)
    replies, total = play(task, problem, [f"#### {wrong}", "no idea", f"#### {problem.answer}"])
    assert total == pytest.approx(0.05 + 0.0 + 1.0)
    assert replies[-1] is None
    assert [message["role"] for reply in replies[:-1] for message in reply] == ["user", "user"]
    with play_turns(task, problem, ["no idea"]) as (episode, _):
        assert episode.counts() == {"env/steps": 1.0}
        assert episode.reward().parts == {"correct": 0.0}


@each_game
def test_a_players_games_are_won_and_problems_repeat(spec: dict[str, Any]) -> None:
    task = build_task(**spec)
    problems = task.sample(8, seed=1, step=2)
    assert problems == build_task(**spec).sample(8, seed=1, step=2)
    assert not {p.key for p in problems} & {p.key for p in task.held_out(64)}
    for problem in problems:
        assert task.reward(problem, task.gold_turns(problem)).parts["correct"] == 1.0
        assert task.usable_for_sft(problem)


@each_game
def test_episodes_side_by_side_are_those_one_after_another(spec: dict[str, Any]) -> None:
    """Random opponents and all: what runs between the turns of an episode changes nothing in it, and is not changed."""
    task = build_task(**spec)
    problems = task.sample(3, seed=0, step=0)
    scripts = [task.gold_turns(problem) for problem in problems]
    alone = [play(task, problem, script)[0] for problem, script in zip(problems, scripts, strict=True)]
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    episodes = [task.start(problem) for problem in problems]
    beside: list[list[Any]] = [[] for _ in problems]
    for turn in range(max(map(len, scripts))):
        for number, script in reversed(list(enumerate(scripts))):
            if turn < len(script):
                beside[number].append(step_sync(episodes[number], script[turn]))
    assert beside == alone
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@each_game
def test_check_task_finds_what_holds(spec: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Four guesses that are always the same find four of ten numbers: that is all it finds."""
    values = [f"task.{name}={json.dumps(value)}" for name, value in spec.items() if name != "name"]
    lucky = spec is GUESS
    assert main(["check-task", spec["name"], *values, "--samples", "8"]) == int(lucky)
    shown = capsys.readouterr().out
    assert ("1 of 13 checks fail: attacks earn less" if lucky else "checks pass") in shown
    assert ("'commonest answer' earns" in shown) == lucky


# ------------------------------------------------------------------------------------------------ runs


SHORT = [
    {**GUESS, "view": f"{PLAYERS}:hint"},
    {**NIM, "view": f"{PLAYERS}:piles"},
    {**LARGEST, "view": f"{PLAYERS}:again"},
]


@pytest.mark.parametrize("spec", SHORT, ids=lambda spec: spec["name"].partition(":")[0])
def test_a_resumed_run_is_the_run_in_one_go(tmp_path: Path, spec: dict[str, Any]) -> None:
    start = {"steps": 4, "batch_size": 4}
    whole = keel.train(small(tmp_path / "whole", spec, warmstart=start)).directory
    part = small(tmp_path / "part", spec, warmstart=start)
    keel.train(part, overrides=["run.max_steps=2"])
    random.seed(11)
    resumed = keel.train(part, resume=True).directory
    assert lines(resumed, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    sampled = [[line for line in lines(run, "rollouts.jsonl") if not line["tracked"]] for run in (resumed, whole)]
    assert sampled[0] == sampled[1]
    assert lines(whole, "metrics.jsonl")[-1]["turn/count_mean"] >= 1


class BreaksGem(gem.Env):
    """Loses its server in the second turn, where its seed is a multiple of 3."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed)
        self.seed, self.turns = seed or 0, 0
        return "say\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        if self.turns == 2 and self.seed % 3 == 0:
            raise ConnectionError("the server is gone")
        return "again\n", float("e" in action), self.turns == 3, False, {}


class BreaksTextArena(textarena.Env):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=3)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "say")
        self.breaks = (seed or 0) % 3 == 0

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if self.state.turn == 1 and self.breaks:
            raise ConnectionError("the server is gone")
        self.state.add_observation("again", textarena.ObservationType.GAME_MESSAGE)
        if self.state.turn == 2:
            self.state.set_outcome(reward=float("e" in action))
        done, info = self.state.step()
        return done, info


class BreaksSkyRL(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.breaks = int((extras or {})["reward_spec"]["ground_truth"]) % 3 == 0

    def step(self, action: str) -> Any:
        self.turns += 1
        if self.turns == 2 and self.breaks:
            raise ConnectionError("the server is gone")
        again = [{"role": "user", "content": "again"}]
        return {"observations": again, "reward": float("e" in action), "done": self.turns == 3, "metadata": {}}


gem.register("test:Breaks-v0", BreaksGem)
textarena.register("Breaks-v0", BreaksTextArena)
skyrl_gym.register("breaks", f"{__name__}:BreaksSkyRL")
BREAKS = [
    {"name": "gem:test:Breaks-v0"},
    {"name": "textarena:Breaks-v0"},
    {"name": "skyrl_gym:breaks", "task": {"name": "arithmetic", "skill": "max"}},
]


@pytest.mark.parametrize("spec", BREAKS, ids=lambda spec: spec["name"].partition(":")[0])
def test_an_environment_that_breaks_is_recorded_and_the_run_goes_on(tmp_path: Path, spec: dict[str, Any]) -> None:
    config = small(tmp_path, spec, reward={"on_error": "skip_group"})
    config["run"]["max_steps"], config["rollout"]["prompts_per_step"] = 2, 8
    run = keel.train(config).directory
    assert len(lines(run, "metrics.jsonl")) == 2
    failed = [event for event in lines(run, "events.jsonl") if event["kind"] == "reward/failed"]
    assert failed
    assert all(re.search(r"step on problem .*ConnectionError: the server is gone", e["message"]) for e in failed)
    with pytest.raises(KeelError, match=r"the server is gone.*reward\.on_error"):
        keel.train(config, overrides=["run.name=stops", "reward.on_error=stop"])


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"name": "gem:game:GuessTheNumber-v0-eazy"}, ("GuessTheNumber-v0-easy", "print_envs")),
        ({"name": "textarena:Nimm-v0"}, ("Nim-v0", "pprint_registry_detailed")),
        ({**LARGEST, "name": "skyrl_gym:gsm9k"}, ("gsm8k", "pprint_registry")),
        ({"name": "textarena:Nim-v0"}, ("textarena:Nim-v0", "number of players", "task.num_players")),
        ({"name": "textarena:Nim-v0", "num_players": 2, "pile": 3}, ("textarena:Nim-v0", "pile")),
        ({"name": "skyrl_gym:gsm8k", "task": "arithmetic"}, ("skyrl_gym:gsm8k", "name")),
        ({"name": "skyrl_gym:gsm8k"}, ("task",)),
        ({**GUESS, "player": "keel.recipes.games:bisekt"}, ("task.player", "bisekt")),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_one_line(spec: dict[str, Any], names: Sequence[str]) -> None:
    with pytest.raises(KeelError) as refused:
        first(build_task(**spec))
    assert "\n" not in str(refused.value)
    assert all(name in str(refused.value) for name in names), refused.value


@pytest.mark.parametrize(
    ("module", "spec", "extra"),
    [("gem", GUESS, "gem"), ("textarena", NIM, "textarena"), ("skyrl_gym", LARGEST, "skyrl-gym")],
)
def test_a_package_that_is_missing_is_one_line(
    module: str, spec: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KeelError, match=rf"needs {module}: pip install 'keel-rl\[{extra}\]'"):
        build_task(**spec)


def test_without_a_player_it_trains_but_has_no_gold_answer() -> None:
    task = build_task("gem:game:GuessTheNumber-v0-easy")
    assert play(task, first(task), ["\\boxed{5}"])
    with pytest.raises(KeelError, match=r"task\.player"):
        task.gold(first(task))
