"""What the model writes: noise, torsos, the unreadable, ever more, ever less."""

from __future__ import annotations

import math

from keel.doctor.advice import changes, either, setting, stronger, times
from keel.doctor.checks.base import (
    LARGE_VOCABULARY,
    RECENT,
    SMALL_VOCABULARY,
    CheckResults,
    Unchecked,
    clear,
    has_teacher,
    not_recorded,
    opt,
    reward_rose,
    reward_trend,
    shape_of,
)
from keel.doctor.findings import Options, finding
from keel.doctor.history import History, Series, finite
from keel.doctor.shapes import MEDIAN_ERROR, course, ends, noise, trend
from keel.doctor.thresholds import Thresholds


def random_weights(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy at the start against that of drawing tokens blindly, or against what trained models have."""
    code, entropy = "output/random-weights", history.get("entropy/mean")
    if entropy is None:
        yield not_recorded(code, "the entropy")
        return
    size = history.vocabulary or SMALL_VOCABULARY
    uniform, first = math.log(size), entropy.finite.head(3)
    if history.vocabulary is None and first.mean > math.log(LARGE_VOCABULARY):
        yield Unchecked(code, f"an entropy of {first.mean:.3g} is none per token in nats: its unit is another one")
        return
    blind = first.mean > thresholds["entropy_uniform_share"] * uniform
    temperature = history.figure("rollout.temperature")
    usual = temperature is not None and temperature < thresholds["temperature_hot"]
    noise = usual and first.mean > thresholds["entropy_noise"] and not reward_rose(history, thresholds)
    if not blind and not noise:
        if history.vocabulary is None:
            yield not_recorded(code, "the size of the vocabulary")
        return
    of = f"ln({size})" if history.vocabulary else f"that of a small vocabulary, ln({size})"
    yield finding(
        code,
        f"entropy is {first.mean:.3g} nats over {first.span}, {100 * first.mean / uniform:.0f} % of {of} = "
        f"{uniform:.3g}, that of drawing tokens blindly",
        "the weights are random or were not loaded",
        "name a trained model in model.name, or give a warmstart section; check that loading reported no missing "
        "weights",
        severity=None if blind else "warning",
    )


def truncated(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of completions that end at the limit; where it is not recorded, lengths that lie there on average."""
    series, limit = history.get("length/truncated_fraction"), history.option("rollout.max_completion_length")
    length, longest = history.get("length/mean"), finite(limit)
    at = f" at {opt(history, 'rollout.max_completion_length')} = {limit}" if limit else ""
    turn = history.option("rollout.max_turn_length")
    at += f", or a turn at rollout.max_turn_length = {turn}" if turn else ""
    if series is not None:
        now = series.tail(RECENT)
        evidence = f"{100 * now.mean:.0f} % of the completions of {now.span} end at the length limit{at}"
        share: float | None = now.mean
        alarm = now.mean > thresholds["truncated_completions"]
        grave = now.mean > thresholds["truncated_completions_error"]
    elif length is not None and longest is not None and longest > 0:
        now, share = length.finite.tail(RECENT), None
        evidence = f"completions of {now.span} have {now.mean:.4g} tokens on average{at}"
        alarm, grave = now.mean > thresholds["near_limit_from"] * longest, False
    else:
        yield not_recorded("output/truncated", "the share of truncated completions")
        return
    if not alarm and (same := _all_as_long(history, longest, thresholds)):
        evidence, alarm, grave, share = same, True, False, None
    if not alarm:
        return
    yield finding(
        "output/truncated",
        evidence,
        "the limit is too short for the task, or the model never writes its end-of-text token",
        either(
            times(history.config, "rollout.max_completion_length", 2, "twice", history.source),
            f"if completions ramble on, a stop string{' (rollout.stop)' if history.source == 'keel' else ''} or a warm "
            "start that ends its answers",
            joined="; ",
        ),
        severity="error" if grave else "warning",
        share=share,
    )


def _all_as_long(history: History, limit: float | None, thresholds: Thresholds) -> str:
    """That all completions of the last steps are as long as the longest may be, whatever is counted as cut; "" else.

    By the limit, or by mean and longest that are the same to the token at every step: texts that end by themselves
    differ, unless they are short by their form.
    """
    length, longest = history.get("length/mean"), history.get("length/max")
    if length is None:
        return ""
    now = length.finite.tail(RECENT)
    if limit is not None and limit > 0 and min(now.values) > thresholds["near_limit_from"] * limit:
        return f"completions of {now.span} have {now.mean:.4g} tokens on average, of {limit:g}, and few count as cut"
    if longest is None or len(now) < RECENT or min(now.values) < thresholds["same_length"]:
        return ""
    at = dict(zip(longest.steps, longest.values, strict=True))
    if any(abs(at.get(step, 0.0) - value) > HALF_A_TOKEN for step, value in zip(now.steps, now.values, strict=True)):
        return ""
    same = max(now.values) - min(now.values) <= HALF_A_TOKEN
    return f"every completion of {now.span} has {now.mean:.6g} tokens, as many as the longest" if same else ""


HALF_A_TOKEN = 0.5


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
            severity="error" if series.mean > thresholds["truncated_prompts_error"] else "warning",
            share=series.mean,
        )


def unparseable(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of completions that the task can read."""
    series = history.get("parse/ok_fraction")
    if series is None:
        yield not_recorded("output/unparseable", "the share of readable completions")
        return
    now, most = series.tail(RECENT), thresholds["parse_rate_warning"]
    stays = "" if now.mean < most else _stays_unreadable(series, thresholds)
    if not (now.mean < most or stays) or reward_rose(history, thresholds):
        return
    yield finding(
        "output/unparseable",
        f"{100 * now.mean:.1f} % of the completions of {now.span} could be read{stays}",
        "the model does not know the answer's form: a base model without examples, a wrong chat template, random "
        "weights",
        "a warmstart section on gold answers, or a system prompt that shows the form (data.system_prompt), and a "
        "reward part that pays for it",
        severity="error" if now.mean < thresholds["parse_rate"] else "warning",
        share=1 - now.mean,
    )


def _stays_unreadable(series: Series, thresholds: Thresholds) -> str:
    """That most completions cannot be read all along, and that it gets no better, as text; "" where it does.

    A form that is being learned is read ever more often: the upper end of what the share has gained decides.
    """
    change, (deviation, memory) = ends(series), noise(series)
    if change is None or max(series.finite.tail(2 * RECENT).values) >= thresholds["parse_rate_misfit"]:
        return ""
    error = MEDIAN_ERROR * deviation * math.sqrt(2 * memory / max(5, len(series.finite) // 10))
    if change.size + thresholds["flat_reward"] * error > thresholds["flat_gain"]:
        return ""
    return f", {100 * change.before:.1f} % at first: it does not grow in {len(series.finite)} logged steps"


def longer(history: History, thresholds: Thresholds) -> CheckResults:
    """Length that grows, by far or until most completions end at the limit, while the reward does not."""
    code, series = "length/explosion", history.get("length/mean")
    at_limit = _into_limit(history, thresholds)
    if series is None and not at_limit:
        yield not_recorded(code, "the length of completions")
        return
    if not at_limit and series is not None and len(series) < 2 * RECENT:
        yield Unchecked(code, f"{len(series)} steps are too few: {2 * RECENT} are needed")
        return
    if reward_rose(history, thresholds):
        return
    if has_teacher(history) and not at_limit:
        return  # the teacher may write longer
    least = 1.0 if at_limit else thresholds["length_growth"]
    growth = _growth(series, least, thresholds) if series is not None else ""
    if not growth and not at_limit:
        return
    if has_teacher(history):
        yield finding(
            code,
            ", and ".join(filter(None, (growth, at_limit))),
            "repeated text is likely to teacher and student alike: no KL leads out of it",
            either(
                "look at the completions",
                setting("{}", _answering_for_the_future(history)),
                times(history.config, "optim.learning_rate", 0.3, "a third of"),
            ),
        )
        return
    gain = reward_trend(history)
    yield finding(
        code,
        ", and ".join(filter(None, (growth, at_limit, gain.text if gain is not None else ""))),
        "a loss that divides by length makes long failures cheap, or the reward pays for length",
        either(
            either(*(setting("{}", _loss(history, name)) for name in ("dr_grpo", "dapo"))),
            "which do not favour length: look at the completions",
            joined=", ",
        )
        if _loss(history, "dr_grpo") or _loss(history, "dapo")
        else "a loss whose denominator does not favour length; look at the completions",
    )


def _answering_for_the_future(history: History) -> Options:
    """The level at which a token answers for the KL after it, where the estimator has one."""
    has_one = history.option("kl.estimator") in ("exact", "k1")
    return changes(history.config, {"kl.level": "sequence"}) if has_one else {}


def _growth(series: Series, least: float, thresholds: Thresholds) -> str:
    """The length at first and now, where it is more than `least` times as much and not by noise; "" otherwise."""
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    change = trend(series)
    if (change is not None and not clear(change, thresholds)) or not now.mean > least * first.mean:
        return ""
    return f"completions have {first.mean:.0f} tokens over {first.span} and {now.mean:.0f} over {now.span}"


def _into_limit(history: History, thresholds: Thresholds) -> str:
    """The share of completions at the limit, where it rises beyond noise until they are most; "" otherwise."""
    cut = history.get("length/truncated_fraction")
    change = course(cut) if cut is not None else None
    most = thresholds["truncated_completions"]
    if change is None or not clear(change, thresholds) or not change.before < most / 2 < most < change.after:
        return ""
    return f"those that end at the limit go from {100 * change.before:.0f} % to {100 * change.after:.0f} %"


def shorter(history: History, thresholds: Thresholds) -> CheckResults:
    """Length that shrinks to next to nothing while the reward does not grow, or is nothing."""
    yield from _empty(history, thresholds)
    code = "length/collapse"
    shape = shape_of(history, code, "length/mean", "the length of completions", course)
    if isinstance(shape, Unchecked):
        yield shape
        return
    series, change = shape
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


def _empty(history: History, thresholds: Thresholds) -> CheckResults:
    """Completions without a token, or requests that came back without one."""
    length, aborted = history.get("length/mean"), history.get("length/aborted_fraction")
    now = length.finite.tail(RECENT) if length is not None else None
    share = aborted.finite.tail(RECENT).mean if aborted is not None else 0.0
    if share > thresholds["truncated_completions"] or (now is not None and now.mean < 1):
        lengths = f"completions have {now.mean:.2g} tokens over {now.span}" if now is not None else ""
        yield finding(
            "length/collapse",
            ", ".join(filter(None, (lengths, f"{100 * share:.0f} % of the requests came back empty" * (share > 0)))),
            "nothing is generated: the first token ends the completion, a stop string is in the prompt, or the engine "
            "gives requests up",
            "read a prompt and its completion with special tokens shown; see the engine's log, stop strings and limits",
        )


def _loss(history: History, name: str) -> Options:
    """Another loss, unless one of those that do not favour length is used or none is known."""
    now = history.option("loss.loss_type")
    if now in (None, "dr_grpo", "dapo"):
        return {}
    return {opt(history, "loss.loss_type"): name}


CHECKS = (random_weights, truncated, prompts, unparseable, longer, shorter)
