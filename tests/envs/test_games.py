"""What adapters to other packages' environments share; the packages themselves are in tests_envs/."""

# ruff: noqa: NPY002  the global streams are what is tested

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs import games
from keel.envs.base import play_turns
from keel.envs.games import Game, Messages, RandomStream, SeededTask, TurnResult, users
from keel.envs.mixture import mixture
from keel.envs.registry import get_task
from keel.envs.validity import check


class Coin(Game):
    """Guess a coin that is tossed in every turn, out of the global streams; three turns."""

    def __init__(self, opening: Callable[[], str] = lambda: "toss") -> None:
        self.env, self.opening, self.turns, self.closed = self, opening, 0, 0

    def reset(self, problem: Problem) -> Messages:
        random.seed(problem.info["seed"])
        return users(self.opening())

    def step(self, text: str) -> TurnResult:
        self.turns += 1
        self.coin = random.choice("ht") + str(np.random.randint(2))
        return TurnResult(users(self.coin), float(text == "h") / 3, self.turns == 3)

    def close(self) -> None:
        self.closed += 1


def task(**options: Any) -> SeededTask:
    return SeededTask("coins", lambda problem: Coin(), player=lambda env, observation: "h", **options)


@pytest.mark.slow
def test_it_is_a_sound_task() -> None:
    coins = task()
    coins.check()
    check(coins, count=8)
    check(mixture([coins, coins]), count=8)


def test_its_reward_is_the_sum_and_correct_from_success_on() -> None:
    problem = task().sample(1, seed=0, step=0)[0]
    for success, turns, earned, correct in ((1.0, "hth", 2 / 3, 0.0), (1.0, "hhh", 1.0, 1.0), (0.5, "hth", 2 / 3, 1.0)):
        with play_turns(task(success=success), problem, turns) as (episode, replies):
            assert episode.reward().total == pytest.approx(earned)
            assert episode.reward().parts == {"correct": correct}
            assert replies[-1] is None
        assert episode.game.closed == 1


def test_notes_tell_what_each_turn_earned_and_what_the_model_did_not_read() -> None:
    """The last answer is read by nobody; the others are where a view shortens them."""
    for view, unread in ((None, (2,)), (lambda text: "short", (0, 1, 2))):
        coins = task(view=view)
        with play_turns(coins, coins.sample(1, seed=0, step=0)[0], "hth") as (episode, _):
            notes = [note.splitlines() for note in episode.turn_notes()]
            coin = episode.game.coin
        assert [note[0] for note in notes] == ["reward 0.333333", "reward 0", "reward 0.333333"]
        assert [index for index, note in enumerate(notes) if len(note) == 2] == list(unread)
        assert notes[2][1] == coin


def test_each_episode_has_a_randomness_of_its_own() -> None:
    coins = task()
    problems = coins.sample(2, seed=0, step=0)

    def replies(turns: int, *episodes: Any) -> list[list[Any]]:
        return [list(row) for row in zip(*[[e.step("h") for e in episodes] for _ in range(turns)], strict=True)]

    alone = [replies(2, coins.start(problem))[0] for problem in problems]
    random.seed(0)
    np.random.seed(0)
    outside = random.Random(0).random(), np.random.RandomState(0).random_sample()
    assert replies(2, *map(coins.start, problems)) == alone
    assert (random.random(), np.random.random_sample()) == outside


def test_a_stream_that_an_exception_leaves_gives_the_others_back() -> None:
    before = random.getstate()

    def raises() -> None:
        with RandomStream("one"):
            raise ValueError(random.random())

    with pytest.raises(ValueError):
        raises()
    assert random.getstate() == before


def test_a_call_that_hangs_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(games, "LOCK_PATIENCE_S", 0.05)
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        with RandomStream("hangs"):
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait(10)
    with RandomStream("mine"):
        mine = random.random()
    for _ in range(2):
        with RandomStream("mine"):
            assert random.random() == mine
    before = random.getstate()
    go.set()
    thread.join()
    assert random.getstate() == before  # the late one changes nothing


def test_a_view_is_what_the_model_and_the_player_read() -> None:
    seen = []

    def player(env: Any, observation: str) -> str:
        seen.append(observation)
        return "h"

    coins = SeededTask("coins", lambda problem: Coin(), player, view=lambda text: text.upper()[:1])
    problem = coins.sample(1, seed=0, step=0)[0]
    assert problem.prompt == [{"role": "user", "content": "T"}]
    with play_turns(coins, problem, "h") as (_, replies):
        assert replies[0][0]["content"] in ("H", "T")
    coins.gold_turns(problem)
    assert seen[0] == "T"
    assert len(seen) == 3


def test_an_environment_that_does_not_repeat_is_refused() -> None:
    ticks = iter(range(100))
    with pytest.raises(KeelError, match=r"^coins .*same seed"):
        SeededTask("coins", lambda problem: Coin(lambda: str(next(ticks)))).check()


def test_an_environment_that_does_not_start_is_one_line() -> None:
    def broken() -> str:
        raise AssertionError("no server\nat all")

    with pytest.raises(KeelError, match=r"^coins does not start: AssertionError: no server$"):
        SeededTask("coins", lambda problem: Coin(broken)).check()


def test_a_game_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(games, "LONGEST_GAME", 2)
    coins = task()
    with pytest.raises(KeelError, match=r"task\.player.* 2 turns"):
        coins.gold_turns(coins.sample(1, seed=0, step=0)[0])


@pytest.mark.parametrize("name", ["gem", "gem:", "textarena:"])
def test_a_package_without_an_environment_is_an_unknown_task(name: str) -> None:
    with pytest.raises(KeelError, match=f"unknown task '{name}'.*gem:…"):
        get_task(name)
