"""The sampler against the policy: what it reports, what it draws, and what explains the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.findings import Finding
from keel.lab.doctor.probes.alternatives import Alternative, alternatives, filter_odds
from keel.lab.doctor.probes.draws import (
    Draws,
    batch_draws,
    best_temperature,
    draws,
    most_tokens,
    tail_masses,
    unfiltered,
    uniform_p_value,
)
from keel.lab.doctor.probes.explanations import configured_finding, drawn_finding
from keel.lab.doctor.probes.gap import largest, reports_close
from keel.lab.doctor.probes.masks import foreign
from keel.lab.doctor.probes.noise import NOISE_STEP, copies_explained, lone_draws, no_copies_findings, noise_findings
from keel.lab.doctor.probes.reported import filtered_findings, later_turns_findings, reported_finding
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.sampling import SamplingParams

_TARGET_TOKENS = 1500  # tokens
_TIMES = 3  # as many where the first ones leave a doubt
_FURTHER = range(6, 6 + 6 * _TIMES)


def probe_sampler(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """The gap between the engine's log-probabilities and the policy's, and whether its tokens are the policy's."""
    drawn = batch_draws(setup).where(~foreign(setup, thresholds))
    reported = drawn.where(~drawn.sample_logp.isnan())
    plain = unfiltered(setup.sampling)
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    unchecked: list[str] = []
    if not len(reported):
        unchecked.append("sampler/*: the engine reports no log-probabilities")
    else:
        gap = reported.sample_logp - reported.logp(plain)
        figures = {"gap_max": largest(gap), "gap_mean": float(gap.abs().mean()), "kl_sampler": float(gap.mean())}
        findings += later_turns_findings(setup, reported, gap, thresholds)
        if not reports_close(setup, gap, thresholds):
            findings.append(reported_finding(setup, reported, gap, thresholds))
            setup.shared["reported"] = findings[-1].code
    if setup.sampling.filtered and all(finding.code == "sampler/filter" for finding in findings):
        findings += filtered_findings(setup, drawn, thresholds)  # else what makes sample_logp wrong is in both
    repeated = [*noise_findings(setup, thresholds)]
    findings += repeated
    more = _sample_more(setup, thresholds)
    ends = setup.policy.eos_ids
    chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    doubt, alarm = thresholds["sampler_doubt"], thresholds["sampler_draws"]
    decided = chance < alarm or odds > -math.log(alarm)
    if not decided and (chance < doubt or odds > -math.log(doubt)):  # decide on other draws, and more of them
        more = _sample_more(setup, thresholds, rounds=_FURTHER)
        chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    figures |= {"draws": float(len(more)), "draws_chance": chance, "other_odds": odds}
    drawn_otherwise = chance < alarm or odds > -math.log(alarm)
    if setup.shared.get("greedy"):  # of a few completions a policy that is sure writes the likeliest ones, too
        setup.shared["greedy"] = bool((more.tokens == more.logits.argmax(-1)).all())
    if drawn_otherwise and repeated and _not_by_copying(setup, more, thresholds):
        findings = [finding for finding in findings if finding not in repeated]
        repeated = []
    if any(finding.severity == "error" for finding in repeated):
        unchecked.append("sampler/filter: draws that repeat each other tell nothing of their distribution")
    elif setup.shared.get("chosen actions"):
        unchecked.append("sampler/filter: actions are only a part of what was drawn, or more than that (see mask/*)")
    elif drawn_otherwise:
        findings += _no_copies(setup, more, thresholds) or [
            drawn_finding(more, setup, chance, others, odds, thresholds)
        ]
    elif setup.sampling.filtered:
        findings.append(configured_finding(setup, more, thresholds))
    lines = (
        f"sampler: {len(reported)} log-probabilities within {figures.get('gap_max', 0.0):.2g} nats of the policy's; "
        f"{len(more)} drawn tokens are the policy's with chance {chance:.2g}",
    )
    return ProbeResult("sampler", _one_per_code(findings), figures, lines, tuple(unchecked))


def _not_by_copying(setup: ProbeSetup, more: Draws, thresholds: Thresholds) -> bool:
    """Whether completions are drawn otherwise, and so repeat themselves more often.

    At a temperature that fits all draws the copies are no more than there should be, or completions are drawn otherwise
    when nothing can be copied.
    """
    if setup.shared.get("repeated steps") or setup.shared.get("greedy"):
        return False
    if copies_explained(setup, _fitting(setup, more)):
        return True
    if setup.shared.get("copies in any step"):  # a sampler that is surer repeats itself more often
        return True
    return _alone_otherwise(setup, thresholds)


def _no_copies(setup: ProbeSetup, more: Draws, thresholds: Thresholds) -> list[Finding]:
    """That completions are made to differ, unless they are drawn otherwise when there is nothing to differ from."""
    found = [*no_copies_findings(setup, _fitting(setup, more), thresholds)]
    return [] if found and _alone_otherwise(setup, thresholds) else found


def _fitting(setup: ProbeSetup, more: Draws) -> SamplingParams:
    """The run's sampling at the temperature that explains the draws best."""
    best = best_temperature(setup.sampling, lambda params: -float(more.logp(params).mean()))
    return replace(setup.sampling, temperature=best)


def _alone_otherwise(setup: ProbeSetup, thresholds: Thresholds) -> bool:
    """Whether completions that are drawn alone are not the policy's either."""
    chance, _, odds = _draw_statistics(lone_draws(setup), setup.sampling, setup.policy.eos_ids)
    return chance < thresholds["sampler_draws"] or odds > -math.log(thresholds["sampler_draws"])


def _one_per_code(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What is reported and what is drawn often have one cause: it is named once."""
    return tuple({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _draw_statistics(
    more: Draws, sampling: SamplingParams, ends: Iterable[int]
) -> tuple[float, list[Alternative], float]:
    """The chance of these draws under the policy; other ways to draw, and the evidence for any of them in nats."""
    chance = uniform_p_value(tail_masses(more, sampling))
    if sampling.filtered:  # beyond the configured filters; a token that they rule out is the chance's matter
        inside = more.logp(sampling).isfinite()
        more, sampling = replace(more, logits=more.distribution(sampling)).where(inside), SamplingParams()
    others, odds = alternatives(more, sampling, ends)
    both = torch.tensor([odds, filter_odds(more, sampling)], dtype=torch.float64)
    return chance, others, float(both.logsumexp(0)) - math.log(2)


def _sample_more(setup: ProbeSetup, thresholds: Thresholds, rounds: range = range(6)) -> Draws:
    """Enough tokens beside the batch's own to tell two distributions apart; other rounds draw other ones."""
    groups: list[Group] = []
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
    return draws(setup, groups).without(batch_draws(setup).tokens[excluded].tolist())  # what looks like foreign text
