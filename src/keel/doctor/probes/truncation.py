"""Truncation: how many prompts and completions end at a length limit or at a stop text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from keel.doctor.advice import either, times
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome


def probe_truncation(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Shares of the batch at the limits. The collection probe reports truncated completions."""
    limit, near = setup.config.rollout.max_completion_length, thresholds["near_limit_from"]
    completions = [c for group in setup.groups for c in group.completions]
    lengths = [len(c.tokens) for c in completions]
    prompts = [len(group.prompt_tokens) for group in setup.groups]
    longest_prompt = _prompt_limit(setup)
    figures = {
        "completions_cut": fmean(c.stop_reason == "length" for c in completions),
        "completions_near_limit": fmean(length >= near * limit for length in lengths),
        "prompts_cut": fmean("prompt_tokens_cut" in group.problem.info for group in setup.groups),
        "prompts_near_limit": fmean(longest_prompt is not None and n >= near * longest_prompt for n in prompts),
        "longest_prompt": float(max(prompts)),
        "longest_completion": float(max(lengths)),
    }
    lines = (
        f"completions: {figures['completions_cut']:.0%} cut at {limit} tokens, longest {max(lengths)}; prompts: "
        f"{figures['prompts_cut']:.0%} cut, longest {max(prompts)}"
        + (f" of {longest_prompt}" if longest_prompt is not None else ""),
    )
    return Outcome("truncation", tuple(_cut_prompts(figures, setup, thresholds)), figures, lines)


def _prompt_limit(setup: KeelSubject) -> int | None:
    """The largest prompt length: the option, or the context length minus a completion."""
    if setup.config.data.max_prompt_length is not None:
        return setup.config.data.max_prompt_length
    context = setup.policy.context_length
    return None if context is None else context - setup.config.rollout.max_completion_length


def _cut_prompts(figures: dict[str, float], setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    share = figures["prompts_cut"]
    if share <= thresholds["truncated_prompts"]:
        return
    yield finding(
        "prompt/truncated",
        f"{share:.0%} of the prompts are cut to data.max_prompt_length={setup.config.data.max_prompt_length}",
        f"prompts are longer than the limit and data.truncation={setup.config.data.truncation} cuts them",
        either(
            times(setup.config.to_dict(), "data.max_prompt_length", 2, "twice"),
            "filter long problems out of the data",
        ),
        severity="error" if share > thresholds["truncated_prompts_error"] else "warning",
    )


def parsed_without_stop(setup: KeelSubject, thresholds: Thresholds) -> float | None:
    """The parse rate of the batch when sampled without `rollout.stop`, if that fixes it.

    None if few completions end at a stop text unparsed, or if the rate stays low without stop texts.
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
    problems, sampling = [group.problem for group in setup.groups], replace(setup.sampling, stop=())
    again = setup.collect(problems, sampling=sampling, judged=True)
    setup.built.judge.drain()
    return fmean(reward.parsed for group in again for reward in group.rewards)
