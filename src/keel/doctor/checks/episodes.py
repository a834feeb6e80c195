"""Episodes with tools: failing calls, and endings without an answer."""

from __future__ import annotations

from collections.abc import Callable

from keel.doctor.checks.base import RECENT, CheckResults, Level, Log, check, levels, not_shown, percent
from keel.doctor.findings import finding
from keel.doctor.shapes import fall

# Kinds of failing calls: the cause and the advice.
KINDS: dict[str, tuple[str, str]] = {
    "malformed": (
        "the model does not write calls in the form that is read, or its turns are cut inside them",
        "a warmstart section on gold episodes; a tool format that the model's template has (docs/environments.md); a "
        "larger rollout.max_turn_length",
    ),
    "unknown_tool": (
        "the model calls tools that it was not given",
        "look at a prompt (keel show) for the tools it lists; a warmstart section on gold episodes",
    ),
    "bad_arguments": (
        "the model leaves parameters out, makes them up, or gives them in another type",
        "describe the parameters in the tool's docstring, or loosen their types; a warmstart section on gold episodes",
    ),
    "failed": (
        "the tool's function raises",
        "fix the tool: it should return a text for every argument that its types allow",
    ),
    "timeout": ("the tool does not return in time", "a faster tool, or a larger timeout_s of tool(…)"),
    "too_many": ("the model makes more calls in a turn than are answered", "a smaller rollout.max_turn_length"),
}
# Endings without an answer: the evidence, the cause and the advice.
ENDS: dict[str, tuple[str, str, str]] = {
    "answer/missing": (
        "episodes without an answer: {mean} an episode over {span}",
        "the model goes on until a budget ends the episode, or stops without answering",
        "a larger rollout.max_turns or rollout.max_completion_length, or a part of the reward that pays for the form",
    ),
    "answer/list": (
        "answers that are lists: {mean} an episode over {span}",
        "the model gives several answers at once, which are judged as one text",
        "an instruction that asks for one answer",
    ),
    "answer/unknown_document": (
        "citations of documents that do not exist: {mean} an episode over {span}",
        "the model makes ids up, or writes something else where they belong",
        "an instruction that shows how ids are cited; keel show RUN has the answers",
    ),
    "turn/limit_fraction": (
        "{share} of the episodes of {span} end at the limit of turns",
        "the model goes on asking instead of answering, or the limit is too short for the task",
        "more turns, or a part of the reward that pays for an answer",
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
        raise not_shown("what came of tool calls")
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
        f"{percent(share)} of the tool calls of {now.span} were answered with an error"
        + (f" (an episode: {kinds})" if kinds else "")
        + (f"; the model was told: {errors[-1]}" if errors else ""),
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
        "the environment, a tool or the judge raises or does not answer: what it should have paid is lost",
        "see the trainer's messages of the kind of error, and fix the environment",
        grave="tool_errors_error",
    ),
)
