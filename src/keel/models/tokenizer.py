"""Tokenizers: checks, and protection against control-token injection.

A tokenizer turns an added token's string into that token anywhere in a text. Untrusted text (data, tools, environments)
could thereby end a turn and open another one. `ControlTokens` encodes such strings as ordinary tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple
from unicodedata import category, normalize

from torch import nn

from keel.base.errors import KeelError


def check_eos(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer without EOS, before the weights are loaded."""
    if tokenizer.eos_token_id is None:
        raise KeelError(
            f"the tokenizer of {name!r} has no EOS token, so completions would never end: "
            "set eos_token in its tokenizer_config.json"
        )


def check_tokenizer(tokenizer: Any, model: nn.Module, name: str) -> tuple[str, ...]:
    """Check EOS and the size of the embedding; set a missing pad token to EOS."""
    notes: tuple[str, ...] = ()
    check_eos(tokenizer, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        notes = (f"the tokenizer of {name!r} has no pad token: {tokenizer.eos_token!r} is used; padding is masked",)
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise KeelError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens but the model embeds {rows}: "
            "give the tokenizer that belongs to the model, or resize the model's embedding and save it"
        )
    return notes


def eos_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """All token ids that end a completion, including those of the generation config."""
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise KeelError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token before sampling")
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return tuple(dict.fromkeys(int(token) for token in (tokenizer.eos_token_id, *listed) if token is not None))


def context_length(model: nn.Module) -> int | None:
    """The longest sequence the config allows, if it names one."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest of the vocabulary, equal for tokenizers with the same tokens and ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


Tokens = tuple[int, ...]
_NAMES = ("role", "name", "tool_call_id")  # fields of a message that templates compare
_THINK_OR_CALL = re.compile(r"think|tool[\W_]?call", re.IGNORECASE)  # control tokens that the model may sample


class Encoded(NamedTuple):
    """The tokens of a text, and the first neutralised control token, if any."""

    tokens: Tokens
    forged: str | None = None


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added tokens other than plain words and spaces."""

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
        """The tokens of an untrusted text; strings of control tokens are encoded as ordinary tokens."""
        return self._plain(text, self.encode)

    @cached_property
    def _newline(self) -> Tokens:
        return self.encode("\n")

    @cached_property
    def _folded_marks(self) -> re.Pattern[str]:
        return _any_of(map(_folded, self._texts.values()))

    def may_forge(self, text: str) -> bool:
        """Whether a text may contain a control token's string, ignoring case and width. The text is not encoded."""
        return self._folded_marks.search(_folded(text)) is not None

    def forged(self, tokens: Collection[int], text: str, *, by_model: bool = False) -> str | None:
        """The first control token among a text's tokens. `by_model` ignores think and tool-call tokens."""
        marks = (self._texts[token] for token in self._found(tokens, text))
        return next((mark for mark in marks if not (by_model and _THINK_OR_CALL.search(mark))), None)

    def rendered(self, render: Callable[..., str], *outside: Any, room: int | None = None) -> Encoded:
        """The tokens of `render(*outside)`, where no untrusted string of `outside` yields a control token.

        Usually these are the tokens of the whole text. If `outside` yields a control token, the template's parts and
        the untrusted strings are encoded separately, the latter as ordinary tokens. For a text far longer than `room`
        tokens, only a beginning of more than `room` tokens is returned.
        """
        text = render(*outside)
        if room is not None and (beginning := self._beginning_if_overlong(text, room)):
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
        """The control tokens among a text's tokens, in order, without `<unk>` for characters that have no token."""
        if self._texts.keys().isdisjoint(tokens):
            return []
        controls = (token for token in tokens if token in self._texts)
        return [token for token in controls if token not in self._unknown or self._texts[token] in text]

    def _plain(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        tokens = encode(text)
        found = self._found(tokens, text)
        if not found:
            return tokens
        if len(text) == 1:  # a one-character special token has no ordinary encoding
            return ()
        first, *rest = _cut(text, {self._texts[token] for token in found})
        plain = {part: self._plain(part, self._after) for part in set(rest)}
        return (*self._plain(first, encode), *chain.from_iterable(plain[part] for part in rest))

    def _encoded_unknown(self) -> frozenset[int]:
        """The tokens of an unknown character; none if the tokenizer raises."""
        try:
            return frozenset(self.encode("\U0010fffd"))
        except Exception:  # tokenizers raises bare Exception
            return frozenset()

    def _after(self, text: str) -> Tokens:
        """The tokens of a text that follows another, without the leading space that some tokenizers add."""
        before, both = self._newline, self.encode(f"\n{text}")
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)

    def _beginning_if_overlong(self, text: str, room: int) -> Tokens | None:
        """The tokens of a text's beginning, if they prove that the whole text has more than `room` tokens.

        The length in characters does not bound the number of tokens, so the beginning is encoded. Cutting a text may
        add a few tokens, so the beginning must have twice the tokens.
        """
        length = 16 * room + 1024
        while length < len(text):
            if len(tokens := self.encode(text[:length])) > 2 * room + 64:
                return tokens
            length *= 4
        return None


class _Tags:
    """Tags around untrusted strings, to split a rendered text into their parts and the template's.

    Tags are digits, because templates and JSON do not change digits. Spaces around a string stay outside its tags,
    because templates strip them. Only strings that may yield a control token are tagged, because tags break comparisons
    in templates. These are strings that contain a control token, that start or end with a part of one, or that the
    template changes. `every` tags all strings, for control tokens that do not appear verbatim in the text.
    Names in messages and field names are replaced by zeros instead.
    """

    def __init__(self, text: str, outside: Any, marks: Collection[str], *, every: bool) -> None:
        everything = f"{text}{outside!r}"
        pairs = ((f"1{'0' * zeros}2", f"1{'0' * zeros}3") for zeros in count(6))
        self.open, self.close = next(pair for pair in pairs if not any(tag in everything for tag in pair))
        self.text, self.marks, self.every, self.used = text, marks, every, False

    def put(self, value: Any, *, neutral: bool = False, name: bool = False) -> Any:
        """Tag the strings of a value, nested ones too. `neutral` replaces them by zeros instead."""
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
        """The parts of a rendered text, and whether each is untrusted; a part with an unpaired tag is untrusted."""
        pieces = [self.close, *re.split(f"({self.open}|{self.close})", text), self.open]
        for before, part, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
            if part:
                yield part, (before, after) != (self.close, self.open)

    def _suspicious(self, text: str, name: bool) -> bool:
        if any(mark in text for mark in self.marks):
            return True
        if not text.isidentifier():  # keep names of fields, roles and types
            if self.every or text not in self.text:
                return True
        elif name:
            return False
        return any(_completes(text, mark) for mark in self.marks)


def control_token_refused(token: str, where: str) -> KeelError:
    return KeelError(
        f"{where} contains {token!r}, which the tokenizer reads as a control token: remove it, or set "
        "data.allow_control_tokens=true if it is intended, as in prompts that a chat template has already rendered"
    )


def _completes(text: str, mark: str) -> bool:
    """Whether a text ends with a prefix of a control token's string, or starts with a suffix of it."""
    return any(text.endswith(mark[:k]) or text.startswith(mark[k:]) for k in range(1, len(mark)))


def _cut(text: str, marks: Collection[str]) -> list[str]:
    """Cut a text after the first character of each of these strings, or in the middle if none occurs."""
    places = (f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks if len(mark) > 1)
    parts = re.split("|".join(places) or "(?!)", text)
    return parts if len(parts) > 1 else [text[: len(text) // 2], text[len(text) // 2 :]]


def _is_mark(text: str) -> bool:
    """Whether a non-special added token can be a control token, unlike added words and runs of spaces."""
    return len(text) > 1 and any(category(c)[0] not in "LMNZ" and c not in "\t\n\r\u2581" for c in text)


def _any_of(marks: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these strings; the longest match wins, as in tokenizers."""
    return re.compile("|".join(map(re.escape, sorted({*marks} - {""}, key=len, reverse=True))) or "(?!)")


def _folded(text: str) -> str:
    return normalize("NFKC", text).casefold()
