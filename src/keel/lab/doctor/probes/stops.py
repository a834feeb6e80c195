"""Whether completions can be read where they are sampled without stop texts, or with more room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout import SamplingParams

ROOM = 4  # times the limit
PROBLEMS = 16  # that are tried with as much


def parsed_without_stop(setup: ProbeSetup, thresholds: Thresholds) -> float | None:
    """The share of the batch that can be read where it is sampled without `rollout.stop`, if that mends it.

    None where few completions end at a stop text without being read, or where as few can be read without it.
    """
    if "parsed without stop" not in setup.of_batch:
        pairs = [pair for g in setup.groups for pair in zip(g.completions, g.rewards, strict=True)]
        cut = fmean(completion.stop_reason == "stop" and not reward.parsed for completion, reward in pairs)
        setup.of_batch["parsed without stop"] = (
            _parsed(setup) if setup.sampling.stop and cut > thresholds["truncated_completions"] else None
        )
    parsed: float | None = setup.of_batch["parsed without stop"]
    return parsed if parsed is not None and parsed >= thresholds["parse_rate_warning"] else None


def _parsed(setup: ProbeSetup) -> float | None:
    if setup.built.judge.remote and setup.judgements_left < sum(len(group.completions) for group in setup.groups):
        return None
    return _read(_judged(setup, setup.groups, replace(setup.sampling, stop=())))


def ends_with_room(setup: ProbeSetup, thresholds: Thresholds) -> bool | None:
    """Whether completions end, or can be read, with `ROOM` times the limit: then it is the limit that cuts them.

    None where nothing can be told: episodes have limits of their own, and a context may have no room.
    """
    groups, limit = setup.groups[:PROBLEMS], setup.sampling.max_completion_length
    context = setup.policy.context_length or 1 << 30
    fits = ROOM * limit + max(len(group.prompt_tokens) for group in groups) <= context
    if setup.config.rollout.max_turns > 1 or not fits:
        return None
    if setup.built.judge.remote and setup.judgements_left < len(groups):
        return None
    roomy = replace(setup.sampling, max_completion_length=ROOM * limit, num_generations=1)
    tried = _judged(setup, groups, roomy)
    ended = fmean(c.stop_reason != "length" for group in tried for c in group.completions)
    return ended > thresholds["truncated_completions"] or _read(tried) >= thresholds["parse_rate"]


def _judged(setup: ProbeSetup, groups: Sequence[Group], sampling: SamplingParams) -> list[Group]:
    again = setup.collect([group.problem for group in groups], sampling=sampling, judged=True)
    setup.built.judge.drain()
    return again


def _read(groups: Sequence[Group]) -> float:
    return fmean(reward.parsed for group in groups for reward in group.rewards)
