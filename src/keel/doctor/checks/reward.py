"""Rewards: numbers at all, with a spread, without a cliff, and not blown up by their normalisation."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left

from keel.doctor.advice import either, stronger, times
from keel.doctor.checks.base import (
    RECENT,
    CheckResults,
    Unchecked,
    clear,
    equal_groups,
    level,
    no_trend,
    not_recorded,
    omitted_steps,
    opt,
    reward_flat,
    reward_rose,
    reward_size,
    reward_trend,
    same_rewards,
    saturated,
    shape_of,
    solved,
    undecided,
)
from keel.doctor.checks.course import WRITTEN, rewritten, shift_steps
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.history import History, Record, Series, finite, step_of
from keel.doctor.shapes import AGAIN, LEAST, course, fall, frozen_since, median, noise, rise, trend, turns
from keel.doctor.thresholds import Thresholds

NO_SCALE = ("none", "dr_grpo")


def non_finite(history: History, thresholds: Thresholds) -> CheckResults:
    """A reward that is no number."""
    series = history.series.get("reward/mean")
    bad = set(series.bad_steps) if series is not None else set()
    omitted = omitted_steps(history, "reward/mean", "length/mean", "length/truncated_fraction", "reward/std")
    single = [record for record in _trained(history) if finite(record.get("reward")) is None]
    failures = [event for event in _failures(history) if _no_number(event)]
    skips = [event for event in history.events if event.get("nonfinite") in ("reward", "advantage")]
    if series is None and not history.rollouts:
        yield not_recorded("reward/non-finite", "the reward")
    if bad or single or failures or skips:
        steps = sorted(bad | {step_of(record) for record in (*single, *failures, *skips)})
        judge_messages = f"; the judge said {len(failures)} times: {failures[0].get('message')}" if failures else ""
        yield finding(
            "reward/non-finite",
            f"reward is not a finite number at {_steps(steps)}{judge_messages}",
            "a reward function divides by zero, takes a logarithm of 0, or passes on the NaN of another model",
            FINITE_REWARD,
        )
    elif omitted:
        yield finding(
            "reward/non-finite",
            f"the mean reward is missing at {_steps(omitted)}, whose other figures were logged",
            "trainers leave out what is not finite: a reward function divides by zero, or takes a logarithm of 0",
            FINITE_REWARD,
            severity="warning",
        )


FINITE_REWARD = (
    "return a finite number for every completion, malformed and empty ones included; for Keel, reward.on_error says "
    "what a failing reward earns"
)


def failed(history: History, thresholds: Thresholds) -> CheckResults:
    """Calls of a reward that gave no value, beside those that gave no number; or rewards that only such calls pay."""
    yield from _unpaid(history, thresholds)
    yield from _stopped(history, thresholds)
    failures = [event for event in _failures(history) if not _no_number(event)]
    if failures:
        steps = sorted({step_of(event) for event in failures})
        many = len(steps) > thresholds["skipped_share"] * max(history.steps, 1)
        yield finding(
            "reward/failed",
            f"{len(failures)} calls of a reward failed at {_steps(steps)}; the first: {failures[0].get('message')}",
            "the function raises, returns something else, or does not return within reward.timeout_s",
            "mend the function: what fails is paid as reward.on_error says, whatever the completion was worth",
            severity="error" if many else "warning",
        )


def _unpaid(history: History, thresholds: Thresholds) -> CheckResults:
    """Batches that earn one and the same reward, far off those around them, again and again."""
    rewards = history.get("reward/mean")
    for value in set() if rewards is None else {min(rewards.finite.values), max(rewards.finite.values)}:
        steps = _off_course(history, value, thresholds)
        if rewards is not None and len(steps) > thresholds["spike_share"] * len(rewards.finite):
            yield finding(
                "reward/failed",
                f"the mean reward is {value:.6g}, to the last digit, at {_steps(steps)} ({len(rewards.finite)} are "
                f"logged), far from what the batches around them earn (median {median(rewards):.3g})",
                "these batches were not judged: a worker that fails or is not reached pays them all the same; or their "
                "problems are of a kind on which all completions fare alike",
                "see what judged these batches, and that a failure is an error and no reward",
            )
            return


def _off_course(history: History, value: float, thresholds: Thresholds) -> list[int]:
    """Steps whose mean reward is that value, far from those of the others around them, where these are never alike.

    Several stretches of them, each with others before and after it: what comes once is a collapse, or a task solved.
    """
    rewards, alike = history.series["reward/mean"].finite, equal_groups(history)
    others = [(s, v) for s, v in zip(rewards.steps, rewards.values, strict=True) if v != value]
    if len(others) < max(LEAST, len(rewards) / 2):
        return []
    usual, deviation = Series.of(others), noise(Series.of(others))[0]
    silent = {s for s, v in zip(alike.steps, alike.values, strict=True) if v == 1} if alike is not None else None
    found: list[int] = []
    stretches: set[int] = set()
    for step in (s for s, v in zip(rewards.steps, rewards.values, strict=True) if v == value):
        at = bisect_left(usual.steps, step)
        near = usual.values[max(0, at - 5) : at + 5]
        far = abs(value - statistics.median(near)) > OFF * deviation and 0 < at < len(others)
        if far and (silent is None or step in silent):
            found.append(int(step))
            stretches.add(at)
    return found if len(stretches) >= 3 and deviation > 0 else []


OFF = 5.0  # deviations from the batches around them: chance does that once in a million, and never to the same digit


def _stopped(history: History, thresholds: Thresholds) -> CheckResults:
    """A part of the reward that falls to one value at once and stays there to the last digit."""
    for name in (name for name in history.series if name.startswith("reward/part/")):
        series = history.get(name)
        since, count = frozen_since(series) if series is not None else (0, 0)
        if series is None or count < LEAST or len(series.finite) - count < RECENT:
            continue
        before, value = series.finite.head(len(series.finite) - count), series.finite.values[-1]
        last = before.tail(RECENT)
        lost = median(last) - value
        at_once = lost > OFF * noise(before)[0] and min(last.values) - value > lost / 2 and len(set(last.values)) > 2
        at_once = at_once and not rewritten(history, since, thresholds, WRITTEN[1:])  # else it is the policy that broke
        if at_once and value <= min(before.values) and lost > thresholds["gap_reward"] * reward_size(history):
            yield finding(
                "reward/failed",
                f"{name.removeprefix('reward/part/')} is {value:.6g}, to the last digit, at each of {count} logged "
                f"steps since step {since}, and was {median(last):.3g} over {last.span}",
                "what judges this part fails or is not reached any more, and pays all completions alike: no policy "
                "unlearns a part to the last completion from one step to the next",
                f"see the verifier's own log from step {since} on; go on from a checkpoint before it",
            )


def _failures(history: History) -> list[Record]:
    return [event for event in history.events if event.get("kind") == "reward/failed"]


def _no_number(event: Record) -> bool:
    """Whether the judge's message is about NaN or an infinity."""
    return re.search(r"(?:returned|is) [+-]?(?:nan|inf)\b", str(event.get("message"))) is not None


def constant(history: History, thresholds: Thresholds) -> CheckResults:
    """Groups without spread."""
    share, limit = equal_groups(history), thresholds["zero_variance_groups"]
    if share is None:
        yield not_recorded("reward/constant", "the share of groups without spread")
        return
    now, all_along = share.tail(RECENT), share.mean > limit
    if now.mean <= limit:
        return
    finite_shares = share.finite.values
    idle = sum(value > limit for value in finite_shares) / len(finite_shares)
    reward = history.get("reward/mean")
    paid = f", mean reward {reward.tail(RECENT).mean:.3g}" if reward is not None else ""
    done = solved(history, thresholds) or (not all_along and reward_rose(history, thresholds))
    done = done or (saturated(history, thresholds) and same_rewards(history) is None)
    done = done and not any(isinstance(result, Finding) for result in part_falling(history, thresholds))
    yield finding(
        "reward/constant",
        f"{100 * now.mean:.0f} % of the groups had equal rewards over {now.span}{paid}"
        + ("; so it was in the whole run" if all_along else f"; so it was at {100 * idle:.0f} % of the steps"),
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
        # what was solved on the way was learned, but most of the run's steps had nothing to learn from
        severity=None if not done else "warning" if all_along or idle > thresholds["mostly_idle"] else "note",
        share=now.mean,
    )


def collapsed(history: History, thresholds: Thresholds) -> CheckResults:
    """Far below the highest level, and staying there."""
    code = "reward/collapse"
    shape = shape_of(history, code, "reward/mean", "the reward", fall)
    if isinstance(shape, Unchecked):
        yield shape
        return
    yield from _relapses(history, thresholds)
    rewards, change = shape
    floor = min(0.0, *rewards.finite.values)
    lost, course = -change.size, trend(rewards)
    far = lost > thresholds["reward_collapse"] * (change.before - floor)
    steady = course is not None and course.size < 0 and clear(course, thresholds)
    steady = steady and 2 * lost > thresholds["reward_collapse"] * (change.before - floor)
    risen = rise(rewards)
    unlearned = (
        risen is not None
        and clear(risen, thresholds)
        and risen.size > thresholds["gap_reward"] * reward_size(history)
        and lost > thresholds["reward_unlearned"] * risen.size
    )
    if (
        clear(change, thresholds)
        and (far or steady or unlearned)
        and lost > thresholds["gap_reward"] * reward_size(history)
        and not any(abs(change.step - step) <= 0.05 * history.steps for step in shift_steps(history, thresholds))
    ):
        yield finding(
            code,
            f"the reward fell from {change.before:.3g} at its best to {change.after:.3g} at the end, from step "
            f"{change.step} on; chance under its noise: {change.chance:.1g}{_beside(history)}",
            "updates too large for what the batches say, a policy that found text no reward was made for, or, if it "
            "falls from the first step on, a loss or an advantage of the wrong sign",
            either(
                times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
                stronger(history.config, history.source),
                f"go on from a checkpoint before step {change.step}, and read the completions after it",
            ),
            severity=None if far else "warning",
        )


def _relapses(history: History, thresholds: Thresholds) -> CheckResults:
    """A reward that falls apart and comes back, more than once."""
    rewards = history.get("reward/mean")
    if rewards is None:
        return
    floor, best = min(0.0, *rewards.finite.values), rise(rewards)
    size = thresholds["reward_collapse"] * (best.after - floor) if best is not None else 0.0
    count, chance = turns(rewards, max(size, thresholds["gap_reward"] * reward_size(history)))
    if count >= AGAIN and chance <= level(thresholds) and size > 0:
        yield finding(
            "reward/collapse",
            f"the level of the reward goes down and up {count} times by more than {size:.3g}, half of what is earned "
            f"at best ({rewards.span}; chance of such a turn under noise: {chance:.1g}){_beside(history)}",
            "the policy falls apart and recovers by turns: updates too large for what the batches say, something that "
            "is steered and overshoots, or batches of different kinds that come in turns",
            either(
                times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
                stronger(history.config, history.source),
                "read completions from where the reward is lowest",
            ),
            severity="warning",
        )


def _beside(history: History) -> str:
    """What KL, entropy and length did meanwhile."""
    names = {"entropy/mean": "entropy", "length/mean": "length"} | (
        {f"{history.kl[0]}/mean": "KL"} if history.kl is not None else {}
    )
    moved = [
        f"{label} {series.finite.head(RECENT).mean:.3g} → {series.finite.tail(RECENT).mean:.3g}"
        for name, label in names.items()
        if (series := history.get(name)) is not None
    ]
    return f"; meanwhile {', '.join(moved)}" if moved else ""


def part_falling(history: History, thresholds: Thresholds) -> CheckResults:
    """A part of the reward that goes down while the sum goes up."""
    code = "reward/part-falling"
    parts = {n.removeprefix("reward/part/"): history.get(n) for n in history.series if n.startswith("reward/part/")}
    shape = shape_of(history, code, "reward/mean", "the reward", course)
    if not any(parts.values()):
        shape = not_recorded(code, "the reward's parts beside its sum")
    if isinstance(shape, Unchecked):
        yield shape
        return
    total = shape[1]
    if not clear(total, thresholds) or total.size <= 0:
        return
    for name, series in parts.items():
        change = course(series) if series is not None else None
        if (
            series is not None
            and change is not None
            and clear(change, thresholds, len(parts))
            and -change.size > thresholds["gap_reward"] * max(abs(change.before), abs(change.after))
        ):
            yield finding(
                code,
                f"{name} falls from {change.before:.3g} to {change.after:.3g} while the reward rises from "
                f"{total.before:.3g} to {total.after:.3g} ({series.span}; chance under noise: {change.chance:.1g})",
                "another part pays more for what this one forbids: the policy trades it away",
                f"a larger weight on {name}, or pay the other part only where {name} is earned; read the best paid "
                "completions",
            )


def scale(history: History, thresholds: Thresholds) -> CheckResults:
    """Advantages far from size 1: the policy term then drowns whatever has a coefficient of its own."""
    code, limit = "reward/scale", thresholds["reward_scale"]
    if history.beta == 0:
        return
    known = advantage_size(history)
    if known is None:
        yield Unchecked(code, "neither advantages nor whether rewards are divided by their deviation is in the log")
        return
    size, text = known
    if size > limit:
        yield finding(
            code,
            f"{text} {size:.3g} (median over the run)",
            "the reward's scale multiplies the policy term only: KL term and entropy bonus act as if their "
            f"coefficients were {size:.2g} times smaller",
            f"divide the reward by {size:.2g}, or let advantages be divided by their deviation "
            f"({opt(history, 'loss.scale_rewards')})",
        )


def advantage_size(history: History) -> tuple[float, str] | None:
    """(size, what it is the size of) of what multiplies the policy term; None where the log does not show it."""
    largest, spread = history.get("advantage/max"), history.get("reward/within_group_std") or history.get("reward/std")
    divides = history.option("loss.scale_rewards") or history.option("loss.loss_type")
    if largest is not None:
        return median(largest), "the largest advantage of a batch is"
    if spread is not None and (divides in NO_SCALE or history.option("loss.scale_rewards") is False):
        return median(spread), "advantages are not divided by their deviation, and that of the rewards is"
    return None


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
    if spread.mean >= thresholds["reward_spread"] or solved(history, thresholds) or saturated(history, thresholds):
        return
    flat = reward_flat(history, thresholds)
    if flat is None:
        yield undecided("reward/weak", history, thresholds)
    elif not reward_rose(history, thresholds):
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
    if silent is None and saturated(history, thresholds):
        spread = spread.head(RECENT)  # most groups are alike by now, and a mean over all does not tell of the others
    live = dict(zip(silent.steps, silent.values, strict=True)) if silent is not None else {}
    typical = [
        value / (1 - live.get(step, 0.0))
        for step, value in zip(spread.steps, spread.values, strict=True)
        if value > 0 and 0 <= live.get(step, 0.0) < 1
    ]
    typical = [value for value in typical if value > 0]
    if not typical:
        return  # no group has any spread: reward/constant
    middle = statistics.median(typical)
    ends = [series for name in ("reward/max", "reward/min") if (series := history.get(name)) is not None]
    known = [abs(value) for series in ends for value in series.finite.values] if len(ends) == 2 else []
    size = min(1.0, max(known, default=1.0)) or 1.0  # in small units differences are small, and meant
    if size / middle > thresholds["advantage_amplification"]:
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
    rewards = [value for record in _trained(history) if (value := finite(record.get("reward"))) is not None]
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


CHECKS = (non_finite, failed, cliff, constant, amplified, weak, collapsed, part_falling, scale)
