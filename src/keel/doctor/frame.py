"""Split a rendered prompt into its messages and the parts that the chat template adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from keel.base.types import Problem
from keel.doctor.rendering import messages_in
from keel.rollout.render import Renderer

WORDS = "words"
Span = tuple[int, int]  # token indices in a prompt
Part = tuple[Span, ...]  # spans that are removed together, in order
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """A prompt's tokens, and the spans that the template wrote before, after and between the messages.

    Each side is cut into segments: a special token followed by ordinary ones. Marks and the text after them can thus be
    removed separately.
    """

    tokens: Tokens
    before: tuple[Span, ...]
    after: tuple[Span, ...]
    special: frozenset[int] = frozenset()
    between: tuple[Span, ...] = ()

    @property
    def messages(self) -> Span:
        """Start and end of the messages, including what stands between them."""
        start, stop = self.before[-1:], self.after[:1]
        return (start[0][1] if start else 0), (stop[0][0] if stop else len(self.tokens))

    def parts(self) -> dict[str, Part]:
        """The parts that can be removed, by name. Equal names mean equal parts in all prompts."""
        # the last segment before the messages opens the user's turn; BOS has a test of its own
        head, tail = [span for span in self.before[:-1] if span != (0, 1)], self.after
        named = [(f"before {i}", span) for i, span in enumerate(head)]
        if len(head) > 1:
            named += [(f"before {i} to its end", (span[0], head[-1][1])) for i, span in enumerate(head[:-1])]
        named += [(f"after {i}", span) for i, span in enumerate(tail)]
        named += [(f"under {i}", (start + 1, end)) for i, (start, end) in enumerate(tail) if end - start > 1]
        return {name: (span,) for name, span in named} | ({WORDS: words} if (words := self.words()) else {})

    def words(self) -> Part:
        """All ordinary tokens that the template wrote around the messages."""
        spans = (*self.before, *self.between, *self.after)
        marked = ((start + (self.tokens[start] in self.special), end) for start, end in spans)
        return tuple((start, end) for start, end in marked if start < end)

    def without(self, part: Part) -> Tokens:
        left_out = {i for start, end in part for i in range(start, end)}
        return tuple(token for i, token in enumerate(self.tokens) if i not in left_out)


def frame_of(renderer: Renderer, problem: Problem, tokens: Tokens) -> Frame | None:
    """The frame of a rendered prompt; None if its messages cannot be found in it."""
    tokenizer: Any = renderer.tokenizer
    contents = ["".join(message["content"].split()) for message in messages_in(renderer, problem)]
    texts = ["".join(str(tokenizer.decode([token], skip_special_tokens=False)).split()) for token in tokens]
    # compared without spaces, which tokenizers add or drop
    ends, whole = list(accumulate(map(len, texts))), "".join(texts)
    stop = whole.rfind(contents[-1])
    starts = [*_places(contents[:-1], whole[: max(stop, 0)]), stop]
    if min(starts) < 0 or not all(contents):
        return None
    begins = [sum(end <= start for end in ends) for start in starts]
    stops = [sum(end < start + len(text) for end in ends) + 1 for start, text in zip(starts, contents, strict=True)]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    head, *between, tail = (
        _segments(tokens, first, last, special) for first, last in zip([0, *stops], [*begins, len(tokens)], strict=True)
    )
    return Frame(tokens, head, tail, frozenset(special), tuple(span for spans in between for span in spans))


def _places(contents: Sequence[str], whole: str) -> Iterator[int]:
    """The position of each text after the previous one, or −1 if it is missing."""
    place = 0
    for content in contents:
        yield (start := whole.find(content, place))
        place = max(start, 0) + len(content)


def _segments(tokens: Tokens, first: int, last: int, special: set[int]) -> tuple[Span, ...]:
    starts = [i for i in range(first, last) if i == first or tokens[i] in special]
    return tuple(zip(starts, [*starts[1:], last], strict=True))
