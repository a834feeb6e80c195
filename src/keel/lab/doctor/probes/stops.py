"""Stop texts that end turns before they can be read."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.lab.doctor.setup import ProbeSetup


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
    groups = setup.collect(sampling=replace(setup.sampling, stop=()), judged=True)
    setup.built.judge.drain()
    return fmean(reward.parsed for group in groups for reward in group.rewards)
