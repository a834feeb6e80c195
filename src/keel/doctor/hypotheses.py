"""Hypotheses as a table: the suspects of two investigations, each confirmed, ruled out, or not testable here.

H01 to H08 are those of a multi-hop run that did not learn; E01 to E06 are the links of the chain by which a chess run
blew up. A row is decided by findings and by figures: those of the preflight's probes (`probe/figure`) or the metrics
of a run's history (`reward/mean`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keel.doctor.diagnosis import Hypothesis
from keel.doctor.findings import CODES, Finding
from keel.doctor.thresholds import Thresholds

if TYPE_CHECKING:
    from keel.doctor.history import History
    from keel.doctor.probes.outcome import Outcome

CONFIRMED, RULED_OUT, UNTESTED = "confirmed", "ruled out", "not testable here"


@dataclass(frozen=True)
class Row:
    """One suspect: the codes that confirm it and the figures that can clear it, the first that is there being shown.

    `figures` are (name, how it is said); `over` and `under` name a figure and a threshold beyond which the row is
    confirmed without a finding.
    """

    name: str
    title: str
    priority: str
    codes: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    interacts: str
    if_confirmed: str
    if_ruled_out: str
    to_test: str = "run keel doctor on the configuration"
    over: tuple[tuple[str, str], ...] = ()
    under: tuple[tuple[str, str], ...] = ()


ROWS: tuple[Row, ...] = (
    Row(
        "H01",
        "advantage scaling",
        "high",
        ("advantage/amplified",),
        (
            ("advantage/amplification", "differences of reward are multiplied by {:.3g}"),
            ("reward/within_group_std", "within-group std {:.3g}"),
        ),
        "amplifies H03 (the KL term has to hold against it) and noise of H05",
        "set loss.scale_rewards=none and run again before anything else is changed",
        "leave loss.scale_rewards as it is",
        to_test="needs rewards that differ within a group: see H05",
    ),
    Row(
        "H02",
        "token masking",
        "high",
        ("mask/attention", "mask/not-actions", "scoring/positions"),
        (("masks/trained_tokens", "{:.0f} tokens trained, all of them sampled"),),
        "hides as a ratio of exactly 1; looks like H05 and H07",
        "mend the mask: loss mask and attention mask are two tensors",
        "none: prompt and tool tokens are seen and not trained",
    ),
    Row(
        "H03",
        "KL formula and direction",
        "medium",
        ("kl/reversed", "kl/no-gradient", "kl/scale", "reference/wrong", "reference/adapter-on", "reference/moving"),
        (
            ("kl_term/cosine", "cosine {:.3f} to the exact ∇KL(policy‖ref)"),
            ("kl/configured", "estimator, gradient and placement are a proven pairing"),
        ),
        "amplified by H01: fix that first, then test this alone",
        "set kl.estimator=k3 with kl.gradient=auto and reference.kind=auto",
        "leave the formula; turn kl.beta if the share of the gradient is wrong",
        to_test="set kl.measure_every=1, so that there is a reference, and run keel doctor on the configuration",
    ),
    Row(
        "H04",
        "context truncation",
        "medium",
        ("prompt/truncated", "output/truncated"),
        (
            ("truncation/completions_cut", "{:.0%} of completions end at the limit"),
            ("length/truncated_fraction", "{:.0%} of completions end at the limit"),
        ),
        "cuts answers off, so that H05 sees no difference; grows with the turns of H07",
        "raise rollout.max_completion_length or data.max_prompt_length",
        "none",
        over=(
            ("truncation/completions_cut", "near_limit"),
            ("truncation/prompts_near_limit", "near_limit"),
            ("length/truncated_fraction", "near_limit"),
        ),
    ),
    Row(
        "H05",
        "weak reward",
        "high",
        ("reward/weak", "reward/constant", "reward/cliff", "reward/non-finite"),
        (
            ("collection/within_group_std", "mean within-group std {:.3g}"),
            ("reward/within_group_std", "mean within-group std {:.3g}"),
        ),
        "what it leaves is what H01 divides by",
        "pay for parts of the answer, or choose problems that are solved sometimes",
        "none: rewards differ within groups",
    ),
    Row(
        "H06",
        "weight sync",
        "high",
        ("sampler/stale",),
        (
            ("weight sync/gap_new", "the synced engine is within {:.2g} nats of the changed weights"),
            ("logp/sampler_gap_max", "largest sampler gap {:.2g} nats"),
        ),
        "an old sampler makes every KL and ratio wrong (H03)",
        "call the engine's sync after every update, adapters included",
        "none: the engine follows the policy",
    ),
    Row(
        "H07",
        "multi-turn handling",
        "medium",
        (),
        (("masks/tool_tokens", "{:.0f} tokens of the environment, none of them trained"),),
        "is H02 where tools speak; lengthens H04",
        "mend the task's respond, or the mask of its messages",
        "none",
        to_test="run keel doctor with rollout.max_turns over 1 and a task that responds",
    ),
    Row(
        "H08",
        "evaluation against training",
        "low",
        ("eval/train-gap",),
        (
            ("evaluation/same_prompts", "{:.0f} prompts are the same tokens by both paths"),
            ("eval/gain", "held-out accuracy moved by {:+.3f}"),
        ),
        "makes a cure of any other row invisible",
        "render both by the same template and judge both by the same reward",
        "none",
    ),
    Row(
        "E01",
        "explosion chain: random weights",
        "high",
        ("output/random-weights",),
        (
            ("collection/entropy_share", "entropy is {:.0%} of uniform"),
            ("entropy/share", "entropy is {:.0%} of uniform"),
        ),
        "leads to E02",
        "load trained weights (model.name), or add a warmstart",
        "none: the model has been trained",
    ),
    Row(
        "E02",
        "explosion chain: unparseable output",
        "high",
        ("output/unparseable",),
        (("collection/parse_rate", "{:.0%} parse"), ("parse/first_steps", "{:.0%} parse in the first steps")),
        "from E01; leads to E03",
        "add a warmstart on the task, and a reward for the form",
        "none",
        under=(("parse/first_steps", "parse_rate_warning"),),
    ),
    Row(
        "E03",
        "explosion chain: reward cliff",
        "high",
        ("reward/cliff",),
        (("collection/reward_mean", "mean reward {:.3g}, no cliff below it"),),
        "from E02; leads to E04",
        "raise the penalty for malformed output towards 0 and pay in grades",
        "none",
    ),
    Row(
        "E04",
        "explosion chain: amplified advantages",
        "high",
        ("advantage/amplified",),
        (
            ("advantage/amplification_max", "at most {:.3g} times"),
            ("reward/within_group_std", "within-group std {:.3g}"),
        ),
        "from E03 (the lone survivor of a group); is H01; leads to E05",
        "set loss.scale_rewards=none",
        "none",
        to_test="needs rewards that differ within a group: see H05",
    ),
    Row(
        "E05",
        "explosion chain: learning rate",
        "high",
        ("optim/lr-too-high", "optim/spike"),
        (("update/kl_after", "{:.2g} nats per token in one update"), ("grad/norm", "gradient norm {:.3g}")),
        "from E04; leads to E06",
        "lower optim.learning_rate, raise optim.warmup_steps",
        "none",
    ),
    Row(
        "E06",
        "explosion chain: KL explosion",
        "high",
        ("kl/explosion", "kl/at-start", "optim/non-finite", "kl/over-budget"),
        (("kl/policy_ref/k3/max", "largest KL of a step {:.3g} nats per token"),),
        "from E05, or alone from dropout or a wrong reference (H03)",
        "cure the first confirmed link above; raising the alarm cures nothing",
        "none",
        to_test="one update cannot show it: run keel doctor on the run",
    ),
)


def weigh(findings: Iterable[Finding], figures: Mapping[str, float], thresholds: Thresholds) -> tuple[Hypothesis, ...]:
    """Every row with its verdict; a note confirms nothing."""
    serious = [finding for finding in findings if finding.severity != "note"]
    return tuple(_decided(row, serious, figures, thresholds) for row in ROWS)


def _decided(row: Row, findings: Sequence[Finding], figures: Mapping[str, float], thresholds: Thresholds) -> Hypothesis:
    against = [finding for finding in findings if finding.code in row.codes]
    beyond = [name for name, limit in row.over if figures.get(name, -math.inf) > thresholds[limit]]
    beyond += [name for name, limit in row.under if figures.get(name, math.inf) < thresholds[limit]]
    there = [(name, words) for name, words in row.figures if math.isfinite(figures.get(name, math.nan))]
    # Of several turns the messages' tokens are what decides: masks are found wrong for one turn and for many alike.
    if row.name == "H07" and there:
        against = [finding for finding in findings if finding.code.startswith("mask/")]
    if against:
        worst = min(against, key=lambda finding: CODES[finding.code].rank)
        return _said(row, CONFIRMED, f"{worst.code}: {worst.evidence}", row.if_confirmed)
    if beyond:
        limits = dict((*row.over, *row.under))
        shown = "; ".join(f"{name} is {figures[name]:.3g} (limit {thresholds[limits[name]]:g})" for name in beyond)
        return _said(row, CONFIRMED, shown, row.if_confirmed)
    if there:
        name, words = there[0]
        return _said(row, RULED_OUT, words.format(figures[name]), row.if_ruled_out)
    return _said(row, UNTESTED, "no figure here decides it", row.to_test)


def _said(row: Row, verdict: str, figure: str, action: str) -> Hypothesis:
    return Hypothesis(row.name, row.title, verdict, figure, row.priority, row.interacts, action)


def preflight_figures(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The probes' figures as `probe/figure`, and how many tokens were the environment's where there are any."""
    figures = {f"{o.name}/{name}": float(value) for o in outcomes for name, value in o.figures.items()}
    given = figures.get("masks/completion_tokens", 0.0) - figures.get("masks/trained_tokens", 0.0)
    return figures | ({"masks/tool_tokens": given} if given > 0 else {})


def history_figures(history: History, recent: int = 10) -> dict[str, float]:
    """What a run's metrics come to: the mean of the last steps, the largest KL, the entropy's share, the evaluation."""
    figures = {name: history.series[name].finite.tail(recent).mean for name in history.series if history.get(name)}
    if history.kl is not None:
        figures["kl/policy_ref/k3/max"] = history.kl[1].top()[1]
    gaps = history.get("logp/sampler_gap_max")
    if gaps is not None:
        figures["logp/sampler_gap_max"] = gaps.top()[1]
    parsed = history.get("parse/ok_fraction")
    if parsed is not None:
        figures["parse/first_steps"] = parsed.finite.head(3).mean
    if history.source == "keel" and history.option("kl.estimator") is not None:
        figures["kl/configured"] = 1.0
    entropy = history.get("entropy/mean")
    if entropy is not None and history.vocabulary:
        figures["entropy/share"] = entropy.finite.values[0] / math.log(history.vocabulary)
    scores = [float(r["pass@1"]) for r in history.evaluations if r.get("split") == "trained" and "pass@1" in r]
    if len(scores) > 1:
        figures["eval/gain"] = scores[-1] - scores[0]
    return figures


__all__ = ["ROWS", "history_figures", "preflight_figures", "weigh"]
