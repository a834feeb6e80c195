"""Rewards: numbers at all, with a spread, without a cliff, and not blown up by their normalisation."""

from __future__ import annotations

import math
import re
import statistics

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import either, times
from keel.lab.doctor.checks.base import (
    RECENT,
    CheckResults,
    Unchecked,
    no_trend,
    not_recorded,
    opt,
    reward_rose,
    reward_trend,
    solved,
)
from keel.lab.doctor.findings import finding, propose
from keel.lab.doctor.history import History, Record, Series
from keel.lab.runs import number

NO_SCALE = ("none", "dr_grpo")


def non_finite(history: History, thresholds: Thresholds) -> CheckResults:
    """A reward that is no number."""
    series = history.series.get("reward/mean")
    bad = set(series.bad_steps) if series is not None else set()
    single = [record for record in _trained(history) if number(record.get("reward")) is None]
    failures = [event for event in _failures(history) if _no_number(event)]
    if series is None and not history.rollouts:
        yield not_recorded("reward/non-finite", "the reward")
    if bad or single or failures:
        steps = sorted(bad | {int(record.get("step") or 0) for record in (*single, *failures)})
        judge_messages = f"; the judge said {len(failures)} times: {failures[0].get('message')}" if failures else ""
        yield finding(
            "reward/non-finite",
            f"reward is not a finite number at {_steps(steps)}{judge_messages}",
            "a reward function divides by zero, takes a logarithm of 0, or passes on the NaN of another model",
            "return a finite number for every completion, malformed and empty ones included; for Keel, "
            "reward.on_error says what a failing reward earns",
        )


def failed(history: History, thresholds: Thresholds) -> CheckResults:
    """Calls of a reward that gave no value, beside those that gave no number."""
    failures = [event for event in _failures(history) if not _no_number(event)]
    if failures:
        steps = sorted({int(event.get("step") or 0) for event in failures})
        many = len(steps) > thresholds["skipped_share"] * max(history.steps, 1)
        yield finding(
            "reward/failed",
            f"{len(failures)} calls of a reward failed at {_steps(steps)}; the first: {failures[0].get('message')}",
            "the function raises, returns something else, or does not return within reward.timeout_s",
            "mend the function: what fails is paid as reward.on_error says, whatever the completion was worth",
            severity="error" if many else "warning",
        )


def _failures(history: History) -> list[Record]:
    return [event for event in history.events if event.get("kind") == "reward/failed"]


def _no_number(event: Record) -> bool:
    """Whether the judge's message is about NaN or an infinity."""
    return re.search(r"(?:returned|is) [+-]?(?:nan|inf)\b", str(event.get("message"))) is not None


def constant(history: History, thresholds: Thresholds) -> CheckResults:
    """Groups without spread."""
    share, limit = history.get("reward/zero_variance_fraction"), thresholds["zero_variance_groups"]
    if share is None:
        spread = history.get("reward/within_group_std") or history.get("reward/std")
        if spread is None:
            yield not_recorded("reward/constant", "the share of groups without spread")
            return
        share = Series.of((s, 1.0 if v == 0 else 0.0) for s, v in zip(spread.steps, spread.values, strict=True))
    now, all_along = share.tail(RECENT), share.mean > limit
    if now.mean <= limit:
        return
    reward = history.get("reward/mean")
    level = f", mean reward {reward.tail(RECENT).mean:.3g}" if reward is not None else ""
    done = solved(history, thresholds) or (not all_along and reward_rose(history, thresholds))
    yield finding(
        "reward/constant",
        f"{100 * now.mean:.0f} % of the groups had equal rewards over {now.span}{level}"
        + ("; so it was in the whole run" if all_along else ""),
        "the task is solved: every completion earns the full reward"
        if done
        else "every completion fails, or every one succeeds, or the reward does not look at the completion",
        "harder problems, or stop here"
        if done
        else either(
            times(history.config, "rollout.num_generations", 2, "twice", history.source),
            "problems that succeed now and then (easier ones, a warm start)",
            "a reward part that pays for coming closer",
        ),
        severity="note" if done else None,
    )


def weak(history: History, thresholds: Thresholds) -> CheckResults:
    """Little spread within groups, with a reward that does not move."""
    spread, name = history.get("reward/within_group_std"), "within-group std"
    if spread is None:  # the spread of a whole batch is at least that of its groups
        spread, name = history.get("reward/std"), "std over the batch (the groups' own is at most that)"
    trend = reward_trend(history)
    if spread is None:
        yield not_recorded("reward/weak", "the spread of the rewards")
        return
    if trend is None:
        yield no_trend("reward/weak", history)
        return
    least = int(thresholds["steps_to_judge"])
    if len(spread) < least:
        yield Unchecked("reward/weak", f"{len(spread)} steps are too few to call a reward flat: {least} are needed")
        return
    silent = history.get("reward/zero_variance_fraction")
    if silent is not None and silent.tail(RECENT).mean > thresholds["zero_variance_groups"]:
        return  # that is reward/constant
    if (
        spread.mean < thresholds["reward_spread"]
        and not reward_rose(history, thresholds)
        and not solved(history, thresholds)
    ):
        yield finding(
            "reward/weak",
            f"{name} is {spread.mean:.3g} on average over {spread.span}, and {trend.text}",
            "completions of a group earn nearly the same, so differences are mostly noise",
            "a reward that tells completions apart (graded parts, larger weights), or problems of middling difficulty",
        )


def amplified(history: History, thresholds: Thresholds) -> CheckResults:
    """1 / (std of the groups that have any), where advantages are divided by it."""
    code = "advantage/amplified"
    scale = history.option("loss.scale_rewards") or history.option("loss.loss_type")
    if scale in (*NO_SCALE, False):
        return
    spread, silent = history.get("reward/within_group_std"), history.get("reward/zero_variance_fraction")
    label = "within-group std of the groups with spread"
    if spread is None:
        spread, silent, label = history.get("reward/std"), None, "std of the whole batch (a group's is at most that)"
    if spread is None:
        yield not_recorded(code, "the spread of the rewards within groups")
        return
    live = dict(zip(silent.steps, silent.values, strict=True)) if silent is not None else {}
    typical = [
        value / (1 - live.get(step, 0.0))
        for step, value in zip(spread.steps, spread.values, strict=True)
        if math.isfinite(value) and value > 0 and live.get(step, 0.0) < 1
    ]
    if not typical:
        return  # no group has any spread: reward/constant
    middle = statistics.median(typical)
    if 1 / middle > thresholds["advantage_amplification"]:
        unsure = history.option("loss") is None
        yield finding(
            code,
            f"{label} is {middle:.3g} (median over {spread.span}): dividing by it amplifies {1 / middle:.0f} times"
            + ("; whether this run divides is not in the log" if unsure else ""),
            "rewards of a group differ by noise, and the division by their std gives the noise full size",
            either(
                propose("{} (dr_grpo does so too)", {opt(history, "loss.scale_rewards"): "none"}),
                "a reward whose differences mean something",
            ),
            severity="warning" if unsure else None,
        )


def cliff(history: History, thresholds: Thresholds) -> CheckResults:
    """Most completions at one negative reward, far below all the others."""
    rewards = [value for record in _trained(history) if (value := number(record.get("reward"))) is not None]
    if len(rewards) < 8:
        yield Unchecked("reward/cliff", "rewards of single completions are needed, and too few were recorded")
        return
    parsed = history.get("parse/ok_fraction")
    lowest = min(rewards)
    others = sorted(value for value in rewards if value > lowest + 1e-9)
    share = 1 - len(others) / len(rewards)
    if (
        lowest >= 0
        or share < thresholds["cliff_share"]
        or (parsed is not None and parsed.mean > thresholds["cliff_parsed"])
    ):
        return
    gap = others[0] - lowest if others else abs(lowest)
    spread = others[-1] - others[0] if others else 0.0
    if gap < thresholds["cliff_gap"] or gap <= thresholds["reward_cliff"] * spread:
        return
    read = f", of which {100 * parsed.mean:.0f} % could be read" if parsed is not None else ""
    yield finding(
        "reward/cliff",
        f"{100 * share:.0f} % of {len(rewards)} recorded completions earn {lowest:g}{read}; the next reward is "
        f"{gap:.3g} higher, the others span {spread:.3g}",
        "failing costs more than all that is to be learned is worth, so a chance success or failure rules the update",
        "a graduated reward: parts for form before content, and a malformed answer at −0.3 or 0 instead of "
        f"{lowest:g}" + ("; reward.warmup_steps eases it in" if history.source == "keel" else ""),
    )


def _trained(history: History) -> list[Record]:
    """Rollouts of training, without the held-out ones that are tracked."""
    return [record for record in history.rollouts if not record.get("tracked")]


def _steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


CHECKS = (non_finite, failed, cliff, constant, amplified, weak)
