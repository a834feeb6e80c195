"""Questions that came into the data in another form than their text: written out, escaped, encoded or garbled."""

from __future__ import annotations

import ast
import base64
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote_plus

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.rendering import messages_of

FEWEST, MOST = 8, 0.9  # questions, and the share of them that has a form; a text about code has it here and there

_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|nbsp|#\d+|#x[0-9a-fA-F]+);")
# What is left of one encoding in another: no text has these.
_GARBLED = re.compile("[\\x00\\ufffd]|\u00c3[\u0080-\u00bf]|\u00e2\u20ac")
# Lower case follows in LaTeX: \\theta, \\neq.
_ESCAPE = re.compile(r"\\(?:n|t|r|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})(?![a-z])")
# A text that is sent as letters and digits; short ones decode to some text by accident, long ones hardly.
CODECS: dict[str, Callable[[str], bytes]] = {
    "hexadecimal digits": bytes.fromhex,
    "base32": base64.b32decode,
    "base64": lambda text: base64.b64decode(text, validate=True),
    "base64 of addresses": lambda text: base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True),
    "base85": base64.b85decode,
}
SHORTEST = 6  # characters that are decoded
_LINE = 60  # characters, of a code that is written in lines


def written_out_findings(problems: Sequence[Problem]) -> Iterator[Finding]:
    """What nearly all questions are: messages or bytes as a program prints them, text that was escaped or misread."""
    asked = [str(messages_of(problem)[-1]["content"] or "") for problem in problems]
    if len(set(asked)) < FEWEST:
        return
    if (encoded := _encoded(problems, asked)) is not None:
        yield encoded
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


def _encoded(problems: Sequence[Problem], asked: Sequence[str]) -> Finding | None:
    """Questions without a plain word, of which a codec makes sentences; None where a message says what to do with them,
    or where what they say is the answer."""
    if any(len(messages_of(problem)) > 1 for problem in problems):
        return None
    for name, decode in (*CODECS.items(), ("escaped for addresses", _unquoted)):
        texts = [(problem, text, decoded(text, decode)) for problem, text in zip(problems, asked, strict=True)]
        read = [(problem, text, plain) for problem, text, plain in texts if plain is not None]
        wanted = sum(plain.strip().casefold() in str(problem.answer).casefold() for problem, _, plain in read)
        if len(read) <= MOST * len(asked) or wanted > len(read) / 2:
            continue
        _, text, plain = read[0]
        return finding(
            "prompt/format",
            f"{len(read)} of {len(asked)} questions are encoded ({name}), such as {text[:60]!r} for {plain[:60]!r}",
            "questions are still in the encoding in which they were sent or stored",
            "decode the prompt column once where the data are prepared; nothing, if decoding is the task",
            severity="warning",
        )
    return None


def decoded(text: str, decode: Callable[[str], bytes]) -> str | None:
    """The words that a codec makes of a text without any; None where it makes none, or not all of it is printable."""
    lines = text.split()
    if len(lines) > 1 and any(len(line) < _LINE for line in lines[:-1]):
        return None
    if not lines or "".join(lines).isdecimal():
        return None
    try:
        plain = decode("".join(lines)).decode()
    except (ValueError, TypeError):
        return None
    printable = len(plain) >= SHORTEST and plain.replace("\n", " ").replace("\t", " ").isprintable()
    return plain if printable and len(plain.split()) > 1 else None


def _unquoted(text: str) -> bytes:
    """Spaces and signs as %20 or +, of a text that is no address."""
    plain = unquote_plus(text, errors="strict")
    if "%" not in text or not text.isascii() or re.search(r"://|/|www\.|\?.*=", text) or plain.count(" ") < 2:
        raise ValueError("not escaped for addresses")
    return plain.encode()


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
