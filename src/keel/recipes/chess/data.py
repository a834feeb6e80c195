"""Chess problems from data: rows of text (P: and A:), or columns fen, move, history and game."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.dataset import Dataset, NoGrader, data_name
from keel.envs.layouts import source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import check_split, split_held_out
from keel.envs.rows import BrokenRow, DataRow, DataRows, handle_broken_rows, read_rows
from keel.recipes.chess.format import require_uci
from keel.recipes.chess.rules import identity

TEXT = "text"
T = TypeVar("T")
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

    several, notes = usable(rows, source, read)
    records = [record for records in several for record in records]
    if not records:
        raise KeelError(f"{rows.source} has no row for {name}: give texts that begin with {mark!r}, or a column fen")
    train, held = _split(records, held_out)
    distinct = len({record.game or identity(record.fen) for record, _ in records})
    rule = " (rows of one game, or of one position, stay together)"
    check_split(f"{rows.source} for {name}", len(records), len(train), len(held), distinct=distinct, more=rule)
    left_out = len(records) - len(train) - len(held)
    summary = f"{rows.source}: {len(train)} training problems of {name}, {len(held)} held out"
    again = f", {left_out} dropped because their positions are held out" if left_out else ""
    return Dataset(f"{name}/{data_name(source)}", train, held, NoGrader(), (*notes, summary + again))


def usable(rows: DataRows, source: SourceOptions, read: Callable[[DataRow], T]) -> tuple[list[T], tuple[str, ...]]:
    """Apply `read` to each row; rows for which it raises are broken. Returns a note on skipped rows."""
    made, broken = [], list(rows.broken)
    for row in rows.rows:
        try:
            made.append(read(row))
        except KeelError as error:
            broken.append(BrokenRow(row.location, str(error)))
    note = handle_broken_rows(rows.source, broken, source.on_broken)
    return made, (note,) if note else ()


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
    chosen = split_held_out((record.game or identity(record.fen) for record, _ in records), held_out)
    held = [(r, p) for r, p in records if (r.game or identity(r.fen)) in chosen]
    positions = {identity(record.fen) for record, _ in held}
    rest = [p for r, p in records if (r.game or identity(r.fen)) not in chosen and identity(r.fen) not in positions]
    return tuple(rest), tuple(p for _, p in held)
