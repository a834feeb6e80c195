"""Statistical tests of a preflight: p-values and confidence intervals of shares, at one common significance level.

Completions of one problem are dependent. The unit of observation is therefore a group, with one value each.

A log evidence ratio is the logarithm of a statistic with expectation 1 under the null hypothesis, such as a likelihood
ratio. It exceeds x by chance with probability at most e^−x (Markov).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.subject import LOOKS
from keel.doctor.thresholds import Thresholds

# Each alarm that a sample can raise by chance gets an equal part of `false_alarms` (Bonferroni). Tests of the
# sampler's draws use the separate levels `sampler_draws` and `foreign_chance`, which add almost nothing to the total.
TESTS = (
    "advantage/amplified",
    "data/misaligned",
    "eval/train-gap",
    "kl/rejects-all",
    "model/tokenizer",
    "output/truncated",
    "output/unparseable",
    "prompt/format",
    "reward/cliff",
    "reward/constant",
    "reward/exploit",
    "reward/gold",
    "reward/scale",
    "reward/weak",
    "sampler/noise",
    "tool/failing",
)
SAME = 1e-9  # rewards closer than this are equal


def level(thresholds: Thresholds, looks: int = LOOKS) -> float:
    """The significance level of one look at one test; higher for a test with fewer looks."""
    return thresholds["false_alarms"] / (len(TESTS) * looks)


def chance_above(values: Sequence[float], edge: float) -> float:
    """An upper bound of the p-value of this mean if the true mean is at most `edge`, for independent values in [0, 1].

    Exact for shares (binomial). Otherwise Hoeffding's bound by the relative entropy, which holds for any distribution.
    """
    from scipy.special import bdtrc

    n = len(values)
    mean = fmean(values) if n else 0.0
    if mean <= edge:
        return 1.0
    if all(value in (0.0, 1.0) for value in values):
        return float(bdtrc(sum(values) - 1, n, edge))
    return math.exp(-n * _relative_entropy(min(mean, 1.0), edge))


def by_signs(gains: Sequence[float], least: float = SAME) -> float:
    """The p-value of the sign test: gains and losses are equally likely. Changes of at most `least` are ignored."""
    from scipy.special import bdtrc

    up, down = sum(gain > least for gain in gains), sum(gain < -least for gain in gains)
    return float(bdtrc(up - 1, up + down, 0.5)) if up else 1.0


def _relative_entropy(p: float, q: float) -> float:
    """KL between two Bernoulli distributions, in nats."""
    if q <= 0.0:
        return math.inf
    heads = p * math.log(p / q) if p > 0 else 0.0
    return heads + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def chance_of_all_but(misses: int, chances: Sequence[float]) -> float:
    """The probability that at most `misses` of independent events with these probabilities do not occur."""
    failures = [1.0]  # probabilities of 0, 1, … failures
    for chance in chances:
        grown = [*(value * chance for value in failures), 0.0]
        for number, value in enumerate(failures):
            grown[number + 1] += value * (1 - chance)
        failures = grown
    return min(1.0, sum(failures[: misses + 1]))


def at_least(values: Sequence[float], chance: float = 0.025) -> float:
    """The lower confidence bound of the mean: the largest mean that a test at this level rejects."""
    low, high = 0.0, fmean(values) if values else 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_above(values, middle) <= chance else (low, middle)
    return low


def at_most(values: Sequence[float], chance: float = 0.025) -> float:
    """The upper confidence bound of the mean."""
    return 1.0 - at_least([1.0 - value for value in values], chance)


def between(values: Sequence[float]) -> str:
    """A share with its 95 % confidence interval, as text."""
    return f"{100 * fmean(values):.0f} % ({100 * at_least(values):.0f} to {100 * at_most(values):.0f} %)"


def log_odds_of_copies(pairs: Sequence[tuple[bool, float]], chain: Sequence[tuple[bool, float]]) -> float:
    """Log evidence ratio, in nats, that equal completions of one group are copies. Values of independent groups add up.

    A pair has two entries: whether two completions have equal tokens, and the log-probability of the first. For
    independent completions, 1[same]/p(first) has expectation 1, however often the policy repeats itself. The product
    over `chain`, pairs with different second completions, also has expectation 1. Half of the weight is on
    the constant ratio 1, so that one group without copies does not make the product 0.
    """
    single = [-logp for same, logp in pairs if same]
    every = [sum(-logp for _, logp in chain)] if chain and all(same for same, _ in chain) else []
    terms = [math.log(0.5), *(value - math.log(4 * len(pairs)) for value in single), *(v - math.log(4) for v in every)]
    return log_mean_exp(terms) + math.log(len(terms))


def odds_of_patterns(groups: Sequence[tuple[Sequence[Hashable], Sequence[float]]]) -> list[float]:
    """For each pattern, the log evidence ratio that all groups repeat completions in that pattern.

    In blocks of b, a completion copies the first of its block. In rounds of b, it copies the one b before it. If
    completions are independent, Π 1[same]/p(source) over all groups has expectation 1 for each pattern, and so has the
    mean over patterns.
    """
    return [
        sum(
            -logp[source] if completions[i] == completions[source] else -math.inf
            for completions, logp in groups
            for i, source in enumerate(pattern(len(completions)))
            if source != i
        )
        for pattern in _PATTERNS
    ]


def _blocks(length: int, size: int) -> list[int]:
    return [i - i % length for i in range(size)]


def _rounds(length: int, size: int) -> list[int]:
    return [i % length for i in range(size)]


_LENGTHS = (2, 3, 4, 8)
_PATTERNS = [partial(_rounds, 1), *(partial(kind, length) for length in _LENGTHS for kind in (_blocks, _rounds))]


def log_mean_exp(values: Sequence[float]) -> float:
    """log(mean(e^values)), the log evidence ratio of a mixture."""
    top = max(values)
    if not math.isfinite(top):
        return top
    return top + math.log(fmean(math.exp(value - top) for value in values))


def more_groups(
    setup: KeelSubject, code: str, undecided: Callable[[Sequence[Group]], bool], *, single: bool = False
) -> list[Group]:
    """The groups of the batch, plus further ones while the test of `code` is undecided.

    Sampled groups are shared by all tests. Sampling ends when the budget of completions or time is used up. A test that
    is then undecided is recorded in `Budget.undecided`. `single` allows a last look at one completion each of further
    problems, for tests in which one completion represents a problem.
    """
    further = setup.budget.further
    most = len(further) + most_completions(setup) // setup.built.sampling.num_generations
    doubt = undecided([*setup.groups, *further])
    for look in range(1, LOOKS):
        count = min(4 ** (look + 1) - len(setup.groups), most) - len(further)
        if not doubt or setup.budget.is_spent:
            break
        if count > 0:
            _sample(setup, further, count)
            doubt = undecided([*setup.groups, *further])
    groups = [*setup.groups, *further]
    if doubt and single:
        groups = with_single_ones(setup, groups)
        doubt = undecided(groups)
    if doubt:
        completions = sum(len(group.completions) for group in groups)
        why = (
            f"the limit of {setup.budget.doubt_s:g} s is reached"
            if setup.budget.is_spent
            else "the limit of completions is reached"
        )
        setup.budget.undecided[code] = f"undecided after {completions} completions of {len(groups)} problems ({why})"
    return groups


@dataclass(frozen=True)
class Sampled:
    """Groups, their shares, and whether the mean share exceeds an alarm, with its p-value."""

    groups: Sequence[Group]
    shares: Sequence[float]
    alarm: float
    chance: float  # p-value at the usual share
    enough: float

    @property
    def mean(self) -> float:
        return fmean(self.shares)

    @property
    def in_doubt(self) -> bool:
        return self.mean > self.alarm and self.chance > self.enough

    @property
    def sure(self) -> bool:
        return self.mean > self.alarm and self.chance <= self.enough


def share_over(
    setup: KeelSubject, code: str, share: Callable[[Group], float | None], alarm: float, usual: float, enough: float
) -> Sampled:
    """The share in each group. Samples more groups while a mean over `alarm` may be chance at the share `usual`."""

    def of(groups: Sequence[Group]) -> Sampled:
        shares = [value for group in groups if (value := share(group)) is not None] or [0.0]
        return Sampled(groups, shares, alarm, chance_above(shares, usual), enough)

    return of(more_groups(setup, code, lambda groups: of(groups).in_doubt))


def with_single_ones(setup: KeelSubject, groups: Sequence[Group], most: int = 4**LOOKS) -> list[Group]:
    """These groups plus one completion each of further problems, up to `most` groups."""
    sampled = list(groups)
    if len(sampled) < most and not setup.budget.is_spent:
        _sample(setup, sampled, most - len(sampled), generations=1)
    return sampled


def single_ones(setup: KeelSubject, most: int = 128) -> list[Group]:
    """The batch's groups plus one completion each of further problems, sampled once and cached."""
    if "single ones" not in setup.shared:
        setup.shared["single ones"] = with_single_ones(setup, setup.groups, most)
    groups: list[Group] = setup.shared["single ones"]
    return groups


def most_completions(setup: KeelSubject) -> int:
    """The number of completions that may still be sampled to decide tests. A remote judge's budget limits it too."""
    spent = sum(len(group.completions) for group in setup.budget.further)
    left = max(0, setup.budget.completions - spent)
    return min(left, setup.judgements_left) if setup.built.judge.remote else left


def _sample(setup: KeelSubject, further: list[Group], count: int, generations: int | None = None) -> None:
    """Append up to `count` groups to `further`, as many as the time allows. Their completions are not cut."""
    step, seed = len(setup.groups) + len(further), setup.config.run.seed
    problems = setup.run.task.sample(count, seed=seed, step=step)
    sampling = replace(
        setup.built.sampling,
        max_completion_length=setup.config.rollout.max_completion_length,
        num_generations=generations or setup.built.sampling.num_generations,
    )
    at_once = max(4, count // 4)
    for start in range(0, len(problems), at_once):
        with setup.budget.spending():
            part = problems[start : start + at_once]
            further += setup.collect(part, step=step, sampling=sampling, judged=generations is None)
        if setup.budget.is_spent:
            break
    setup.built.judge.drain()
