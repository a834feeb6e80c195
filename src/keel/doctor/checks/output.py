"""What the model writes: noise, torsos, the unreadable, ever more, ever less."""

from __future__ import annotations

import math

from keel.doctor.advice import changes, either, setting
from keel.doctor.checks.base import (
    LARGE_VOCABULARY,
    RECENT,
    SMALL_VOCABULARY,
    CheckResults,
    Log,
    Missing,
    check,
    joined,
    not_shown,
    over,
    percent,
)
from keel.doctor.findings import finding, propose
from keel.doctor.history import Series, finite
from keel.doctor.shapes import MEDIAN_ERROR, course, ends, noise, trend

HALF_A_TOKEN = 0.5


@check("output/random-weights")
def random_weights(log: Log) -> CheckResults:
    """Entropy at the start against that of drawing tokens blindly, or against what trained models have."""
    size = log.vocabulary or SMALL_VOCABULARY
    uniform, first = math.log(size), log.need("entropy/mean", "the entropy").finite.head(3)
    if log.vocabulary is None and first.mean > math.log(LARGE_VOCABULARY):
        raise Missing(f"an entropy of {first.mean:.3g} is none per token in nats: its unit is another one")
    blind = first.mean > log.limits["entropy_uniform_share"] * uniform
    usual = (log.figure("rollout.temperature") or math.inf) < log.limits["temperature_hot"]
    if blind or (usual and first.mean > log.limits["entropy_noise"] and not log.rose):
        of = f"ln({size})" if log.vocabulary else f"that of a small vocabulary, ln({size})"
        yield finding(
            "output/random-weights",
            f"entropy is {first.mean:.3g} nats over {first.span}, {percent(first.mean / uniform)} of {of} = "
            f"{uniform:.3g}, that of drawing tokens blindly",
            "the weights are random or were not loaded",
            "name a trained model in model.name, or give a warmstart section; check that loading reported no missing "
            "weights",
            severity=None if blind else "warning",
        )
    elif log.vocabulary is None:
        raise not_shown("the size of the vocabulary")


@check("output/truncated")
def truncated(log: Log) -> CheckResults:
    """The share of completions that end at the limit; where it is not recorded, lengths that lie there on average."""
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
                f"if completions ramble on, a stop string{' (rollout.stop)' if log.source == 'keel' else ''} or a warm "
                "start that ends its answers",
                joined="; ",
            ),
            severity="error" if grave else "warning",
            share=share,
        )


def _all_as_long(log: Log, limit: float | None) -> str:
    """That all completions of the last steps are as long as the longest may be, whatever is counted as cut; "" else.

    By the limit, or by mean and longest that are the same to the token at every step: texts that end by themselves
    differ, unless they are short by their form.
    """
    length, longest = log.get("length/mean"), log.get("length/max")
    if length is None:
        return ""
    now = length.finite.tail(RECENT)
    if limit is not None and limit > 0 and min(now.values) > log.limits["near_limit_from"] * limit:
        return f"completions of {now.span} have {now.mean:.4g} tokens on average, of {limit:g}, and few count as cut"
    if longest is None or len(now) < RECENT or min(now.values) < log.limits["same_length"]:
        return ""
    alike = [step for step, mean, most in now.beside(longest) if abs(most - mean) <= HALF_A_TOKEN]
    same = len(alike) == len(now) and max(now.values) - min(now.values) <= HALF_A_TOKEN
    return f"every completion of {now.span} has {now.mean:.6g} tokens, as many as the longest" if same else ""


@check("prompt/truncated")
def prompts(log: Log) -> CheckResults:
    """The share of prompts that were cut."""
    if log.source != "keel" or log.option("data.truncation") not in (None, "error"):
        log.need("prompt/truncated_fraction", "the share of truncated prompts")
    yield from over(
        log,
        "prompt/truncated",
        "prompt/truncated_fraction",
        "truncated_prompts",
        "{share} of the prompts of {span} were cut at the limit",
        "the prompt limit is shorter than the data",
        either(log.times("data.max_prompt_length", 2, "twice"), "leave overlong rows out"),
        grave="truncated_prompts_error",
        whole=True,
    )


@check("output/unparseable")
def unparseable(log: Log) -> CheckResults:
    """The share of completions that the task can read."""
    series = log.need("parse/ok_fraction", "the share of readable completions")
    now, most = series.tail(RECENT), log.limits["parse_rate_warning"]
    stays = "" if now.mean < most else _stays_unreadable(series, log)
    if not (now.mean < most or stays) or log.rose:
        return
    yield finding(
        "output/unparseable",
        f"{percent(now.mean, '.1f')} of the completions of {now.span} could be read{stays}",
        "the model does not know the answer's form: a base model without examples, a wrong chat template, random "
        "weights",
        "a warmstart section on gold answers, or a system prompt that shows the form (data.system_prompt), and a "
        "reward part that pays for it",
        severity="error" if now.mean < log.limits["parse_rate"] else "warning",
        share=1 - now.mean,
    )


def _stays_unreadable(series: Series, log: Log) -> str:
    """That most completions cannot be read all along, and that it gets no better, as text; "" where it does.

    A form that is being learned is read ever more often: the upper end of what the share has gained decides.
    """
    change, (deviation, memory) = ends(series), noise(series)
    if change is None or max(series.finite.tail(2 * RECENT).values) >= log.limits["parse_rate_misfit"]:
        return ""
    error = MEDIAN_ERROR * deviation * math.sqrt(2 * memory / max(5, len(series.finite) // 10))
    if change.size + log.limits["flat_reward"] * error > log.limits["flat_gain"]:
        return ""
    return f", {percent(change.before, '.1f')} at first: it does not grow in {len(series.finite)} logged steps"


@check("length/explosion")
def longer(log: Log) -> CheckResults:
    """Length that grows, by far or until most completions end at the limit, while the reward does not."""
    series, at_limit = log.get("length/mean"), _into_limit(log)
    if series is None and not at_limit:
        raise not_shown("the length of completions")
    if not at_limit and series is not None and len(series) < 2 * RECENT:
        raise Missing(f"{len(series)} steps are too few: {2 * RECENT} are needed")
    growth = _growth(series, 1.0 if at_limit else log.limits["length_growth"], log) if series is not None else ""
    if log.rose or not (growth or at_limit) or (log.has_teacher and not at_limit):  # a teacher may write longer
        return
    if log.has_teacher:
        answering = {"kl.level": "sequence"} if log.option("kl.estimator") in ("exact", "k1") else {}
        yield finding(
            "length/explosion",
            joined(growth, at_limit, by=", and "),
            "repeated text is likely to teacher and student alike: no KL leads out of it",
            either(
                "look at the completions",
                setting("{}", changes(log.config, answering)),  # a token answers for the KL after it
                log.rate(0.3, "a third of"),
            ),
        )
        return
    loss, name = log.option("loss.loss_type"), log.opt("loss.loss_type")
    other = loss not in (None, "dr_grpo", "dapo")  # which do not favour length
    yield finding(
        "length/explosion",
        joined(growth, at_limit, log.gain, by=", and "),
        "a loss that divides by length makes long failures cheap, or the reward pays for length",
        propose(
            "{}, or {}, which do not favour length: look at the completions", *({name: n} for n in ("dr_grpo", "dapo"))
        )
        if other
        else "a loss whose denominator does not favour length; look at the completions",
    )


def _growth(series: Series, least: float, log: Log) -> str:
    """The length at first and now, where it is more than `least` times as much and not by noise; "" otherwise."""
    first, now, change = series.finite.head(RECENT), series.finite.tail(RECENT), trend(series)
    if (change is not None and not log.clear(change)) or not now.mean > least * first.mean:
        return ""
    return f"completions have {first.mean:.0f} tokens over {first.span} and {now.mean:.0f} over {now.span}"


def _into_limit(log: Log) -> str:
    """The share of completions at the limit, where it rises beyond noise until they are most; "" otherwise."""
    change, most = log.course("length/truncated_fraction"), log.limits["truncated_completions"]
    if change is None or not change.before < most / 2 < most < change.after:
        return ""
    return f"those that end at the limit go from {percent(change.before)} to {percent(change.after)}"


@check()
def empty(log: Log) -> CheckResults:
    """Completions without a token, or requests that came back without one."""
    length, share = log.get("length/mean"), log.now("length/aborted_fraction", 0.0)
    now = length.finite.tail(RECENT) if length is not None else None
    if share > log.limits["truncated_completions"] or (now is not None and now.mean < 1):
        yield finding(
            "length/collapse",
            joined(
                f"completions have {now.mean:.2g} tokens over {now.span}" if now is not None else None,
                f"{percent(share)} of the requests came back empty" if share > 0 else None,
                by=", ",
            ),
            "nothing is generated: the first token ends the completion, a stop string is in the prompt, or the engine "
            "gives requests up",
            "read a prompt and its completion with special tokens shown; see the engine's log, stop strings and limits",
        )


@check("length/collapse")
def shorter(log: Log) -> CheckResults:
    """Length that shrinks to next to nothing while the reward does not grow."""
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
            "the policy ends at once: the reward, or a loss that divides by length, makes short failures cheap, or end "
            "tokens are all that is learned",
            either("a reward that an empty answer does not earn", log.stronger, log.rate(0.3, "a third of")),
        )
