"""Episodes with tools: failing calls, and endings without an answer."""

from __future__ import annotations

from collections.abc import Callable

from keel.doctor.checks.base import RECENT, CheckResults, Level, Log, check, levels, not_shown, percent
from keel.doctor.findings import finding
from keel.doctor.shapes import fall

# Kinds of failing calls: the cause and the advice.
KINDS: dict[str, tuple[str, str]] = {
    "malformed": (
        "the model does not write calls in the expected format, or its turns are cut inside calls",
        "add a warmstart section on gold episodes; use a tool format of the model's template (docs/environments.md); "
        "set "
        "a larger rollout.max_turn_length",
    ),
    "unknown_tool": (
        "the model calls tools that do not exist",
        "check the list of tools in a prompt (keel show); add a warmstart section on gold episodes",
    ),
    "bad_arguments": (
        "the model omits parameters, invents them, or gives them the wrong type",
        "describe the parameters in the tool's docstring, or allow more types; add a warmstart section on gold "
        "episodes",
    ),
    "failed": (
        "the tool's function raises an error",
        "fix the tool: it should return a text for every argument that its types allow",
    ),
    "timeout": ("the tool does not return in time", "make the tool faster, or set a larger timeout_s of tool(…)"),
    "too_many": ("the model makes more calls in a turn than are allowed", "set a smaller rollout.max_turn_length"),
}
# Endings without an answer: the evidence, the cause and the advice.
ENDS: dict[str, tuple[str, str, str]] = {
    "answer/missing": (
        "episodes without an answer: {mean} per episode over {span}",
        "a limit ends the episode before the model answers, or the model stops without an answer",
        "set a larger rollout.max_turns or rollout.max_completion_length, or add a reward part for the format",
    ),
    "answer/list": (
        "answers that are lists: {mean} per episode over {span}",
        "the model gives several answers, which are judged as one text",
        "add an instruction that asks for one answer",
    ),
    "answer/unknown_document": (
        "citations of documents that do not exist: {mean} per episode over {span}",
        "the model invents ids, or writes other text in their place",
        "add an instruction that shows how to cite ids; keel show RUN prints the answers",
    ),
    "turn/limit_fraction": (
        "{share} of the episodes of {span} end at the limit of turns",
        "the model keeps calling tools instead of answering, or the limit is too small for the task",
        "allow more turns, or add a reward part for giving an answer",
    ),
}


def _of_other_causes(name: str) -> Callable[[Log], bool]:
    """Whether another finding covers this one: hardly any completion can be parsed, or episodes have one turn only."""

    def unless(log: Log) -> bool:
        unread = name == "answer/missing" and log.now("parse/ok_fraction") < log.limits["parse_rate_warning"]
        return unread or (name == "turn/limit_fraction" and not log.now("turn/mean") > 1)

    return unless


@check("tool/failing")
def calls(log: Log) -> CheckResults:
    """The share of tool calls with an error, and the most frequent kind of error."""
    error_share, call_counts = log.get("tool/error_fraction"), log.get("tool/calls_mean")
    if error_share is None or call_counts is None:
        if log.source == "keel" and call_counts is None:
            return  # the run has no tools
        raise not_shown("the results of tool calls")
    now = error_share.finite.tail(RECENT)
    # weighted by calls, so that a step with one call counts less than one with a thousand
    weighed = [(value, calls) for _, value, calls in now.beside(call_counts.finite)]
    total = sum(calls for _, calls in weighed)
    share = sum(value * calls for value, calls in weighed) / total if total else 0.0
    if share <= log.limits["tool_errors"]:
        return
    counts = {kind: log.now(f"tool/{kind}") for kind in KINDS if log.get(f"tool/{kind}") is not None}
    kind = max(counts, key=lambda name: counts[name]) if counts else "failed"
    kinds = ", ".join(
        f"{name.replace('_', ' ')} {count:.3g}" for name, count in sorted(counts.items(), key=lambda p: -p[1]) if count
    )
    errors = [event["error"] for event in log.events if event.get("kind") == "tool/errors" and event.get("error")]
    # if most calls worked at first, the model is not the cause
    broke = error_share.finite.head(RECENT).mean < log.limits["tool_errors"] / 2 and log.clear(
        fall(error_share.scaled(-1.0))
    )
    cause, advice = KINDS[kind]
    yield finding(
        "tool/failing",
        f"{percent(share)} of the tool calls of {now.span} returned an error"
        + (f" (per episode: {kinds})" if kinds else "")
        + (f"; the last error: {errors[-1]}" if errors else ""),
        cause,
        advice,
        severity="error" if share > log.limits["tool_errors_error"] or broke else "warning",
        share=share,
    )


levels(
    "episodes",
    *(
        Level("answer/unusable", name, "unusable_answers", evidence, cause, advice, unless=_of_other_causes(name))
        for name, (evidence, cause, advice) in ENDS.items()
    ),
    Level(
        "reward/failed",
        "rollout/error_fraction",
        "tool_errors",
        "{share} of the episodes of {span} ended in an error of their environment",
        "the environment, a tool or the reward raises an error or does not return, so the reward of the episode is "
        "lost",
        "find the error in the trainer's messages, and fix the environment",
        grave="tool_errors_error",
    ),
)
