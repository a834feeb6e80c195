"""`keel doctor CONFIG`: build the real parts, try them on one small batch, and say what is wrong before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keel.config import Config
from keel.doctor.bench import build_bench
from keel.doctor.diagnosis import Diagnosis, with_raised
from keel.doctor.findings import ranked
from keel.doctor.hypotheses import preflight_figures, weigh
from keel.doctor.probes import PROBES, Outcome
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.models.load import first_line
from keel.tasks import Task

OnProbe = Callable[[Outcome, float], None]


def preflight(
    config: Config,
    thresholds: Thresholds | None = None,
    on_probe: OnProbe | None = None,
    *,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
) -> Diagnosis:
    """Findings of all probes, worst first; `on_probe(outcome, seconds)` is called after each of them.

    A probe that fails on what it is given is said to have failed and does not end the others.
    """
    limits = load_thresholds() if thresholds is None else thresholds
    bench = build_bench(config, task=task, reward=reward)
    outcomes = []
    for name, probe in PROBES:
        began = time.monotonic()
        try:
            outcome = probe(bench, limits)
        except Exception as error:  # a user's part may raise anything
            outcome = Outcome(name, unchecked=(f"{name}: {type(error).__name__}: {first_line(error)}",))
        outcomes.append(outcome)
        if on_probe is not None:
            on_probe(outcome, time.monotonic() - began)
    findings = tuple(ranked(finding for outcome in outcomes for finding in outcome.findings))
    diagnosis = Diagnosis(
        findings=findings,
        hypotheses=weigh(findings, preflight_figures(outcomes), limits),
        unchecked=tuple(line for outcome in outcomes for line in outcome.unchecked),
        notes=(*bench.notes, *(line for outcome in outcomes for line in outcome.lines)),
    )
    return with_raised(diagnosis, limits)


__all__ = ["preflight"]
