"""Token ids that are off by a constant: gold answers are likelier once all ids are moved back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import level
from keel.lab.doctor.probes.frames import unframed_logp
from keel.lab.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise, drawn_golds, golds, read_golds
from keel.lab.doctor.probes.templates import of_gains
from keel.lab.doctor.setup import ProbeSetup

CHOOSING = 8  # problems that choose a shift
TESTING = 128  # that are drawn to test it, where it promises something
NEAR = (-2, -1, 1, 2)


def shifted_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Ids that are off by one or two, or by as many as there are special tokens, with these or without."""
    first, least = golds(setup)[:CHOOSING], thresholds["template_gain"]
    own = read_golds(setup).logp[:CHOOSING] if first else []
    if len(first) < CHOOSING or -fmean(own) <= least:
        return  # few, or none that can become likelier by as much
    gains = {
        (by, whole): fmean(answer_logp(setup, moved)) - fmean(own)
        for by in dict.fromkeys((*NEAR, -len(_special(setup)), len(_special(setup))))
        for whole in (False, True)
        if by and (moved := [shifted(setup, gold, by, whole=whole) for gold in first]) != list(first)
    }
    best = max(gains, key=lambda way: (round(gains[way], 1), -abs(way[0])), default=None)  # the nearest that does
    if best is None or gains[best] <= least:
        return
    (by, whole), rest = best, list(dict.fromkeys(g for g in drawn_golds(setup, TESTING) if g not in first))
    if len(rest) < CHOOSING:
        return
    unmoved, scored = answer_logp(setup, rest), answer_logp(setup, [shifted(setup, g, by, whole=whole) for g in rest])
    tested = [after - before for before, after in zip(unmoved, scored, strict=True)]
    chance = of_gains(tested)
    # the right ids leave little of the surprise: a task may be much the same with all its digits moved
    if (
        fmean(tested) <= max(least, -fmean(unmoved) / 2)
        or chance > level(thresholds, looks=1)
        or -fmean(scored) >= blind_surprise(setup, thresholds)
        or unframed_logp(setup) > fmean(scored)  # it is the template that confuses the model, and not the ids
    ):
        return
    yield tokenizer_finding(
        f"gold answers are {fmean(tested):.2g} nats a token likelier where the ids of all "
        f"{'' if whole else 'ordinary '}tokens are {abs(by)} {'higher' if by > 0 else 'lower'} ({len(tested)} "
        f"problems, chance {chance:.1g})"
    )


def shifted(setup: ProbeSetup, gold: Gold, by: int, *, whole: bool) -> Gold:
    """Prompt and answer with ids `by` higher, around the vocabulary's end; special ones stay unless `whole`."""
    special, size = _special(setup), min(setup.vocabulary, len(setup.policy.tokenizer))

    def moved(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(t if t in special and not whole else (t + by) % size for t in tokens)

    return Gold(moved(gold.prompt), moved(gold.answer))


def tokenizer_finding(evidence: str) -> Finding:
    """The tokenizer is not the model's, by this evidence."""
    return finding(
        "model/tokenizer",
        evidence,
        "the tokenizer is not the one that the model was trained with, or was changed since",
        "load model and tokenizer of one checkpoint (model.name), and change neither ids nor texts of its tokens",
    )


def _special(setup: ProbeSetup) -> frozenset[int]:
    return frozenset(setup.policy.tokenizer.all_special_ids)
