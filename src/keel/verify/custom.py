"""Facts about a user's own estimator, in the form of `keel.kl.facts`. An audit proves them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from keel.kl.facts import MEANINGS, POLICY_REF, REF_POLICY, Fact, is_custom

if TYPE_CHECKING:
    from torch import Tensor


@cache  # an audit is expensive
def estimator_facts(name: str) -> tuple[Fact, ...]:
    """The rows that an audit proves for a user's own estimator `module:attr`; empty for built-in estimators.

    The function takes d = log p − log π, or (logp, ref_logp), or (logp, ref_logp, old_logp), each `[B, T]`, and
    returns one value per token. Exact enumeration gives its gradients in the loss, the reward and the advantage.
    """
    if not is_custom(name):
        return ()
    from keel.kl.estimators import call_checked, custom_estimator, takes_ratio  # these import torch
    from keel.verify.audit import audit
    from keel.verify.formula import checked_callable

    function = custom_estimator(name)

    def of_ratio(logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
        return call_checked(name, function, ref - logp)

    return _rows(name, audit(of_ratio if takes_ratio(function) else checked_callable(name, function), name))


def _rows(name: str, report: dict[str, Any]) -> tuple[Fact, ...]:
    """The audit's results as rows of the table of facts."""
    value = report["value"]["estimates"]
    on, off = _verdict(report["in_loss"]), _verdict(report["off_policy"]["in_loss"])
    if off == "wrong" and f"near {on}" in MEANINGS:
        off = f"near {on}"
    rows = [
        Fact(name, "loss", "on", "plain", value, on),
        Fact(name, "loss", "off", "plain", "none", off),
    ]
    score = {"on": _verdict(report["in_reward"]), "off": _verdict(report["off_policy"]["in_reward"])}
    for placement in ("reward", "advantage"):
        for sampling, verdict in score.items():
            rows.append(Fact(name, placement, sampling, "score", value, verdict))
            rows.append(Fact(name, placement, sampling, "score", value, verdict, level="sequence"))
    return tuple(rows)


def _verdict(result: dict[str, Any]) -> str:
    gradient = result["gradient"]
    return gradient if gradient in (POLICY_REF, REF_POLICY, "zero") else "wrong"


__all__ = ["estimator_facts"]
