"""Facts about a user's own estimator, in the form of `keel.kl.facts`. An audit proves them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from keel.kl.facts import ALONG, MEANINGS, REF_POLICY, Fact, is_custom

if TYPE_CHECKING:
    from torch import Tensor


@cache  # an audit is expensive
def estimator_facts(name: str) -> tuple[Fact, ...]:
    """The rows that an audit proves for a user's own estimator `module:attr`; empty for built-in estimators.

    The function takes d = log p − log π, or (logp, ref_logp), or (logp, ref_logp, old_logp), each `[B, T]`, and
    returns one value per token. Exact enumeration gives its gradients in the loss, the reward and the advantage, per
    token and over completions of different lengths.
    """
    if not is_custom(name):
        return ()
    from keel.kl.estimators import custom_estimator, takes_ratio  # these import torch
    from keel.verify.audit import audit
    from keel.verify.formula import checked_callable

    function = custom_estimator(name)

    def of_ratio(logp: Tensor, ref: Tensor) -> Any:
        return function(ref - logp)

    return rows_of(name, audit(checked_callable(name, of_ratio if takes_ratio(function) else function), name))


def rows_of(name: str, report: dict[str, Any]) -> tuple[Fact, ...]:
    """The audit's results as rows of the table of facts."""
    value, bare_score = report["value"]["estimates"], report["bare_score"]
    along = f"{ALONG}{value}" if value == REF_POLICY else value  # its sum over the policy's own completions
    rows = []
    for sampling, results in (("on", report), ("off", report["off_policy"])):
        verdict = {place: _verdict(results[place]) for place in _PLACES}
        own_value = value if sampling == "on" else report["off_policy"]["value"]
        rows.append(Fact(name, "loss", sampling, "plain", own_value, verdict["in_loss"], bare_score=bare_score["loss"]))
        for placement in ("reward", "advantage"):
            scored, of_sequence = verdict["in_advantage"], verdict[_OF_SEQUENCE[placement]]
            rows += [
                Fact(name, placement, sampling, "score", value, scored, bare_score=bare_score["advantage"]),
                Fact(name, placement, sampling, "score", along, of_sequence, level="sequence"),
            ]
    return tuple(rows)


_OF_SEQUENCE = {"reward": "in_reward", "advantage": "in_advantage_sequence"}
_PLACES = ("in_loss", "in_advantage", *_OF_SEQUENCE.values())


def _verdict(result: dict[str, Any]) -> str:
    gradient = str(result["gradient"])
    return gradient if gradient in MEANINGS else "wrong"


__all__ = ["estimator_facts"]
