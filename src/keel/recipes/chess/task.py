"""The base of the chess tasks: sources of problems, graders, and the task class."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.layouts import source_of
from keel.envs.problems import Draw, held_out_problems, is_held_out, seeded_rng, training_problems
from keel.recipes.chess.data import ChessRow, load
from keel.recipes.chess.format import PARSES, Padding, read_policy
from keel.recipes.chess.positions import Games, Position
from keel.recipes.chess.rewards import malformed_value
from keel.recipes.chess.rules import identity, mating_moves


class ChessGrader:
    """The interface of graders: gold answer, reward of a text, metrics over judged groups, and running counts."""

    def gold(self, problem: Problem) -> str:
        raise NotImplementedError

    def reward(self, problem: Problem, text: str) -> Reward:
        raise NotImplementedError

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        raise NotImplementedError

    def counters(self) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True)
class RandomPositions(Task):
    """Problems from a stream of random positions; a hash of the position decides which are held out."""

    name: str
    games: Games
    ask: Callable[[random.Random, Position], Problem]
    share: float

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        draw = self._draw(lambda position: not self._held(position))
        return training_problems(draw, count, seeded_rng(self.name, "train", seed, step), self._held)

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return held_out_problems(self._draw(self._held), count, seeded_rng(self.name, "held-out", seed), self._held)

    def _held(self, position: str) -> bool:
        return is_held_out(position, self.share)

    def _draw(self, accept: Callable[[str], bool]) -> Draw:
        def draw(rng: random.Random) -> tuple[str, Problem]:
            position = self.games.draw(rng, accept)
            return identity(position.fen), self.ask(rng, position)

        return draw


@dataclass(frozen=True)
class ChessTask(TaskWrapper):
    """A chess task: `inner` has the problems, from data (`Dataset`) or generated (`RandomPositions`)."""

    inner: Task
    grader: ChessGrader
    name: str = "chess"

    def gold(self, problem: Problem) -> str:
        """The correct completion of the prompt."""
        return self.grader.gold(problem)

    def gold_turns(self, problem: Problem) -> list[str]:
        return [self.gold(problem)]

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """The reward of the model's text, by part."""
        return self.grader.reward(problem, turns[-1] if turns else "")

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Metrics over all completions of an evaluation."""
        return self.grader.metrics(groups)

    def counters(self) -> Mapping[str, float]:
        """The engine's failures so far, if there is an engine."""
        return self.grader.counters()

    def picture(self, problem: Problem, text: str) -> str | None:
        """An SVG of an answer's board, for the report."""
        from keel.recipes.chess.picture import answer_picture

        return answer_picture(problem, text)


def check_grading(system: str, parse: str, malformed: float | None) -> dict[str, Any]:
    """Check the options of a reward; returns its keyword arguments."""
    if parse not in PARSES:
        raise unknown("chess parse", parse, PARSES)
    malformed_value(system, malformed)
    return {"system": system, "parse": parse, "malformed": malformed}


def part_means(
    groups: Sequence[Group], names: Sequence[str], again: Callable[[Problem, str], Reward]
) -> dict[str, float]:
    """The mean of each named part over all completions that have it, graded again by the task's own reward.

    `truncated_without_eos` is the fraction of truncated completions.
    """
    completions = [(group.problem, c) for group in groups for c in group.completions]
    judged = [again(problem, completion.text).parts for problem, completion in completions]
    means = {}
    for name in names:
        values = [parts[name] for parts in judged if name in parts]
        if values:
            means[name] = fmean(values)
    means["truncated_without_eos"] = fmean(c.stop_reason == "length" for _, c in completions)
    return means


def mate_in_one(groups: Sequence[Group], padding: Padding) -> dict[str, float]:
    """The fraction of completions whose best move mates, among positions with such a move; empty without any."""
    played = []
    for group in groups:
        mates = mating_moves(group.problem.info["fen"])
        played += [read_policy(c.text, padding).best in mates for c in group.completions] if mates else []
    return {"mate_in_one": fmean(played), "mate_in_one_positions": float(len(played))} if played else {}


def problems_of(
    name: str,
    mark: str,
    data: Mapping[str, Any] | None,
    games: Games,
    ask: Callable[[random.Random, Position], Problem],
    ask_of: Callable[[ChessRow], Problem],
    held_out: int | float,
) -> Task:
    """A task's problems: from its data if given, otherwise from random games."""
    if (
        not isinstance(held_out, int | float)
        or isinstance(held_out, bool)
        or held_out <= 0
        or (held_out >= 1 and held_out != int(held_out))
    ):
        raise KeelError(f"chess held_out is {held_out!r}: give a fraction below 1, or with data a number of positions")
    if data is not None and source_of(data).path is not None:
        if games != Games():
            raise KeelError(f"{name} reads its positions from data.path: leave plies and pieces out")
        return load(data, mark, ask_of, held_out, name)
    if held_out >= 1:
        raise KeelError(f"chess held_out is {held_out}: without data it must be a fraction below 1")
    return RandomPositions(name, games, ask, float(held_out))
