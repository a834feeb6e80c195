"""Decide the suspects in suspects.yaml: each is confirmed, ruled out or not testable here.

A finding or a figure beyond its threshold confirms a suspect. A figure on the safe side of its threshold rules it out;
the absence of findings does not. The formula of the KL term, if known, decides the rows with `by_formula`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

from keel.base.yaml_text import load_package_yaml
from keel.doctor.findings import CODES, Advice, Finding, SuspectVerdict, overrides
from keel.doctor.formula import Formula
from keel.doctor.history import History, divides_by_std, early_moves
from keel.doctor.runs import number
from keel.doctor.thresholds import Thresholds

if TYPE_CHECKING:
    from keel.doctor.measure import Outcome

Side = Literal["at least", "at most"]


@dataclass(frozen=True)
class RuleOut:
    """A condition that rules a suspect out: all figures are known and on the safe side of a threshold."""

    text: str
    figures: tuple[tuple[str, Side, str | float], ...]


@dataclass(frozen=True)
class Suspect:
    """One hypothesis; the fields are explained in suspects.yaml."""

    name: str
    title: str
    priority: str
    codes: tuple[str, ...]
    ruled_out_by: tuple[RuleOut, ...]
    interacts: str
    if_ruled_out: str
    if_confirmed: str | None = None
    to_test: str = "run keel doctor on the configuration"
    codes_if_measured: tuple[str, ...] = ()
    over: tuple[tuple[str, str], ...] = ()
    under: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    by_formula: bool = False


def _suspects() -> tuple[Suspect, ...]:
    rows = load_package_yaml("keel.doctor", "suspects.yaml")
    return tuple(_suspect(name, row) for name, row in rows.items())


def _suspect(name: str, row: dict[str, Any]) -> Suspect:
    ruled_out_by = tuple(RuleOut(entry["text"], _tuples(entry["figures"])) for entry in row["ruled_out_by"])
    return Suspect(name, **{**{key: _tuples(value) for key, value in row.items()}, "ruled_out_by": ruled_out_by})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


SUSPECTS = _suspects()

CONFIRMED, RULED_OUT, UNTESTED = "confirmed", "ruled out", "not testable here"


def judge_suspects(
    findings: Iterable[Finding],
    figures: Mapping[str, float],
    thresholds: Thresholds,
    unchecked: Iterable[str] = (),
    formula: Formula | None = None,
) -> tuple[SuspectVerdict, ...]:
    """The verdict on every suspect. Notes confirm nothing. `unchecked` are lines `code, code: why`."""
    serious = [finding for finding in findings if finding.severity != "note"]
    lines = tuple(unchecked)
    return tuple(
        _decide(row, serious, figures, thresholds, lines, formula if row.by_formula else None) for row in SUSPECTS
    )


def _decide(
    row: Suspect,
    findings: Sequence[Finding],
    figures: Mapping[str, float],
    thresholds: Thresholds,
    unchecked: Sequence[str],
    formula: Formula | None = None,
) -> SuspectVerdict:
    beyond = [name for name, limit in row.over if figures.get(name, -math.inf) > thresholds[limit]]
    beyond += [name for name, limit in row.under if figures.get(name, math.inf) < thresholds[limit]]
    measured = [
        rule_out
        for rule_out in row.ruled_out_by
        if all(math.isfinite(figures.get(name, math.nan)) for name, _, _ in rule_out.figures)
    ]
    codes = (*row.codes, *(row.codes_if_measured if measured else ()))
    against = [finding for finding in findings if finding.code in codes]
    if against:
        worst = min(against, key=lambda finding: CODES[finding.code].rank)
        return _hypothesis(
            row, CONFIRMED, f"{worst.code}: {worst.evidence}", row.if_confirmed or worst.advice, worst.options
        )
    if beyond:
        limits = dict((*row.over, *row.under))
        shown = "; ".join(f"{name} is {figures[name]:.3g} (limit {thresholds[limits[name]]:g})" for name in beyond)
        return _hypothesis(row, CONFIRMED, shown, row.if_confirmed or row.to_test)
    if formula is not None:
        return _by_formula(row, formula, figures)
    open_question = _not_checked(row, unchecked)
    if open_question is not None:
        return _hypothesis(row, UNTESTED, open_question, row.to_test)
    for rule_out in measured:
        if _unsafe(rule_out, figures, thresholds) is None:
            return _hypothesis(row, RULED_OUT, rule_out.text.format(figures[rule_out.figures[0][0]]), row.if_ruled_out)
    if measured:
        return _hypothesis(row, UNTESTED, str(_unsafe(measured[0], figures, thresholds)), row.to_test)
    return _hypothesis(row, UNTESTED, "no measured figure decides this hypothesis", row.to_test)


def _by_formula(row: Suspect, formula: Formula, figures: Mapping[str, float]) -> SuspectVerdict:
    """Decide a row by the formula; a measured cosine is added as information only."""
    measured = figures.get("kl_term/cosine_expected", math.nan)
    seen = f"; the cosine measured on this batch is {measured:.3f}" if math.isfinite(measured) else ""
    if not formula.active:
        return _hypothesis(row, RULED_OUT, formula.note, row.if_ruled_out)
    if formula.right:
        return _hypothesis(row, RULED_OUT, formula.note + seen, row.if_ruled_out)
    text = f"{formula.advice.text} for ∇KL(policy‖ref)" + (
        f", or keep it if {formula.meaning} is intended" if "∇" in formula.meaning else ""
    )
    return _hypothesis(
        row, CONFIRMED, f"{formula.note}, not ∇KL(policy‖ref){seen}", Advice(text, formula.advice.proposals)
    )


def _unsafe(rule_out: RuleOut, figures: Mapping[str, float], thresholds: Thresholds) -> str | None:
    """A sentence on the first figure that does not rule the row out; None if all do."""
    for name, side, limit in rule_out.figures:
        value, edge = figures[name], thresholds[limit] if isinstance(limit, str) else limit
        if not (value >= edge if side == "at least" else value <= edge):
            return f"{name} is {value:.3g}: {side} {edge:g} would rule it out"
    return None


def _not_checked(row: Suspect, unchecked: Sequence[str]) -> str | None:
    """The `unchecked` line that leaves a row open: that of a needed code, or any if all codes of the row have one."""
    lines = {code: _line_of(code, unchecked) for code in row.codes}
    needed = [line for code in row.needs if (line := lines[code]) is not None]
    if needed:
        return needed[0]
    return next(iter(lines.values())) if lines and None not in lines.values() else None


def _line_of(code: str, unchecked: Sequence[str]) -> str | None:
    """The line `code, family/*: why` that matches this code."""
    for line in unchecked:
        if any(fnmatch(code, pattern) for pattern in line.partition(":")[0].split(", ")):
            return line
    return None


def _hypothesis(
    row: Suspect, verdict: str, figure: str, action: str | Advice, options: tuple[tuple[str, ...], ...] = ()
) -> SuspectVerdict:
    if isinstance(action, Advice):
        options = tuple(overrides(proposal) for proposal in action.proposals)
    return SuspectVerdict(row.name, row.title, verdict, figure, row.priority, row.interacts, str(action), options)


def preflight_figures(outcomes: Iterable[Outcome], *, multi_turn: bool = False) -> dict[str, float]:
    """The probes' figures as `probe/figure`; with several turns also the number of the environment's tokens."""
    figures = {f"{o.name}/{name}": float(value) for o in outcomes for name, value in o.figures.items()}
    if "masks/trained_tokens" not in figures:
        return figures
    untrained = figures.get("masks/completion_tokens", math.nan) - figures["masks/trained_tokens"]
    return figures | ({"masks/tool_tokens": untrained} if multi_turn and untrained > 0 else {})


def history_figures(history: History, recent: int = 10) -> dict[str, float]:
    """Statistics of a run's metrics: means of the last steps, extremes of the run, and values at its start."""
    figures = {name: history.series[name].finite.tail(recent).mean for name in history.series if history.get(name)}
    if history.kl is not None:
        _, kl = history.kl
        figures["kl/policy_ref/k3/max"] = max(kl.top()[1], history.final_kl or 0.0)
        if kl.finite.steps[0] <= 1:
            figures["kl/at_start"] = abs(kl.finite.values[0])
        sampler = history.get("kl/sampler_policy/k3/mean")
        moved = kl.finite.tail(recent).mean
        if sampler is not None and moved > 0:
            figures["sampler/left_behind"] = sampler.finite.tail(recent).mean / moved
    moves = early_moves(history)
    if moves:
        figures["update/largest_move"] = max(moves)[0]
    parsed = history.get("parse/ok_fraction")
    if parsed is not None:
        figures["parse/first_steps"] = parsed.finite.head(3).mean
    if not divides_by_std(history):
        figures["advantage/divides"] = 0.0
    entropy = history.get("entropy/mean")
    if entropy is not None and history.vocabulary:
        figures["entropy/share"] = entropy.finite.values[0] / math.log(history.vocabulary)
    earned = [number(record.get("reward")) for record in history.rollouts if not record.get("tracked")]
    rewards = [reward for reward in earned if reward is not None]
    if rewards:
        figures["reward/lowest"] = min(rewards)
    return figures


__all__ = ["SUSPECTS", "history_figures", "judge_suspects", "preflight_figures"]
