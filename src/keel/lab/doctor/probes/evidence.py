"""Evidence against chance: what a sample says of a share, at the level that a preflight may spend on a false alarm.

Completions of one problem are alike, so that problems are what is counted: a figure of each group is one observation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.setup import ProbeSetup

# Every alarm that a sample can raise by chance, each with an equal part of `false_alarms` (Bonferroni). The draws of
# the sampler are tested at levels of their own, `sampler_draws` and `foreign_chance`, which add next to nothing.
TESTS = (
    "advantage/amplified",
    "data/misaligned",
    "kl/rejects-all",
    "output/truncated",
    "output/unparseable",
    "reward/cliff",
    "reward/constant",
    "reward/exploit",
    "reward/gold",
    "reward/scale",
    "reward/weak",
    "sampler/noise",
)
LOOKS = 4  # how often a test may look at its sample while that grows
MOST_COMPLETIONS = 768  # that are sampled for doubts
SECONDS = 6.0  # after which nothing more is sampled for them


def level(thresholds: Thresholds) -> float:
    """The chance of a false alarm that one look of one test may have."""
    return thresholds["false_alarms"] / (len(TESTS) * LOOKS)


def chance_above(values: Sequence[float], edge: float) -> float:
    """At most how likely a mean this high is where the true one is `edge` or less; values of [0, 1], independent.

    Exact for shares (binomial); else Hoeffding's bound by the relative entropy, which holds for any distribution.
    """
    from scipy.stats import binom

    n = len(values)
    mean = fmean(values) if n else 0.0
    if mean <= edge:
        return 1.0
    if all(value in (0.0, 1.0) for value in values):
        return float(binom.sf(sum(values) - 1, n, edge))
    return math.exp(-n * _relative_entropy(min(mean, 1.0), edge))


def chance_below(values: Sequence[float], edge: float) -> float:
    """The same for a mean this low where the true one is `edge` or more."""
    return chance_above([1.0 - value for value in values], 1.0 - edge)


def _relative_entropy(p: float, q: float) -> float:
    """KL of two coins, in nats."""
    if q <= 0.0:
        return math.inf
    heads = p * math.log(p / q) if p > 0 else 0.0
    return heads + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def chance_of_all_but(misses: int, chances: Sequence[float]) -> float:
    """How likely at most `misses` of independent events fail to happen, each with a chance of its own."""
    failures = [1.0]  # chance of 0, 1, … failures
    for chance in chances:
        grown = [*(value * chance for value in failures), 0.0]
        for number, value in enumerate(failures):
            grown[number + 1] += value * (1 - chance)
        failures = grown
    return min(1.0, sum(failures[: misses + 1]))


def at_least(values: Sequence[float], chance: float = 0.025) -> float:
    """The lower end of an interval of the mean: the largest one that a test at this level rejects."""
    low, high = 0.0, fmean(values) if values else 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_above(values, middle) <= chance else (low, middle)
    return low


def at_most(values: Sequence[float], chance: float = 0.025) -> float:
    """The upper end of it."""
    return 1.0 - at_least([1.0 - value for value in values], chance)


def between(values: Sequence[float]) -> str:
    """A share with its interval of 95 %, as text."""
    return f"{100 * fmean(values):.0f} % ({100 * at_least(values):.0f} to {100 * at_most(values):.0f} %)"


def log_odds_of_copies(pairs: Sequence[tuple[bool, float]], chain: Sequence[tuple[bool, float]]) -> float:
    """Evidence in nats from one group that equal completions are copies; that of groups adds up.

    A pair is whether two completions are the same tokens, and the log-probability of the first. Where they are drawn
    apart, 1[same]/p(first) is 1 on average however often the policy repeats itself, and so is the product over
    `chain`, completions that are compared with one or with another one each. Odds of e^x for copies then come about by
    chance once in e^x (Markov). Half of the stake is kept back, so that one group without copies does not lose it all.
    """
    single = [-logp for same, logp in pairs if same]
    every = [sum(-logp for _, logp in chain)] if chain and all(same for same, _ in chain) else []
    terms = [math.log(0.5), *(value - math.log(4 * len(pairs)) for value in single), *(v - math.log(4) for v in every)]
    top = max(terms)
    return top + math.log(sum(math.exp(term - top) for term in terms))


def more_groups(setup: ProbeSetup, undecided: Callable[[Sequence[Group]], bool]) -> list[Group]:
    """The groups of the batch, and further ones of the run's own size as long as a test is undecided.

    What one test sampled serves the next. It ends where the completions or the time for doubts are used up.
    """
    groups: list[Group] = setup.shared.setdefault("groups", list(setup.groups))
    size = setup.built.sampling.num_generations
    for look in range(1, LOOKS):
        aim = 4 ** (look + 1)
        count = min(aim - len(groups), (MOST_COMPLETIONS - (len(groups) - len(setup.groups)) * size) // size)
        if len(groups) >= aim:
            continue
        if count <= 0 or setup.shared.get("seconds for doubts", 0.0) > SECONDS or not undecided(groups):
            break
        _sample(setup, groups, count)
    return groups


def _sample(setup: ProbeSetup, groups: list[Group], count: int) -> None:
    """`count` further groups, as many as the time allows."""
    step, seed = len(groups), setup.config.run.seed
    problems = setup.run.task.sample(count, seed=seed, step=step)
    at_once = max(4, count // 4)
    for start in range(0, len(problems), at_once):
        began = time.monotonic()
        groups += setup.collect(problems[start : start + at_once], step=step, sampling=setup.built.sampling)
        spent = setup.shared.get("seconds for doubts", 0.0) + time.monotonic() - began
        setup.shared["seconds for doubts"] = spent
        if spent > SECONDS:
            break
    setup.built.judge.drain()
