"""Completions: noise, truncated or unparseable text, length, and sampling that is too cold or too hot."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, unfiltered
from keel.doctor.checks.base import (
    LARGE_VOCABULARY,
    RECENT,
    SMALL_VOCABULARY,
    CheckResults,
    Level,
    Log,
    Missing,
    check,
    joined,
    levels,
    not_shown,
    percent,
)
from keel.doctor.findings import finding, propose
from keel.doctor.history import Series, finite
from keel.doctor.shapes import LEAST, MEDIAN_ERROR, course, ends, median, noise, trend

NOTHING_WRITTEN = (
    "almost nothing is generated: the first token ends the completion, a stop string is in the prompt, or the engine "
    "drops requests"
)
READ_ONE = "read a prompt and its completion with special tokens; check the engine's log, stop strings and limits"
BONUS = {"loss.entropy_coef": 0.001}


@check("output/random-weights")
def random_weights(log: Log) -> CheckResults:
    """The entropy at the start against uniform sampling, or against the range of trained models."""
    size = log.vocabulary or SMALL_VOCABULARY
    uniform, first = math.log(size), log.need("entropy/mean", "the entropy").finite.head(3)
    if log.vocabulary is None and first.mean > math.log(LARGE_VOCABULARY):
        raise Missing(f"an entropy of {first.mean:.3g} is too high for nats per token, so its unit is unknown")
    blind = first.mean > log.limits["entropy_uniform_share"] * uniform
    usual = (log.figure("rollout.temperature") or math.inf) < log.limits["temperature_hot"]
    if blind or (usual and first.mean > log.limits["entropy_noise"] and not log.rose):
        of = f"ln({size})" if log.vocabulary else f"that of a small vocabulary, ln({size})"
        yield finding(
            "output/random-weights",
            f"entropy is {first.mean:.3g} nats over {first.span}, {percent(first.mean / uniform)} of {of} = "
            f"{uniform:.3g}, the entropy of uniform sampling",
            "the weights are random or were not loaded",
            "set model.name to a trained model, or add a warmstart section; check that loading reported no missing "
            "weights",
            severity=None if blind else "warning",
        )
    elif log.vocabulary is None:
        raise not_shown("the size of the vocabulary")


@check("output/truncated")
def truncated(log: Log) -> CheckResults:
    """The share of completions that reach the length limit; if it is not recorded, a mean length near the limit."""
    series, limit = log.get("length/truncated_fraction"), log.option("rollout.max_completion_length")
    length, longest = log.get("length/mean"), finite(limit)
    at = f" at {log.opt('rollout.max_completion_length')} = {limit}" if limit else ""
    turn = log.option("rollout.max_turn_length")
    at += f", or a turn at rollout.max_turn_length = {turn}" if turn else ""
    share: float | None = None
    grave = False
    if series is not None:
        now = series.tail(RECENT)
        evidence, share = f"{percent(now.mean)} of the completions of {now.span} end at the length limit{at}", now.mean
        alarm = now.mean > log.limits["truncated_completions"]
        grave = now.mean > log.limits["truncated_completions_error"]
    elif length is not None and longest is not None and longest > 0:
        now = length.finite.tail(RECENT)
        evidence = f"completions of {now.span} have {now.mean:.4g} tokens on average{at}"
        alarm = now.mean > log.limits["near_limit_from"] * longest
    else:
        raise not_shown("the share of truncated completions")
    if not alarm:
        evidence, share = _all_as_long(log, longest), None
    if evidence:
        yield finding(
            "output/truncated",
            evidence,
            "the limit is too short for the task, or the model never writes its end-of-text token",
            either(
                log.times("rollout.max_completion_length", 2, "twice"),
                f"if completions do not stop, a stop string{' (rollout.stop)' if log.source == 'keel' else ''} or a "
                "warm "
                "start on answers that end",
                joined="; ",
            ),
            severity="error" if grave else "warning",
            share=share,
        )


def _all_as_long(log: Log, limit: float | None) -> str:
    """Evidence that all recent completions have the limit's length, or one equal length; "" otherwise."""
    length, longest = log.get("length/mean"), log.get("length/max")
    if length is None:
        return ""
    now = length.finite.tail(RECENT)
    if limit is not None and min(now.values) > log.limits["near_limit_from"] * limit > 0:
        return (
            f"completions of {now.span} have {now.mean:.4g} tokens on average, of {limit:g}, but few are counted as "
            "truncated"
        )
    alike = (
        {round(value) for _, *both in now.beside(longest.finite) for value in both} if longest is not None else set()
    )
    same = len(now) == RECENT and len(alike) == 1 and now.mean >= log.limits["same_length"]
    return f"all completions of {now.span} have {now.mean:.6g} tokens" if same else ""


levels(
    "output",
    Level(
        "prompt/truncated",
        "prompt/truncated_fraction",
        "truncated_prompts",
        "{share} of the prompts of {span} were cut at the limit",
        "the prompt limit is shorter than the prompts",
        lambda log: either(log.times("data.max_prompt_length", 2, "twice"), "remove rows that are too long"),
        grave="truncated_prompts_error",
        whole=True,
    ),
    *(
        Level("length/collapse", metric, limit, evidence, NOTHING_WRITTEN, READ_ONE, below=below)
        for metric, limit, below, evidence in (
            ("length/mean", 1.0, True, "completions have {mean} tokens over {span}"),
            ("length/aborted_fraction", "truncated_completions", False, "{share} of the requests came back empty"),
        )
    ),
)


@check("output/unparseable")
def unparseable(log: Log) -> CheckResults:
    """The share of completions that the task can parse."""
    series = log.need("parse/ok_fraction", "the share of readable completions")
    now, most = series.tail(RECENT), log.limits["parse_rate_warning"]
    stays = "" if now.mean < most else _stays_unreadable(series, log)
    if not (now.mean < most or stays) or log.rose:
        return
    yield finding(
        "output/unparseable",
        f"{percent(now.mean, '.1f')} of the completions of {now.span} could be parsed{stays}",
        "the model does not know the answer's format: it is a base model without examples, has a wrong chat template "
        "or "
        "random weights",
        "add a warmstart section on gold answers, or a system prompt that shows the format (data.system_prompt), and a "
        "reward part for the format",
        severity="error" if now.mean < log.limits["parse_rate"] else "warning",
        share=1 - now.mean,
    )


def _stays_unreadable(series: Series, log: Log) -> str:
    """Evidence that most completions are unparseable and the share does not improve; "" otherwise.

    While a format is learned, the share rises. The upper confidence bound of the gain decides.
    """
    change, (deviation, memory) = ends(series), noise(series)
    if change is None or max(series.finite.tail(2 * RECENT).values) >= log.limits["parse_rate_misfit"]:
        return ""
    error = MEDIAN_ERROR * deviation * math.sqrt(2 * memory / max(5, len(series.finite) // 10))
    grows = change.size + log.limits["flat_reward"] * error > log.limits["flat_gain"]
    return "" if grows else f", and {percent(change.before, '.1f')} at first: the share does not grow"


@check("length/explosion")
def longer(log: Log) -> CheckResults:
    """Length grows, either strongly or until most completions reach the limit, while the reward does not rise."""
    series, at_limit = log.get("length/mean"), _into_limit(log)
    if series is None and not at_limit:
        raise not_shown("the length of completions")
    if not at_limit and series is not None and len(series) < 2 * RECENT:
        raise Missing(f"{len(series)} steps are too few: {2 * RECENT} are needed")
    growth = _growth(series, 1.0 if at_limit else log.limits["length_growth"], log) if series is not None else ""
    # the teacher's completions may be longer
    if log.rose or not (growth or at_limit) or (log.has_teacher and not at_limit):
        return
    loss, name = log.option("loss.loss_type"), log.opt("loss.loss_type")
    other = loss not in (None, "dr_grpo", "dapo") and not log.has_teacher  # those two losses do not favour length
    yield finding(
        "length/explosion",
        joined(growth, at_limit, log.gain, by=", and "),
        "both teacher and student give repeated text a high probability"
        if log.has_teacher
        else "the loss divides by length, so long failures cost little, or the reward pays for length",
        propose(
            "{}, or {}, which do not favour length; read the completions", *({name: n} for n in ("dr_grpo", "dapo"))
        )
        if other
        else "use a loss whose denominator does not favour length; read the completions",
    )


def _growth(series: Series, least: float, log: Log) -> str:
    """Evidence that the length has grown significantly and by more than the factor `least`; "" otherwise."""
    first, now, change = series.finite.head(RECENT), series.finite.tail(RECENT), trend(series)
    if (change is not None and not log.clear(change)) or not now.mean > least * first.mean:
        return ""
    return f"completions have {first.mean:.0f} tokens over {first.span} and {now.mean:.0f} over {now.span}"


def _into_limit(log: Log) -> str:
    """Evidence that the share at the length limit rises significantly to a majority; "" otherwise."""
    change, most = log.course("length/truncated_fraction"), log.limits["truncated_completions"]
    if change is None or not change.before < most / 2 < most < change.after:
        return ""
    return f"the share that ends at the limit rises from {percent(change.before)} to {percent(change.after)}"


@check("length/collapse")
def shorter(log: Log) -> CheckResults:
    """Length shrinks to almost nothing while the reward does not rise."""
    series, change = log.shape("length/mean", "the length of completions", course)
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    if log.limits["length_growth"] * now.mean < first.mean and log.clear(change) and not log.rose:
        yield finding(
            "length/collapse",
            joined(
                f"completions have {first.mean:.3g} tokens over {first.span} and {now.mean:.3g} over {now.span}",
                log.gain,
                by=", and ",
            ),
            "completions end at once: with this reward, or a loss that divides by length, short failures cost "
            "little, or "
            "only end tokens are learned",
            either("a reward that empty answers do not get", log.stronger, log.rate(0.3, "a third of")),
        )


# ------------------------------------------------------------------------ exploration


@check("rollout/temperature")
def cold(log: Log) -> CheckResults:
    """Groups of equal completions, together with sampling options or a low initial entropy that cause them."""
    equal, entropy = log.equal_groups, log.get("entropy/mean")
    if equal is None and entropy is None:
        raise not_shown("the entropy or the share of groups without spread")
    share = equal.mean if equal is not None else math.nan
    start = entropy.finite.head(RECENT) if entropy is not None else None
    first, greedy = median(start) if start is not None else math.nan, _greedy(log)
    copies = share > log.limits["same_groups"] or (equal is None and first < log.limits["entropy_rise_least"])
    sharp = start is not None and max(start.values) < log.limits["entropy_collapse"]
    if log.solved or (not (greedy and copies) and not (sharp and share > log.limits["zero_variance_groups"])):
        return
    back = unfiltered(log.config, log.source) if greedy.startswith("top") else {}
    yield finding(
        "rollout/temperature",
        joined(
            f"{percent(share)} of the groups had equal rewards over {equal.span}" if equal is not None else None,
            f"the entropy is {first:.2g} nats per token over its first steps" if entropy is not None else None,
            greedy,
            by=", ",
        ),
        "sampling is greedy or almost greedy, so the completions of a group are copies with equal rewards",
        setting("set {}", back or {log.opt("rollout.temperature"): 1.0}),
    )


def _greedy(log: Log) -> str:
    """The sampling option that makes sampling greedy, as text; "" if there is none."""
    temperature, top_p = log.figure("rollout.temperature"), log.figure("rollout.top_p")
    if temperature is not None and temperature < log.limits["temperature_cold"]:
        return f"the temperature is {temperature:g}"
    if log.figure("rollout.top_k") == 1:
        return "top_k is 1"
    return f"top_p is {top_p:g}" if top_p is not None and 0 < top_p < log.limits["exploration_least"] else ""


@check()
def hot(log: Log) -> CheckResults:
    """Noise from the first step on: an entropy above any trained model's, or a temperature above any recipe's."""
    entropy, temperature = log.get("entropy/mean"), log.figure("rollout.temperature")
    first = median(entropy.finite.head(RECENT)) if entropy is not None else 0.0
    blind = log.limits["entropy_uniform_share"] * math.log(log.vocabulary or SMALL_VOCABULARY)
    noise = first > min(log.limits["entropy_noise"], blind)
    configured = temperature is not None and temperature >= log.limits["temperature_hot"]
    guessed = temperature is None and noise and first <= blind
    if log.rose or log.solved or not (guessed or configured):
        return
    silent = log.equal_groups is not None and log.equal_groups.mean > log.limits["same_groups"]
    yield finding(
        "rollout/temperature",
        joined(
            f"the temperature is {temperature:g}" if temperature is not None else None,
            f"the entropy is {first:.3g} nats per token over its first steps" if entropy is not None else None,
            log.gain,
            by=", ",
        ),
        "sampling is so hot that completions are noise, whatever the policy has learned"
        + (", or the weights were not loaded correctly" if guessed else ""),
        setting("set {}", {log.opt("rollout.temperature"): 1.0}),
        severity="error" if noise or silent else "warning",
    )


@check("entropy/collapse")
def collapse(log: Log) -> CheckResults:
    """Entropy near 0 although the task is not solved."""
    series = log.need("entropy/mean", "the entropy")
    if len(series) < 2 * RECENT:
        raise Missing(f"{len(series)} steps are too few: {2 * RECENT} are needed")
    first, now = series.finite.head(3).mean, series.finite.tail(RECENT)
    # a significant fall is reported before the entropy is at 0
    low = log.limits["entropy_rise_least" if log.clear(course(series)) else "entropy_collapse"]
    gone = now.mean < min(low, log.limits["entropy_collapse_share"] * first)
    above = series.finite.where(lambda value: value >= low)
    since = log.since(max(above)) if above else log  # gains before the collapse do not count
    judged = since if (left := since.get("reward/mean")) is not None and len(left.finite) >= LEAST else log
    if not gone or log.solved or judged.rose:
        return
    # loss types that accept DAPO's upper clip limit
    clips = log.option("loss.loss_type") in ("grpo", "dr_grpo", "dapo", "bnpo")
    wider = clips and (log.figure("loss.epsilon_high") or 0.0) < 0.28
    yield finding(
        "entropy/collapse",
        f"entropy fell from {first:.3g} to {now.mean:.3g} nats per token ({now.span})",
        "the policy repeats one answer, so the rewards of a group do not differ and nothing is learned",
        either(
            log.stronger,
            log.keel({"loss.epsilon_high": 0.28} if wider else {}),
            log.keel({} if log.option("loss.entropy_coef") else BONUS),
            log.rate(0.5, "half of"),
        ),
    )


@check("entropy/rising")
def rising(log: Log) -> CheckResults:
    """A significant rise of the entropy without a gain in reward."""
    series, change = log.shape("entropy/mean", "the entropy", trend)
    first, now = series.finite.head(RECENT).mean, series.finite.tail(RECENT).mean
    far = now > log.limits["entropy_rise"] * first and now - first > log.limits["entropy_rise_least"]
    if not far or change.size <= 0 or not log.clear(change) or log.rose:
        return
    logged = log.get("entropy/coefficient")
    bonus = logged.finite.values[-1] if logged is not None else log.figure("loss.entropy_coef") or 0.0
    evidence = joined(
        f"entropy rises from {first:.3g} to {now:.3g} nats per token over {series.span} (chance under noise: "
        f"{change.chance:.1g})",
        log.gain,
    )
    if bonus >= log.limits["entropy_bonus_least"]:
        yield finding(
            "entropy/too-strong",
            f"{evidence}; the bonus has a coefficient of {bonus:g}",
            "the entropy bonus is worth more than the reward for answers",
            either(
                setting("set {}", {log.opt("loss.entropy_coef"): 0}), log.times("loss.entropy_coef", 0.1, "a tenth of")
            ),
        )
    else:
        yield finding(
            "entropy/rising",
            evidence,
            "the policy drifts into noise: advantages are mostly noise, updates are too large, there is an entropy "
            "bonus, "
            "or sampling has a higher temperature than scoring",
            either(log.rate(0.3, "a third of"), log.stronger, "read the completions"),
        )
