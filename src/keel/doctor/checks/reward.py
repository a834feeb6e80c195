"""Rewards: finite values, spread within groups, cliffs, and amplification by normalisation."""

from __future__ import annotations

import re
import statistics

from keel.doctor.advice import either
from keel.doctor.checks.base import (
    RECENT,
    CheckResults,
    Log,
    Missing,
    advantage_size,
    check,
    not_shown,
    of_steps,
    percent,
)
from keel.doctor.checks.course import WRITTEN, rewritten, shifts
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.history import Record, Series, divides_by_std, finite, step_of
from keel.doctor.shapes import LEAST, course, fall, frozen_since, median, noise, rise, trend

PENALTIES = ("penal", "punish", "overlong")  # in names of parts whose best value is 0
OFF = 5.0  # standard deviations: noise exceeds them once in a million, and never repeats exactly
FINITE_REWARD = (
    "return a finite number for every completion, also if it is malformed or empty; in Keel, reward.on_error decides "
    "what happens if a reward fails"
)


@check("reward/non-finite")
def non_finite(log: Log) -> CheckResults:
    """A non-finite reward."""
    series = log.series.get("reward/mean")
    if series is None and not log.rollouts:
        raise not_shown("the reward")
    bad = set(series.bad_steps) if series is not None else set()
    single = [record for record in _trained(log) if finite(record.get("reward")) is None]
    failures = [event for event in _failures(log) if _no_number(event)]
    skips = [event for event in log.events if event.get("nonfinite") in ("reward", "advantage")]
    omitted = log.omitted("reward/mean", "length/mean", "length/truncated_fraction", "reward/std")
    if bad or single or failures or skips:
        steps = sorted(bad | {step_of(record) for record in (*single, *failures, *skips)})
        judge_messages = f"; {len(failures)} messages, such as {failures[0].get('message')}" if failures else ""
        yield finding(
            "reward/non-finite",
            f"reward is not a finite number at {of_steps(steps)}{judge_messages}",
            "a reward function divides by zero, takes a logarithm of 0, or returns the NaN of another model",
            FINITE_REWARD,
        )
    elif omitted:
        yield finding(
            "reward/non-finite",
            f"the mean reward is missing at {of_steps(omitted)}, although other metrics of these steps were logged",
            "some trainers do not log values that are not finite: a reward function divides by zero, or takes a "
            "logarithm of 0",
            FINITE_REWARD,
            severity="warning",
        )


@check("reward/failed")
def failed(log: Log) -> CheckResults:
    """Reward calls that failed, other than by a non-finite value."""
    failures = [event for event in _failures(log) if not _no_number(event)]
    if failures:
        steps = sorted({step_of(event) for event in failures})
        many = len(steps) > log.limits["skipped_share"] * max(log.steps, 1)
        yield finding(
            "reward/failed",
            f"{len(failures)} calls of a reward failed at {of_steps(steps)}; the first: {failures[0].get('message')}",
            "the function raises, returns something else, or does not return within reward.timeout_s",
            "fix the function: the reward of a failed call is set by reward.on_error and not by the completion",
            severity="error" if many else "warning",
        )


def _failures(log: Log) -> list[Record]:
    return [event for event in log.events if event.get("kind") == "reward/failed"]


def _no_number(event: Record) -> bool:
    """Whether the judge's message reports NaN or an infinity."""
    return re.search(r"(?:returned|is) [+-]?(?:nan|inf)\b", str(event.get("message"))) is not None


@check()
def unjudged(log: Log) -> CheckResults:
    """A reward part that is exactly constant: at 0 or less in the whole run, or from one step on."""
    for name, series in _parts(log).items():
        since, count = frozen_since(series)
        before, value = series.finite.head(len(series.finite) - count), series.finite.values[-1]
        if count < LEAST or value > min(before.values, default=0.0):
            continue
        last = before.tail(RECENT)
        lost = median(last) - value if before.values else 0.0
        # if the text changed as well, the policy collapsed and not the judge
        at_once = len(set(last.values)) > 2 and lost > OFF * noise(before)[0] and min(last.values) - value > lost / 2
        at_once = at_once and not rewritten(log, since, WRITTEN[1:]) and lost > log.limits["gap_reward"] * log.size
        never = not before.values and len(_parts(log)) > 1 and not any(word in name for word in PENALTIES)
        if not at_once and not never:
            continue
        yield finding(
            "reward/failed",
            f"{name} is exactly {value:.6g} at each of {count} logged steps since step {since}"
            + (f", and was {median(last):.3g} over {last.span}" if before.values else ""),
            "the judge of this part fails, is not reached or cannot parse completions, and gives all the same value: "
            "no "
            "policy fails a part at every completion, or unlearns it from one step to the next",
            f"compute {name} of a right answer, and check the verifier's own log from step {since} on",
            severity=None if before.values else "warning",
        )


def _parts(log: Log) -> dict[str, Series]:
    names = [name for name in log.series if name.startswith("reward/part/")]
    return {n.removeprefix("reward/part/"): series for n in names if (series := log.get(n)) is not None}


@check("reward/cliff")
def cliff(log: Log) -> CheckResults:
    """Most completions earn one negative reward, far below all others."""
    rewards = [value for record in _trained(log) if (value := finite(record.get("reward"))) is not None]
    if len(rewards) < 8:
        raise Missing("too few rewards of single completions were recorded")
    parsed, lowest = log.get("parse/ok_fraction"), min(rewards)
    others = sorted(value for value in rewards if value > lowest + 1e-9)
    share = 1 - len(others) / len(rewards)
    readable = parsed is not None and parsed.mean > log.limits["cliff_parsed"]
    gap, spread = (others[0] - lowest, others[-1] - others[0]) if others else (abs(lowest), 0.0)
    if lowest >= 0 or share < log.limits["cliff_share"] or readable:
        return
    if gap < log.limits["cliff_gap"] or gap <= log.limits["reward_cliff"] * spread:
        return
    read = f", of which {percent(parsed.mean)} could be parsed" if parsed is not None else ""
    yield finding(
        "reward/cliff",
        f"{percent(share)} of {len(rewards)} recorded completions earn {lowest:g}{read}; the next reward is "
        f"{gap:.3g} higher, and the range of the others is {spread:.3g}",
        "failing costs far more than the other rewards differ by, so a success by chance dominates the update",
        "use a graded reward: parts for the format before the content, and −0.3 or 0 for a malformed answer instead of "
        f"{lowest:g}" + ("; reward.warmup_steps phases the reward in" if log.source == "keel" else ""),
    )


def _trained(log: Log) -> list[Record]:
    """Rollouts of training, without tracked held-out ones."""
    return [record for record in log.rollouts if not record.get("tracked")]


@check("reward/constant")
def constant(log: Log) -> CheckResults:
    """Groups whose rewards are all equal."""
    share, limit, reward = log.equal_groups, log.limits["zero_variance_groups"], log.get("reward/mean")
    if share is None:
        raise not_shown("the share of groups without spread")
    now, all_along = share.tail(RECENT), share.mean > limit
    if now.mean <= limit:
        return
    idle = len(share.finite.where(lambda value: value > limit)) / len(share.finite)
    done = log.solved_held_out or (not all_along and log.rose) or (log.saturated and log.same_rewards is None)
    done = done and not any(isinstance(result, Finding) for result in part_falling(log))
    yield finding(
        "reward/constant",
        f"{percent(now.mean)} of the groups had equal rewards over {now.span}"
        + (f", mean reward {reward.tail(RECENT).mean:.3g}" if reward is not None else "")
        + ("; this holds for the whole run" if all_along else f"; this holds at {percent(idle)} of the steps"),
        "the task is solved: every completion earns the full reward"
        if done
        else "all completions fail, or all succeed, or the reward does not depend on the completion",
        "use harder problems, or stop here"
        if done
        else either(
            log.times("rollout.num_generations", 2, "twice"),
            "problems that the policy solves sometimes (easier ones, or a warm start)",
            "a reward part for partial success",
        ),
        # the run learned the task, but most of its steps had no signal
        severity=None if not done else "warning" if all_along or idle > log.limits["mostly_idle"] else "note",
        share=now.mean,
    )


@check("advantage/amplified")
def amplified(log: Log) -> CheckResults:
    """Advantages amplified by a large 1 / (std of the groups with spread), if they are divided by it."""
    if not divides_by_std(log):
        return
    spread, silent = log.get("reward/within_group_std"), log.get("reward/zero_variance_fraction")
    label = "within-group std of the groups with spread"
    if spread is None:
        spread, silent = log.need("reward/std", "the spread of the rewards within groups"), None
        label = "std of the whole batch (that of a group is at most as large)"
    if silent is None and log.saturated:
        spread = spread.head(RECENT)  # later most groups have equal rewards, which lowers the mean
    live = dict(zip(silent.steps, silent.values, strict=True)) if silent is not None else {}
    shares = [(value, 1 - live.get(step, 0.0)) for step, value in zip(spread.steps, spread.values, strict=True)]
    typical = [value / differ for value, differ in shares if value > 0 and 0 < differ <= 1]
    if not typical:
        return  # reported as reward/constant
    middle = statistics.median(typical)
    highest, lowest = log.get("reward/max"), log.get("reward/min")
    known = (*highest.finite.values, *lowest.finite.values) if highest is not None and lowest is not None else ()
    # for rewards on a small scale, small differences are intended
    size = min(1.0, max(map(abs, known), default=1.0)) or 1.0
    if size / middle > log.limits["advantage_amplification"]:
        unsure = log.option("loss") is None
        yield finding(
            "advantage/amplified",
            f"{label} is {middle:.3g} (median over {spread.span}): division by it multiplies differences by "
            f"{1 / middle:.0f}" + ("; the log does not show whether this run divides" if unsure else ""),
            "rewards of a group differ only by noise, and division by their std turns the noise into full-size "
            "advantages",
            either(
                propose("{} (as dr_grpo does)", {log.opt("loss.scale_rewards"): "none"}),
                "a reward whose differences depend on the answer",
            ),
            severity="warning" if unsure else None,
        )


@check("reward/weak")
def weak(log: Log) -> CheckResults:
    """Little spread within groups, and a reward that does not rise."""
    spread, name = log.get("reward/within_group_std"), "within-group std"
    if spread is None:  # the batch's spread is at least that of its groups
        spread = log.need("reward/std", "the spread of the rewards")
        name = "std over the batch (the mean within-group std is at most as large)"
    gain, least = log.need_trend, int(log.limits["steps_to_judge"])
    if len(spread) < least:
        raise Missing(f"{len(spread)} steps are too few to call a reward flat: {least} are needed")
    if log.now("reward/zero_variance_fraction") > log.limits["zero_variance_groups"]:
        return  # reported as reward/constant
    if spread.mean < log.limits["reward_spread"] and not log.solved and not log.rose and (log.flat or gain.z_score < 0):
        yield finding(
            "reward/weak",
            f"{name} is {spread.mean:.3g} on average over {spread.span}, and {gain.text}",
            "completions of a group earn nearly the same reward, so differences are mostly noise",
            "use a reward that distinguishes completions (graded parts, larger weights), or problems of medium "
            "difficulty",
        )


@check("reward/collapse")
def collapsed(log: Log) -> CheckResults:
    """A reward far below its highest level that does not recover."""
    rewards, change = log.shape("reward/mean", "the reward", fall)
    floor, best, least = min(0.0, *rewards.finite.values), rise(rewards), log.limits["gap_reward"] * log.size
    lost, steady = -change.size, trend(rewards)
    most = log.limits["reward_collapse"] * (change.before - floor)
    falls = lost > most or (steady is not None and steady.size < 0 and log.clear(steady) and 2 * lost > most)
    learned = best.size if best is not None and log.clear(best) and best.size > least else float("inf")
    if (
        log.clear(change)
        and (falls or lost > log.limits["reward_unlearned"] * learned)
        and lost > least
        and not any(abs(change.step - step) <= 0.05 * log.steps for step in shifts(log))
    ):
        yield finding(
            "reward/collapse",
            f"the reward fell from {change.before:.3g} at its best to {change.after:.3g} at the end, from step "
            f"{change.step} on; chance under noise: {change.chance:.1g}",
            "updates are too large, or the policy writes text that the reward was not made for; if the reward falls "
            "from "
            "the first step on, the loss or the advantage has the wrong sign",
            either(
                log.rate(0.3, "a third of"),
                log.stronger,
                f"resume from a checkpoint before step {change.step}, and read the completions after it",
            ),
            severity=None if lost > most else "warning",
        )


@check("reward/part-falling")
def part_falling(log: Log) -> CheckResults:
    """A part of the reward falls while the total rises."""
    total, parts = log.shape("reward/mean", "the reward", course)[1], _parts(log)
    if not parts:
        raise not_shown("the parts of the reward")
    for name, series in parts.items() if log.clear(total) and total.size > 0 else ():
        change = course(series)
        if change is None or not log.clear(change, len(parts)):
            continue
        if -change.size > log.limits["gap_reward"] * max(abs(change.before), abs(change.after)):
            yield finding(
                "reward/part-falling",
                f"{name} falls from {change.before:.3g} to {change.after:.3g} while the reward rises from "
                f"{total.before:.3g} to {total.after:.3g} ({series.span}; chance under noise: {change.chance:.1g})",
                f"another part pays more for text that fails {name}, so the policy improves that part at the cost "
                f"of {name}",
                f"use a larger weight on {name}, or pay the other part only if {name} is earned; read the completions "
                "with the highest rewards",
            )


@check("reward/scale")
def scale(log: Log) -> CheckResults:
    """Advantages far larger than 1: the policy term then outweighs every term with a fixed coefficient."""
    if log.beta == 0:
        return
    known = advantage_size(log)
    if known is None:
        raise Missing("the log shows neither advantages nor whether rewards are divided by their deviation")
    size, text = known
    if size > log.limits["reward_scale"]:
        yield finding(
            "reward/scale",
            f"{text} {size:.3g} (median over the run)",
            "the scale of the reward multiplies only the policy term, so the KL term and the entropy bonus act as if "
            f"their coefficients were {size:.2g} times smaller",
            f"divide the reward by {size:.2g}, or let advantages be divided by their deviation "
            f"({log.opt('loss.scale_rewards')})",
        )
