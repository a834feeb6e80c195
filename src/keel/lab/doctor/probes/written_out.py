"""Questions that came into the data in another form than their text: written out, escaped, encoded or garbled."""

from __future__ import annotations

import ast
import base64
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote

from keel.base.types import Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.rendering import messages_of

FEWEST, MOST = 8, 0.9  # questions, and the share of them that has a form; a text about code has it here and there

_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|nbsp|#\d+|#x[0-9a-fA-F]+);")
# What is left of one encoding in another: no text has these.
_GARBLED = re.compile("[\\x00\\ufffd]|\u00c3[\u0080-\u00bf]|\u00e2\u20ac")
# Lower case follows in LaTeX: \\theta, \\neq.
_ESCAPE = re.compile(r"\\(?:n|t|r|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})(?![a-z])")
# How an assistant takes a request up: who asks does not begin so, question after question.
_REPLY = re.compile(
    r"\W*(?:(?:sure(?: thing)?|certainly|absolutely|of course|no problem|got it)\W*[!.,:]|as an ai\b|"
    r"(?:i'd|i would|i'll|i will|i am|i'm)(?: be)? (?:happy|glad) to\b)",
    re.I,
)
# A text that is sent as letters and digits. One of 4 letters by accident decodes to text once in twenty times at most.
CODECS: dict[str, Callable[[str], bytes]] = {
    "hexadecimal digits": bytes.fromhex,
    "base32": base64.b32decode,
    "base64": lambda text: base64.b64decode(text, validate=True),
    "base64 of addresses": lambda text: base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True),
    "base85": base64.b85decode,
}
SHORTEST = 3  # characters that are decoded


def written_out_findings(problems: Sequence[Problem]) -> Iterator[Finding]:
    """What nearly all questions are: messages or bytes as a program prints them, text that was escaped or misread."""
    asked = [messages_of(problem)[-1]["content"] for problem in problems]
    if len(set(asked)) < FEWEST:
        return
    if (encoded := _encoded(problems, asked)) is not None:
        yield encoded
        return
    for form, test in (
        ("a list of messages, written out as a text", _is_messages),
        ("bytes, written out as a text", _is_bytes),
        ("read in another encoding than they were written in", lambda text: _GARBLED.search(text) is not None),
        ("replies, as an assistant begins them", lambda text: _REPLY.match(text.replace("\u2019", "'")) is not None),
        ("escaped for HTML", lambda text: _ENTITY.search(text) is not None),
        ("escaped as inside a string, on one line", lambda text: "\n" not in text and _ESCAPE.search(text) is not None),
    ):
        count = sum(map(test, asked))
        if count <= MOST * len(asked):
            continue
        yield finding(
            "prompt/format",
            f"{count} of {len(asked)} questions are {form}, such as {next(filter(test, asked))[:80]!r}",
            "rows were printed or escaped where they were saved and not read back in the same way, or a model wrote "
            "them and its words around them were kept",
            "give the prompt column messages or plain text (data.columns): parse what is written out, unescape once, "
            "cut what a generator says before it asks",
            severity="warning",
        )
        return


def _encoded(problems: Sequence[Problem], asked: Sequence[str]) -> Finding | None:
    """Questions without a plain word, of which a codec makes texts; None where these are what is to be answered."""
    for name, decode in (*CODECS.items(), ("escaped for addresses", _unquoted)):
        texts = [(problem, text, decoded(text, decode)) for problem, text in zip(problems, asked, strict=True)]
        read = [(problem, text, plain) for problem, text, plain in texts if plain is not None]
        wanted = sum(str(problem.answer).strip() == plain.strip() for problem, _, plain in read)
        if len(read) <= MOST * len(asked) or wanted > len(read) / 2:
            continue
        _, text, plain = read[0]
        return finding(
            "prompt/format",
            f"{len(read)} of {len(asked)} questions are encoded ({name}), such as {text[:60]!r} for {plain[:60]!r}",
            "questions are still in the encoding in which they were sent or stored",
            "decode the prompt column once where the data are prepared",
        )
    return None


def decoded(text: str, decode: Callable[[str], bytes]) -> str | None:
    """The text that a codec makes of one without spaces; None where it makes none, or not all of it is printable."""
    if " " in text.strip():
        return None
    try:
        plain = decode("".join(text.split())).decode()
    except (ValueError, TypeError):
        return None
    return plain if len(plain) >= SHORTEST and plain.replace("\n", " ").replace("\t", " ").isprintable() else None


def _unquoted(text: str) -> bytes:
    """Spaces and signs as %20, of a text that is no address."""
    plain = unquote(text, errors="strict")
    if plain == text or "://" in text:
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
