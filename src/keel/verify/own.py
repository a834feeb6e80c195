"""A user's own estimator in training: audited first, so that what its gradient does is known as for Keel's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.estimators import ESTIMATORS, OWN
from keel.kl.facts import MEANINGS, OWN_FACTS, POLICY_REF, REF_POLICY, Fact
from keel.verify.audit import audit
from keel.verify.formula import load_callable
from keel.verify.oracle import Formula


def register_estimator(name: str, function: Any) -> tuple[Fact, ...]:
    """Put `module:attr` beside Keel's estimators with the rows that the audit proves; returns them.

    The function takes d = log p − log π, or (logp, ref_logp), or (logp, ref_logp, old_logp), each `[B, T]`, and
    returns one value a token. What it does in the loss, the reward and the advantage is found by exact enumeration.
    """
    if not callable(function):
        raise KeelError(f"kl.estimator={name} is a {type(function).__name__}: give a function of log-probabilities")
    formula: Formula
    if _takes_ratio(function):
        ESTIMATORS[name] = function

        def formula(logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
            value: Tensor = function(ref - logp)
            return value

        report = audit(formula, name)
    else:
        own = load_callable(name)
        OWN[name] = own.formula
        report = audit(own, name)
    OWN_FACTS[name] = _rows(name, report)
    return OWN_FACTS[name]


def _takes_ratio(function: Callable[..., Any]) -> bool:
    """Whether it takes one tensor, the log-ratio."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        return False
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(placed) == 1


def _rows(name: str, report: dict[str, Any]) -> tuple[Fact, ...]:
    """The audit's answers in the form of the table of facts."""
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


def _verdict(answer: dict[str, Any]) -> str:
    gradient = answer["gradient"]
    return gradient if gradient in (POLICY_REF, REF_POLICY, "zero") else "wrong"


__all__ = ["register_estimator"]
