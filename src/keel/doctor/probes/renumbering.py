"""Token ids that the model does not know: gold answers are likelier under others that stand for the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from keel.doctor.findings import Finding, finding
from keel.doctor.probes.evidence import level
from keel.doctor.probes.frames import unframed_logp
from keel.doctor.probes.gold_likelihood import (
    Gold,
    answer_logp,
    answer_tokens,
    blind_surprise,
    drawn_golds,
    golds,
    read_golds,
)
from keel.doctor.probes.templates import of_gains
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds

CHOOSING = 8  # problems that choose a shift
TESTING = 128  # that are drawn to test it, where it promises something
NEAR = (-2, -1, 1, 2)
MENDED = 2 / 3  # of the surprise, at least, is gone with the right ids


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
    by, whole = best
    if proof := _proof(setup, partial(shifted, setup, by=by, whole=whole), thresholds):
        words = f"the ids of all {'' if whole else 'ordinary '}tokens are {abs(by)} {'higher' if by > 0 else 'lower'}"
        yield tokenizer_finding(f"gold answers are {proof[0]:.2g} nats a token likelier where {words} {proof[1]}")


def added_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Tokens that were added to the vocabulary and stand in prompts and answers, written as they were before."""
    drawn = drawn_golds(setup, TESTING)
    spelt = _spelt_out(setup, {token for gold in drawn for token in (*gold.prompt, *gold.answer)})
    if not spelt:
        return

    def unadded(gold: Gold) -> Gold:
        prompt, answer = (tuple(t for token in part for t in spelt.get(token, (token,))) for part in _parts(gold))
        return Gold(prompt, answer)

    if proof := _proof(setup, unadded, thresholds):
        names = ", ".join(repr(setup.policy.tokenizer.decode([token])) for token in sorted(spelt)[:4])
        yield tokenizer_finding(
            f"gold answers are {proof[0]:.2g} nats a token likelier where tokens that were added to the vocabulary, "
            f"such as {names}, are written as the tokens they had before {proof[1]}"
        )


def _parts(gold: Gold) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return gold.prompt, gold.answer


def _spelt_out(setup: ProbeSetup, used: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Of each ordinary token of these that was added, what its text was before; nothing of tokenizers unread."""
    from tokenizers import Tokenizer

    tokenizer: Any = setup.policy.tokenizer
    added = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if not token.special}
    added = {i: text for i, text in added.items() if i in used}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not added or backend is None:
        return {}
    try:
        content = json.loads(backend.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
        before = Tokenizer.from_str(json.dumps(content))
    except Exception:  # parts of one's own cannot be written out
        return {}
    spelt = {i: tuple(before.encode(text, add_special_tokens=False).ids) for i, text in added.items()}
    return {i: ids for i, ids in spelt.items() if ids and i not in ids}


def _proof(setup: ProbeSetup, change: Callable[[Gold], Gold], thresholds: Thresholds) -> tuple[float, str] | None:
    """By how many nats a token gold answers are likelier under a change, with its evidence; None where that is none.

    The right ids leave little of the surprise: a task may be much the same with all its digits moved.
    """
    first = golds(setup)[:CHOOSING]
    drawn, context = dict.fromkeys(drawn_golds(setup, TESTING)), setup.policy.context_length or 1 << 30
    rest = [gold for gold in drawn if gold not in first and sum(map(len, _parts(change(gold)))) <= context]
    if len(rest) < CHOOSING:
        return None
    unmoved, scored = totals(setup, rest), totals(setup, map(change, rest))
    tested = [(after - before) / len(gold.answer) for gold, before, after in zip(rest, unmoved, scored, strict=True)]
    chance, left = of_gains(tested), -fmean(after / len(gold.answer) for gold, after in zip(rest, scored, strict=True))
    if (
        fmean(tested) <= max(thresholds["template_gain"], MENDED * (left + fmean(tested)))
        or chance > level(thresholds, looks=1)
        or left >= blind_surprise(setup, thresholds)
        or unframed_logp(setup) > -left  # it is the template that confuses the model, and not the ids
    ):
        return None
    return fmean(tested), f"({len(tested)} problems, chance {chance:.1g})"


def totals(setup: ProbeSetup, chosen: Iterable[Gold]) -> list[float]:
    """The log-probability of each answer, however many tokens it is written in."""
    return [float(logp.sum()) for logp in answer_tokens(setup, list(chosen))]


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
