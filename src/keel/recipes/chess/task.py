"""Common parts of the chess tasks: data rows, sources of problems, graders, the task class, pictures of answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import chess
import chess.svg
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.dataset import Dataset, NoGrader, data_name
from keel.envs.layouts import source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import (
    Draw,
    check_split,
    held_out_problems,
    is_held_out,
    seeded_rng,
    split_held_out,
    training_problems,
)
from keel.envs.rows import DataRow, convert_rows, read_rows
from keel.recipes.chess.format import Padding, is_uci, read_env, read_policy, require_uci
from keel.recipes.chess.positions import Games, Position
from keel.recipes.chess.rules import board_of, identity, mating_moves

TEXT = "text"
HeldOut = Annotated[int | float, Field(gt=0)]
Ask = Callable[["ChessRow"], Problem]


@dataclass(frozen=True)
class ChessRow:
    """One row: its location, its text or its columns, and its game."""

    location: str
    text: str | None
    fen: str
    move: str
    history: tuple[str, ...]
    game: str

    @property
    def split_key(self) -> str:
        """The game, or the position of a row without one: rows with the same key are in the same split."""
        return self.game or identity(self.fen)


def load(data: Mapping[str, Any], mark: str, ask: Ask, held_out: int | float, name: str) -> Dataset:
    """Build problems with `ask` from rows with columns and from texts that start with `mark`.

    A row that `ask` refuses is a broken row. Rows are split by the column `game` if it exists, else by position.
    Training rows with a held-out position are dropped.
    """
    source = source_of(data)
    if source.path is None:
        raise KeelError(f"{name} reads data: give data.path")
    rows = read_rows(source.path, source.split)

    def read(row: DataRow) -> list[tuple[ChessRow, Problem]]:
        record = _record(row, source)
        return [(record, ask(record))] if record.text is None or record.text.startswith(mark) else []

    several, notes = convert_rows(rows, read, source.on_broken)
    records = [record for records in several for record in records]
    if not records:
        raise KeelError(f"{rows.source} has no row for {name}: give texts that begin with {mark!r}, or a column fen")
    train, held = _split(records, held_out)
    distinct = len({record.split_key for record, _ in records})
    rule = " (rows of one game, or of one position, stay together)"
    check_split(f"{rows.source} for {name}", len(records), len(train), len(held), distinct=distinct, more=rule)
    left_out = len(records) - len(train) - len(held)
    summary = f"{rows.source}: {len(train)} training problems of {name}, {len(held)} held out"
    again = f", {left_out} dropped because their positions are held out" if left_out else ""
    return Dataset(f"{name}/{data_name(source)}", train, held, NoGrader(), (*notes, summary + again))


def _record(row: DataRow, source: SourceOptions) -> ChessRow:
    values = row.values
    for other in ("messages", "system"):
        if getattr(source.columns, other) is not None:
            raise KeelError(f"data.columns.{other} has no effect for chess: rows are texts, or columns fen and move")
    column = source.columns.prompt if source.columns.prompt in values else TEXT
    text = values.get(column)
    if text is None and isinstance(values.get("prompt"), str) and isinstance(values.get("completion"), str):
        text = values["prompt"] + values["completion"]  # the format of `python -m keel.recipes.chess data`
    if isinstance(text, str) and text[:3] in ("P: ", "A: "):
        fen = text[3:].partition("M:" if text.startswith("P") else "+")[0].strip()
        return ChessRow(row.location, text, fen, "", (), str(values.get("game") or ""))
    if text is not None:
        raise KeelError(f"column {column!r} must start with 'P: ' or 'A: '")
    fen = values.get("fen", values.get("FEN"))
    if not isinstance(fen, str):
        raise KeelError(f"it has neither a text ({TEXT!r}) nor a position ('fen'): its columns are {', '.join(values)}")
    moves = values.get("history") or ()
    if not isinstance(moves, str | list | tuple):
        raise KeelError(f"its history is {moves!r}: give the previous moves, as text or a list")
    history = tuple(moves.split() if isinstance(moves, str) else map(str, moves))
    for move in history:
        require_uci(move)
    return ChessRow(row.location, None, fen, str(values.get("move") or ""), history, str(values.get("game") or ""))


def _split(
    records: Sequence[tuple[ChessRow, Problem]], held_out: int | float
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    chosen = split_held_out((record.split_key for record, _ in records), held_out)
    held = [(record, problem) for record, problem in records if record.split_key in chosen]
    positions = {identity(record.fen) for record, _ in held}
    rest = [p for r, p in records if r.split_key not in chosen and identity(r.fen) not in positions]
    return tuple(rest), tuple(p for _, p in held)


SIZE = 240
RIGHT, WRONG, ENGINE = "#15781b88", "#c0392b99", "#1f5fa888"


def answer_picture(problem: Problem, text: str) -> str | None:
    """The board of an answer, or None if it cannot be drawn.

    A: the answer's position, with wrong squares in red. P: the best move as a green arrow if it is the engine's, else
    as a red one, with the engine's move in blue.
    """
    try:
        board = board_of(problem.info["fen"])
    except KeelError:
        return None
    return _environment(problem, text) if "move" in problem.info else _policy(problem, board, text)


def board_picture(board: chess.Board) -> str:
    """A position with its last move."""
    return str(chess.svg.board(board, size=SIZE, lastmove=board.move_stack[-1] if board.move_stack else None))


def _environment(problem: Problem, text: str) -> str:
    fen, truth = read_env(text).fen, chess.Board(problem.answer[0])
    shown = chess.Board(fen) if fen is not None else chess.Board(None)
    wrong = {s: WRONG for s in chess.SQUARES if shown.piece_at(s) != truth.piece_at(s)}
    move = chess.Move(*_squares(problem.info["move"]))
    return str(chess.svg.board(shown, size=SIZE, fill=wrong, lastmove=move))


def _policy(problem: Problem, board: chess.Board, text: str) -> str:
    best = read_policy(text).best
    lines = problem.info.get("lines") or ()
    right_move = lines[0][0] if lines else problem.answer[0] if problem.answer else None
    arrows = []
    if right_move is not None and right_move != best:
        arrows.append(_arrow(right_move, ENGINE))
    if best is not None and is_uci(best):
        arrows.append(_arrow(best, RIGHT if best == right_move else WRONG))
    return str(chess.svg.board(board, size=SIZE, arrows=arrows))


def _arrow(move: str, color: str) -> chess.svg.Arrow:
    return chess.svg.Arrow(*_squares(move), color=color)


def _squares(move: str) -> tuple[chess.Square, chess.Square]:
    """The squares of a move. A model may write e2e2, with one square twice, which is drawn as a circle."""
    return chess.parse_square(move[:2]), chess.parse_square(move[2:4])


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
        return self.grader.gold(problem)

    def gold_turns(self, problem: Problem) -> list[str]:
        return [self.gold(problem)]

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return self.grader.reward(problem, turns[-1] if turns else "")

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        return self.grader.metrics(groups)

    def counters(self) -> Mapping[str, float]:
        """The engine's failures so far, if there is an engine."""
        return self.grader.counters()

    def picture(self, problem: Problem, text: str) -> str | None:
        return answer_picture(problem, text)


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
    held_out: HeldOut,
) -> Task:
    """A task's problems: from its data if given, otherwise from random games."""
    if held_out >= 1 and held_out != int(held_out):
        raise KeelError(f"chess held_out is {held_out!r}: give a fraction below 1, or with data a number of positions")
    if data is not None and source_of(data).path is not None:
        if games != Games():
            raise KeelError(f"{name} reads its positions from data.path: leave plies and pieces out")
        return load(data, mark, ask_of, held_out, name)
    if held_out >= 1:
        raise KeelError(f"chess held_out is {held_out}: without data it must be a fraction below 1")
    return RandomPositions(name, games, ask, float(held_out))
