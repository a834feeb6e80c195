"""Weight sync: change the weights, sync, and check that the engine uses the new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.draws import STRANGE_STEPS, Draws, batch_draws, draws, strange_turns, unfiltered
from keel.doctor.findings import finding
from keel.doctor.gap import ROUNDING, average, rounding_explains
from keel.doctor.measure import Outcome, Verdict
from keel.doctor.probes.reported import Reports
from keel.doctor.subject import STRONG_NOISE, Subject

_SMALL = 0.01  # share of a weight's RMS, the size of an update
_MISSED = 0.3  # a synced engine misses at most this share of the small change
_ROUNDED = 0.1  # share of a change of log-probabilities that a lower-precision type may lose to rounding
_SEEN = 10.0  # factor over the engine's initial error that a change must reach to be visible
_MOVED = 1e-3  # nats; smaller changes of log-probabilities cannot be tested
_COPIED = 20.0  # nats in total; after a larger change, equal noise cannot draw equal completions


@dataclass(frozen=True)
class Synced:
    """Distances of the engine's log-probabilities after a sync to perturbed weights, in nats per token.

    They are `new` nats from the perturbed weights' and `old` nats from the original ones'. The noise changes
    log-probabilities by `apart` nats. `ratio` is the mean log-ratio, new over old weights, of the drawn tokens:
    KL(new‖old) if the new weights drew them, negative if the old ones did.
    """

    new: float
    old: float
    apart: float
    ratio: float
    tokens: list[tuple[int, ...]]


def measure_sync(subject: Any) -> Outcome:
    """Perturb the policy, sync and sample: the engine's log-probabilities and tokens must be those of the new weights.

    An engine that reports no log-probabilities is judged by its tokens. The original weights are then synced back.
    """
    if "sampler/noise" in subject.found:  # the engine repeats earlier answers, whatever its weights
        return Outcome.of(
            "weight sync",
            [Verdict.unchecked(["sampler/stale"], "the engine returns repeated completions (sampler/noise)")],
        )
    limits, own = subject.thresholds, Reports.of(subject, subject.groups)
    at_first = errors(subject, batch_draws(subject))
    before = average(at_first)
    steady = own.close(limits, at_first) or rounding_explains(own.gap, own.rounding, limits)
    seen = _synced(subject, STRONG_NOISE, 1, subject.sample)
    why = _unfollowed(subject, seen, before, steady) or ("" if subject.engine is None else _small_change(subject))
    again = subject.sample()
    back = average(errors(subject, draws(subject, again)))
    if not why and seen.tokens == _tokens(again) and seen.apart * sum(map(len, seen.tokens)) > _COPIED:
        why = (
            f"with the same noise, the engine draws the same {len(seen.tokens)} completions before and after a change "
            "of all weights"
        )
    if not why and back > max(limits["sync_gap_growth"] * before, limits["scoring_gap_half"]):
        why = f"after the weights were restored and synced again, the gap is {back:.3g} nats"
    figures = {"log_ratio": seen.ratio}
    line = (
        f"weight sync: drawn tokens are {seen.ratio:.2g} nats more probable under the changed weights than under the "
        "old ones"
    )
    if len(at_first):
        figures |= {"gap_new": seen.new, "gap_old": seen.old, "gap_back": back}
        line = (
            f"weight sync: the engine's log-probabilities are within {seen.new:.2g} nats of the changed weights' and "
            f"{seen.old:.2g} of the old ones'"
        )
    if not why:
        proven = "" if subject.engine is None else subject.engine.proven
        proof = (f"weight sync verified: {proven}",) if proven else ()
        return Outcome.of("weight sync", [Verdict.sound(line, **figures)], (line, *proof))
    stale = finding(
        "sampler/stale",
        why,
        "sync does not update the engine's own copy of the weights",
        "let the engine's sync copy every trainable weight (LoRA: merge or send the adapter)",
    )
    return Outcome.of("weight sync", [Verdict.found(stale, **figures)], (line,))


def errors(subject: Subject, drawn: Draws) -> Tensor:
    """Reported minus computed log-probabilities `[N]`, for tokens with a report.

    Uses the best of three temperature and filter settings, because another measure reports a wrong temperature.
    """
    scored, plain = drawn.where(~drawn.sample_logp.isnan()), unfiltered(subject.sampling)
    variants = (plain, replace(plain, temperature=1.0), subject.sampling)
    return min((scored.sample_logp - scored.logp(params) for params in variants), key=average)


def _synced(subject: Any, noise: float, seed: int, sample: Callable[[], Sequence[Group]]) -> Synced:
    """Sample after a sync to perturbed weights, then sync the original ones back."""
    try:
        with subject.perturbed(noise, seed=seed):
            subject.sync()
            groups = sample()
            new = draws(subject, groups)
        old = draws(subject, groups)
    finally:
        subject.sync()
    plain = unfiltered(subject.sampling)
    moved = new.logp(plain) - old.logp(plain)
    ratio = float(moved.mean()) if len(moved) else 0.0
    return Synced(average(errors(subject, new)), average(errors(subject, old)), average(moved), ratio, _tokens(groups))


def _tokens(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [completion.tokens for group in groups for completion in group.completions]


def _unfollowed(subject: Any, seen: Synced, before: float, steady: bool) -> str:
    """Evidence that the engine lacks some or all of the new weights; "" if there is none.

    `before` is the engine's error at unchanged weights, and `steady` is whether that error is only rounding. A larger
    error has another cause and says nothing about the sync.
    """
    limits = subject.thresholds
    decisive = limits["sync_drawn_share"] * seen.apart
    # perturbed weights have larger rounding errors in lower precision; a policy that was certain hides them
    narrow = decisive if before > limits["scoring_gap"] else _ROUNDED * seen.apart
    floor = narrow if before > limits["scoring_gap"] or subject.policy.dtype != torch.float32 else 0.0
    lora = " (LoRA: only the adapter was changed)" if subject.policy.lora is not None else ""
    after = f"after a change of all trainable weights and a sync{lora}"
    if seen.apart < _MOVED:
        return ""
    if seen.ratio < -decisive:
        return (
            f"{after}, drawn tokens are {-seen.ratio:.3g} nats more probable under the old weights than under the new "
            "ones"
        )
    if steady and seen.new > max(limits["sync_gap_growth"] * before, limits["scoring_gap_half"], floor):
        return (
            f"{after}, the engine's log-probabilities are {seen.new:.3g} nats from the new weights' and "
            f"{seen.old:.3g} from the old ones'; the gap was {before:.3g} before the change. Some weights were not "
            "sent, or are applied differently (such as a LoRA scale)"
        )
    return ""


def _small_change(subject: Any) -> str:
    """On random prompts, test a change as small as an update, because an engine may skip small changes."""
    step = STRANGE_STEPS[1]
    before = draws(subject, strange_turns(subject, step))
    seen = _synced(subject, _SMALL, 5, lambda: strange_turns(subject, step + 1))
    if seen.apart < _SEEN * max(average(errors(subject, before)), ROUNDING) or seen.new < _MISSED * seen.apart:
        return ""
    return (
        f"after a change of all trainable weights by {_SMALL:.0%} of their size and a sync, the engine's "
        f"log-probabilities are {seen.new:.3g} nats from the new weights'; the change itself moves log-probabilities "
        f"by {seen.apart:.3g} nats"
    )


__all__ = ["measure_sync"]
