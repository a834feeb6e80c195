"""`keel doctor --trl module:build_trainer`: run one batch through a TRL trainer's own methods and report errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keel.doctor.causes import explain
from keel.doctor.findings import Diagnosis, finding, with_threshold_notes
from keel.doctor.measure import Measure, OnOutcome, Outcome, examine
from keel.doctor.preflight import LEAST_GROUPS, token_budget
from keel.doctor.preflight import MEASURES as OF_KEEL
from keel.doctor.suspects import UNTESTED, judge_suspects, preflight_figures
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.integrations.trl.preflight.inputs import measure_masks, measure_rewards, measure_texts
from keel.integrations.trl.preflight.sampler import measure_reference, measure_sampler
from keel.integrations.trl.preflight.subject import TrlSubject, first_batch
from keel.integrations.trl.preflight.trainer import check_trainer, load_trainer, untouched
from keel.integrations.trl.preflight.update import measure_accumulation, measure_kl, measure_resume, measure_update
from keel.models.fingerprint import fingerprint
from keel.reference.weights import unwrap


def _measure(name: str, run: Callable[[Any], Outcome], *codes: str, **how: Any) -> Measure:
    return Measure(name, run, run.__doc__ or "", codes, **how)


_MOST_LOGITS = 1 << 28  # largest number of logits in memory at once
_GENERAL = {measure.name: measure for measure in OF_KEEL}
MEASURES: tuple[Measure, ...] = (
    _measure("travel", measure_texts),
    _measure("collection", measure_rewards),
    _GENERAL["scoring"],  # the first pass; later measures need to know whether passes are deterministic
    _measure("masks", measure_masks),
    _measure("sampler", measure_sampler),
    _GENERAL["weight sync"],
    _measure("reference", measure_reference, "reference/*", "kl/at-start", needs=("reference",)),
    _measure("kl_term", measure_kl),
    _measure("accumulation", measure_accumulation, "loss/scale", needs=("loss",)),
    _measure("resume", measure_resume),
    _measure("update", measure_update, "optim/no-update", needs=("first_update",)),  # last: it changes the optimizer
    _GENERAL["prompt format"],
    _GENERAL["loading"],
)


def _affordable(subject: Any) -> TrlSubject:
    """The subject with fewer completions, if passes over all of them take too long or their logits too much memory."""
    limit = min(token_budget(subject, quick=False), _MOST_LOGITS / subject.vocabulary)
    share = limit / sum(len(g.prompt_tokens) + len(c.tokens) for g in subject.groups for c in g.completions)
    rows = max(LEAST_GROUPS, int(share * len(subject.groups)))
    few: TrlSubject = subject.swapped(groups=subject.groups[:rows], of_batch={})
    return few


def preflight(trainer: Any, thresholds: Thresholds | None = None, on_probe: OnOutcome | None = None) -> Diagnosis:
    """Findings on a `GRPOTrainer` or `KeelGRPOTrainer`, worst first; the trainer is restored.

    `on_probe(outcome, seconds)` is called after every measure.
    """
    check_trainer(trainer)
    limits = load_thresholds() if thresholds is None else thresholds
    before = fingerprint(unwrap(trainer.model))
    with untouched(trainer):
        subject = first_batch(trainer, limits)
        tokens = int(subject.sampled.sum())
        small = _affordable(subject)
        outcomes = examine(MEASURES, subject, small, on_probe)
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    if fingerprint(unwrap(trainer.model)) != before:
        changed = finding(
            "doctor/probe-failed",
            "the model's weights are not the same after the doctor's checks as before",
            "the doctor restores the trainable weights only, and generating or scoring has changed other weights",
            "build the trainer again before training",
        )
        findings.append(changed)
    unchecked = tuple(line for outcome in outcomes for line in (*outcome.unchecked, *outcome.undecided))
    hypotheses = judge_suspects(findings, preflight_figures(outcomes), limits, unchecked)
    kind = type(trainer).__name__
    looked_at = f"{kind}: the first batch has {len(subject.groups)} completions with {tokens} tokens"
    if len(small.groups) < len(subject.groups):
        looked_at += f"; scoring and weight sync were checked on {len(small.groups)} of them, because passes are large"
    diagnosis = Diagnosis(
        findings=explain(findings, log=False),
        hypotheses=tuple(row for row in hypotheses if row.verdict != UNTESTED),  # untested ones need a Keel config
        unchecked=unchecked,
        notes=(looked_at, *(line for outcome in outcomes for line in outcome.lines)),
        sound=tuple(outcome.name for outcome in outcomes if outcome.sound),
    )
    return with_threshold_notes(diagnosis, limits)


__all__ = ["MEASURES", "load_trainer", "preflight"]
