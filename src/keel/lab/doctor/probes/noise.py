"""The engine's noise: the same for the same seed and step, another for every other step and sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.draws import batch_draws, draws
from keel.lab.doctor.probes.evidence import level, log_mean_exp, log_odds_of_copies, more_groups, odds_of_patterns
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.sampling import SamplingParams

NOISE_STEP = 1_000_003  # a step that no run reaches: other noise than training's first steps
_DOUBT = 3.0  # nats: copies by chance once in twenty
_LEAST = -2.3  # nats a token: tokens that no draw explains are another fault, and few of them must not decide
_SURE = 0.5  # nats: below it a model repeats itself by its own choice, and more groups that do would not tell


def noise_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Equal seeds must draw alike; other steps and other completions no more often than the policy repeats itself."""
    problems = [group.problem for group in setup.groups]
    same, other = setup.collect(problems), setup.collect(problems, step=NOISE_STEP)
    enough = -math.log(level(thresholds))
    steps = repeated_steps(setup, other)
    if steps > enough:
        yield finding(
            "sampler/noise",
            f"completions of two different steps are the same tokens: by chance once in e^{steps:.3g}",
            "the engine ignores seed and step: every step draws the same noise",
            "key the engine's noise by seed, attempt, step, problem and sample",
        )
        return

    def undecided(groups: Sequence[Group]) -> bool:
        odds, pattern = copies(setup, groups, setup.sampling)
        return odds <= enough and (odds > _DOUBT or pattern > _SURE)

    groups = more_groups(setup, "sampler/noise", undecided)
    odds, _ = copies(setup, groups, setup.sampling)
    if odds > enough:
        drawn = draws(setup, groups)
        greedy = bool((drawn.tokens == drawn.logits.argmax(-1)).all())
        yield finding(
            "sampler/noise",
            f"completions of {len(groups)} groups are copies of each other: by the policy's own chance of repeating "
            f"itself once in e^{odds:.3g}" + ("; every token is the policy's likeliest" if greedy else ""),
            "the engine decodes greedily" if greedy else "the engine ignores the sample's number",
            "draw each completion of a group with noise of its own at rollout.temperature",
        )
    elif _tokens(same) != _tokens(setup.groups):
        yield finding(
            "sampler/noise",
            "the same seed, step and problems gave other tokens a second time",
            "the engine's noise or its kernels depend on more than the seed",
            "nothing has to change for training; a run cannot be repeated or resumed exactly",
            severity="note",
        )


def repeated_steps(setup: ProbeSetup, other: Sequence[Group]) -> float:
    """Evidence in nats that a step repeats the batch's completions, sample by sample."""
    total = 0.0
    for first, second, logp in zip(setup.groups, other, _logp(setup, setup.groups, setup.sampling), strict=True):
        pairs = [
            (a.tokens == b.tokens, value)
            for a, b, value in zip(first.completions, second.completions, logp, strict=True)
        ]
        total += log_odds_of_copies(pairs, pairs)
    return total


def copies(setup: ProbeSetup, groups: Sequence[Group], params: SamplingParams) -> tuple[float, float]:
    """Evidence in nats that completions of a group repeat each other more often than draws under `params` do.

    Any of them in some groups, or in all groups the same ones; second, that of the likeliest such pattern alone.
    """
    every, total = [*zip(_tokens(groups), _logp(setup, groups, params), strict=True)], 0.0
    for tokens, logp in every:
        pairs = [(tokens[i] == tokens[j], logp[i]) for i, j in combinations(range(len(tokens)), 2)]
        total += log_odds_of_copies(pairs, [(other == tokens[0], logp[0]) for other in tokens[1:]]) if pairs else 0.0
    patterns = odds_of_patterns(every)
    return log_mean_exp([total, log_mean_exp(patterns)]), max(patterns)


def _tokens(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group.completions] for group in groups]


def _logp(setup: ProbeSetup, groups: Sequence[Group], params: SamplingParams) -> list[list[float]]:
    """Log-probability of each completion of each group: tokens that were not looked at count as certain."""
    drawn = batch_draws(setup) if tuple(groups) == setup.groups else draws(setup, groups)
    sums = [0.0] * sum(len(group.completions) for group in groups)
    for row, value in zip(drawn.row.tolist(), drawn.logp(params).clamp_min(_LEAST).tolist(), strict=True):
        sums[row] += value
    totals = iter(sums)
    return [[next(totals) for _ in group.completions] for group in groups]
