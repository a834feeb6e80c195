"""The sampler against the policy: its reported log-probabilities, its samples, and its noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import torch

from keel.base.types import Group
from keel.doctor.draws import (
    STRANGE_STEPS,
    Draws,
    batch_draws,
    chance_of,
    draws,
    first_tokens,
    most_tokens,
    strange_turns,
)
from keel.doctor.evidence import level, log_mean_exp, log_odds_of_copies, more_groups, odds_of_patterns
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import in_half_precision, largest
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.alternatives import Alternative, alternatives, configured_finding, drawn_finding, filter_odds
from keel.doctor.probes.masks import foreign
from keel.doctor.probes.reported import Reports, filtered_findings, reported_finding
from keel.rollout.sampling import SamplingParams

_TARGET_TOKENS = 1500  # number of tokens for the test of draws
_TIMES = 3  # factor on the number of tokens if the first test does not decide
_FURTHER = range(6, 6 + 6 * _TIMES)
_STRANGE = 2  # number of times that random texts are continued


def probe_sampler(setup: KeelSubject) -> Outcome:
    """Compare the engine's log-probabilities with the policy's, and test whether the policy drew the tokens."""
    own = ~foreign(setup)
    drawn, reports = batch_draws(setup).where(own), Reports.of(setup, setup.groups, own)
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    unchecked: list[str] = []
    if not len(reports.drawn):
        unchecked.append("sampler/*: the engine reports no log-probabilities")
    else:
        gap = reports.gap
        figures = {"gap_max": largest(gap), "gap_mean": reports.size, "kl_sampler": float(gap.mean())}
        of_reports = _reported(setup, reports)
        setup.shared["reported"] = of_reports[-1].code if of_reports else ""
        findings += of_reports
    if setup.sampling.filtered and all(finding.code == "sampler/filter" for finding in findings):
        findings += filtered_findings(setup, drawn)  # otherwise one error would be reported twice
    repeated = [*noise_findings(setup)]
    findings += repeated
    if setup.shared["repeated steps"]:
        unchecked.append("sampler/filter: steps that repeat each other say nothing about the distribution")
        return Outcome("sampler", _one_per_code(findings), figures, (), tuple(unchecked))
    more = _sample_more(setup)
    ends = setup.policy.eos_ids
    chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    doubt, alarm = setup.thresholds["sampler_doubt"], setup.thresholds["sampler_draws"]
    decided = chance < alarm or odds > -math.log(alarm)
    if not decided and (chance < doubt or odds > -math.log(doubt)):  # undecided: test more and independent draws
        more = _sample_more(setup, rounds=_FURTHER)
        chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    figures |= {"draws": float(len(more)), "draws_chance": chance, "other_odds": odds}
    drawn_otherwise = chance < alarm or odds > -math.log(alarm)
    if any(finding.severity == "error" for finding in repeated):
        unchecked.append("sampler/filter: draws that repeat each other say nothing about the distribution")
    elif setup.shared.get("chosen actions"):
        unchecked.append("sampler/filter: the action mask does not match the drawn tokens (see mask/*)")
    elif drawn_otherwise:
        findings.append(drawn_finding(more, setup, chance, others, odds))
    elif setup.sampling.filtered:
        findings.append(configured_finding(setup, more))
    lines = (
        f"sampler: {len(reports.drawn)} log-probabilities within {figures.get('gap_max', 0.0):.2g} nats of the "
        f"policy's; {len(more)} drawn tokens have a p-value of {chance:.2g} under the policy",
    )
    return Outcome("sampler", _one_per_code(findings), figures, lines, tuple(unchecked))


def _reported(setup: KeelSubject, reports: Reports) -> list[Finding]:
    """Findings about the reports for the batch; without errors, also about those for tokens after random texts.

    After the run's prompts, the log-probabilities of a confident policy hardly change even if a token of its context is
    wrong.
    """
    found = [] if reports.close(setup.thresholds) else [reported_finding(reports, setup.thresholds)]
    strange = strange_turns(setup, STRANGE_STEPS[0])
    if any(finding.severity == "error" for finding in found) or not strange:
        return found
    after = Reports.of(setup, strange)
    if not len(after.drawn) or after.close(setup.thresholds):
        return found
    further = reported_finding(after, setup.thresholds)
    if further.severity != "error":
        return found
    mild = after.size <= setup.thresholds["scoring_gap_half"] or in_half_precision(setup)
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
    if sampling.filtered:  # a token that the filters exclude has −∞ log-probability, so the alternatives skip it
        inside = more.logp(sampling).isfinite()
        more, sampling = replace(more, logits=more.distribution(sampling)).where(inside), SamplingParams()
    others, odds = alternatives(more, sampling, ends)
    both = torch.tensor([odds, filter_odds(more, sampling)], dtype=torch.float64)
    return chance, others, float(both.logsumexp(0)) - math.log(2)


def _sample_more(setup: KeelSubject, rounds: range = range(6)) -> Draws:
    """Enough additional tokens to distinguish two distributions. Other rounds give independent samples.

    Up to half of them follow random texts, where the policy is unsure and similar distributions differ most.
    """
    groups: list[Group] = []
    steps = range(STRANGE_STEPS[0], STRANGE_STEPS[0] + (_STRANGE if rounds.start == 0 else _STRANGE * _TIMES))
    strange = [group for step in steps for group in strange_turns(setup, step + 100 * rounds.start, step)]
    excluded = foreign(setup)
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


# ------------------------------------------------------------------------ noise of steps and samples

NOISE_STEP = 1_000_003  # a step that no run reaches, so that its noise differs from that of training
# p-value above which copies are as frequent across steps as within, and number of permutations
_EITHER, _ORDERS = 0.05, 400
_ALIGNED = 0.01  # p-value above which equal completions of two steps need not have the same sample number
_DOUBT = 3.0  # nats of evidence for copies, which chance exceeds once in twenty
_LEAST = -2.3  # lower bound of log p per token, so that a few foreign tokens do not dominate
_SURE = 0.5  # nats of evidence; below it, the policy itself repeats completions and further groups would not help


def noise_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Steps and samples must not repeat each other more often than the policy itself does.

    Copies within a step are not reported if they are as frequent across steps: a sampler may be more confident than the
    policy.
    """
    problems = [group.problem for group in setup.groups]
    other = setup.collect(problems, step=NOISE_STEP)
    enough = -math.log(level(setup.thresholds))
    first, second = (strange_turns(setup, step) for step in STRANGE_STEPS)
    steps = log_mean_exp([repeated_steps(setup, setup.groups, other), repeated_steps(setup, first, second)])
    both = zip(_tokens([*setup.groups, *first]), _tokens([*other, *second]), strict=True)
    setup.shared["repeated steps"] = steps > enough and chance_aligned([*both]) <= _ALIGNED
    if setup.shared["repeated steps"]:
        yield finding(
            "sampler/noise",
            "completions of two different steps have the same tokens; the odds of this by chance are 1 in "
            f"e^{steps:.3g}",
            "the engine ignores seed and step, or returns earlier completions, so every step has the same noise",
            "derive the engine's noise from seed, attempt, step, problem and sample, and do not cache completions",
        )
        return

    def undecided(groups: Sequence[Group]) -> bool:
        odds, pattern = copies(setup, groups)
        return odds <= enough and (odds > _DOUBT or pattern > _SURE)

    groups = more_groups(setup, "sampler/noise", undecided)
    odds, _ = copies(setup, groups)
    if odds > enough:
        if _chance_of_copies(setup, groups) > _EITHER:
            return  # a sampler with another distribution repeats itself across steps as well
        yield finding(
            "sampler/noise",
            f"completions of {len(groups)} groups are copies of each other; the odds of this under the policy are 1 "
            f"in e^{odds:.3g}",
            "the engine ignores the index of the sample",
            "sample each completion of a group with its own noise at rollout.temperature",
        )


def chance_aligned(steps: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> float:
    """The p-value of the number of completions that equal the one with their sample number in another step.

    A permutation test over the other step's completions. Shared noise gives equal completions at equal sample numbers;
    a confident sampler gives them at any numbers.
    """
    random = Random(0)

    def matches(pairs: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> int:
        return sum(a == b for own, other in pairs for a, b in zip(own, other, strict=True))

    seen = matches(steps)
    shuffled = ([(own, random.sample(other, len(other))) for own, other in steps] for _ in range(_ORDERS))
    return (1 + sum(matches(order) >= seen for order in shuffled)) / (1 + _ORDERS)


def _chance_of_copies(setup: KeelSubject, groups: Sequence[Group]) -> float:
    """The p-value of copies within these groups, against those of the same problems in another step."""
    own = list({group.problem.key: group for group in groups}.values())
    other = setup.collect([group.problem for group in own], step=NOISE_STEP)
    return chance_within(list(zip(_tokens(own), _tokens(other), strict=True)))


def chance_within(steps: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> float:
    """The p-value of the number of equal completions within a step, against those of another step.

    A permutation test: the completions of a problem are exchanged between its two steps. A sampler that is more
    confident than the policy produces equal completions within steps and across them.
    """
    pooled = [(len(own), [*own, *other]) for own, other in steps if len({*own, *other}) > 1]
    seen, random = _equal_within(pooled), Random(0)
    shuffled = ([(count, random.sample(tokens, len(tokens))) for count, tokens in pooled] for _ in range(_ORDERS))
    return (1 + sum(_equal_within(order) >= seen for order in shuffled)) / (1 + _ORDERS)


def _equal_within(pooled: Iterable[tuple[int, Sequence[Hashable]]]) -> int:
    """The number of pairs of equal completions within the first `count` completions and within the others."""
    sides = (side for count, tokens in pooled for side in (tokens[:count], tokens[count:]))
    return sum(number * (number - 1) // 2 for side in sides for number in Counter(side).values())


def repeated_steps(setup: KeelSubject, groups: Sequence[Group], other: Sequence[Group]) -> float:
    """Log evidence ratio, in nats, that a step repeats the completions of another, sample by sample."""
    total = 0.0
    scored = _logp(setup, groups) if groups else []
    for first, second, logp in zip(groups, other, scored, strict=True):
        pairs = [
            (a.tokens == b.tokens, value)
            for a, b, value in zip(first.completions, second.completions, logp, strict=True)
        ]
        total += log_odds_of_copies(pairs, pairs)
    return total


def copies(setup: KeelSubject, groups: Sequence[Group]) -> tuple[float, float]:
    """Two log evidence ratios, in nats: of copies within groups, and of the best pattern of copies alone.

    The first covers copies in some groups, and one pattern of copies in all groups.
    """
    every, total = [*zip(_tokens(groups), _logp(setup, groups), strict=True)], 0.0
    for tokens, logp in every:
        pairs = [(tokens[i] == tokens[j], logp[i]) for i, j in combinations(range(len(tokens)), 2)]
        total += log_odds_of_copies(pairs, [(other == tokens[0], logp[0]) for other in tokens[1:]]) if pairs else 0.0
    patterns = odds_of_patterns(every)
    return log_mean_exp([total, log_mean_exp(patterns)]), max(patterns)


def _tokens(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group.completions] for group in groups]


def _logp(setup: KeelSubject, groups: Sequence[Group]) -> list[list[float]]:
    """Log-probability of each completion of each group. Tokens that were not scored count as certain."""
    drawn = batch_draws(setup) if tuple(groups) == setup.groups else draws(setup, groups)
    sums = [0.0] * sum(len(group.completions) for group in groups)
    for row, value in zip(drawn.row.tolist(), drawn.logp(setup.sampling).clamp_min(_LEAST).tolist(), strict=True):
        sums[row] += value
    totals = iter(sums)
    return [[next(totals) for _ in group.completions] for group in groups]
