"""Truncation: how many prompts and completions end where the limit is and not where they should."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from keel.doctor.advice import either, times
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome


def probe_truncation(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Shares of the batch at the limits; that completions are cut is a finding of the collection."""
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
    """What a prompt may have: the option, or what the model's context leaves beside a completion."""
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
