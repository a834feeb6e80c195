"""Suggest the smallest change of options that makes a pairing's expected gradient ∇KL(policy‖ref)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.kl.facts import LENGTH_WEIGHTED, NEAR, POLICY_REF, check_pairing

CORRECT_GRADIENTS = (POLICY_REF, NEAR, f"{LENGTH_WEIGHTED}{POLICY_REF}", f"near {LENGTH_WEIGHTED}{POLICY_REF}")

# Candidates in order: a change of one option, then an estimator with a correct gradient, then the default pairing.
_CANDIDATES: tuple[Mapping[str, str], ...] = (
    {"gradient": "auto"},
    {"estimator": "k3"},
    {"estimator": "exact"},
    {"estimator": "k1"},
    {"gradient": "sg_rho*k2"},
    {"gradient": "auto", "estimator": "k3"},
    {"gradient": "auto", "estimator": "exact"},
    {"gradient": "auto", "estimator": "k1"},
    {"gradient": "auto", "estimator": "k3", "placement": "loss", "level": "token"},
)


def suggest_pairing(estimator: str, placement: str, gradient: str, level: str, **context: Any) -> dict[str, str]:
    """The `kl` options to change; empty if the pairing is already correct, or if no candidate is correct.

    `context` are further arguments of `check_pairing`, such as `off_policy`.
    """
    current = {"estimator": estimator, "placement": placement, "gradient": gradient, "level": level}
    exact_first = (
        sorted(_CANDIDATES, key=lambda candidate: candidate.get("estimator", "") == "k3")
        if "exact" in estimator
        else _CANDIDATES
    )
    for candidate in ({}, *exact_first):
        changed = {name: value for name, value in candidate.items() if value != current[name]}
        if (changed or not candidate) and _is_correct({**current, **changed}, context):
            return {f"kl.{name}": value for name, value in changed.items()}
    return {}


def _is_correct(pairing: Mapping[str, str], context: Mapping[str, Any]) -> bool:
    arguments: dict[str, Any] = {**pairing, **context}
    try:
        return check_pairing(**arguments).expected_gradient in CORRECT_GRADIENTS
    except KeelError:
        return False


__all__ = ["CORRECT_GRADIENTS", "suggest_pairing"]
