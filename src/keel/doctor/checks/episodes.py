"""Episodes with tools: calls that go wrong, and ends that are no answer."""

from __future__ import annotations

from keel.doctor.checks.base import RECENT, CheckResults, clear, not_recorded
from keel.doctor.findings import finding
from keel.doctor.history import History, Series
from keel.doctor.shapes import fall
from keel.doctor.thresholds import Thresholds

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
ENDS: dict[str, tuple[str, str, str]] = {
    "answer/missing": (
        "episodes without an answer",
        "the model goes on until a budget ends the episode, or stops without answering",
        "a larger rollout.max_turns or rollout.max_completion_length, or a part of the reward that pays for the form",
    ),
    "answer/list": (
        "answers that are lists",
        "the model gives several answers at once, which are judged as one text",
        "an instruction that asks for one answer",
    ),
    "answer/unknown_document": (
        "citations of documents that do not exist",
        "the model makes ids up, or writes something else where they belong",
        "an instruction that shows how ids are cited; keel show RUN has the answers",
    ),
}


def calls(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of calls that are answered with an error, and what most of those errors are."""
    code, error_share, call_counts = "tool/failing", history.get("tool/error_fraction"), history.get("tool/calls_mean")
    if error_share is None or call_counts is None:
        if history.source != "keel" or history.get("tool/calls_mean") is not None:
            yield not_recorded(code, "what came of tool calls")
        return
    now = error_share.finite.tail(RECENT)
    share = _weighted(now, call_counts)
    if share <= thresholds["tool_errors"]:
        return
    counts = {kind: series.finite.tail(RECENT).mean for kind in KINDS if (series := history.get(f"tool/{kind}"))}
    kind = max(counts, key=lambda name: counts[name]) if counts else "failed"
    kinds = ", ".join(
        f"{name.replace('_', ' ')} {count:.3g}" for name, count in sorted(counts.items(), key=lambda p: -p[1]) if count
    )
    last_error = next((event["error"] for event in reversed(history.events) if _names_error(event)), None)
    cause, advice = KINDS[kind]
    yield finding(
        code,
        f"{100 * share:.0f} % of the tool calls of {now.span} were answered with an error"
        + (f" (an episode: {kinds})" if kinds else "")
        + (f"; the model was told: {last_error}" if last_error else ""),
        cause,
        advice,
        severity="error" if share > thresholds["tool_errors_error"] or _broke(error_share, thresholds) else "warning",
        share=share,
    )


def _broke(error_share: Series, thresholds: Thresholds) -> bool:
    """Whether most calls were answered at first, beyond noise: then it is not the model that has yet to learn."""
    change = fall(error_share.scaled(-1.0))
    worked = error_share.finite.head(RECENT).mean < thresholds["tool_errors"] / 2
    return worked and clear(change, thresholds)


def ends(history: History, thresholds: Thresholds) -> CheckResults:
    """Counts of what is no usable answer; where next to none can be read, another finding says so."""
    code, parsed = "answer/unusable", history.get("parse/ok_fraction")
    recorded = [name for name in ENDS if history.get(name) is not None]
    if not recorded and history.source != "keel":
        yield not_recorded(code, "how episodes end")
    unread = parsed is not None and parsed.tail(RECENT).mean < thresholds["parse_rate_warning"]
    for name in recorded:
        series = history.get(name)
        assert series is not None
        now = series.finite.tail(RECENT)
        if now.mean > thresholds["unusable_answers"] and not (unread and name == "answer/missing"):
            what, cause, advice = ENDS[name]
            evidence = f"{what}: {now.mean:.2g} an episode over {now.span}"
            yield finding(code, evidence, cause, advice, share=min(1.0, now.mean))
    yield from _limits(history, thresholds)


def _limits(history: History, thresholds: Thresholds) -> CheckResults:
    """Episodes of several turns that end because their turns are used up, and those that end in an error."""
    reached, turns = history.get("turn/limit_fraction"), history.get("turn/mean")
    if reached is not None and turns is not None and turns.finite.tail(RECENT).mean > 1:
        now = reached.finite.tail(RECENT)
        if now.mean > thresholds["unusable_answers"]:
            yield finding(
                "answer/unusable",
                f"{100 * now.mean:.0f} % of the episodes of {now.span} end at the limit of turns",
                "the model goes on asking instead of answering, or the limit is too short for the task",
                "more turns, or a part of the reward that pays for an answer",
                share=now.mean,
            )
    errors = history.get("rollout/error_fraction")
    if errors is not None and (now := errors.finite.tail(RECENT)).mean > thresholds["tool_errors"]:
        yield finding(
            "reward/failed",
            f"{100 * now.mean:.0f} % of the episodes of {now.span} ended in an error of their environment",
            "the environment, a tool or the judge raises or does not answer: what it should have paid is lost",
            "see the trainer's messages of the kind of error, and mend the environment",
            severity="error" if now.mean > thresholds["tool_errors_error"] else "warning",
            share=now.mean,
        )


def _weighted(shares: Series, calls: Series) -> float:
    """The share over all calls: a step with a single call does not count as much as one with a thousand."""
    at = dict(zip(calls.finite.steps, calls.finite.values, strict=True))
    weights = [at.get(step, 0.0) for step in shares.steps]
    total = sum(weights)
    return sum(w * v for w, v in zip(weights, shares.values, strict=True)) / total if total else 0.0


def _names_error(event: object) -> bool:
    return isinstance(event, dict) and event.get("kind") == "tool/errors" and bool(event.get("error"))


CHECKS = (calls, ends)
