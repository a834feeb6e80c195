"""Detect stop strings, which end a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from keel.rollout.sampling import SamplingParams


class StopStrings:
    """Decodes tokens and truncates their text at stop strings."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def cut(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """The text before the first stop string, or None.

        The last tokens are decoded first; all tokens are decoded only if these contain a stop string. A stop string of
        n bytes spans at most n tokens, because a token adds at least one byte. The window of 2n + 8 tokens leaves room
        for special tokens, which add no bytes. A stop string that contains a special token is searched in the text with
        special tokens. Any other stop string is searched in the text without them.
        """
        cuts = [
            text
            for special in (False, True)
            if (strings := [string for string in stop if self._has_special(string) == special])
            and (text := self._cut_at(tokens, strings, special)) is not None
        ]
        return min(cuts, key=len) if cuts else None

    def ending(
        self, tokens: list[int], limit: int, sampling: SamplingParams, eos_ids: Collection[int]
    ) -> tuple[str, str | None]:
        """The stop reason at the newest token ("" if none), and the truncated text if a stop string ended it."""
        if tokens[-1] in sampling.stop_ids or (tokens[-1] in eos_ids and not sampling.ignore_eos):
            return "eos", None
        if sampling.stop and (text := self.cut(tokens, sampling.stop)) is not None:
            return "stop", text
        return ("length" if len(tokens) == limit else ""), None

    def special_in(self, stop: Sequence[str]) -> bool:
        """Whether any stop string contains a special token."""
        return any(map(self._has_special, stop))

    def _cut_at(self, tokens: list[int], stop: list[str], special: bool) -> str | None:
        window = 2 * max(len(string.encode()) for string in stop) + 8
        if len(tokens) > window:
            tail = self.decode(tokens[-window:], special=special)
            if not any(string in tail for string in stop):
                return None
        text = self.decode(tokens, special=special)
        starts = [text.find(string) for string in stop if string in text]
        if not starts:
            return None
        return self._without_special(tokens, text[: min(starts)]) if special else text[: min(starts)]

    def _has_special(self, string: str) -> bool:
        return any(token in string for token in self._special)

    def _without_special(self, tokens: list[int], before: str) -> str:
        """Remove special tokens from the text `before` a stop string.

        The complete tokens are decoded without special tokens; the remaining text is appended.
        """
        count = len(tokens)
        while count and len(self.decode(tokens[:count], special=True)) > len(before):
            count -= 1
        return self.decode(tokens[:count]) + before[len(self.decode(tokens[:count], special=True)) :]


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """The tokens that decoding skips."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(filter(None, (*named, *(str(token) for token in added.values() if token.special))))
