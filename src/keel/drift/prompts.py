"""Prompts of a user's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.types import Problem


def read_prompts(path: Path) -> list[Problem]:
    """One prompt a line of a text file, or the `prompt` (text or messages) of each line of a .jsonl file.

    Blank lines are passed over; a prompt's key is its line number.
    """
    path = path.expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise KeelError(f"--prompts {path} is not UTF-8 text: save it as UTF-8, one prompt a line") from None
    except OSError as error:
        raise KeelError(f"cannot read --prompts {path}: {error.strerror or error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise KeelError(f"--prompts {path} holds no prompt: write one a line")
    if path.suffix == ".jsonl":
        return [Problem(str(number), _prompt(line, f"{path} line {number}")) for number, line in numbered]
    return [Problem(str(number), line) for number, line in numbered]


def _prompt(line: str, where: str) -> Any:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise KeelError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or "prompt" not in record:
        there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise KeelError(f"{where} has no 'prompt' (there is: {there}): each line needs one, a text or messages")
    if not isinstance(record["prompt"], str | list):
        raise KeelError(f"{where}: a prompt is a text or a list of messages, not {type(record['prompt']).__name__}")
    return record["prompt"]
