"""What completions earn where the same problems are asked in another way: what is meant to be asked so earns by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean

from keel.base.types import Group, Problem
from keel.config import Config
from keel.doctor.probes.evidence import by_signs, doubt_seconds, level, more_groups, spending
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.rollout.engine import Engine
from keel.run.build import build_collector


@dataclass(frozen=True)
class Earned:
    """Mean rewards as the run asks and as it might, and the chance of so many problems that earn more (sign test)."""

    own: float
    other: float
    problems: int
    chance: float
    sure: bool  # that the other way earns more

    def __str__(self) -> str:
        return f"{self.other:.3g} instead of {self.own:.3g} ({self.problems} problems, chance {self.chance:.1g})"


def earned_otherwise(
    setup: ProbeSetup,
    config: Config,
    thresholds: Thresholds,
    change: Callable[[Problem], Problem] = lambda p: p,
    within: Callable[[], AbstractContextManager[Engine | None]] = nullcontext,
) -> Earned | None:
    """The same problems under another configuration, changed, or by another engine; more while it seems to earn more.

    None where rewards fail, or are given elsewhere, at a price.
    """
    setup = setup.whole
    built, run = setup.built, setup.run
    if built.judge.remote or setup.failures:
        return None
    limit = setup.config.rollout.max_completion_length
    sampling = replace(built.sampling, max_completion_length=limit)
    others: list[Group] = []

    def compared(groups: Sequence[Group]) -> Earned:
        with spending(setup), within() as engine:
            asks = engine or run.engine
            collector = build_collector(config, asks, run.task, setup.policy.tokenizer, built.judge, run.world)
            for rows in list(batches(groups[len(others) :])):
                asked, size = [change(group.problem) for group in rows], len(rows[0].completions)
                drawn = replace(sampling, num_generations=size)
                others.extend(replace(collector, sampling=drawn, release=True).collect(asked, step=len(others)))
                if doubt_seconds(setup) > setup.doubt_s:
                    break
        built.judge.drain()
        both = min(len(groups), len(others))
        before, after = ([fmean(r.total for r in g.rewards) for g in side[:both]] for side in (groups, others))
        chance = by_signs([b - a for a, b in zip(before, after, strict=True)])
        own, other = fmean(before), fmean(after)
        return Earned(own, other, both, chance, other > own and chance <= level(thresholds))

    def undecided(groups: Sequence[Group]) -> bool:
        found = compared(groups)
        return found.other > found.own and not found.sure

    return compared(more_groups(setup, "prompt/format", undecided))


def batches(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Runs of groups of one size in which no problem stands twice: the same key would be given the same noise."""
    batch: list[Group] = []
    for group in groups:
        sizes = {len(other.completions) for other in batch} - {len(group.completions)}
        if sizes or group.problem.key in {other.problem.key for other in batch}:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch
