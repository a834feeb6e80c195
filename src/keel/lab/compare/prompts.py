"""Prompts of a user's own file."""

from __future__ import annotations

from pathlib import Path

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.layouts import PROMPT, PROMPTS, Columns, problem_of
from keel.envs.rows import READERS, BrokenRow, read_rows

TEXT = ".txt"


def read_prompts(path: Path) -> list[Problem]:
    """One prompt a line of a .txt file, or one a row of a file of data, in its column of prompts (text or messages).

    Blank lines are passed over; a prompt's key is its line number, or its row's place.
    """
    path = path.expanduser()
    if path.suffix.lower() not in (TEXT, *READERS):
        known = ", ".join((TEXT, *READERS))
        raise KeelError(f"cannot read --prompts {path}: its ending is {path.suffix!r}, known are {known}")
    if not path.is_file():
        raise KeelError(f"cannot read --prompts {path}: there is no such file")
    problems = _lines(path) if path.suffix.lower() == TEXT else _rows(path)
    if not problems:
        raise KeelError(f"--prompts {path} holds no prompt: write one a line")
    return problems


def _lines(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise KeelError(f"--prompts {path} is not UTF-8 text: save it as UTF-8, one prompt a line") from None
    except OSError as error:
        raise KeelError(f"cannot read --prompts {path}: {error.strerror or error}") from None
    return [Problem(str(number), line) for number, line in enumerate(lines, start=1) if line.strip()]


def _rows(path: Path) -> list[Problem]:
    rows = read_rows(str(path))
    columns = (PROMPT, *PROMPTS)
    column = next((name for name in columns if name in rows.columns), None)
    if column is None and rows.rows:
        raise KeelError(
            f"--prompts {path} has no column of prompts: it has {', '.join(rows.columns)}, and needs one called "
            f"{', '.join(columns[:-1])} or {columns[-1]}"
        )
    layout = Columns(column or PROMPT, None, messages=column == "messages")
    parsed = [*rows.broken, *(problem_of(row, layout) for row in rows.rows)]
    broken = next((item for item in parsed if isinstance(item, BrokenRow)), None)
    if broken is not None:
        raise KeelError(f"--prompts {path}, {broken.location}: {broken.why}")
    return [item for item in parsed if isinstance(item, Problem)]
