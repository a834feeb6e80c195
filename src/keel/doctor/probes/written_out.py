"""Questions that came into the data in another form than their text: written out, escaped or garbled."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.rendering import messages_of

FEWEST, MOST = 8, 0.9  # questions, and the share of them that has a form; a text about code has it here and there

_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|nbsp|#\d+|#x[0-9a-fA-F]+);")
# What is left of one encoding in another: no text has these.
_GARBLED = re.compile("[\\x00\\ufffd]|\u00c3[\u0080-\u00bf]|\u00e2\u20ac")
# Lower case follows in LaTeX: \\theta, \\neq.
_ESCAPE = re.compile(r"\\(?:n|t|r|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})(?![a-z])")


def written_out_findings(problems: Sequence[Problem]) -> Iterator[Finding]:
    """What nearly all questions are: messages or bytes as a program prints them, text that was escaped or misread."""
    asked = [str(messages_of(problem)[-1]["content"] or "") for problem in problems]
    if len(set(asked)) < FEWEST:
        return
    for form, test in (
        ("a list of messages, written out as a text", _is_messages),
        ("bytes, written out as a text", _is_bytes),
        ("read in another encoding than they were written in", lambda text: _GARBLED.search(text) is not None),
        ("escaped for HTML", lambda text: _ENTITY.search(text) is not None),
        ("escaped as inside a string, on one line", lambda text: "\n" not in text and _ESCAPE.search(text) is not None),
    ):
        count = sum(map(test, asked))
        if count <= MOST * len(asked):
            continue
        yield finding(
            "prompt/format",
            f"{count} of {len(asked)} questions are {form}, such as {next(filter(test, asked))[:80]!r}",
            "rows were printed or escaped where they were saved and not read back in the same way",
            "give the prompt column messages or plain text (data.columns): parse what is written out, unescape once",
            severity="warning",
        )
        return


def _value(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_messages(text: str) -> bool:
    value = _value(text) if text.lstrip()[:1] in ("[", "{") else None
    rows = value if isinstance(value, list) else [value]
    return bool(rows) and all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows)


def _is_bytes(text: str) -> bool:
    return text.lstrip()[:2] in ("b'", 'b"') and isinstance(_value(text), bytes)
