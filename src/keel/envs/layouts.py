"""Convert rows to problems: find the columns of prompt and answer, in custom, TRL's or verl's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.base.errors import KeelError, nearest
from keel.base.options import read_options
from keel.base.types import Problem
from keel.envs.options import ColumnOptions, SourceOptions
from keel.envs.rows import BrokenRow, DataRow, DataRows, convert_rows, handle_broken_rows, read_rows, row_order

PROMPT, ANSWER = ColumnOptions().prompt, ColumnOptions().answer
# Fallbacks for a missing default column; the first that exists is used, with a note.
PROMPTS = ("prompt", "problem", "messages")
ANSWERS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "completion")
_MISSING = object()


def source_of(data: Mapping[str, Any] | None) -> SourceOptions:
    """Check and parse the `data` options of a task."""
    if data is not None and not isinstance(data, Mapping):
        raise KeelError(f"data is {data!r}: give a section such as {{path: mine.jsonl}}")
    return read_options(SourceOptions, data or {}, "data")


@dataclass(frozen=True)
class LoadedProblems:
    """Problems in data order, and notes on how they were read."""

    source: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The columns of prompt, answer and system message. `messages`: the prompt column has whole conversations.

    Without an answer column, the last turn of a conversation is the answer (`last_turn`), or there are only prompts.
    """

    prompt: str
    answer: str | None
    system: str | None = None
    messages: bool = False
    last_turn: bool = False


def load_problems(source: SourceOptions) -> LoadedProblems:
    """Convert rows to problems: prompt and answer from their columns, all other columns in `info`.

    The key of a problem is the location of its row, such as `mine.jsonl:3`. Rows without prompt or answer are broken.
    """
    if source.path is None:
        raise KeelError("this task reads data: give data.path, a file, a folder or a hub name")
    rows = read_rows(source.path, source.split)
    if not rows.rows:
        handle_broken_rows(rows.source, rows.broken, "error")
    columns, notes = choose_columns(rows, source.columns)

    def convert(row: DataRow) -> Problem:
        problem = problem_of(row, columns)
        if isinstance(problem, BrokenRow):
            raise ValueError(problem.why)
        return problem

    problems, skipped = convert_rows(rows, convert, source.on_broken)
    if not problems:
        every: list[DataRow | BrokenRow] = [*rows.rows, *rows.broken]
        first = min(every, key=row_order).location
        raise KeelError(f"{rows.source} has no usable rows: all {len(every)} are broken, the first at {first}")
    if columns.answer is not None:
        _check_types(rows.source, columns.answer, problems)
    return LoadedProblems(rows.source, tuple(problems), (*notes, *skipped))


def choose_columns(rows: DataRows, options: ColumnOptions) -> tuple[Columns, list[str]]:
    """Find the columns, with a note on fallbacks; a configured column must exist."""
    names, chosen = rows.columns, []
    messages, system = options.messages, options.system
    for option, name in (("messages", messages), ("system", system)):
        if name is not None and not _has(rows, name):
            raise _missing(rows, option, name)
    prompt = messages or options.prompt
    is_conversation = messages is not None
    if not _has(rows, prompt):
        recognised = next((name for name in PROMPTS if name in names), None) if prompt == PROMPT else None
        if recognised is None:
            raise _missing(rows, "prompt", prompt)
        prompt, is_conversation = recognised, recognised == "messages"
        chosen.append(f"prompts from {recognised!r}")
    answer, last_turn = options.answer, False
    if answer is not None and not _has(rows, answer):
        candidates = [name for name in ANSWERS if name != prompt and _has(rows, name)] if answer == ANSWER else []
        alone = answer == ANSWER and names == ("prompt",)  # TRL's prompt-only data
        if not candidates and not is_conversation and not alone:
            raise _missing(rows, "answer", answer, ", or data.columns.answer=null for prompts without answers")
        answer, last_turn = (candidates[0], False) if candidates else (None, not alone)
        source_of_answers = "answers from the conversations' last turns" if last_turn else "no answers"
        chosen.append(f"answers from {answer!r}" if answer else source_of_answers)
    notes = []
    if chosen:
        layout = "verl's layout" if {"data_source", "reward_model"} <= set(names) else "recognised columns"
        notes.append(f"{rows.source}: {layout}, {' and '.join(chosen)}; set data.columns to use others")
    return Columns(prompt, answer, system, is_conversation, last_turn), notes


def problem_of(row: DataRow, columns: Columns) -> Problem | BrokenRow:
    """Convert a row to a problem or a BrokenRow."""
    prompt = _prompt(_get(row.values, columns.prompt))
    if isinstance(prompt, _Fault):
        return BrokenRow(row.location, f"column {columns.prompt!r} {prompt}")
    answer = None if columns.answer is None else _get(row.values, columns.answer)
    if columns.messages and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        answer = prompt[-1]["content"] if columns.last_turn else answer
        prompt = prompt[:-1]
        if not prompt:
            return BrokenRow(row.location, f"column {columns.prompt!r} has an answer but no question")
    elif columns.last_turn:
        return BrokenRow(row.location, f"column {columns.prompt!r} does not end with the assistant's turn")
    if columns.answer is not None:
        if answer is _MISSING:
            return BrokenRow(row.location, f"no column {columns.answer!r}")
        turns = _messages(answer)
        answer = turns[-1]["content"] if turns else answer
        if answer is None or answer == [] or (isinstance(answer, str) and not answer.strip()):
            return BrokenRow(row.location, f"column {columns.answer!r} is empty")
    if columns.system is not None:
        system = _get(row.values, columns.system)
        if not isinstance(system, str):
            return BrokenRow(row.location, f"column {columns.system!r} is not text")
        conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [{"role": "system", "content": system}, *conversation]
    used = {columns.prompt, columns.answer, columns.system}
    return Problem(row.location, prompt, answer, {name: v for name, v in row.values.items() if name not in used})


class _Fault(str):
    """The reason why a value is not a valid prompt."""


def _prompt(value: Any) -> str | list[dict[str, str]] | _Fault:
    if value is _MISSING:
        return _Fault("is missing")
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return _Fault("is empty")
    turns = _messages(value)
    if turns is not None:
        return turns if any(turn["content"].strip() for turn in turns) else _Fault("is empty")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _Fault("has messages without a role or a text content")
    return _Fault(f"has a value of type {type(value).__name__}, not text or messages")


def _messages(value: Any) -> list[dict[str, str]] | None:
    """Parse chat messages, also from JSON text in CSV; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    turns = []
    for turn in value:
        content = _content(turn.get("content")) if isinstance(turn, Mapping) else None
        if content is None or not isinstance(turn.get("role"), str):
            return None
        # parquet stores absent keys as null
        turns.append({k: v for k, v in {**turn, "content": content}.items() if v is not None})
    return turns


def _content(value: Any) -> str | None:
    """The text of a message, or the joined text parts; None for other content."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in value]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def _get(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column or, for a name with dots, of a field inside it; `_MISSING` if absent."""
    if name in values:
        return values[name]
    head, dot, rest = name.partition(".")
    inner = values.get(head) if dot else None
    if isinstance(inner, str) and inner.lstrip().startswith("{"):  # CSV has structs as JSON text
        try:
            inner = json.loads(inner)
        except ValueError:
            return _MISSING
    return _get(inner, rest) if isinstance(inner, Mapping) else _MISSING


def _has(rows: DataRows, name: str) -> bool:
    return any(_get(row.values, name) is not _MISSING for row in rows.rows)


def _missing(rows: DataRows, option: str, name: str, instead: str = "") -> KeelError:
    columns = list(rows.columns)
    fields = [f"{c}.{k}" for c in columns for k in _fields(rows, c)]
    near = nearest(name, [*columns, *fields])
    hint = f"did you mean data.columns.{option}={near}? " if near else f"set data.columns.{option}{instead}; "
    return KeelError(f"{rows.source} has no column {name!r} for the {option}: {hint}it has {', '.join(columns)}")


def _fields(rows: DataRows, column: str) -> Sequence[str]:
    structs = (row.values[column] for row in rows.rows if isinstance(row.values.get(column), Mapping))
    return list(next(structs, ()))


_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("a boolean", (bool,)),
    ("a number", (int, float)),
    ("a text", (str,)),
    ("a list", (list, tuple)),
    ("an object", (Mapping,)),
)


def _check_types(source: str, column: str, problems: Sequence[Problem]) -> None:
    """Refuse an answer column with mixed types, which is usually a mistake in the file."""
    first: dict[str, str] = {}
    for problem in problems:
        first.setdefault(_kind(problem.answer), problem.key)
    if len(first) > 1:
        kinds = ", ".join(f"{kind} at {location}" for kind, location in first.items())
        raise KeelError(f"{source}: the answer column {column!r} mixes types, {kinds}: use one type")
    kind, location = next(iter(first.items()))
    if kind == "an object":
        raise KeelError(
            f"{source}: the answer column {column!r} has objects ({location}): name the field, such as "
            f"data.columns.answer={column}.value"
        )
    mixed = next(
        (p.key for p in problems if isinstance(p.answer, list) and len({_kind(a) for a in p.answer}) > 1), None
    )
    if mixed is not None:
        raise KeelError(f"{mixed}: the list in column {column!r} mixes types: use one type")


def _kind(value: Any) -> str:
    return next((name for name, types in _KINDS if isinstance(value, types)), f"a {type(value).__name__}")
