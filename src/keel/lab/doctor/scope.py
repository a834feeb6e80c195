"""Findings that mean nothing for a run: a teacher is another model from the start; KL alone trains without rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keel.lab.doctor.findings import Finding
from keel.lab.runs import option_of

_OF_THE_POLICY_TERM = (
    "kl/too-strong",
    "kl/not-learning",
    "reward/",
    "advantage/",
    "loss/no-gradient",
    "loss/sign",
    "loss/scale",
    "parse/",
)
_OF_THE_START = ("kl/at-start", "reference/wrong", "kl/over-budget", "kl/unneeded")
_START_FIGURES = ("kl/at_start", "reference/kl_at_start")


def in_scope(findings: Iterable[Finding], config: Mapping[str, Any]) -> list[Finding]:
    """The findings without those that this configuration, as plain data, makes meaningless."""
    prefixes: tuple[str, ...] = ()
    if option_of(config, "loss.policy_weight") == 0:
        prefixes += _OF_THE_POLICY_TERM
    if option_of(config, "reference.model") is not None:
        prefixes += _OF_THE_START
    return [finding for finding in findings if not finding.code.startswith(prefixes)]


def figures_in_scope(figures: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """The figures that decide hypotheses, without the KL at the start where that is the distance to a teacher."""
    left_out = _START_FIGURES if option_of(config, "reference.model") is not None else ()
    return {name: value for name, value in figures.items() if name not in left_out}
