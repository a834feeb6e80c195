"""What the model writes: noise, torsos, the unreadable, ever more, ever the same."""

from __future__ import annotations

import math

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import either, setting, stronger, times
from keel.lab.doctor.checks.base import (
    RECENT,
    CheckResults,
    Unchecked,
    clear,
    not_recorded,
    opt,
    reward_rose,
    reward_trend,
    solved,
)
from keel.lab.doctor.findings import Options, finding
from keel.lab.doctor.history import History
from keel.lab.doctor.shapes import trend


def random_weights(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy at the start against that of drawing tokens blindly."""
    code, entropy = "output/random-weights", history.get("entropy/mean")
    if entropy is None or history.vocabulary is None:
        yield not_recorded(code, "the entropy" if entropy is None else "the size of the vocabulary")
        return
    uniform, first = math.log(history.vocabulary), entropy.finite.head(3)
    share = first.mean / uniform
    if share > thresholds["entropy_uniform_share"]:
        yield finding(
            code,
            f"entropy is {first.mean:.3g} nats over {first.span}, {100 * share:.0f} % of ln({history.vocabulary}) = "
            f"{uniform:.3g}, that of drawing tokens blindly",
            "the weights are random or were not loaded",
            "name a trained model in model.name, or give a warmstart section; check that loading reported no missing "
            "weights",
        )


def truncated(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of completions that end at the limit."""
    series = history.get("length/truncated_fraction")
    if series is None:
        yield not_recorded("output/truncated", "the share of truncated completions")
        return
    now = series.tail(RECENT)
    if now.mean <= thresholds["truncated_completions"]:
        return
    limit = history.option("rollout.max_completion_length")
    at = f" at {opt(history, 'rollout.max_completion_length')} = {limit}" if limit else ""
    turn = history.option("rollout.max_turn_length")
    at += f", or a turn at rollout.max_turn_length = {turn}" if turn else ""
    yield finding(
        "output/truncated",
        f"{100 * now.mean:.0f} % of the completions of {now.span} end at the length limit{at}",
        "the limit is too short for the task, or the model never writes its end-of-text token",
        either(
            times(history.config, "rollout.max_completion_length", 2, "twice", history.source),
            f"if completions ramble on, a stop string{' (rollout.stop)' if history.source == 'keel' else ''} or a warm "
            "start that ends its answers",
            joined="; ",
        ),
        severity="error" if now.mean > thresholds["truncated_completions_error"] else "warning",
    )


def prompts(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of prompts that were cut."""
    series = history.get("prompt/truncated_fraction")
    if series is None:
        if history.source != "keel" or history.option("data.truncation") not in (None, "error"):
            yield not_recorded("prompt/truncated", "the share of truncated prompts")
        return
    if series.mean > thresholds["truncated_prompts"]:
        yield finding(
            "prompt/truncated",
            f"{100 * series.mean:.1f} % of the prompts of {series.span} were cut at the limit",
            "the prompt limit is shorter than the data",
            either(
                times(history.config, "data.max_prompt_length", 2, "twice", history.source), "leave overlong rows out"
            ),
        )


def unparseable(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of completions that the task can read."""
    series = history.get("parse/ok_fraction")
    if series is None:
        yield not_recorded("output/unparseable", "the share of readable completions")
        return
    now = series.tail(RECENT)
    if now.mean >= thresholds["parse_rate_warning"] or reward_rose(history, thresholds):
        return
    yield finding(
        "output/unparseable",
        f"{100 * now.mean:.1f} % of the completions of {now.span} could be read",
        "the model does not know the answer's form: a base model without examples, a wrong chat template, random "
        "weights",
        "a warmstart section on gold answers, or a system prompt that shows the form (data.system_prompt), and a "
        "reward part that pays for it",
        severity="error" if now.mean < thresholds["parse_rate"] else "warning",
    )


def longer(history: History, thresholds: Thresholds) -> CheckResults:
    """Length that grows while the reward does not."""
    series = history.get("length/mean")
    if series is None:
        yield not_recorded("length/explosion", "the length of completions")
        return
    if len(series) < 2 * RECENT:
        yield Unchecked("length/explosion", f"{len(series)} steps are too few: {2 * RECENT} are needed")
        return
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    change = trend(series)
    if change is not None and not clear(change, thresholds):
        return
    if now.mean > thresholds["length_growth"] * first.mean and not reward_rose(history, thresholds):
        gain = reward_trend(history)
        yield finding(
            "length/explosion",
            f"completions have {first.mean:.0f} tokens over {first.span} and {now.mean:.0f} over {now.span}"
            + (f", and {gain.text}" if gain is not None else ""),
            "a loss that divides by length makes long failures cheap, or the reward pays for length",
            either(
                either(*(setting("{}", _loss(history, name)) for name in ("dr_grpo", "dapo"))),
                "which do not favour length: look at the completions",
                joined=", ",
            )
            if _loss(history, "dr_grpo") or _loss(history, "dapo")
            else "a loss whose denominator does not favour length; look at the completions",
        )


def collapse(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy gone without the task being solved."""
    code, series = "entropy/collapse", history.get("entropy/mean")
    if series is None:
        yield not_recorded(code, "the entropy")
        return
    if len(series) < 2 * RECENT:
        yield Unchecked(code, f"{len(series)} steps are too few: {2 * RECENT} are needed")
        return
    first, now = series.finite.head(3).mean, series.finite.tail(RECENT)
    gone = now.mean < thresholds["entropy_collapse"] and now.mean < thresholds["entropy_collapse_share"] * first
    if gone and not reward_rose(history, thresholds) and not solved(history, thresholds):
        yield finding(
            code,
            f"entropy fell from {first:.3g} to {now.mean:.3g} nats per token ({now.span})",
            "the policy repeats one answer, so groups have no spread left to learn from",
            either(
                stronger(history.config, history.source),
                setting("{}", _wider(history)),
                setting("{}", {} if history.source != "keel" or history.option("loss.entropy_coef") else BONUS),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
            ),
        )


def rising(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy above its start, beyond noise, without a gain."""
    code, series = "entropy/rising", history.get("entropy/mean")
    if series is None:
        yield not_recorded(code, "the entropy")
        return
    change = trend(series)
    if change is None:
        yield Unchecked(code, "the logged steps are too few to tell a trend from noise")
        return
    first, now = series.finite.head(RECENT).mean, series.finite.tail(RECENT).mean
    far = now > thresholds["entropy_rise"] * first and now - first > thresholds["entropy_rise_least"]
    if not far or change.size <= 0 or not clear(change, thresholds) or reward_rose(history, thresholds):
        return
    logged = history.get("entropy/coefficient")
    bonus = logged.finite.values[-1] if logged is not None else history.figure("loss.entropy_coef")
    trend_text = f"; {reward.text}" if (reward := reward_trend(history)) is not None else ""
    evidence = (
        f"entropy rises from {first:.3g} to {now:.3g} nats per token over {series.span} (chance under noise: "
        f"{change.chance:.1g}){trend_text}"
    )
    if bonus:
        yield finding(
            "entropy/too-strong",
            f"{evidence}; the bonus has a coefficient of {bonus:g}",
            "the bonus pays more for noise than the reward does for answers",
            either(
                setting("set {}", {opt(history, "loss.entropy_coef"): 0}),
                times(history.config, "loss.entropy_coef", 0.1, "a tenth of", history.source),
            ),
        )
        return
    yield finding(
        code,
        evidence,
        "the policy drifts into noise: advantages that are mostly noise, too large updates, a bonus on entropy, or "
        "sampling hotter than what is scored",
        either(
            times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            stronger(history.config, history.source),
            "read the completions",
        ),
    )


def shorter(history: History, thresholds: Thresholds) -> CheckResults:
    """Length that shrinks to next to nothing while the reward does not grow."""
    code, series = "length/collapse", history.get("length/mean")
    if series is None:
        yield not_recorded(code, "the length of completions")
        return
    change = trend(series)
    if change is None:
        yield Unchecked(code, "the logged steps are too few to tell a trend from noise")
        return
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    shrunk = thresholds["length_growth"] * now.mean < first.mean
    if shrunk and clear(change, thresholds) and not reward_rose(history, thresholds):
        gain = f", and {reward.text}" if (reward := reward_trend(history)) is not None else ""
        yield finding(
            code,
            f"completions have {first.mean:.3g} tokens over {first.span} and {now.mean:.3g} over {now.span}{gain}",
            "the policy ends at once: the reward, or a loss that divides by length, makes short failures cheap, or end "
            "tokens are all that is learned",
            either(
                "a reward that an empty answer does not earn",
                stronger(history.config, history.source),
                times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            ),
        )


BONUS = {"loss.entropy_coef": 0.001}


def _loss(history: History, name: str) -> Options:
    """Another loss, unless one of those that do not favour length is used or none is known."""
    now = history.option("loss.loss_type")
    if now in (None, "dr_grpo", "dapo"):
        return {}
    return {opt(history, "loss.loss_type"): name}


def _wider(history: History) -> Options:
    """DAPO's upper limit, for losses that clip ratios and have a lower one."""
    clips = history.option("loss.loss_type") in ("grpo", "dr_grpo", "dapo", "bnpo")
    wide = (history.figure("loss.epsilon_high") or 0.0) >= 0.28
    return {"loss.epsilon_high": 0.28} if history.source == "keel" and clips and not wide else {}


CHECKS = (random_weights, truncated, prompts, unparseable, longer, shorter, collapse, rising)
