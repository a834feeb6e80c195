"""Weight sync: change the weights, sync, and see the engine change with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.draws import Draws, batch_draws, draws, unfiltered
from keel.doctor.findings import finding
from keel.doctor.gap import ROUNDING, average, rounding_explains
from keel.doctor.probes.reported import Reports
from keel.doctor.strange import STRANGE_STEPS, strange_turns
from keel.doctor.subject import STRONG_NOISE, Subject
from keel.doctor.verdict import Outcome, Verdict

_SMALL = 0.01  # of a weight's RMS: what an update changes
_MISSED = 0.3  # of such a change that an engine which has the new weights does not miss
_ROUNDED = 0.1  # of a change that a narrow type may round away
_SEEN = 10.0  # times what the engine is off by before: a change that its type rounds away tells nothing
_MOVED = 1e-3  # nats that log-probabilities have to move by, or nothing can be told


@dataclass(frozen=True)
class Synced:
    """After a sync to noisy weights: what is reported is `new` nats from these and `old` from those before.

    The noise moves log-probabilities by `apart` nats. `ratio` is the drawn tokens' mean log-ratio, new weights over
    old: KL(new‖old) if the new ones drew them, and negative if the old ones did.
    """

    new: float
    old: float
    apart: float
    ratio: float


def measure_sync(subject: Any) -> Outcome:
    """Perturb the policy, sync, sample: log-probabilities and tokens must be the new policy's; then back again."""
    if "sampler/noise" in subject.found:  # what was asked before is answered as before, by whatever weights
        return Outcome.of("weight sync", [Verdict.unchecked(["sampler/stale"], "the engine repeats itself")])
    limits, own = subject.thresholds, Reports.of(subject, subject.groups)
    at_first = errors(subject, batch_draws(subject))
    before = average(at_first)
    steady = own.close(limits, at_first) or rounding_explains(own.gap, own.rounding, limits)
    seen = _synced(subject, STRONG_NOISE, 1, subject.sample)
    why = _unfollowed(subject, seen, before, steady) or _small_change(subject)
    back = average(errors(subject, draws(subject, subject.sample())))
    if not why and back > max(limits["sync_gap_growth"] * before, limits["scoring_gap_half"]):
        why = f"after the weights were restored and synced again the gap is {back:.3g} nats"
    figures = {"gap_new": seen.new, "gap_old": seen.old, "gap_back": back, "log_ratio": seen.ratio}
    line = f"weight sync: engine within {seen.new:.2g} nats of the changed weights, {seen.old:.2g} of the old ones"
    if not why:
        proven = subject.engine.proven
        proof = (f"weight sync: tried and found sound: {proven}",) if proven else ()
        return Outcome.of("weight sync", [Verdict.sound(line, **figures)], (line, *proof))
    stale = finding(
        "sampler/stale",
        why,
        "the engine keeps weights of its own that sync does not bring up to date",
        "let engine.sync(policy, version) copy every trainable weight (LoRA: merge or send the adapter)",
    )
    return Outcome.of("weight sync", [Verdict.found(stale, **figures)], (line,))


def errors(subject: Subject, drawn: Draws) -> Tensor:
    """What was reported less these weights' log-probabilities `[N]`; of tokens without a report nothing.

    At the temperature, filtered or not, that fits best: a wrong temperature is another measure's finding.
    """
    scored, plain = drawn.where(~drawn.sample_logp.isnan()), unfiltered(subject.sampling)
    variants = (plain, replace(plain, temperature=1.0), subject.sampling)
    return min((scored.sample_logp - scored.logp(params) for params in variants), key=average)


def _synced(subject: Any, noise: float, seed: int, sample: Callable[[], Sequence[Group]]) -> Synced:
    """What the engine draws once it was told of noisy weights; afterwards it is told of the policy's own."""
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
    return Synced(average(errors(subject, new)), average(errors(subject, old)), average(moved), ratio)


def _unfollowed(subject: Any, seen: Synced, before: float, steady: bool) -> str:
    """Evidence that the engine has not the new weights, or not all of them; "" if there is none.

    `before` is what it is off by at unchanged weights, `steady` that this is rounding: what is wrong there is wrong at
    any weights, and tells nothing of a sync.
    """
    limits = subject.thresholds
    decisive = limits["sync_drawn_share"] * seen.apart
    # a narrow type rounds noisy weights by more, and shows nothing of it where the policy was certain before
    narrow = decisive if before > limits["scoring_gap"] else _ROUNDED * seen.apart
    floor = narrow if before > limits["scoring_gap"] or subject.policy.dtype != torch.float32 else 0.0
    lora = " (LoRA included: only the adapter was changed)" if subject.policy.lora is not None else ""
    after = f"after a change of all trainable weights and a sync{lora}"
    if seen.apart < _MOVED:
        return ""
    if seen.ratio < -decisive:
        return f"{after} drawn tokens are {-seen.ratio:.3g} nats more probable under the old weights than the new ones"
    if steady and seen.new > max(limits["sync_gap_growth"] * before, limits["scoring_gap_half"], floor):
        return (
            f"{after} the engine's log-probabilities are {seen.new:.3g} nats from the new weights' and {seen.old:.3g} "
            f"from the old ones', {before:.3g} before: weights were left behind, or are used otherwise (a LoRA scale)"
        )
    return ""


def _small_change(subject: Any) -> str:
    """The same with a change as small as an update's, after random texts: what is near what it was must travel, too."""
    step = STRANGE_STEPS[1]
    before = draws(subject, strange_turns(subject, step))
    seen = _synced(subject, _SMALL, 5, lambda: strange_turns(subject, step + 1))
    if seen.apart < _SEEN * max(average(errors(subject, before)), ROUNDING) or seen.new < _MISSED * seen.apart:
        return ""
    return (
        f"after a change of all trainable weights by {_SMALL:.0%} of their size, which moves log-probabilities by "
        f"{seen.apart:.3g} nats, and a sync the engine's are {seen.new:.3g} nats from the new weights'"
    )


__all__ = ["measure_sync"]
