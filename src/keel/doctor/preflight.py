"""`keel doctor CONFIG`: build the real parts, run experiments on one small batch, and report problems before a run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import pstdev
from typing import Any

from keel.base.types import Completion, Group
from keel.config import Config
from keel.doctor.asking import measure_format
from keel.doctor.causes import explain, figures_in_scope, in_scope
from keel.doctor.findings import CODES, Diagnosis, Finding, ranked, with_threshold_notes
from keel.doctor.formula import formula_of
from keel.doctor.keel_subject import WARMSTART_S, KeelSubject, build_subject
from keel.doctor.loading import measure_loading
from keel.doctor.measure import Measure, OnOutcome, Outcome, examine, refused
from keel.doctor.probes.balance import probe_balance
from keel.doctor.probes.collection import probe_collection, probe_truncation
from keel.doctor.probes.exploration import probe_evaluation, probe_exploration
from keel.doctor.probes.kl_term import probe_kl_term
from keel.doctor.probes.limits import probe_limits
from keel.doctor.probes.masks import probe_masks
from keel.doctor.probes.model import probe_model
from keel.doctor.probes.objective import probe_advantage, probe_objective
from keel.doctor.probes.prompts import probe_prompts
from keel.doctor.probes.reach import probe_reach
from keel.doctor.probes.reference import probe_reference
from keel.doctor.probes.sampler import probe_sampler
from keel.doctor.probes.travel import probe_travel
from keel.doctor.probes.update import probe_update
from keel.doctor.scoring import measure_scoring
from keel.doctor.subject import Budget
from keel.doctor.suspects import judge_suspects, preflight_figures
from keel.doctor.sync import measure_sync
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.envs import Task
from keel.rollout.engine import ModelMismatch, StaleWeights


def _probe(name: str, probe: Any, *codes: str, **how: Any) -> Measure:
    """A measure from a probe, with the first line of its docstring."""
    about = (inspect.getdoc(probe) or "").splitlines()[0]
    return Measure(name, probe, about, codes, **how)


MEASURES: tuple[Measure, ...] = (
    _probe("model", probe_model),
    _probe("prompts", probe_prompts),
    Measure("prompt format", measure_format, measure_format.__doc__ or "", ("prompt/format",), needs=("golds",)),
    Measure(
        "loading",
        measure_loading,
        measure_loading.__doc__ or "",
        ("model/tokenizer", "model/missing-weights"),
        needs=("golds",),
    ),
    _probe("collection", probe_collection, skill=True),
    _probe("travel", probe_travel, passes=True),
    _probe("exploration", probe_exploration, passes=True),
    _probe("masks", probe_masks, passes=True),
    Measure("scoring", measure_scoring, measure_scoring.__doc__ or "", ("scoring/*",), ("score",), passes=True),
    _probe("sampler", probe_sampler, passes=True),
    Measure(
        "weight sync",
        measure_sync,
        measure_sync.__doc__ or "",
        ("sampler/stale",),
        needs=("sample", "sync"),
        passes=True,
        quick=False,
    ),
    _probe("reference", probe_reference, passes=True),
    _probe("advantage", probe_advantage, skill=True),
    _probe("objective", probe_objective),
    _probe("kl_term", probe_kl_term, "kl/reversed", "kl/no-gradient", "kl/scale", passes=True, quick=False),
    _probe("update", probe_update, passes=True, skill=True),  # the next three reuse its first update
    _probe("reach", probe_reach, passes=True),
    _probe("balance", probe_balance, passes=True),
    _probe("limits", probe_limits, passes=True),
    _probe("truncation", probe_truncation, skill=True),
    _probe("evaluation", probe_evaluation, "eval/train-gap", quick=False),
)


# ------------------------------------------------------------------------ a smaller batch for a large model

PASS_FLOP = 1.1e11  # FLOP of one forward over the batch: some seconds on one CPU core; a preflight needs about fifty
QUICK_SHARE = 1 / 4
GPU_TIMES = 1000
LEAST_GROUPS, LEAST_TOKENS = 2, 16


def within_budget(setup: KeelSubject, *, quick: bool = False) -> KeelSubject:
    """Return the setup unchanged if a forward over its batch is cheap, else one with fewer and shorter completions.

    Rewards and stop reasons of the full completions are kept. Groups whose rewards differ most are preferred, because
    an update needs advantages. Comparing two passes needs few tokens.
    """
    limit = token_budget(setup, quick)
    groups = sorted(setup.groups, key=lambda group: -pstdev(reward.total for reward in group.rewards))
    while len(groups) > LEAST_GROUPS and _tokens(groups) > limit:
        groups.pop()
    rows = sum(len(group.completions) for group in groups)
    prompts = sum(len(group.prompt_tokens) * len(group.completions) for group in groups)
    length = max(LEAST_TOKENS, int(limit - prompts) // rows)
    longest = max(len(c.tokens) for group in groups for c in group.completions)
    if len(groups) == len(setup.groups) and longest <= length:
        return setup
    shorter = [
        replace(group, completions=tuple(_cut(setup, completion, length) for completion in group.completions))
        for group in groups
    ]
    sampling = setup.built.sampling
    if longest > length:
        sampling = replace(sampling, max_completion_length=min(sampling.max_completion_length, length))
    return replace(
        setup,
        built=replace(setup.built, collector=replace(setup.built.collector, sampling=sampling)),
        batch=setup.pack(shorter),
        cut_from=setup,
        of_batch={},
    )


def token_budget(setup: KeelSubject, quick: bool) -> float:
    """The largest number of tokens per forward, by the size of the model and its device."""
    size = sum(parameter.numel() for parameter in setup.policy.model.parameters())
    times = (QUICK_SHARE if quick else 1.0) * (1 if setup.policy.device.type == "cpu" else GPU_TIMES)
    return times * PASS_FLOP / (2 * size)


def budget_note(setup: KeelSubject, whole: KeelSubject) -> str:
    """A line with the size of the reduced batch."""
    rows, length = len(setup.batch.completions), max(len(c.tokens) for c in setup.batch.completions)
    return (
        f"passes over the model were tried on {rows} of {len(whole.batch.completions)} completions, up to {length} "
        "tokens of each, because the model is large for this device"
    )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(group.prompt_tokens) + len(c.tokens) for group in groups for c in group.completions)


def _cut(setup: KeelSubject, completion: Completion, length: int) -> Completion:
    """The first tokens of a completion, also a sample of the policy, with the full completion's stop reason."""
    if len(completion.tokens) <= length:
        return completion
    tokens = completion.tokens[:length]
    return replace(
        completion,
        tokens=tokens,
        action=completion.action[:length],
        sample_logp=completion.sample_logp[:length],
        filtered_logp=completion.filtered_logp[:length],
        text=setup.policy.tokenizer.decode(tokens, skip_special_tokens=True),
    )


# ------------------------------------------------------------------------ the preflight

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

    If the sampler has another model or stale weights when it is built, that is the only finding. A warm start that
    would take more than twice `warmstart_s` is stopped after `warmstart_s`. Findings that depend on the policy's skill
    are then notes and decide no hypothesis.

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
    """The diagnosis without a usable sampler."""
    formula = formula_of(config.to_dict())
    hypotheses = judge_suspects(outcome.findings, {}, limits, outcome.unchecked, formula)
    return with_threshold_notes(Diagnosis(outcome.findings, hypotheses, outcome.unchecked), limits)


def _softened(finding: Finding, cut: str) -> Finding:
    """Turn a finding that depends on skill into a note that names the cut warm start."""
    if not CODES[finding.code].skill:
        return finding
    return replace(finding, severity="note", evidence=f"after {cut}: {finding.evidence}")


__all__ = ["MEASURES", "preflight"]
