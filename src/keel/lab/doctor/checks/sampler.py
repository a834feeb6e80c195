"""The sampler against the trainer, as far as a log can tell: a gap that grows is stale weights, another is not."""

from __future__ import annotations

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import either, setting, times, unfiltered
from keel.lab.doctor.checks.base import RECENT, CheckResults, Unchecked, not_recorded
from keel.lab.doctor.findings import Advice, finding
from keel.lab.doctor.history import History, Series


def sampler(history: History, thresholds: Thresholds) -> CheckResults:
    """KL(sampler‖policy) or the log-probability gap: its size now, and against the first step.

    Before the first update even an engine that is never synced has the trainer's weights, so what is there at step 1 is
    no stale weight, and what came later and was not there may be. A mean over the first steps would hold drift already.
    """
    codes = ("sampler/stale", "sampler/temperature", "sampler/filter", "sampler/precision")
    kl, gap = history.get("kl/sampler_policy/k3/mean"), history.get("logp/sampler_gap_max")
    size = kl or _half_square(history.get("logp/sampler_gap_mean"))
    if size is None and gap is None:
        for code in codes:
            yield not_recorded(code, "the sampler's log-probabilities beside the trainer's")
        return
    if size is None:
        for code in codes:
            yield Unchecked(code, "only the largest gap of a token was recorded, which one rare token decides")
        return
    first, now = size.finite.head(1), size.tail(RECENT)
    grew = len(size.finite) > 1 and now.mean > thresholds["sampler_gap_growth"] * max(
        first.mean, thresholds["sampler_rounding"]
    )
    behind, ahead = _left_behind(history, now), history.option("rollout.max_staleness") or 0
    never_synced = grew and not ahead and behind is not None and behind > thresholds["sampler_never_synced"]
    if now.mean <= thresholds["sampler_kl_warning"] and not never_synced:
        return
    worst = f"; the largest gap of a token is {gap.top()[1]:.3g} nats (step {gap.top()[0]})" if gap is not None else ""
    evidence = (
        f"KL(sampler‖policy) is {now.mean:.3g} nats per token over {now.span} and was {first.mean:.3g} over "
        f"{first.span}{worst}"
        + (f"; it is {100 * behind:.0f} % of what the policy has moved" if never_synced and behind is not None else "")
    )
    if grew and ahead:
        yield finding(
            "sampler/too-old",
            evidence,
            f"rollout.max_staleness={ahead} lets samples be as many steps old, and in these the policy moves further "
            "than their weights can repair",
            either(
                setting("set {}", {"rollout.max_staleness": ahead - 1}),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
            ),
        )
        return
    if grew:
        yield finding(
            "sampler/stale",
            evidence,
            "the gap grows as the policy moves: the sampler keeps weights that the trainer has left",
            "sync the engine after every update, adapters included; keel doctor on the configuration shows whether a "
            "sync reaches it",
        )
        return
    code, cause = _constant_cause(history)
    since = (
        "the gap is there from the first step, so it is not the weights"
        if first.steps[0] <= 1
        else f"the gap is there since the log begins, at step {first.steps[0]:.0f}; if not stale weights, it is"
    )
    yield finding(
        code,
        evidence,
        f"{since}: {cause}",
        either(
            setting("set {}", unfiltered(history.config, history.source)),
            "take log-probabilities at the sampling temperature and before any filter, in the trainer's precision",
            _weighed(history),
            joined="; ",
        ),
        severity="error" if now.mean > thresholds["sampler_kl_error"] else "warning",
    )


def _weighed(history: History) -> Advice:
    """The correction by truncated weights, where it is not on: it holds what remains."""
    off = history.source == "keel" and history.option("loss.mismatch.kind") == "none"
    return setting("{} holds what remains", {"loss.mismatch.kind": "truncate"} if off else {})


def _left_behind(history: History, gap: Series) -> float | None:
    """KL(sampler‖policy) over KL(policy‖reference) of the same steps: near 1 for an engine that was never synced."""
    if history.kl is None:
        return None
    moved = history.kl[1].tail(RECENT).mean
    return gap.mean / moved if moved > 0 else None


def _constant_cause(history: History) -> tuple[str, str]:
    """The likeliest of the causes that a log cannot tell apart, by the options."""
    top_p, top_k, min_p = (history.option(f"rollout.{name}") for name in ("top_p", "top_k", "min_p"))
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        return "sampler/filter", f"top_p={top_p}, top_k={top_k}, min_p={min_p} change the sampler's probabilities"
    temperature = history.option("rollout.temperature")
    if isinstance(temperature, int | float) and temperature != 1:
        return "sampler/temperature", f"temperature {temperature:g} may be applied on one side only"
    return "sampler/precision", "another precision, other kernels, or another temperature or filter"


def _half_square(difference: Series | None) -> Series | None:
    """k2 of a mean gap: what a log of TRL's allows."""
    if difference is None:
        return None
    return Series.of((s, v * v / 2) for s, v in zip(difference.steps, difference.values, strict=True))


def reported(history: History, thresholds: Thresholds) -> CheckResults:
    """Tokens whose log-probability the engine did not report: their mismatch is neither measured nor corrected."""
    share = history.get("mismatch/unreported_fraction")
    if share is not None and share.tail(RECENT).mean > 0:
        yield finding(
            "sampler/unreported",
            f"for {100 * share.tail(RECENT).mean:.3g} % of the sampled tokens no log-probability was reported",
            "without the sampler's own numbers a difference from the policy is neither seen nor weighed",
            "let the engine return sample_logp (and filtered_logp under filters) for every token it samples",
        )


def filtered(history: History, thresholds: Thresholds) -> CheckResults:
    """The probability that configured filters cut off, which bounds the bias of every mean."""
    mass = history.get("rollout/kept_mass/mean")
    if mass is None:
        return
    cut = 1 - mass.tail(RECENT).mean
    if cut > thresholds["filtered_mass"]:
        yield finding(
            "sampler/filter",
            f"filters cut off {100 * cut:.3g} % of the probability over {mass.tail(RECENT).span}",
            "what the policy does outside of the kept support is never seen: a mean at a state is biased by at most "
            "that share of its largest value",
            setting("set {}", unfiltered(history.config, history.source)),
            severity="warning",
        )


CHECKS = (sampler, reported, filtered)
