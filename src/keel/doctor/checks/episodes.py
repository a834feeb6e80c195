"""Episodes with tools: calls that go wrong, and ends that are no answer."""

from __future__ import annotations

from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown, over, percent
from keel.doctor.findings import finding
from keel.doctor.shapes import fall

# What goes wrong in a call: why, and what to do.
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
        "mend the tool: it should return a text for every argument that its types allow",
    ),
    "timeout": ("the tool does not return in time", "a faster tool, or a larger timeout_s of tool(…)"),
    "too_many": ("the model makes more calls in a turn than are answered", "a smaller rollout.max_turn_length"),
}
# Ends that are no answer: what is counted an episode, why, and what to do.
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


@check("tool/failing")
def calls(log: Log) -> CheckResults:
    """The share of calls that are answered with an error, and what most of those errors are."""
    error_share, call_counts = log.get("tool/error_fraction"), log.get("tool/calls_mean")
    if error_share is None or call_counts is None:
        if log.source == "keel" and call_counts is None:
            return  # it has no tools
        raise not_shown("what came of tool calls")
    now = error_share.finite.tail(RECENT)
    # over all calls: a step with a single call does not count as much as one with a thousand
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
    # most calls were answered at first: then it is not the model that has yet to learn
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


@check("answer/unusable")
def ends(log: Log) -> CheckResults:
    """Counts of what is no usable answer; where next to none can be read, another finding says so."""
    if log.source != "keel" and not any(log.get(name) for name in ENDS):
        raise not_shown("how episodes end")
    for name, (evidence, cause, advice) in ENDS.items():
        unread = name == "answer/missing" and log.now("parse/ok_fraction") < log.limits["parse_rate_warning"]
        of_one_turn = name == "turn/limit_fraction" and not log.now("turn/mean") > 1
        if not unread and not of_one_turn:
            yield from over(log, "answer/unusable", name, "unusable_answers", evidence, cause, advice)


@check()
def failed(log: Log) -> CheckResults:
    """Episodes that end in an error."""
    return over(
        log,
        "reward/failed",
        "rollout/error_fraction",
        "tool_errors",
        "{share} of the episodes of {span} ended in an error of their environment",
        "the environment, a tool or the judge raises or does not answer: what it should have paid is lost",
        "see the trainer's messages of the kind of error, and mend the environment",
        grave="tool_errors_error",
    )
