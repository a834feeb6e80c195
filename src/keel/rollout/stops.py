"""Stop strings: where the text of sampled tokens ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from keel.rollout.sampling import SamplingParams


class StopStrings:
    """Text of tokens, and its cut at a stop string, by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def cut(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """The text before the first stop string, or None; looks at the last few tokens first, at all only on a hit.

        A stop string that the newest token completes lies within its own length in bytes of tokens, since a token
        adds a byte at least; twice that and eight more leave room for special tokens, which add none. A stop string
        with a special token in it is searched where those are written out, any other where they are left out.
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
        """Why the newest token ends a completion, "" where it does not, and its text where a stop string cut it."""
        if tokens[-1] in eos_ids and not sampling.ignore_eos:
            return "eos", None
        if sampling.stop and (text := self.cut(tokens, sampling.stop)) is not None:
            return "stop", text
        return ("length" if len(tokens) == limit else ""), None

    def special_in(self, stop: Sequence[str]) -> bool:
        """Whether any stop string has a special token in it."""
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
        """The text `before` a stop string, special tokens left out: that of its whole tokens, and what remains."""
        count = len(tokens)
        while count and len(self.decode(tokens[:count], special=True)) > len(before):
            count -= 1
        return self.decode(tokens[:count]) + before[len(self.decode(tokens[:count], special=True)) :]


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """The tokens that decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(filter(None, (*named, *(str(token) for token in added.values() if token.special))))
