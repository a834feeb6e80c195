"""Weight sync: change the weights, sync, and see the engine change with them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keel.doctor.findings import Finding, finding
from keel.doctor.gap import ROUNDING, average
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.draws import Draws, batch_draws, draws, unfiltered
from keel.doctor.probes.reported import Reports
from keel.doctor.probes.strange import STRANGE_STEPS, strange_turns
from keel.doctor.subject import STRONG_NOISE
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome

_SMALL = 0.01  # of a weight's RMS: what an update changes
_MISSED = 0.3  # of such a change that an engine which has the new weights does not miss
_ROUNDED = 0.1  # of a change that a narrow type may round away
_SEEN = 10.0  # times what the engine is off by before: a change that its type rounds away tells nothing


def probe_sync(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Perturb the policy, sync, sample: log-probabilities and tokens must be the new policy's; then back again."""
    engine, model = setup.run.engine, setup.policy.model
    try:
        with setup.perturbed(STRONG_NOISE, seed=1):
            engine.sync(model, 1)
            groups = setup.collect()
            new = draws(setup, groups)
        old = draws(setup, groups)
        finding = _finding(setup, new, old, thresholds) or _unmoved(setup, new, old)
    finally:
        engine.sync(model, 2)
    if finding is None:
        finding = _left_out(setup)
    findings = [] if finding is None else [finding]
    if setup.shared.get("repeated steps"):  # what was asked before is answered as before, by whatever weights
        return Outcome("weight sync", unchecked=("sampler/stale: the engine repeats itself (see sampler/noise)",))
    back = draws(setup, setup.collect())
    returned = _gap(setup, back)
    grown = thresholds["sync_gap_growth"] * _gap(setup, batch_draws(setup))
    if not findings and returned > max(grown, thresholds["scoring_gap_half"]):
        findings.append(_stale(f"after the weights were restored and synced again the gap is {returned:.3g} nats"))
    figures = {"gap_new": _gap(setup, new), "gap_old": _gap(setup, old), "gap_back": returned}
    figures["log_ratio"] = _ratio(setup, new, old)
    line = (
        f"weight sync: engine within {figures['gap_new']:.2g} nats of the changed weights, {figures['gap_old']:.2g} of "
        "the old ones"
    )
    proof = (f"weight sync: tried and found sound: {engine.proven}",) if engine.proven and not findings else ()
    return Outcome("weight sync", tuple(findings), figures, (line, *proof))


def _left_out(setup: KeelSubject) -> Finding | None:
    """The same with a change as small as an update's, after random texts: what is near what it was must travel, too."""
    engine, model, step = setup.run.engine, setup.policy.model, STRANGE_STEPS[1]
    before = draws(setup, strange_turns(setup, step))
    try:
        with setup.perturbed(_SMALL, seed=5):
            engine.sync(model, 3)
            groups = strange_turns(setup, step + 1)
            new = draws(setup, groups)
        old = draws(setup, groups)
    finally:
        engine.sync(model, 4)
    if not len(new) or not len(before):
        return None
    plain = unfiltered(setup.sampling)
    apart, fresh = average(new.logp(plain) - old.logp(plain)), _gap(setup, new)
    if apart < _SEEN * max(_gap(setup, before), ROUNDING) or fresh < _MISSED * apart:
        return None
    return _stale(
        f"after a change of all trainable weights by {_SMALL:.0%} of their size, which moves log-probabilities by "
        f"{apart:.3g} nats, and a sync the engine's are {fresh:.3g} nats from the new weights'"
    )


def _unmoved(setup: KeelSubject, new: Draws, old: Draws) -> Finding | None:
    """Draws and reports that are to the last digit what they were before the change, whatever they are worth."""
    before, plain = batch_draws(setup), unfiltered(setup.sampling)
    if len(before) != len(new) or not len(new) or average(new.logp(plain) - old.logp(plain)) < 1e-3:
        return None
    same = torch.equal(before.tokens, new.tokens) and torch.equal(before.sample_logp, new.sample_logp)
    if not same:
        return None
    return _stale(
        f"after a change of all trainable weights and a sync the engine draws the same {len(new)} tokens as before, "
        "with the same log-probabilities to the last digit"
    )


def _finding(setup: KeelSubject, new: Draws, old: Draws, thresholds: Thresholds) -> Finding | None:
    apart = float((new.logp(unfiltered(setup.sampling)) - old.logp(unfiltered(setup.sampling))).abs().mean())
    if apart < 1e-3:  # rounding: no alarm hangs on it
        return None  # the noise moved nothing: nothing can be told
    fresh, stale = _gap(setup, new), _gap(setup, old)
    drawn, decisive = _ratio(setup, new, old), thresholds["sync_drawn_share"] * apart
    lora = " (LoRA included: only the adapter was changed)" if setup.policy.lora is not None else ""
    # what is wrong at unchanged weights is wrong at any, and more so at noisy ones: that tells nothing of a sync
    unchanged = batch_draws(setup)
    sound = Reports.of(setup, setup.groups).close(thresholds, _differences(setup, unchanged))
    sound = sound and not setup.shared.get("sampler off")
    if stale < thresholds["sync_stale_share"] * fresh and (sound or drawn < decisive):
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the engine's log-probabilities are {stale:.3g} "
            f"nats from the old weights' and {fresh:.3g} from the new ones'"
        )
    if drawn < -decisive:
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the drawn tokens are {-drawn:.3g} nats a token "
            "more probable under the old weights than under the new ones"
        )
    rounded = setup.shared.get("reported") == "sampler/precision"
    before = _gap(setup, unchanged)
    # a narrow type rounds noisy weights by more, and shows nothing of it where the policy was certain before
    floor = _ROUNDED * apart if setup.policy.dtype != torch.float32 else 0.0
    if rounded or before > thresholds["scoring_gap"]:
        floor = decisive
    grown = fresh > max(thresholds["sync_gap_growth"] * before, thresholds["scoring_gap_half"], floor)
    if grown and (sound or rounded):
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the gap grew from {before:.3g} to {fresh:.3g} "
            "nats: a part of the weights was left behind, or is used otherwise (a LoRA scale that differs)"
        )
    return None


def _gap(setup: KeelSubject, drawn: Draws) -> float:
    """Mean distance of what was reported from these weights' log-probabilities; 0 where nothing was reported."""
    return average(_differences(setup, drawn))


def _differences(setup: KeelSubject, drawn: Draws) -> Tensor:
    """The same token by token `[N]`.

    At the temperature, filtered or not, that fits best: a wrong temperature is another probe's finding.
    """
    scored = drawn.where(~drawn.sample_logp.isnan())
    plain = unfiltered(setup.sampling)
    variants = (plain, replace(plain, temperature=1.0), setup.sampling)
    return min((scored.sample_logp - scored.logp(params) for params in variants), key=average)


def _ratio(setup: KeelSubject, new: Draws, old: Draws) -> float:
    """Mean log-ratio of the drawn tokens, new weights over old: KL(new‖old) if the new ones drew, negative if not."""
    plain = unfiltered(setup.sampling)
    return float((new.logp(plain) - old.logp(plain)).mean())


def _stale(evidence: str) -> Finding:
    return finding(
        "sampler/stale",
        evidence,
        "the engine keeps weights of its own that sync does not bring up to date",
        "let engine.sync(policy, version) copy every trainable weight (LoRA: merge or send the adapter)",
    )
