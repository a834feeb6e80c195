"""From any pairing to one whose expected gradient is ∇KL(policy‖ref), by the fewest options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.kl.facts import LENGTH_WEIGHTED, NEAR, POLICY_REF, check_pairing

RIGHT = (POLICY_REF, NEAR, f"{LENGTH_WEIGHTED}{POLICY_REF}", f"near {LENGTH_WEIGHTED}{POLICY_REF}")

# What is tried, in this order: one option alone, then an estimator with a right gradient at this placement and level.
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


def nearest_right(estimator: str, placement: str, gradient: str, level: str, **context: Any) -> dict[str, str]:
    """Options of `kl` to set, none of them as it is already; empty where the pairing is right, or none near it is.

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
        if (changed or not candidate) and _is_right({**current, **changed}, context):
            return {f"kl.{name}": value for name, value in changed.items()}
    return {}


def _is_right(pairing: Mapping[str, str], context: Mapping[str, Any]) -> bool:
    arguments: dict[str, Any] = {**pairing, **context}
    try:
        return check_pairing(**arguments).expected_gradient in RIGHT
    except KeelError:
        return False


__all__ = ["RIGHT", "nearest_right"]
