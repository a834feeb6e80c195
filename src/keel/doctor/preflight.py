"""`keel doctor CONFIG`: build the real parts, run experiments on one small batch, and report problems before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from keel.config import Config
from keel.doctor.budget import budget_note, within_budget
from keel.doctor.causes import explain, figures_in_scope, in_scope
from keel.doctor.diagnosis import Diagnosis, with_threshold_notes
from keel.doctor.findings import CODES, Finding, ranked
from keel.doctor.formula import formula_of
from keel.doctor.keel_subject import WARMSTART_S, build_subject
from keel.doctor.measure import OnOutcome, examine, refused
from keel.doctor.measures import MEASURES
from keel.doctor.subject import Budget
from keel.doctor.suspects import judge_suspects, preflight_figures
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.doctor.verdict import Outcome
from keel.envs import Task
from keel.rollout.engine import ModelMismatch, StaleWeights

QUICK = partial(Budget, doubt_s=15.0, judgements=60)  # the budget of --quick


def preflight(
    config: Config,
    thresholds: Thresholds | None = None,
    on_probe: OnOutcome | None = None,
    *,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
    warmstart_s: float = WARMSTART_S,
    quick: bool = False,
) -> Diagnosis:
    """Findings of all measures, worst first. `on_probe(outcome, seconds)` is called after each measure.

    If the sampler is refused when it is built, that is the only finding. A warm start that would take more than twice
    `warmstart_s` is stopped after `warmstart_s`. Findings that depend on the policy's skill are then notes and decide
    no hypothesis.

    `quick` skips some measures and reduces the batch of the others.
    """
    limits = load_thresholds() if thresholds is None else thresholds
    began = time.monotonic()
    try:
        subject = build_subject(config, task=task, reward=reward, warmstart_s=warmstart_s)
        subject = replace(subject, thresholds=limits, budget=QUICK() if quick else subject.budget)
    except (ModelMismatch, StaleWeights) as refusal:
        outcome = refused("*", refusal)
        if on_probe is not None:
            on_probe(replace(outcome, name="engine"), time.monotonic() - began)
        return _without_samples(config, outcome, limits)
    with closing(subject.run):
        affordable = within_budget(subject, quick=quick)
        outcomes = examine(MEASURES, subject, affordable, on_probe, quick=quick)
    every = in_scope((finding for outcome in outcomes for finding in outcome.findings), config.to_dict())
    cut = subject.warmstart_cut
    findings = tuple(ranked(every if cut is None else [_softened(finding, cut) for finding in every]))
    skilled = {measure.name for measure in MEASURES if measure.skill}
    decisive = [outcome for outcome in outcomes if cut is None or outcome.name not in skilled]
    several = config.rollout.max_turns > 1 and subject.run.task.multi_turn
    left_out = [f"{', '.join(m.codes)}: {m.name} is left out by --quick" for m in MEASURES if quick and not m.quick]
    unchecked = (*(line for outcome in outcomes for line in (*outcome.unchecked, *outcome.undecided)), *left_out)
    bounded = () if affordable is subject else (budget_note(affordable, subject),)
    diagnosis = Diagnosis(
        findings=explain(findings, log=False),
        hypotheses=judge_suspects(
            findings,
            figures_in_scope(preflight_figures(decisive, multi_turn=several), config.to_dict()),
            limits,
            unchecked,
            formula_of(config.to_dict()),
        ),
        unchecked=unchecked,
        notes=(*subject.notes, *bounded, *(line for outcome in outcomes for line in outcome.lines)),
        sound=tuple(outcome.name for outcome in outcomes if outcome.sound),
        cut=cut,
    )
    return with_threshold_notes(diagnosis, limits)


def _without_samples(config: Config, outcome: Outcome, limits: Thresholds) -> Diagnosis:
    """The diagnosis if the sampler was refused."""
    formula = formula_of(config.to_dict())
    hypotheses = judge_suspects(outcome.findings, {}, limits, outcome.unchecked, formula)
    return with_threshold_notes(Diagnosis(outcome.findings, hypotheses, outcome.unchecked), limits)


def _softened(finding: Finding, cut: str) -> Finding:
    """With a cut warm start, turn a finding that depends on skill into a note that says so."""
    if not CODES[finding.code].skill:
        return finding
    return replace(finding, severity="note", evidence=f"after {cut}: {finding.evidence}")


__all__ = ["preflight"]
