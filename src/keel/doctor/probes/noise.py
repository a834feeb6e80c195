"""The engine's noise: equal for equal seeds and steps, different for other steps and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from random import Random

from keel.base.types import Group
from keel.doctor.draws import batch_draws, draws
from keel.doctor.evidence import level, log_mean_exp, log_odds_of_copies, more_groups, odds_of_patterns
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.strange import STRANGE_STEPS, strange_turns
from keel.doctor.thresholds import Thresholds

NOISE_STEP = 1_000_003  # a step that no run reaches, so that its noise differs from that of training
# p-value above which copies are as frequent across steps as within, and number of permutations
_EITHER, _ORDERS = 0.05, 400
_ALIGNED = 0.01  # p-value above which equal completions of two steps need not have the same sample number
_DOUBT = 3.0  # nats of evidence for copies, which chance exceeds once in twenty
_LEAST = -2.3  # lower bound of log p per token, so that a few foreign tokens do not dominate
_SURE = 0.5  # nats of evidence; below it, the policy itself repeats completions and further groups would not help


def noise_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Equal seeds must give equal samples. Other steps and samples must not repeat more often than the policy itself.

    Repeats must not be more frequent within a step than across steps either, since a sampler may be more confident than
    the policy.
    """
    problems = [group.problem for group in setup.groups]
    same, other = setup.collect(problems), setup.collect(problems, step=NOISE_STEP)
    enough = -math.log(level(thresholds))
    first, second = (strange_turns(setup, step) for step in STRANGE_STEPS)
    steps = log_mean_exp([repeated_steps(setup, setup.groups, other), repeated_steps(setup, first, second)])
    both = zip(_tokens([*setup.groups, *first]), _tokens([*other, *second]), strict=True)
    setup.shared["repeated steps"] = steps > enough and chance_aligned([*both]) <= _ALIGNED
    if setup.shared["repeated steps"]:
        yield finding(
            "sampler/noise",
            f"completions of two different steps are the same tokens: by chance once in e^{steps:.3g}",
            "the engine ignores seed and step, or gives back what it wrote before: every step draws the same noise",
            "key the engine's noise by seed, attempt, step, problem and sample, and cache no completions",
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
            f"completions of {len(groups)} groups are copies of each other: by the policy's own chance of repeating "
            f"itself once in e^{odds:.3g}",
            "the engine ignores the sample's number",
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
    """Log evidence ratio, in nats, of copies within groups; second, that of the best pattern alone.

    It covers copies in some groups, and one pattern of copies in all groups.
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
