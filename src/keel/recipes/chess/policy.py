"""The tasks with P: prompts: `chess_policy` (analyse a position) and `chess_puzzles` (solve a puzzle)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any

import chess
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.dataset import Dataset, NoGrader, data_name
from keel.envs.layouts import source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import HELD_OUT_FRACTION, check_split, seeded_rng, split_held_out
from keel.envs.rows import DataRow, convert_rows, read_rows
from keel.recipes.chess.engine import Query, StockfishOptions, engine_options, pool_of
from keel.recipes.chess.format import (
    PADDINGS,
    Analysis,
    Padding,
    PaddingName,
    padding_of,
    policy_completion,
    policy_prompt,
    read_policy,
    read_policy_row,
    require_uci,
)
from keel.recipes.chess.positions import Pieces, Position, games_of
from keel.recipes.chess.rewards import SYSTEMS, Malformed, Parse, System, policy_reward
from keel.recipes.chess.rules import board_of, fen_of, identity, legal_moves, mating_moves
from keel.recipes.chess.task import (
    ChessGrader,
    ChessRow,
    ChessTask,
    HeldOut,
    mate_in_one,
    part_means,
    problems_of,
)

_LEGALITY, _QUALITY = ("legal", "legal5", "best_legal"), ("top5", "best", "eval", "content")
POLICY_PARTS = ("parsed", "structure", *_LEGALITY, *_QUALITY, "unavailable")
# Parts with other names in the metrics of an evaluation.
_RENAMED = {
    "best": "top1",
    "legal": "moves_legal",
    "best_legal": "legal_move_rate",
    "correct": "puzzle_accuracy",
}
DRAWS = 3  # draws of positions without any label before the run stops
MOST_LOSS = 10.0  # pawns: the largest loss of a move, such as a missed mate


@dataclass(frozen=True)
class PolicyGrader(ChessGrader):
    """Grade P: answers by the engine's lines in a problem's info. Lines that are None mean that the engine failed."""

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
        means = part_means(groups, POLICY_PARTS, self.reward)
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
        """Pawns lost by each legal best move: best score − its score. The engine scores moves without a label."""
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
        """`count` problems; a problem without a label is replaced by a copy of another problem of the batch."""
        # an offset of the seed that no other draw has, so that positions are new but reproducible
        draws = (self.inner.sample(count, seed=seed + 32_452_843 * draw, step=step) for draw in range(DRAWS))
        labelled = self._first_labelled(draws) if count else []
        again = ((labelled[i % len(labelled)], i) for i in range(count - len(labelled)))
        return [*labelled, *(replace(problem, key=f"{problem.key}#again{i}") for problem, i in again)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """The labelled problems of a fixed set. If none has a label, those of the next fixed set."""
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
    pieces: Pieces = None,
    padding: PaddingName = "source",
    engine: Mapping[str, Any] | None = None,
    system: System = "graduated",
    parse: Parse = "lenient",
    malformed: Malformed = None,
    held_out: HeldOut = HELD_OUT_FRACTION,
) -> ChessTask:
    """The task `chess_policy`: positions of `data`, or of random games of `plies` [from, to] half-moves, from the
    starting position or from one of at most `pieces` pieces.

    Labels are those of the data's P: rows, or else the engine's (`engine`: see `StockfishOptions`), which must be
    installed. `padding` is source (90, 30 and 40 characters) or none; the other parameters are those of `chess_env`.
    """
    options = {"system": system, "parse": parse, "malformed": malformed}
    widths, chosen = padding_of(padding), engine_options(engine)

    def ask(rng: random.Random, position: Position) -> Problem:
        return policy_problem(position.fen, widths)

    def ask_of(record: ChessRow) -> Problem:
        return _policy_of_row(record, widths)

    problems = problems_of("chess_policy", "P: ", data, games_of(plies, pieces), ask, ask_of, held_out)
    if isinstance(problems, Dataset) and all("lines" in p.info for p in (*problems.train, *problems.held)):
        return ChessTask(problems, PolicyGrader(widths, None, options), "chess_policy")
    pool_of(chosen)
    return ChessTask(EngineLabelled(problems, chosen), PolicyGrader(widths, chosen, options), "chess_policy")


def _policy_of_row(record: ChessRow, padding: Padding) -> Problem:
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


COLUMNS = ("FEN", "Moves")
PUZZLE_PARTS = ("parsed", "structure", "best_legal", "correct")
LEGAL_WORTH = 0.1  # reward of a legal move that is not the solution


@dataclass(frozen=True)
class PuzzleGrader(ChessGrader):
    """1 for the solution (if it is mate, for any mate), 0.1 for another legal move, 0 for an illegal one, and
    `malformed` without a move."""

    padding: Padding = PADDINGS["source"]
    malformed: float = -0.3

    def gold(self, problem: Problem) -> str:
        move = problem.answer[0]
        return policy_completion(Analysis((move,), (0.0,), move), self.padding)

    def reward(self, problem: Problem, text: str) -> Reward:
        answer = read_policy(text, self.padding)
        best = answer.best
        parts = {
            "structure": float(answer.structure),
            "parsed": float(best is not None),
            "best_legal": float(best in legal_moves(problem.info["fen"])),
            "correct": float(best in problem.answer),
        }
        paid = max(parts["correct"], LEGAL_WORTH * parts["best_legal"])
        return Reward(paid if best is not None else self.malformed, parts, parsed=best is not None)

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        means = part_means(groups, PUZZLE_PARTS, self.reward)
        return {_RENAMED.get(name, name): value for name, value in means.items()} | mate_in_one(groups, self.padding)


def chess_puzzles(
    path: str | None = None,
    data: Mapping[str, Any] | None = None,
    padding: PaddingName = "source",
    malformed: Malformed = None,
    held_out: Annotated[float, Field(gt=0, le=1)] = 1.0,
) -> ChessTask:
    """The task `chess_puzzles`: find the move. `path`, or `data.path`, is a file with columns FEN and Moves, where the
    first move is the opponent's and the second the solution.

    `held_out` is the fraction of puzzles for evaluation, by default all of them.
    """
    source = source_of(data)
    if (path is None) == (source.path is None):
        raise KeelError("chess_puzzles reads one file with columns FEN and Moves: give path, or data.path")
    widths = padding_of(padding)
    grader = PuzzleGrader(widths, SYSTEMS["graduated"] if malformed is None else malformed)
    problems = _read_puzzles(source.model_copy(update={"path": path or source.path}), widths, float(held_out))
    return ChessTask(problems if problems.train else OnlyHeldOut(problems), grader, "chess_puzzles")


def _read_puzzles(source: SourceOptions, padding: Padding, share: float) -> Dataset:
    assert source.path is not None
    rows = read_rows(source.path, source.split)
    missing = [name for name in COLUMNS if name not in rows.columns]
    if rows.rows and missing:
        columns = ", ".join(rows.columns)
        raise KeelError(f"{rows.source} has no column {' and '.join(missing)}, which a puzzle needs: it has {columns}")
    puzzles, notes = convert_rows(rows, lambda row: _puzzle(row, padding), source.on_broken)
    if not puzzles:
        raise KeelError(f"{rows.source} has no puzzles: give rows with FEN and Moves")
    positions = [identity(puzzle.info["fen"]) for puzzle in puzzles]
    chosen = split_held_out(positions, share)
    held = tuple(puzzle for puzzle, position in zip(puzzles, positions, strict=True) if position in chosen)
    train = tuple(puzzle for puzzle, position in zip(puzzles, positions, strict=True) if position not in chosen)
    if share < 1:
        evaluate = ", or held_out=1 for evaluation only"
        distinct = len(set(positions))
        check_split(rows.source, len(puzzles), len(train), len(held), distinct=distinct, more=evaluate)
    summary = f"{rows.source}: {len(held)} puzzles held out, {len(train)} to train on"
    return Dataset(f"chess_puzzles/{data_name(source)}", train, held, NoGrader(), (*notes, summary))


@dataclass(frozen=True)
class OnlyHeldOut(TaskWrapper):
    """Puzzles that are all held out."""

    inner: Task
    evaluation_only = True

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        raise KeelError("all puzzles are held out for evaluation: set held_out below 1 to train on the others")


def _puzzle(row: DataRow, padding: Padding) -> Problem:
    fen, moves = (row.values.get(name) for name in COLUMNS)
    if not isinstance(fen, str) or not isinstance(moves, str):
        raise KeelError("FEN or Moves is empty")
    board = board_of(fen.strip())
    line = [require_uci(move) for move in moves.split()]
    if len(line) < 2:
        raise KeelError(f"Moves is {moves!r}: it must have at least the opponent's move and the answer")
    for move in line[:2]:
        if chess.Move.from_uci(move) not in board.legal_moves:
            raise KeelError(f"the move {move} is not legal in {fen_of(board)!r}")
        board.push_uci(move)
    mates = board.is_checkmate()
    board.pop()
    position = fen_of(board)
    right = tuple(dict.fromkeys((line[1], *(mating_moves(position) if mates else ()))))
    return Problem(row.location, policy_prompt(position, padding), answer=right, info={"fen": position})
