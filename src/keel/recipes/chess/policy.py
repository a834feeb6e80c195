"""`chess_policy` (P:): given a position, name five moves, their evaluations, and the best move."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.dataset import Dataset
from keel.envs.problems import HELD_OUT_FRACTION, seeded_rng
from keel.recipes.chess.data import ChessRow
from keel.recipes.chess.engine import Query, StockfishOptions, engine_options, pool_of
from keel.recipes.chess.format import (
    PADDINGS,
    Analysis,
    Padding,
    padding_of,
    policy_completion,
    policy_prompt,
    read_policy,
    read_policy_row,
)
from keel.recipes.chess.positions import Position, games_of
from keel.recipes.chess.rewards import policy_reward
from keel.recipes.chess.rules import legal_moves
from keel.recipes.chess.task import ChessGrader, ChessTask, check_grading, mate_in_one, part_means, problems_of

PARTS = ("parsed", "structure", "legal", "legal5", "best_legal", "top5", "best", "eval", "content", "unavailable")
_RENAMED = {"best": "top1", "legal": "moves_legal", "best_legal": "legal_move_rate"}
DRAWS = 3  # draws of positions without any label before the run stops
MOST_LOSS = 10.0  # pawns: the largest loss of a move, such as a missed mate


@dataclass(frozen=True)
class PolicyGrader(ChessGrader):
    """Grade P: answers by the engine's lines in a problem's info; None there means `unavailable`."""

    padding: Padding = PADDINGS["source"]
    engine: StockfishOptions | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def gold(self, problem: Problem) -> str:
        """The engine's moves, shuffled by the position's random stream."""
        lines = list(self._lines(problem) or ())
        if not lines:
            raise KeelError(f"the position {problem.info['fen']!r} has no labels, because the engine failed")
        best = lines[0][0]
        seeded_rng("chess shuffle", problem.info["fen"]).shuffle(lines)
        moves, values = zip(*lines, strict=True)
        return policy_completion(Analysis(moves, values, best), self.padding)

    def reward(self, problem: Problem, text: str) -> Reward:
        answer = read_policy(text, self.padding)
        return policy_reward(answer, legal_moves(problem.info["fen"]), self._lines(problem), **self.options)

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Means of the parts, and the mean centipawn loss of the legal best moves."""
        means = part_means(groups, PARTS, self.reward)
        metrics = {_RENAMED.get(name, name): value for name, value in means.items()}
        losses = self._losses(groups)
        if losses:
            metrics["centipawn_loss"] = 100 * fmean(losses)
        metrics |= mate_in_one(groups, self.padding)
        return {**metrics, **self.counters()}

    def counters(self) -> Mapping[str, float]:
        """The number of failures of the engine in this process."""
        if self.engine is None:
            return {}
        counts = pool_of(self.engine).counts
        return {f"engine/{name}": float(counts[name]) for name in ("crashed", "timed_out", "unavailable")}

    def _losses(self, groups: Sequence[Group]) -> list[float]:
        """Pawns lost by each legal best move: best score − its score, from the engine if it is not a label."""
        played = [
            (group.problem, read_policy(c.text, self.padding).best) for group in groups for c in group.completions
        ]
        chosen = [(p, m) for p, m in played if m is not None and m in legal_moves(p.info["fen"]) and self._lines(p)]
        unknown = [(p, m) for p, m in chosen if m not in dict(self._lines(p) or ())]
        scores: dict[tuple[str, str], float] = {}
        if unknown and self.engine is not None:
            queries = [Query(p.info["fen"], (m,)) for p, m in unknown]
            for query, lines in zip(queries, pool_of(self.engine).analyse(queries), strict=True):
                if lines:
                    scores[query.fen, query.moves[0]] = lines[0][1]
        losses = []
        for problem, move in chosen:
            labels = self._lines(problem) or ()
            value = dict(labels).get(move, scores.get((problem.info["fen"], move)))
            if value is not None:
                losses.append(min(MOST_LOSS, max(0.0, labels[0][1] - value)))
        return losses

    def _lines(self, problem: Problem) -> Sequence[tuple[str, float]] | None:
        lines: Sequence[tuple[str, float]] | None = problem.info.get("lines")
        return lines


@dataclass(frozen=True)
class EngineLabelled(TaskWrapper):
    """Problems with the engine's lines in their info; existing labels are kept."""

    inner: Task
    engine: StockfishOptions

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """`count` problems; one without a label is replaced by a second copy of another problem of the batch."""
        # an offset of the seed that no other draw has, so that positions are new but reproducible
        draws = (self.inner.sample(count, seed=seed + 32_452_843 * draw, step=step) for draw in range(DRAWS))
        labelled = self._first_labelled(draws) if count else []
        again = ((labelled[i % len(labelled)], i) for i in range(count - len(labelled)))
        return [*labelled, *(replace(problem, key=f"{problem.key}#again{i}") for problem, i in again)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """The labelled problems of a fixed set; if there are none, of further positions."""
        draws = (self.inner.held_out(count * (draw + 1), seed=seed)[count * draw :] for draw in range(DRAWS))
        return self._first_labelled(draws) if count else []

    def _first_labelled(self, draws: Iterable[list[Problem]]) -> list[Problem]:
        """The labelled problems of the first draw with any. A position may crash an engine; several draws without a
        label mean that the engine is broken."""
        tried = 0
        for problems in draws:
            labelled = self._label(problems)
            if labelled:
                return labelled
            tried += len(problems)
        engine = pool_of(self.engine).path
        raise KeelError(
            f"the engine {engine} answered for none of {tried} positions in {DRAWS} draws: "
            "run it by hand, raise task.engine.timeout_s, or name another in task.engine.path"
        )

    def _label(self, problems: list[Problem]) -> list[Problem]:
        """The problems with their lines, without unavailable ones, which the pool counts."""
        unlabelled = [p for p in problems if "lines" not in p.info]
        answers = pool_of(self.engine).analyse([Query(p.info["fen"]) for p in unlabelled])
        lines = {p.key: line for p, line in zip(unlabelled, answers, strict=True)}
        labelled = [replace(p, info={**p.info, "lines": lines[p.key]}) if p.key in lines else p for p in problems]
        return [p for p in labelled if p.info["lines"]]


def policy_problem(fen: str, padding: Padding, key: str | None = None) -> Problem:
    """The P: problem of a position."""
    return Problem(key=key or fen, prompt=policy_prompt(fen, padding), info={"fen": fen})


def chess_policy(
    data: Mapping[str, Any] | None = None,
    plies: Sequence[int] | None = None,
    pieces: int | None = None,
    padding: str = "source",
    engine: Mapping[str, Any] | None = None,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
) -> ChessTask:
    """The task `chess_policy`: positions of `data`, or of random games of `plies` [from, to] moves, from the starting
    position or from one of at most `pieces` pieces.

    Labels are those of the data's P: rows, or else the engine's (`engine`: see `StockfishOptions`), which must be
    installed. `padding` is source (90, 30 and 40 characters) or none; the other parameters are those of `chess_env`.
    """
    options = check_grading(system, parse, malformed)
    widths, chosen = padding_of(padding), engine_options(engine)

    def ask(rng: random.Random, position: Position) -> Problem:
        return policy_problem(position.fen, widths)

    def ask_of(record: ChessRow) -> Problem:
        return _of_record(record, widths)

    problems = problems_of("chess_policy", "P: ", data, games_of(plies, pieces), ask, ask_of, held_out)
    if isinstance(problems, Dataset) and all("lines" in p.info for p in (*problems.train, *problems.held)):
        return ChessTask(problems, PolicyGrader(widths, None, options), "chess_policy")
    pool_of(chosen)
    return ChessTask(EngineLabelled(problems, chosen), PolicyGrader(widths, chosen, options), "chess_policy")


def _of_record(record: ChessRow, padding: Padding) -> Problem:
    """A row's problem with the labels of its text; illegal moves, and a best move without the highest evaluation, are
    refused."""
    fen, lines = record.fen, None
    if record.text is not None:
        fen, labels = read_policy_row(record.text)
        lines = sorted(zip(labels.moves, labels.evaluations, strict=True), key=lambda line: -line[1])
        lines.sort(key=lambda line: line[0] != labels.best)
    legal = legal_moves(fen)
    if not legal:
        raise KeelError(f"the position {fen!r} has no legal move")
    wrong = next((move for move, _ in lines or () if move not in legal), None)
    if wrong is not None:
        raise KeelError(f"the move {wrong} is not legal in {fen!r}")
    if lines and lines[0][1] < max(value for _, value in lines):
        raise KeelError(
            f"the best move {lines[0][0]} does not have the highest evaluation: evaluations are for the side to move"
        )
    problem = policy_problem(fen, padding, record.location)
    return replace(problem, info={**problem.info, "lines": tuple(lines)}) if lines else problem
