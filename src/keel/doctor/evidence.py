"""Evidence against chance: what a sample says of a share, at the level that a preflight may spend on a false alarm.

Completions of one problem are alike, so that problems are what is counted: a figure of each group is one observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.subject import LOOKS
from keel.doctor.thresholds import Thresholds

# Every alarm that a sample can raise by chance, each with an equal part of `false_alarms` (Bonferroni). The draws of
# the sampler are tested at levels of their own, `sampler_draws` and `foreign_chance`, which add next to nothing.
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
SAME = 1e-9  # within which rewards are equal


def level(thresholds: Thresholds, looks: int = LOOKS) -> float:
    """The chance of a false alarm that one look of one test may have; more for one that looks fewer times."""
    return thresholds["false_alarms"] / (len(TESTS) * looks)


def chance_above(values: Sequence[float], edge: float) -> float:
    """At most how likely a mean this high is where the true one is `edge` or less; values of [0, 1], independent.

    Exact for shares (binomial); else Hoeffding's bound by the relative entropy, which holds for any distribution.
    """
    from scipy.special import bdtrc

    n = len(values)
    mean = fmean(values) if n else 0.0
    if mean <= edge:
        return 1.0
    if all(value in (0.0, 1.0) for value in values):
        return float(bdtrc(sum(values) - 1, n, edge))
    return math.exp(-n * _relative_entropy(min(mean, 1.0), edge))


def chance_below(values: Sequence[float], edge: float) -> float:
    """The same for a mean this low where the true one is `edge` or more."""
    return chance_above([1.0 - value for value in values], 1.0 - edge)


def by_signs(gains: Sequence[float], least: float = SAME) -> float:
    """The chance of as many gains where gains and losses are equally likely (sign test; what is less says nothing)."""
    from scipy.special import bdtrc

    up, down = sum(gain > least for gain in gains), sum(gain < -least for gain in gains)
    return float(bdtrc(up - 1, up + down, 0.5)) if up else 1.0


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
    return log_mean_exp(terms) + math.log(len(terms))


def odds_of_patterns(groups: Sequence[tuple[Sequence[Hashable], Sequence[float]]]) -> list[float]:
    """Evidence in nats that all groups repeat themselves in one way, for each; of completions and log-probabilities.

    In blocks of b a completion is a copy of the first of its block, in rounds of b that of the one b before it. For
    each Π 1[same]/p(source) over all groups is 1 on average where completions are drawn apart, and so is the mean.
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
    """The logarithm of the mean of e^values, in which a mixture of odds is reckoned."""
    top = max(values)
    if not math.isfinite(top):
        return top
    return top + math.log(fmean(math.exp(value - top) for value in values))


def more_groups(
    setup: KeelSubject, code: str, undecided: Callable[[Sequence[Group]], bool], *, single: bool = False
) -> list[Group]:
    """The groups of the batch, and further ones of the run's own size as long as the test of `code` is undecided.

    What one test sampled serves the next. It ends where the completions or the time for doubts are used up; a test that
    is undecided then is remembered (see `undecided_tests`). Where large groups have left it few problems and one
    completion says as much of a problem as all, a `single` one of others is its last look.
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
        why = f"{setup.budget.doubt_s:g} s are up" if setup.budget.is_spent else "as many as are sampled"
        setup.budget.undecided[code] = f"undecided after {completions} completions of {len(groups)} problems ({why})"
    return groups


def with_single_ones(setup: KeelSubject, groups: Sequence[Group], most: int = 4**LOOKS) -> list[Group]:
    """These groups and one completion each of further problems, as many as a last look has."""
    sampled = list(groups)
    if len(sampled) < most and not setup.budget.is_spent:
        _sample(setup, sampled, most - len(sampled), generations=1)
    return sampled


def single_ones(setup: KeelSubject, most: int = 128) -> list[Group]:
    """The batch's groups and one completion each of further problems, sampled once."""
    if "single ones" not in setup.shared:
        setup.shared["single ones"] = with_single_ones(setup, setup.groups, most)
    groups: list[Group] = setup.shared["single ones"]
    return groups


def most_completions(setup: KeelSubject) -> int:
    """Completions that may still be sampled for doubts; with a judge elsewhere no more than it may be asked about."""
    spent = sum(len(group.completions) for group in setup.budget.further)
    left = max(0, setup.budget.completions - spent)
    return min(left, setup.judgements_left) if setup.built.judge.remote else left


def _sample(setup: KeelSubject, further: list[Group], count: int, generations: int | None = None) -> None:
    """`count` further groups, as many as the time allows; whole ones, even where the batch holds shorter ones."""
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
