"""Weight sync: change the weights, sync, and see the engine change with them."""

from __future__ import annotations

from dataclasses import replace

import torch

from keel.base.thresholds import Thresholds
from keel.lab.doctor.bench import Bench
from keel.lab.doctor.findings import Finding, found
from keel.lab.doctor.probes.draws import Draws, draws, unfiltered
from keel.lab.doctor.probes.result import ProbeResult

STRONG = 1.0  # relative noise on the weights: another policy altogether, so that a few draws tell too


def probe_sync(bench: Bench, thresholds: Thresholds) -> ProbeResult:
    """Perturb the policy, sync, sample: log-probabilities and tokens must be the new policy's; then back again."""
    engine, model = bench.run.engine, bench.policy.model
    try:
        with bench.perturbed(STRONG, seed=1):
            engine.sync(model, 1)
            groups = bench.collect()
            new = draws(bench, groups)
        old = draws(bench, groups)
        finding = _judged(bench, new, old, thresholds)
    finally:
        engine.sync(model, 2)
    findings = [] if finding is None else [finding]
    back = draws(bench, bench.collect())
    returned = _gap(bench, back)
    grown = thresholds["sync_gap_growth"] * _gap(bench, draws(bench, bench.groups))
    if not findings and returned > max(grown, thresholds["scoring_gap_half"]):
        findings.append(_stale(f"after the weights were restored and synced again the gap is {returned:.3g} nats"))
    figures = {"gap_new": _gap(bench, new), "gap_old": _gap(bench, old), "gap_back": returned}
    figures["log_ratio"] = _ratio(bench, new, old)
    line = (
        f"weight sync: engine within {figures['gap_new']:.2g} nats of the changed weights, {figures['gap_old']:.2g} of "
        "the old ones"
    )
    return ProbeResult("weight sync", tuple(findings), figures, (line,))


def _judged(bench: Bench, new: Draws, old: Draws, thresholds: Thresholds) -> Finding | None:
    apart = float((new.logp(unfiltered(bench.sampling)) - old.logp(unfiltered(bench.sampling))).abs().mean())
    if apart < 1e-3:  # rounding: no alarm hangs on it
        return None  # the noise moved nothing: nothing can be told
    fresh, stale = _gap(bench, new), _gap(bench, old)
    drawn = _ratio(bench, new, old)
    lora = " (LoRA included: only the adapter was changed)" if bench.policy.lora is not None else ""
    if stale < thresholds["sync_stale_share"] * fresh:
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the engine's log-probabilities are {stale:.3g} "
            f"nats from the old weights' and {fresh:.3g} from the new ones'"
        )
    if drawn < -thresholds["sync_drawn_share"] * apart:
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the drawn tokens are {-drawn:.3g} nats a token "
            "more probable under the old weights than under the new ones"
        )
    before = _gap(bench, draws(bench, bench.groups))
    # what makes the engine another one by its prompts makes it so with any weights, and more with noisy ones
    floor = thresholds["sync_drawn_share"] * apart if bench.found.get("sampler mismatch") else 0.0
    if fresh > max(thresholds["sync_gap_growth"] * before, thresholds["scoring_gap_half"], floor):
        return _stale(
            f"after a change of all trainable weights and a sync{lora} the gap grew from {before:.3g} to {fresh:.3g} "
            "nats: a part of the weights was left behind, or is used otherwise (a LoRA scale that differs)"
        )
    return None


def _gap(bench: Bench, drawn: Draws) -> float:
    """Mean distance of what was reported from these weights' log-probabilities; 0 where nothing was reported.

    At the temperature, filtered or not, that fits best: a wrong temperature is another probe's finding.
    """
    kept = drawn.where(~drawn.reported.isnan())
    if not len(kept):
        return 0.0
    plain = unfiltered(bench.sampling)
    ways = (plain, replace(plain, temperature=1.0), bench.sampling)
    return min(float((kept.reported - kept.logp(way)).abs().nan_to_num(torch.inf).mean()) for way in ways)


def _ratio(bench: Bench, new: Draws, old: Draws) -> float:
    """Mean log-ratio of the drawn tokens, new weights over old: KL(new‖old) if the new ones drew, negative if not."""
    plain = unfiltered(bench.sampling)
    return float((new.logp(plain) - old.logp(plain)).mean())


def _stale(evidence: str) -> Finding:
    return found(
        "sampler/stale",
        evidence,
        "the engine keeps weights of its own that sync does not bring up to date",
        "let engine.sync(policy, version) copy every trainable weight (LoRA: merge or send the adapter)",
    )
