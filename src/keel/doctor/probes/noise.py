"""The engine's noise: the same for the same seed and step, another for every other step and sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from random import Random

import torch

from keel.base.types import Group
from keel.doctor.draws import Draws, batch_draws, draws, most_tokens
from keel.doctor.evidence import (
    level,
    log_mean_exp,
    log_odds_of_copies,
    log_odds_of_no_copies,
    more_groups,
    odds_of_patterns,
)
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.strange import STRANGE_STEPS, strange_turns
from keel.doctor.thresholds import Thresholds
from keel.rollout.sampling import SamplingParams

NOISE_STEP = 1_000_003  # a step that no run reaches: other noise than training's first steps
_DOUBT = 3.0  # nats: copies by chance once in twenty
_LEAST = -2.3  # nats a token: tokens that no draw explains are another fault, and few of them must not decide
_EITHER, _ORDERS = 0.05, 400  # chance above which copies are the same across steps, and orders that tell it
_ALIGNED = 0.01  # chance above which equal completions of two steps need not be of one number
_DIFFERING, _FEWEST_GROUPS = 256, 8  # completions and groups whose copies are counted
_LONE = 24  # steps whose completions are drawn alone
_SURE = 0.5  # nats: below it a model repeats itself by its own choice, and more groups that do would not tell


def noise_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Equal seeds must draw alike; other steps and other completions no more often than the policy repeats itself."""
    problems = [group.problem for group in setup.groups]
    same, other = setup.collect(problems), setup.collect(problems, step=NOISE_STEP)
    enough = -math.log(level(thresholds))
    steps = repeated_steps(setup, setup.groups, other)
    first, second = (strange_turns(setup, step) for step in STRANGE_STEPS)
    if steps <= enough:  # a policy that is certain after its own prompts repeats itself by its own choice
        steps = log_mean_exp([steps, repeated_steps(setup, first, second)])
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
        odds, pattern = copies(setup, groups, setup.sampling)
        return odds <= enough and (odds > _DOUBT or pattern > _SURE)

    groups = more_groups(setup, "sampler/noise", undecided)
    odds, _ = copies(setup, groups, setup.sampling)
    if odds > enough:
        drawn = draws(setup, groups)
        greedy = bool((drawn.tokens == drawn.logits.argmax(-1)).all())
        setup.shared["greedy"], setup.shared["copied groups"] = greedy, groups
        setup.shared["copies in any step"] = _chance_of_copies(setup, groups) > _EITHER
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


def copies_explained(setup: KeelSubject, params: SamplingParams) -> bool:
    """Whether draws under `params` repeat each other as often as those groups that were called copies do."""
    return copies(setup, setup.shared.get("copied groups", ()), params)[0] < _DOUBT


def chance_aligned(steps: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> float:
    """The chance of so many completions that equal the one of their own number in another step.

    Completions of the other step change places: noise that is the same gives equal ones at equal places, a sampler that
    is surer than the policy gives them anywhere.
    """
    random = Random(0)

    def matches(pairs: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> int:
        return sum(a == b for own, other in pairs for a, b in zip(own, other, strict=True))

    seen = matches(steps)
    shuffled = ([(own, random.sample(other, len(other))) for own, other in steps] for _ in range(_ORDERS))
    return (1 + sum(matches(order) >= seen for order in shuffled)) / (1 + _ORDERS)


def lone_draws(setup: KeelSubject) -> Draws:
    """Completions that are drawn alone, one of each text a step: there is no other one to be like."""
    steps = range(STRANGE_STEPS[1] + 1, STRANGE_STEPS[1] + 1 + _LONE)
    return draws(setup, [group for step in steps for group in strange_turns(setup, step, step, samples=1)])


def _chance_of_copies(setup: KeelSubject, groups: Sequence[Group]) -> float:
    """The same for groups of some step and their problems in another."""
    own = list({group.problem.key: group for group in groups}.values())
    other = setup.collect([group.problem for group in own], step=NOISE_STEP)
    return chance_within(list(zip(_tokens(own), _tokens(other), strict=True)))


def chance_within(steps: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> float:
    """The chance of so many equal completions within a step, where those of another step are drawn like them.

    Completions of one problem change places between its two steps: with one way to draw, whatever it is, all orders
    are as likely. A sampler that is surer than the policy writes equal ones within steps and across them.
    """
    pooled = [(len(own), [*own, *other]) for own, other in steps if len({*own, *other}) > 1]
    seen, random = _equal_within(pooled), Random(0)
    shuffled = ([(count, random.sample(tokens, len(tokens))) for count, tokens in pooled] for _ in range(_ORDERS))
    return (1 + sum(_equal_within(order) >= seen for order in shuffled)) / (1 + _ORDERS)


def _equal_within(pooled: Iterable[tuple[int, Sequence[Hashable]]]) -> int:
    """Pairs of equal completions on the same side, the first so many or the others."""
    sides = (side for count, tokens in pooled for side in (tokens[:count], tokens[count:]))
    return sum(number * (number - 1) // 2 for side in sides for number in Counter(side).values())


def repeated_steps(setup: KeelSubject, groups: Sequence[Group], other: Sequence[Group]) -> float:
    """Evidence in nats that a step repeats the completions of another, sample by sample."""
    total = 0.0
    scored = _logp(setup, groups, setup.sampling) if groups else []
    for first, second, logp in zip(groups, other, scored, strict=True):
        pairs = [
            (a.tokens == b.tokens, value)
            for a, b, value in zip(first.completions, second.completions, logp, strict=True)
        ]
        total += log_odds_of_copies(pairs, pairs)
    return total


def copies(setup: KeelSubject, groups: Sequence[Group], params: SamplingParams) -> tuple[float, float]:
    """Evidence in nats that completions of a group repeat each other more often than draws under `params` do.

    Any of them in some groups, or in all groups the same ones; second, that of the likeliest such pattern alone.
    """
    every, total = [*zip(_tokens(groups), _logp(setup, groups, params), strict=True)], 0.0
    for tokens, logp in every:
        pairs = [(tokens[i] == tokens[j], logp[i]) for i, j in combinations(range(len(tokens)), 2)]
        total += log_odds_of_copies(pairs, [(other == tokens[0], logp[0]) for other in tokens[1:]]) if pairs else 0.0
    patterns = odds_of_patterns(every)
    return log_mean_exp([total, log_mean_exp(patterns)]), max(patterns)


def no_copies_findings(setup: KeelSubject, fitting: SamplingParams, thresholds: Thresholds) -> Iterator[Finding]:
    """Completions of a group must repeat each other as often as the policy does, and as draws under `fitting` do."""
    size, length = setup.sampling.num_generations, max(1.0, setup.completion_length)
    count = min(max(_FEWEST_GROUPS, _DIFFERING // size), int(most_tokens(setup) / (size * length)))
    if size < 2 or count < _FEWEST_GROUPS:
        return  # too few fit to be looked at
    problems = setup.run.task.sample(count, seed=setup.config.run.seed, step=NOISE_STEP)
    groups = setup.collect(problems, step=NOISE_STEP)
    if not all(all(completion.action) for group in groups for completion in group.completions):
        return  # what tools and users say in between is drawn by others
    drawn = draws(setup, groups)  # of the first ones, where completions are longer than they were
    sums = torch.zeros(len(drawn.texts), dtype=torch.float64, device=drawn.tokens.device)
    both = [sums.index_add(0, drawn.row, drawn.logp(params)).tolist() for params in (setup.sampling, fitting)]
    odds = min(
        log_odds_of_no_copies([*zip(tokens, rest, strict=False)] for tokens in _tokens(groups))
        for rest in map(iter, both)
    )
    if odds > -math.log(level(thresholds)):
        yield finding(
            "sampler/noise",
            f"{len(drawn.texts)} completions in groups of {size} repeat each other less than the policy does itself: "
            f"by chance once in e^{odds:.3g}",
            "the engine, or what stands around it, leaves out what it has drawn before: what the policy is sure of "
            "comes too seldom, its mistakes too often",
            "keep every completion that is drawn: a group's mean is that of independent draws",
        )


def among_others_finding(tokens: int, chance: float) -> Finding:
    """That completions are drawn otherwise beside others of their prompt than alone."""
    return finding(
        "sampler/noise",
        f"{tokens} tokens of completions that were drawn alone are the policy's with chance {chance:.2g}, those of "
        "groups are not: completions of a prompt depend on each other",
        "the engine, or what stands around it, chooses among what it has drawn, or draws some by others",
        "keep every completion that is drawn, each with noise of its own: a group's mean is that of independent draws",
    )


def _tokens(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group.completions] for group in groups]


def _logp(setup: KeelSubject, groups: Sequence[Group], params: SamplingParams) -> list[list[float]]:
    """Log-probability of each completion of each group: tokens that were not looked at count as certain."""
    drawn = batch_draws(setup) if tuple(groups) == setup.groups else draws(setup, groups)
    sums = [0.0] * sum(len(group.completions) for group in groups)
    for row, value in zip(drawn.row.tolist(), drawn.logp(params).clamp_min(_LEAST).tolist(), strict=True):
        sums[row] += value
    totals = iter(sums)
    return [[next(totals) for _ in group.completions] for group in groups]
