"""Whether completions can be read where they are sampled without stop texts, or with all the room there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.rollout import SamplingParams

SAMPLES, MOST_TOKENS = 16, 1 << 16  # that are tried with the whole context


def parsed_without_stop(setup: KeelSubject, thresholds: Thresholds) -> float | None:
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


def _parsed(setup: KeelSubject) -> float | None:
    if setup.built.judge.remote and setup.judgements_left < sum(len(group.completions) for group in setup.groups):
        return None
    return _read(_judged(setup, setup.groups, replace(setup.sampling, stop=())))


def in_whole_context(setup: KeelSubject) -> tuple[float, float] | None:
    """Shares of completions that can be read, and that end, with all the room that the context has.

    Where none can be read it is not the limit that makes them unreadable. None where nothing can be told: turns have
    limits of their own, a long context takes too long, and a limit that leaves no more room than there is cannot be
    raised.
    """
    rollout, groups = setup.config.rollout, setup.groups[:SAMPLES]
    contexts = [n for n in (setup.policy.context_length, setup.run.engine.context) if n is not None]
    room = min(contexts, default=0) - max(len(group.prompt_tokens) for group in groups)
    if rollout.max_turns > 1 or rollout.max_turn_length is not None:
        return None
    count = -(-SAMPLES // len(groups))
    if not setup.sampling.max_completion_length < room <= MOST_TOKENS // (count * len(groups)):
        return None
    if setup.built.judge.remote and setup.judgements_left < count * len(groups):
        return None
    tried = _judged(setup, groups, replace(setup.sampling, max_completion_length=room, num_generations=count))
    return _read(tried), fmean(c.stop_reason != "length" for group in tried for c in group.completions)


def _judged(setup: KeelSubject, groups: Sequence[Group], sampling: SamplingParams) -> list[Group]:
    again = setup.collect([group.problem for group in groups], sampling=sampling, judged=True)
    setup.built.judge.drain()
    return again


def _read(groups: Sequence[Group]) -> float:
    return fmean(reward.parsed for group in groups for reward in group.rewards)
