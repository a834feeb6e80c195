"""Words that all questions begin or end with: gold answers tell whether the model was taught behind them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.earnings import earned_otherwise
from keel.doctor.probes.evidence import level
from keel.doctor.probes.frames import CHOOSING, frame_of, matters, span_surprise
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise
from keel.doctor.probes.rendering import messages_of
from keel.doctor.probes.templates import SHARED, of_gains, prompt_golds
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.run.build import build_renderer

PROBLEMS = 64  # of which the first choose what is left out, and the others test it
CUTS = 5  # places on either side that are tried
FEWEST = 4  # tokens that are left out, for a warning
SECONDS = 20.0  # after which no further cut is tried
FIRST = 4  # problems that choose; as many again are asked what all questions share
Tokens = tuple[int, ...]
Cut = tuple[int, int]  # tokens that are left out at the beginning of the messages, and at their end


@dataclass(frozen=True)
class TextAsked:
    """A gold answer, and where the messages stand in its prompt."""

    gold: Gold
    start: int
    stop: int

    @property
    def messages(self) -> Tokens:
        return self.gold.prompt[self.start : self.stop]

    def without(self, cut: Cut) -> Gold:
        prompt = self.gold.prompt
        left = self.messages[cut[0] : len(self.messages) - cut[1]]
        return Gold((*prompt[: self.start], *left, *prompt[self.stop :]), self.gold.answer)


def around_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Text around all questions without which answers are likelier, and that surprises the model itself.

    As for what a template writes (`frames`): an instruction in a language that the model reads is no surprise to it.
    What is meant to be there earns by it, so that only completions that earn more without it make it an error; a rare
    word or two, as some models have them for a switch, are no warning.
    """
    first, rest, cut = _chosen(setup)
    if cut == (0, 0) or not matters([row.gold for row in first], *_scored(setup, first, cut), thresholds):
        return
    before, after = _scored(setup, rest, cut)
    gains = [b - a for a, b in zip(before, after, strict=True)]
    chance, blind = of_gains(gains), blind_surprise(setup, thresholds)
    sure = chance <= level(thresholds) / SHARED and -fmean(after) < blind
    if not sure or not matters([row.gold for row in rest], before, after, thresholds):
        return
    surprise = span_surprise(
        setup, [(r.gold.prompt, ((r.start, r.start + cut[0]), (r.stop - cut[1], r.stop))) for r in rest]
    )
    if surprise <= blind:
        return
    decode, messages = setup.policy.tokenizer.decode, rest[0].messages
    head, tail = (
        str(decode(list(part), skip_special_tokens=False)) if part else ""
        for part in (messages[: cut[0]], messages[len(messages) - cut[1] :])
    )
    bare = partial(_bare, head=head, tail=tail)
    told = all(bare(group.problem) is not group.problem for group in setup.groups)
    earned = earned_otherwise(setup, setup.config, thresholds, bare) if told else None
    proven = earned is not None and earned.sure
    if (earned is not None and earned.other < earned.own) or (sum(cut) < FEWEST and not proven):
        return
    text = " … ".join(filter(None, (head, tail)))
    setup.shared["another template"] = text
    yield finding(
        "prompt/format",
        f"gold answers are {fmean(gains):.2g} nats a token likelier without {text[:80]!r}, which stands around every "
        f"question ({len(gains)} problems, chance {chance:.1g}), and its own tokens have a surprise of {surprise:.2g} "
        "nats each" + (f"; completions earn {earned} without it" if earned is not None else ""),
        "the data ask in another form than the model was taught: markup of a page, headings, an example or an "
        "instruction of another set",
        "take that out of the questions, or ask the model in the form that it knows"
        + ("" if proven else "; nothing, if the model is to learn this form"),
        severity=None if proven else "warning",
    )


def _bare(problem: Problem, head: str, tail: str) -> Problem:
    """A problem without what is written around its question; as it is where that is not found."""
    messages = [dict(message) for message in messages_of(problem)]
    first, last, head, tail = messages[0], messages[-1], head.strip(), tail.strip()
    if not first["content"].lstrip().startswith(head) or not last["content"].rstrip().endswith(tail):
        return problem
    first["content"] = first["content"].lstrip().removeprefix(head).lstrip()
    last["content"] = last["content"].rstrip().removesuffix(tail).rstrip()
    if not first["content"] or not last["content"]:
        return problem
    return replace(problem, prompt=first["content"] if isinstance(problem.prompt, str) else messages)


def bare_logp(setup: ProbeSetup) -> float:
    """The mean log-probability a token of gold answers without what their questions share; −∞ where that is nothing."""
    _, rest, cut = _chosen(setup)
    return -math.inf if cut == (0, 0) else fmean(answer_logp(setup, [row.without(cut) for row in rest]))


def _scored(setup: ProbeSetup, rows: Sequence[TextAsked], cut: Cut) -> tuple[list[float], list[float]]:
    """Answers after their prompts as they are, and with a cut."""
    return answer_logp(setup, [row.gold for row in rows]), answer_logp(setup, [row.without(cut) for row in rows])


def _chosen(setup: ProbeSetup) -> tuple[list[TextAsked], list[TextAsked], Cut]:
    """The problems that choose a cut, those that test it, and the cut, found once; (0, 0) where there is none."""
    if "around" not in setup.shared:
        rows = _asked(setup)
        first, rest = rows[:CHOOSING], rows[CHOOSING:]
        setup.shared["around"] = first, rest, _best(setup, first) if len(rest) >= CHOOSING else (0, 0)
    chosen: tuple[list[TextAsked], list[TextAsked], Cut] = setup.shared["around"]
    return chosen


def _asked(setup: ProbeSetup) -> list[TextAsked]:
    """Problems of one turn, each once, with the place of their messages."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    rows = []
    for filled in (True, False):
        for gold, problem in {g: p for p, g in prompt_golds(setup, renderer, PROBLEMS, filled=filled)}.items():
            start, stop = int(gold.prompt[0] == setup.policy.tokenizer.bos_token_id), len(gold.prompt)
            if filled:
                frame = frame_of(renderer, problem, gold.prompt)
                if frame is None:
                    return []
                start, stop = (
                    max((end for _, end in frame.before), default=0),
                    min((begin for begin, _ in frame.after), default=stop),
                )
            rows.append(TextAsked(gold, start, stop))
        if rows:
            break
    return rows


def _best(setup: ProbeSetup, rows: Sequence[TextAsked]) -> Cut:
    """The cut that makes answers likeliest; both ends at once, since either may be enough to confuse a model."""
    shortest = min(len(row.messages) for row in rows) - 1
    heads = _places(setup, [row.messages for row in rows], shortest)
    tails = _places(setup, [row.messages[::-1] for row in rows], shortest)
    cuts = [(head, tail) for head in heads for tail in tails if head + tail <= shortest]
    began, scores = time.monotonic(), dict[Cut, float]()
    for cut in cuts if len(cuts) > 1 else ():
        scores[cut] = fmean(answer_logp(setup, [row.without(cut) for row in rows[:FIRST]]))
        if time.monotonic() - began > SECONDS:
            break
    return max(scores, key=scores.__getitem__, default=(0, 0))


def _places(setup: ProbeSetup, rows: Sequence[Tokens], most: int) -> list[int]:
    """How many tokens may be left out of what all rows begin with: up to a sign, or to the end of what they share."""
    tokenizer: Any = setup.policy.tokenizer
    shared = next((i for i in range(most) if len({row[i] for row in rows}) > 1), most)
    texts = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in rows[0][:shared]]
    signs = [i + 1 for i, text in enumerate(texts) if not text.strip().isalnum()]
    places = [*dict.fromkeys((*signs, *([shared] if shared else [])))]
    step = max(1, -(-len(places) // CUTS))
    return [0, *reversed(places[::-step])]
