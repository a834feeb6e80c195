"""The sampler against the policy: its reported log-probabilities, its samples, and the cause of a difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from keel.base.types import Group
from keel.doctor.draws import (
    Draws,
    batch_draws,
    chance_of,
    draws,
    first_tokens,
    most_tokens,
)
from keel.doctor.findings import Finding
from keel.doctor.gap import in_half_precision, largest
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.alternatives import Alternative, alternatives, filter_odds
from keel.doctor.probes.explanations import configured_finding, drawn_finding
from keel.doctor.probes.masks import foreign
from keel.doctor.probes.noise import (
    NOISE_STEP,
    noise_findings,
)
from keel.doctor.probes.reported import Reports, filtered_findings, reported_finding
from keel.doctor.strange import STRANGE_STEPS, strange_turns
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.rollout.sampling import SamplingParams

_TARGET_TOKENS = 1500  # number of tokens for the test of draws
_TIMES = 3  # factor on the number of tokens if the first test does not decide
_FURTHER = range(6, 6 + 6 * _TIMES)
_STRANGE = 2  # number of times that random texts are continued


def probe_sampler(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The gap between the engine's log-probabilities and the policy's, and a test that the policy drew the tokens."""
    own = ~foreign(setup, thresholds)
    drawn, reports = batch_draws(setup).where(own), Reports.of(setup, setup.groups, own)
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    unchecked: list[str] = []
    if not len(reports.drawn):
        unchecked.append("sampler/*: the engine reports no log-probabilities")
    else:
        gap = reports.gap
        figures = {"gap_max": largest(gap), "gap_mean": reports.size, "kl_sampler": float(gap.mean())}
        of_reports = _reported(setup, reports, thresholds)
        setup.shared["reported"] = of_reports[-1].code if of_reports else ""
        findings += of_reports
    if setup.sampling.filtered and all(finding.code == "sampler/filter" for finding in findings):
        findings += filtered_findings(setup, drawn, thresholds)  # otherwise one error affects both
    repeated = [*noise_findings(setup, thresholds)]
    findings += repeated
    if setup.shared["repeated steps"]:
        unchecked.append("sampler/filter: steps that repeat each other tell nothing of their distribution")
        return Outcome("sampler", _one_per_code(findings), figures, (), tuple(unchecked))
    more = _sample_more(setup, thresholds)
    ends = setup.policy.eos_ids
    chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    doubt, alarm = thresholds["sampler_doubt"], thresholds["sampler_draws"]
    decided = chance < alarm or odds > -math.log(alarm)
    if not decided and (chance < doubt or odds > -math.log(doubt)):  # not decided: test more and other draws
        more = _sample_more(setup, thresholds, rounds=_FURTHER)
        chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    figures |= {"draws": float(len(more)), "draws_chance": chance, "other_odds": odds}
    drawn_otherwise = chance < alarm or odds > -math.log(alarm)
    if any(finding.severity == "error" for finding in repeated):
        unchecked.append("sampler/filter: draws that repeat each other tell nothing of their distribution")
    elif setup.shared.get("chosen actions"):
        unchecked.append("sampler/filter: actions are only a part of what was drawn, or more than that (see mask/*)")
    elif drawn_otherwise:
        findings.append(drawn_finding(more, setup, chance, others, odds, thresholds))
    elif setup.sampling.filtered:
        findings.append(configured_finding(setup, more, thresholds))
    lines = (
        f"sampler: {len(reports.drawn)} log-probabilities within {figures.get('gap_max', 0.0):.2g} nats of the "
        f"policy's; {len(more)} drawn tokens are the policy's with chance {chance:.2g}",
    )
    return Outcome("sampler", _one_per_code(findings), figures, lines, tuple(unchecked))


def _reported(setup: KeelSubject, reports: Reports, thresholds: Thresholds) -> list[Finding]:
    """Findings about the reports for the batch; if they are fine, also for tokens after random texts.

    After its own prompts, a confident policy gives its tokens the same log-probabilities even if an earlier token was
    wrong.
    """
    found = [] if reports.close(thresholds) else [reported_finding(reports, thresholds)]
    strange = strange_turns(setup, STRANGE_STEPS[0])
    if any(finding.severity == "error" for finding in found) or not strange:
        return found
    after = Reports.of(setup, strange)
    if not len(after.drawn) or after.close(thresholds):
        return found
    further = reported_finding(after, thresholds)
    if further.severity != "error":
        return found
    mild = after.size <= thresholds["scoring_gap_half"] or in_half_precision(setup)
    evidence = f"after random texts {further.evidence}"
    return [replace(further, evidence=evidence, severity="warning" if mild else "error")]


def _one_per_code(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Reports and samples often have a common cause, so each code is listed once."""
    return tuple({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _draw_statistics(
    more: Draws, sampling: SamplingParams, ends: Iterable[int]
) -> tuple[float, list[Alternative], float]:
    """The p-value of these draws under the policy, the alternatives, and the log evidence ratio for any of them."""
    chance = chance_of(more, sampling)
    if sampling.filtered:  # a token that the filters exclude makes the p-value 0, so the alternatives skip it
        inside = more.logp(sampling).isfinite()
        more, sampling = replace(more, logits=more.distribution(sampling)).where(inside), SamplingParams()
    others, odds = alternatives(more, sampling, ends)
    both = torch.tensor([odds, filter_odds(more, sampling)], dtype=torch.float64)
    return chance, others, float(both.logsumexp(0)) - math.log(2)


def _sample_more(setup: KeelSubject, thresholds: Thresholds, rounds: range = range(6)) -> Draws:
    """Enough additional tokens to distinguish two distributions. Other rounds give independent samples.

    Up to half of them follow random texts, where the policy is unsure and similar distributions differ most.
    """
    groups: list[Group] = []
    steps = range(STRANGE_STEPS[0], STRANGE_STEPS[0] + (_STRANGE if rounds.start == 0 else _STRANGE * _TIMES))
    strange = [group for step in steps for group in strange_turns(setup, step + 100 * rounds.start, step)]
    excluded = foreign(setup, thresholds)
    first = min(_TARGET_TOKENS, most_tokens(setup))
    target = min(first * (1 if rounds.start == 0 else _TIMES), most_tokens(setup))
    length = max(1, int(setup.mask.sum()) // len(setup.mask))
    count = min(64, max(2, -(-first // (4 * length))))
    wide = replace(setup.sampling, num_generations=count)
    total = 0
    for number in rounds:
        step = NOISE_STEP + number
        problems = setup.run.task.sample(4, seed=setup.config.run.seed, step=step)
        groups += setup.collect(problems, step=step, sampling=wide)
        total = sum(sum(c.action) for group in groups for c in group.completions)
        if total >= target:
            break
    groups = [*first_tokens(strange, most_tokens(setup) // 2), *groups]
    # without tokens that look foreign
    return draws(setup, groups).without(batch_draws(setup).tokens[excluded].tolist())
