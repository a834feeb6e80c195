"""What a chat template writes around the messages by itself, part by part: gold answers tell which one is too many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.evidence import level
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise, row_logits
from keel.doctor.probes.templates import FOLD, SHARED, messages_in, of_gains, template_golds
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.rollout.render import Renderer
from keel.run.build import build_renderer

WORDS = "words"
CHOOSING = 8  # problems that choose a part; others test it, so that trying many parts raises no false alarm
TESTING = 128  # that are drawn to test it, where it promises something
Span = tuple[int, int]  # of a prompt's tokens
Part = tuple[Span, ...]  # what is left out together, in order
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """A prompt's tokens, and which of them a template has written itself: before the messages, after and between them.

    Either side is cut into segments: a special token with the ordinary ones behind it, so that marks and what is
    written under them are told apart.
    """

    tokens: Tokens
    before: tuple[Span, ...]
    after: tuple[Span, ...]
    special: frozenset[int] = frozenset()
    between: tuple[Span, ...] = ()

    def parts(self) -> list[tuple[str, Part]]:
        """What may be left out, by what it is called: the same names stand for the same parts of all prompts."""
        # the last segment before a question opens the user's turn, and a BOS has a test of its own
        head, tail = [span for span in self.before[:-1] if span != (0, 1)], self.after
        named = [(f"before {i}", span) for i, span in enumerate(head)]
        if len(head) > 1:
            named += [(f"before {i} to its end", (span[0], head[-1][1])) for i, span in enumerate(head[:-1])]
        named += [(f"after {i}", span) for i, span in enumerate(tail)]
        named += [(f"under {i}", (start + 1, end)) for i, (start, end) in enumerate(tail) if end - start > 1]
        parts: list[tuple[str, Part]] = [(name, (span,)) for name, span in named]
        return [*parts, (WORDS, words)] if (words := self.words()) else parts

    def words(self) -> Part:
        """All that is no special token: what is written around every message within its marks."""
        spans = (*self.before, *self.between, *self.after)
        marked = ((start + (self.tokens[start] in self.special), end) for start, end in spans)
        return tuple((start, end) for start, end in marked if start < end)

    def without(self, part: Part) -> Tokens:
        left_out = {i for start, end in part for i in range(start, end)}
        return tuple(token for i, token in enumerate(self.tokens) if i not in left_out)


def frame_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """A part of the template without which gold answers are likelier, and that surprises the model itself.

    What a model was taught behind, such as a thought that it always opens or the system prompt of its makers, is no
    surprise to it, even where short answers are likelier without.
    """
    first, shorter = _chosen(setup)
    name = max(shorter, key=lambda name: fmean(shorter[name]), default=None)
    golds = [gold for _, gold in first]
    if name is None or not matters(golds, answer_logp(setup, golds), shorter[name], thresholds):
        return
    rest = _testing(setup, first)
    if len(rest) < CHOOSING or not _in_all(rest, name):
        return
    whole, without = answer_logp(setup, [gold for _, gold in rest]), answer_logp(setup, _shortened(rest, name))
    tested = [after - before for before, after in zip(whole, without, strict=True)]
    chance, blind = of_gains(tested), blind_surprise(setup, thresholds)
    if not matters([gold for _, gold in rest], whole, without, thresholds) or chance > level(thresholds) / SHARED:
        return
    surprise = span_surprise(setup, [(f.tokens, dict(f.parts())[name]) for f, _ in rest])
    if -fmean(without) >= blind or surprise <= blind:
        return
    frame = rest[0][0]
    decode, part = setup.policy.tokenizer.decode, dict(frame.parts())[name]
    text = " … ".join(str(decode(list(frame.tokens[a:b]), skip_special_tokens=False)) for a, b in part)
    side = "around" if name == WORDS else "before" if name.startswith("before") else "behind"
    setup.shared["another template"] = name
    yield finding(
        "prompt/format",
        f"gold answers are {fmean(tested):.2g} nats a token likelier without {text[:80]!r}, which the chat template "
        f"writes {side} the messages by itself ({len(tested)} "
        f"problems, chance {chance:.1g}), and its own tokens have a surprise of {surprise:.2g} nats each",
        "the template writes something that the model was not trained behind: a system prompt of another model, an "
        "instruction, the opening of a thought, quotes around a message, a mark twice",
        "take that out of the template (tokenizer.chat_template), or use the one that the model was published with "
        "(data.chat_template)",
    )


def unframed_logp(setup: ProbeSetup) -> float:
    """The mean log-probability a token of gold answers without the part of the template that they miss least; −∞ where
    there is none. Other problems than those tell it that have chosen the part."""
    first, shorter = _chosen(setup)
    name = max(shorter, key=lambda name: fmean(shorter[name]), default=None)
    rest = _testing(setup, first) if name is not None else []
    if name is None or len(rest) < CHOOSING or not _in_all(rest, name):
        return -math.inf
    return fmean(answer_logp(setup, _shortened(rest, name)))


def _chosen(setup: ProbeSetup) -> tuple[list[tuple[Frame, Gold]], dict[str, list[float]]]:
    """The problems that choose a part, and what their answers' likelihood is without each of them, found once."""
    if "frames" not in setup.shared:
        first = _framed(setup, build_renderer(setup.config, setup.policy.tokenizer), CHOOSING)
        names = [name for name, _ in first[0][0].parts() if _in_all(first, name)] if len(first) == CHOOSING else []
        setup.shared["frames"] = first, {name: answer_logp(setup, _shortened(first, name)) for name in names}
    chosen: tuple[list[tuple[Frame, Gold]], dict[str, list[float]]] = setup.shared["frames"]
    return chosen


def _testing(setup: ProbeSetup, first: Sequence[tuple[Frame, Gold]]) -> list[tuple[Frame, Gold]]:
    """Further problems, each once."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    return [row for row in dict.fromkeys(_framed(setup, renderer, TESTING)) if row not in first]


def matters(golds: Sequence[Gold], before: Sequence[float], after: Sequence[float], thresholds: Thresholds) -> bool:
    """Whether answers gain enough a token, or over half of their surprise and e times their likelihood.

    Most tokens of a long answer are its form, which is sure under any prompt: a mean over all of them dilutes the rest.
    """
    gain, surprise = fmean(after) - fmean(before), -fmean(before)
    whole = fmean(len(gold.answer) * (b - a) for gold, a, b in zip(golds, before, after, strict=True))
    return gain > thresholds["template_gain"] or (gain > surprise / 2 and whole > FOLD)


def _framed(setup: ProbeSetup, renderer: Renderer, count: int) -> list[tuple[Frame, Gold]]:
    rows = ((frame_of(renderer, p, gold.prompt), gold) for p, gold in template_golds(setup, renderer, count))
    return [(frame, gold) for frame, gold in rows if frame is not None]


def _in_all(rows: Sequence[tuple[Frame, Gold]], name: str) -> bool:
    return all(name in dict(frame.parts()) for frame, _ in rows)


def frame_of(renderer: Renderer, problem: Problem, tokens: Tokens) -> Frame | None:
    """The frame of a rendered prompt; None where its messages are not found in it, or are all there is."""
    tokenizer: Any = renderer.tokenizer
    contents = ["".join(message["content"].split()) for message in messages_in(renderer, problem)]
    texts = ["".join(str(tokenizer.decode([token], skip_special_tokens=False)).split()) for token in tokens]
    ends, whole = list(accumulate(map(len, texts))), "".join(texts)  # without spaces, which tokenizers add or drop
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
    """Where each of these stands, one behind the other; −1 where it does not."""
    place = 0
    for content in contents:
        yield (start := whole.find(content, place))
        place = max(start, 0) + len(content)


def _segments(tokens: Tokens, first: int, last: int, special: set[int]) -> tuple[Span, ...]:
    starts = [i for i in range(first, last) if i == first or tokens[i] in special]
    return tuple(zip(starts, [*starts[1:], last], strict=True))


def _shortened(rows: Sequence[tuple[Frame, Gold]], name: str) -> list[Gold]:
    return [Gold(frame.without(dict(frame.parts())[name]), gold.answer) for frame, gold in rows]


def span_surprise(setup: ProbeSetup, rows: Sequence[tuple[Tokens, Part]]) -> float:
    """The mean −log p of a part's own tokens where it stands; of the first token of a prompt nothing is known."""
    values = []
    for (tokens, part), logits in zip(rows, row_logits(setup, [tokens for tokens, _ in rows]), strict=True):
        for start, end in ((max(start, 1), end) for start, end in part):
            own = torch.tensor(tokens[start:end], dtype=torch.long, device=logits.device)[:, None]
            values += (-logits[start - 1 : end - 1].log_softmax(-1).gather(-1, own)).flatten().tolist()
    return fmean(values) if values else 0.0
