"""`keel doctor CONFIG`: build the real parts, try them on one small batch, and say what is wrong before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.config import Config
from keel.doctor.budget import budget_note, within_budget
from keel.doctor.causes import explain, figures_in_scope, in_scope
from keel.doctor.diagnosis import Diagnosis, with_threshold_notes
from keel.doctor.findings import CODES, Finding, finding, ranked
from keel.doctor.formula import formula_of
from keel.doctor.probes import PROBES, ProbeResult
from keel.doctor.probes.evidence import undecided_tests
from keel.doctor.probes.result import failed_probe
from keel.doctor.setup import WARMSTART_S, build_setup
from keel.doctor.suspects import judge_suspects, preflight_figures
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.envs import Task
from keel.envs.calls import TooManyHungCalls
from keel.rollout.engine import ModelMismatch, StaleWeights

OnProbe = Callable[[ProbeResult, float], None]


def preflight(
    config: Config,
    thresholds: Thresholds | None = None,
    on_probe: OnProbe | None = None,
    *,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
    warmstart_s: float = WARMSTART_S,
    quick: bool = False,
) -> Diagnosis:
    """Findings of all probes, worst first; `on_probe(outcome, seconds)` is called after each of them.

    A probe that fails on what it is given is said to have failed and does not end the others; a sampler that is
    refused when it is built is the only finding, since nothing can be sampled. A warm start is cut after
    `warmstart_s` if it would take more than twice that; what then depends on the policy's skill is a note and decides
    no hypothesis.
    `quick` leaves some probes out and gives the others less of the batch.
    """
    limits = load_thresholds() if thresholds is None else thresholds
    began = time.monotonic()
    try:
        setup = build_setup(config, task=task, reward=reward, warmstart_s=warmstart_s)
    except (ModelMismatch, StaleWeights) as refusal:
        outcome = _refused("*", refusal)
        if on_probe is not None:
            on_probe(replace(outcome, name="engine"), time.monotonic() - began)
        return _without_samples(config, outcome, limits)
    outcomes = []
    with closing(setup.run):
        setup = replace(setup, doubt_s=QUICK_DOUBT_S, judgements=QUICK_JUDGEMENTS) if quick else setup
        affordable = within_budget(setup, quick=quick)
        for name, probe in PROBES:
            if quick and name in LEFT_OUT:
                continue
            began = time.monotonic()
            try:
                outcome = probe(affordable if name in PASSES else setup, limits)
            except (ModelMismatch, StaleWeights) as refusal:
                outcome = _refused(name, refusal)
            except TooManyHungCalls as hung:
                outcome = _hung(name, hung)
            except Exception as error:  # a user's part may raise anything
                outcome = failed_probe(name, error)
            outcome = replace(outcome, undecided=(*outcome.undecided, *undecided_tests(setup)))
            outcomes.append(outcome)
            if on_probe is not None:
                on_probe(outcome, time.monotonic() - began)
    every = in_scope((finding for outcome in outcomes for finding in outcome.findings), config.to_dict())
    findings = tuple(
        ranked(every if setup.warmstart_cut is None else [_softened(finding, setup.warmstart_cut) for finding in every])
    )
    decisive = [outcome for outcome in outcomes if setup.warmstart_cut is None or outcome.name not in _SKILL_PROBES]
    several = config.rollout.max_turns > 1 and setup.run.task.multi_turn
    left_out = [f"{codes}: {name} is left out by --quick" for name, codes in LEFT_OUT.items() if quick]
    unchecked = (*(line for outcome in outcomes for line in (*outcome.unchecked, *outcome.undecided)), *left_out)
    bounded = () if affordable is setup else (budget_note(affordable, setup),)
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
        notes=(*setup.notes, *bounded, *(line for outcome in outcomes for line in outcome.lines)),
        sound=tuple(outcome.name for outcome in outcomes if outcome.sound),
        cut=setup.warmstart_cut,
    )
    return with_threshold_notes(diagnosis, limits)


# Experiments that run pass after pass over the batch: a large model has less of it.
PASSES = (
    *("travel", "exploration", "masks", "scoring", "sampler", "weight sync", "reference", "kl_term"),
    *("update", "reach", "balance", "limits"),  # which share the first update
)
QUICK_DOUBT_S = 15.0  # for samples beyond the batch under --quick
QUICK_JUDGEMENTS = 60
# What --quick does without, and what is not known then.
LEFT_OUT = {
    "weight sync": "sampler/stale",
    "kl_term": "kl/reversed, kl/no-gradient, kl/scale",
    "evaluation": "eval/train-gap",
}


def _refused(name: str, refusal: KeelError) -> ProbeResult:
    """An engine's refusal as the finding that it is; `name` is what cannot be told then."""
    if isinstance(refusal, ModelMismatch):
        code, cause = "sampler/other-model", "the sampler was started on another model than the one that is trained"
        advice = "start the sampler on model.name of this configuration, or correct rollout.vllm.url"
    else:
        code, cause = "sampler/stale", "the sampler keeps weights of its own that a sync does not bring up to date"
        advice = "start the sampler anew, of this version of Keel; a backend of your own must load all that it is sent"
    return ProbeResult(
        name, (finding(code, str(refusal), cause, advice),), unchecked=(f"{name}: the sampler was refused",)
    )


def _hung(name: str, hung: TooManyHungCalls) -> ProbeResult:
    """Rewards that do not return while a probe asks them more: they fail, and the probe does not."""
    failed = finding(
        "reward/failed",
        f"while the probe of {name} asked for more rewards: {first_line(hung)}",
        "a reward does not return in the time that it is given, or never",
        "raise reward.timeout_s if the reward is slow, or mend it",
    )
    return ProbeResult(name, (failed,), unchecked=(f"{name}: rewards did not return",))


def _without_samples(config: Config, outcome: ProbeResult, limits: Thresholds) -> Diagnosis:
    """What is left to say where the sampler was refused."""
    formula = formula_of(config.to_dict())
    hypotheses = judge_suspects(outcome.findings, {}, limits, outcome.unchecked, formula)
    return with_threshold_notes(Diagnosis(outcome.findings, hypotheses, outcome.unchecked), limits)


# What a policy writes and how far an update takes it depend on how much it has learned.
_SKILL_PROBES = ("collection", "advantage", "update", "truncation")


def _softened(finding: Finding, cut: str) -> Finding:
    """A finding about a policy whose warm start was cut says so and is a note: the run's own policy knows more."""
    if not CODES[finding.code].skill:
        return finding
    return replace(finding, severity="note", evidence=f"after {cut}: {finding.evidence}")


__all__ = ["LEFT_OUT", "PASSES", "preflight"]
