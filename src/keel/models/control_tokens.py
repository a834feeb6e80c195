"""Control tokens: which tokens of a tokenizer a text can forge, and encoding that keeps text from outside from it.

A tokenizer turns an added token's string into that token wherever it stands in a text. Text from outside (data, tools,
environments) could so end a turn and open another one. Its characters are encoded here as ordinary tokens instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple
from unicodedata import category, normalize

from keel.base.errors import KeelError

Tokens = tuple[int, ...]
_NAMES = ("role", "name", "tool_call_id")  # of a message: templates compare and measure them
_THINK_OR_CALL = re.compile(r"think|tool[\W_]?call", re.IGNORECASE)  # marks that a model itself writes


class Encoded(NamedTuple):
    """The tokens of a text, and a control token's string that was in the way, if any."""

    tokens: Tokens
    forged: str | None = None


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added ones that are more than a word or spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        named = zip(
            getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True
        )
        marks = {int(i): str(token) for i, token in added.items() if token.special or _is_mark(str(token))}
        self._texts: dict[int, str] = {**marks, **{int(i): str(token) for i, token in named}}
        self._unknown = self._encoded_unknown()
        self._marks = _any_of(self._texts.values())

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, control tokens included."""
        return tuple(int(token) for token in self.tokenizer.encode(text, add_special_tokens=False))

    def plain(self, text: str) -> Tokens:
        """The tokens of a text from outside: those of `encode` where none is a control token, and else without them."""
        return self._plain(text, self.encode)

    @cached_property
    def _newline(self) -> Tokens:
        return self.encode("\n")

    @cached_property
    def _folded_marks(self) -> re.Pattern[str]:
        return _any_of(map(_folded, self._texts.values()))

    def may_forge(self, text: str) -> bool:
        """Whether a text may hold a control token's string, in any case and width: a scan that encodes nothing."""
        return self._folded_marks.search(_folded(text)) is not None

    def forged(self, tokens: Collection[int], text: str, *, by_model: bool = False) -> str | None:
        """The first control token among a text's tokens; `by_model`: one that is no think or tool-call mark."""
        marks = (self._texts[token] for token in self._found(tokens, text))
        return next((mark for mark in marks if not (by_model and _THINK_OR_CALL.search(mark))), None)

    def rendered(self, render: Callable[..., str], *outside: Any, room: int | None = None) -> Encoded:
        """The tokens of `render(*outside)`, where no string of `outside` becomes a control token or a part of one.

        The tokens are those of the whole text, unless it has other control tokens than its parts have, the strings of
        `outside` taken as ordinary text: then they are those of the parts. A text of far more than `room` tokens is not
        encoded to its end: its first tokens, more than `room`, are returned.
        """
        text = render(*outside)
        if room is not None and (beginning := self._overlong(text, room)):
            return Encoded(beginning)
        tokens = self.encode(text)
        found = self._found(tokens, text)
        if not found:
            return Encoded(tokens)
        verbatim, found_texts = Counter(self._marks.findall(text)), Counter(self._texts[token] for token in found)
        tags = _Tags(text, outside, found_texts, every=bool(found_texts - verbatim))
        tagged = [tags.put(value) for value in outside]
        if not tags.used:
            return Encoded(tokens)
        try:
            pieces = list(tags.split(render(*tagged)))
        except KeelError:  # the template refuses the tags
            pieces = [(render(*(tags.put(value, neutral=True) for value in outside)), False)]
        parts, own = list[int](), list[int]()
        for part, is_outside in pieces:
            encode = self._after if parts else self.encode
            encoded = self._plain(part, encode) if is_outside else encode(part)
            parts += encoded
            own += [] if is_outside else self._found(encoded, part)
        if own == found:
            return Encoded(tokens)
        return Encoded(tuple(parts), self._texts[next(iter(Counter(found) - Counter(own)), found[0])])

    def _found(self, tokens: Collection[int], text: str) -> list[int]:
        """The control tokens among a text's tokens, in order; not `<unk>` for a character that has no token."""
        if self._texts.keys().isdisjoint(tokens):
            return []
        controls = (token for token in tokens if token in self._texts)
        return [token for token in controls if token not in self._unknown or self._texts[token] in text]

    def _plain(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        tokens = encode(text)
        found = self._found(tokens, text)
        if not found:
            return tokens
        if len(text) == 1:  # a special token of one character: there are no others for it
            return ()
        first, *rest = _cut(text, {self._texts[token] for token in found})
        plain = {part: self._plain(part, self._after) for part in set(rest)}
        return (*self._plain(first, encode), *chain.from_iterable(plain[part] for part in rest))

    def _encoded_unknown(self) -> frozenset[int]:
        """The tokens of a character that no text has; none where the tokenizer raises for such a one."""
        try:
            return frozenset(self.encode("\U0010fffd"))
        except Exception:  # of tokenizers' own, which has no other class
            return frozenset()

    def _after(self, text: str) -> Tokens:
        """The tokens of a text that stands behind another, without the space that some tokenizers begin a text with."""
        before, both = self._newline, self.encode(f"\n{text}")
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)

    def _overlong(self, text: str, room: int) -> Tokens | None:
        """The tokens of a text's beginning, if they are so many that the whole text has more than `room`.

        A token may stand for any number of characters, so that the beginning is encoded to see. Where it is cut off it
        may have a few tokens more than as a part of the whole: hence twice `room`.
        """
        length = 16 * room + 1024
        while length < len(text):
            if len(tokens := self.encode(text[:length])) > 2 * room + 64:
                return tokens
            length *= 4
        return None


class _Tags:
    """Tags around strings from outside, so that a rendered text can be taken apart into theirs and the template's.

    They are of digits, which templates and JSON leave as they are, and stand inside of spaces, which templates strip.
    Only strings that may make a control token get them: comparisons in templates see what they expect. Those are
    strings that hold a mark, could complete one at an end, or are changed by the template, and `every` one where some
    control token of the text does not stand in it as such. What names a message or its fields gets zeros instead.
    """

    def __init__(self, text: str, outside: Any, marks: Collection[str], *, every: bool) -> None:
        everything = f"{text}{outside!r}"
        pairs = ((f"1{'0' * zeros}2", f"1{'0' * zeros}3") for zeros in count(6))
        self.open, self.close = next(pair for pair in pairs if not any(tag in everything for tag in pair))
        self.text, self.marks, self.every, self.used = text, marks, every, False

    def put(self, value: Any, *, neutral: bool = False, name: bool = False) -> Any:
        """The value with tags in its strings, those in lists and mappings too; `neutral`: with zeros for them."""
        if isinstance(value, str):
            inner = value.strip()
            if not inner or not self._suspicious(inner, name):
                return value
            self.used = True
            before, _, after = value.partition(inner)
            return f"{before}{'0' * len(inner) if neutral else f'{self.open}{inner}{self.close}'}{after}"
        if isinstance(value, Mapping) and "role" in value:
            names = {key: key in _NAMES for key in value}
            return {key: self.put(item, neutral=neutral or names[key], name=names[key]) for key, item in value.items()}
        if isinstance(value, Mapping):
            return {
                self.put(key, neutral=neutral, name=True): self.put(item, neutral=neutral)
                for key, item in value.items()
            }
        return [self.put(item, neutral=neutral) for item in value] if isinstance(value, list | tuple) else value

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text, and whether each is from outside; in doubt, it is."""
        pieces = [self.close, *re.split(f"({self.open}|{self.close})", text), self.open]
        for before, part, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
            if part:
                yield part, (before, after) != (self.close, self.open)

    def _suspicious(self, text: str, name: bool) -> bool:
        if any(mark in text for mark in self.marks):
            return True
        if not text.isidentifier():  # names of fields, roles and types are left as they are
            if self.every or text not in self.text:
                return True
        elif name:
            return False
        return any(_completes(text, mark) for mark in self.marks)


def control_token_refused(token: str, where: str) -> KeelError:
    return KeelError(
        f"{where} holds {token!r}, which the tokenizer makes a control token: take it out, or set "
        "data.allow_control_tokens=true if it is meant, as in prompts that are rendered already"
    )


def _completes(text: str, mark: str) -> bool:
    """Whether a text ends as a control token's string begins, or begins as it ends."""
    return any(text.endswith(mark[:k]) or text.startswith(mark[k:]) for k in range(1, len(mark)))


def _cut(text: str, marks: Collection[str]) -> list[str]:
    """A text cut behind the first character of each of these strings in it, or in the middle if it has none of them."""
    places = (f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks if len(mark) > 1)
    parts = re.split("|".join(places) or "(?!)", text)
    return parts if len(parts) > 1 else [text[: len(text) // 2], text[len(text) // 2 :]]


def _is_mark(text: str) -> bool:
    """Whether an added token that is not special can mark anything: vocabularies add words and runs of spaces too."""
    return len(text) > 1 and any(category(c)[0] not in "LMNZ" and c not in "\t\n\r\u2581" for c in text)


def _any_of(marks: Iterable[str]) -> re.Pattern[str]:
    """Any of these strings, the longest first, as tokenizers match them."""
    return re.compile("|".join(map(re.escape, sorted({*marks} - {""}, key=len, reverse=True))) or "(?!)")


def _folded(text: str) -> str:
    return normalize("NFKC", text).casefold()
