"""`keel doctor --trl module:build_trainer`: one batch through a TRL trainer's own methods, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keel.doctor.causes import explain
from keel.doctor.diagnosis import Diagnosis, with_threshold_notes
from keel.doctor.findings import finding
from keel.doctor.suspects import UNTESTED, judge_suspects, preflight_figures
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.doctor.verdict import Outcome, failed_measure
from keel.integrations.trl.preflight.accumulation import probe_accumulation
from keel.integrations.trl.preflight.batch import Subject, first_batch
from keel.integrations.trl.preflight.kl_term import probe_kl
from keel.integrations.trl.preflight.masks import probe_masks
from keel.integrations.trl.preflight.reference import probe_reference
from keel.integrations.trl.preflight.resume import probe_resume
from keel.integrations.trl.preflight.rewards import probe_rewards
from keel.integrations.trl.preflight.sampler import probe_sampler, probe_sync
from keel.integrations.trl.preflight.scoring import probe_scoring
from keel.integrations.trl.preflight.subject import check_trainer, load_trainer, untouched
from keel.integrations.trl.preflight.texts import probe_texts
from keel.integrations.trl.preflight.update import probe_update
from keel.models.fingerprint import fingerprint
from keel.reference.weights import unwrap

Probe = Callable[[Subject, Thresholds], Outcome]
PROBES: tuple[tuple[str, Probe], ...] = (
    ("travel", probe_texts),
    ("collection", probe_rewards),
    ("scoring", probe_scoring),  # the first pass: later probes read whether passes are deterministic
    ("masks", probe_masks),
    ("sampler", probe_sampler),
    ("weight sync", probe_sync),
    ("reference", probe_reference),
    ("kl_term", probe_kl),
    ("accumulation", probe_accumulation),
    ("resume", probe_resume),
    ("update", probe_update),  # last: it also changes the optimizer
)


def preflight(
    trainer: Any,
    thresholds: Thresholds | None = None,
    on_probe: Callable[[Outcome, float], None] | None = None,
) -> Diagnosis:
    """Findings on a `GRPOTrainer` or `KeelGRPOTrainer`, worst first; the trainer is restored.

    `on_probe(outcome, seconds)` is called after every probe. A probe that fails on what it is given is said to have
    failed and does not end the others.
    """
    check_trainer(trainer)
    limits = load_thresholds() if thresholds is None else thresholds
    outcomes: list[Outcome] = []
    before = fingerprint(unwrap(trainer.model))
    with untouched(trainer):
        subject = first_batch(trainer)
        for name, probe in PROBES:
            began = time.monotonic()
            try:
                outcome = probe(subject, limits)
            except Exception as error:  # a user's part may raise anything
                outcome = failed_measure(name, error)
            outcomes.append(outcome)
            if on_probe is not None:
                on_probe(outcome, time.monotonic() - began)
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    if fingerprint(unwrap(trainer.model)) != before:
        findings.append(_changed())
    unchecked = tuple(line for outcome in outcomes for line in (*outcome.unchecked, *outcome.undecided))
    hypotheses = judge_suspects(findings, preflight_figures(outcomes), limits, unchecked)
    diagnosis = Diagnosis(
        findings=explain(findings, log=False),
        hypotheses=tuple(row for row in hypotheses if row.verdict != UNTESTED),  # the rest asks for a configuration
        unchecked=unchecked,
        notes=(_looked_at(subject), *(line for outcome in outcomes for line in outcome.lines)),
        sound=tuple(outcome.name for outcome in outcomes if outcome.sound),
    )
    return with_threshold_notes(diagnosis, limits)


def _looked_at(subject: Subject) -> str:
    kind = type(subject.trainer).__name__
    return (
        f"{kind}: {len(subject.texts)} completions of {int(subject.sampled.sum())} tokens, as its first batch has them"
    )


def _changed() -> Any:
    return finding(
        "doctor/probe-failed",
        "the model's weights are not what they were before the doctor looked at them",
        "something outside of the trainer's own parameters was changed while it generated or scored",
        "build the trainer anew before training",
    )


__all__ = ["PROBES", "load_trainer", "preflight"]
