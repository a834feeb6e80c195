"""Marks that a chat template writes and the tokenizer does not know as marks: spelled in letters, or the pad token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise
from keel.doctor.probes.renumbering import tokenizer_finding
from keel.doctor.probes.templates import KNOWN, by_chance, messages_in, prompt_golds
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.rollout.render import Renderer
from keel.run.build import build_renderer

PROBLEMS = 8
MARK = re.compile("|".join([r"<\|[^<>|\n]+\|>", *sorted({re.escape(m) for marks, _ in KNOWN.values() for m in marks})]))


def mark_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Marks of turns that are no tokens, and turns that end in padding, unless the model was trained on just that."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    rows, plain = (prompt_golds(setup, renderer, PROBLEMS, filled=filled) for filled in (True, False))
    if rows:
        yield from _spelled(setup, renderer, rows, thresholds)
    if rows or plain:
        yield from _padded(setup, rows or plain, thresholds)
    if plain:
        yield from _ended(setup, plain, thresholds)


def _spelled(
    setup: ProbeSetup, renderer: Renderer, rows: Sequence[tuple[Problem, Gold]], thresholds: Thresholds
) -> Iterator[Finding]:
    tokenizer: Any = setup.policy.tokenizer
    spelled = spelled_marks(renderer, *rows[0])
    bare = [
        Gold(tuple(tokenizer.encode(messages_in(renderer, p)[-1]["content"], add_special_tokens=False)), gold.answer)
        for p, gold in rows
    ]
    if not spelled or not all(gold.prompt for gold in bare) or _is_own(setup, rows, bare, thresholds):
        return
    mark, pieces = spelled[0], len(tokenizer.encode(spelled[0], add_special_tokens=False))
    setup.shared["another template"] = mark
    evidence = f"the chat template writes {', '.join(map(repr, spelled))}: {mark!r} becomes {pieces} tokens"
    if mark in tokenizer.get_vocab():
        yield tokenizer_finding(f"{evidence}, although it is one of the vocabulary")
        return
    yield finding(
        "prompt/format",
        f"{evidence}, none of them a mark, and gold answers are no likelier for it",
        "the template is another model's: this one has no such token, so that it reads letters in place of marks",
        "give a base model plain prompts (data.chat_template=none), or use the template that the model was published "
        "with",
    )


def spelled_marks(renderer: Renderer, problem: Problem, gold: Gold) -> list[str]:
    """Marks in a rendered prompt, and in no message, that take several tokens."""
    tokenizer: Any = renderer.tokenizer
    said = " ".join(message["content"] for message in messages_in(renderer, problem))
    text = str(tokenizer.decode(list(gold.prompt), skip_special_tokens=False))
    marks = [mark for mark in dict.fromkeys(MARK.findall(text)) if mark not in said]
    return [mark for mark in marks if len(tokenizer.encode(mark, add_special_tokens=False)) > 1]


def _padded(setup: ProbeSetup, rows: Sequence[tuple[Problem, Gold]], thresholds: Thresholds) -> Iterator[Finding]:
    """The pad token within prompts, where it is no other token's second name."""
    tokenizer: Any = setup.policy.tokenizer
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or end is None or pad in (end, tokenizer.bos_token_id, tokenizer.unk_token_id):
        return
    begins = [next((i for i, t in enumerate(gold.prompt) if t != pad), 0) for _, gold in rows]
    within = [pad in gold.prompt[begin:] for (_, gold), begin in zip(rows, begins, strict=True)]
    ended = [Gold(tuple(end if t == pad else t for t in gold.prompt), gold.answer) for _, gold in rows]
    if not all(within) or _is_own(setup, rows, ended, thresholds):
        return
    setup.shared["another template"] = tokenizer.pad_token
    yield finding(
        "prompt/format",
        f"{tokenizer.pad_token!r}, the pad token, stands within all of {len(rows)} prompts, and gold answers are no "
        f"likelier for it than for {tokenizer.eos_token!r} in its place",
        "the chat template ends turns in the token that fills up batches, or prompts were padded before they came: no "
        "model is trained to read it, and what masks padding by its id masks these, too",
        f"end turns in {tokenizer.eos_token!r}, or in what the model was published with (tokenizer.chat_template), and "
        "give prompts without padding",
    )


def _ended(setup: ProbeSetup, rows: Sequence[tuple[Problem, Gold]], thresholds: Thresholds) -> Iterator[Finding]:
    """Plain prompts that are ended like a text, behind which a model has nothing more to say."""
    tokenizer: Any = setup.policy.tokenizer
    ends = set(setup.policy.eos_ids) - {tokenizer.bos_token_id}
    opened = [Gold(gold.prompt[:-1], gold.answer) for _, gold in rows]
    ended = all(gold.prompt[-1] in ends for _, gold in rows)
    if not ended or not all(gold.prompt for gold in opened) or _is_own(setup, rows, opened, thresholds):
        return
    setup.shared["another template"] = "prompts that are ended"
    yield finding(
        "prompt/format",
        f"all of {len(rows)} prompts end in {tokenizer.decode([rows[0][1].prompt[-1]])!r}, the end of a text, and gold "
        "answers are no likelier for it",
        "the tokenizer adds its end token to every text (add_eos_token), or the prompts are written with it",
        "switch add_eos_token off, or take the end token out of the prompts",
    )


def _is_own(
    setup: ProbeSetup, rows: Sequence[tuple[Problem, Gold]], other: Sequence[Gold], thresholds: Thresholds
) -> bool:
    """Whether the model knows answers behind these prompts, and less so behind other ones, by more than chance.

    Where a few problems leave that open, they are the model's own: what is said of a template must be sure.
    """
    own = answer_logp(setup, [gold for _, gold in rows])
    if -fmean(own) >= blind_surprise(setup, thresholds):
        return False
    lost = [thresholds["template_gain"] - (a - b) for a, b in zip(own, answer_logp(setup, other), strict=True)]
    return fmean(lost) < 0 or len(lost) < 2 or by_chance(lost) > thresholds["false_alarms"]
