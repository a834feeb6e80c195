"""The expected gradient of the configured KL term, by the table of verified pairings; used for configurations and logs.

It follows from the options alone. A measurement on a batch (`probes/kl_term.py`) checks the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.base.errors import KeelError
from keel.doctor.findings import Advice, propose
from keel.doctor.runs import number
from keel.kl.facts import CORRECT_GRADIENTS, MEANINGS, Pairing, check_pairing, suggest_pairing, term_reduction
from keel.losses.recipes import LOSSES
from keel.verify.custom import estimator_facts


@dataclass(frozen=True)
class Formula:
    """The pairing as text, its expected gradient (a name in `keel.kl.facts.MEANINGS`), its meaning, and the options
    that correct it. `right`: whether it follows ∇KL(policy‖ref), at least approximately.
    """

    note: str
    expected: str
    meaning: str
    change: Mapping[str, Any]
    right: bool = False
    active: bool = True

    @property
    def advice(self) -> Advice:
        """The options that correct the pairing."""
        return propose("set {}", self.change) if self.change else Advice("choose another pairing from docs/kl.md")


def formula_of(config: Mapping[str, Any], source: str = "keel") -> Formula | None:
    """The formula of a configuration tree, of Keel or mapped from TRL; None if the options do not determine it."""
    kl = config.get("kl")
    if not isinstance(kl, Mapping) or source not in ("keel", "TRL") or kl.get("beta") is None:
        return None
    beta, steered = kl["beta"], str(_inner(kl, "controller", "name", "fixed"))
    if not beta and steered == "fixed":
        return Formula("kl.beta is 0: no KL term acts", "zero", "zero", {}, active=False)
    several = _inner(config, "loss", "num_iterations", 1) > 1 or _inner(config, "optim", "minibatches", 1) > 1
    loss_type = str(_inner(config, "loss", "loss_type", "grpo"))
    if source == "TRL":
        return _of_trl(bool(kl.get("bias_correction")), several, loss_type)
    options: dict[str, Any] = {name: str(kl.get(name, default)) for name, default in _DEFAULTS.items()}
    off_policy = several or _inner(config, "rollout", "max_staleness", 0) > 0
    loss = LOSSES.get(loss_type)
    averaged = term_reduction(options["placement"], str(kl.get("reduction")), loss.reduction if loss else "token_mean")
    try:
        context = {"off_policy": off_policy, "reduction": averaged, "facts": estimator_facts(options["estimator"])}
        pairing = check_pairing(**options, **context, allow_biased=True)
    except KeelError:
        return None  # a user's estimator that cannot be imported here
    note, expected = pairing.note, pairing.expected_gradient
    if not pairing.proven:
        expected = _measured(options, pairing)
        note = f"{note.partition(': expected')[0]}: expected gradient is {MEANINGS[expected]}"
    right = expected in CORRECT_GRADIENTS
    change: Mapping[str, Any] = {} if right else suggest_pairing(**options, **context)
    return Formula(note, expected, MEANINGS[expected].partition(":")[0], change, right)


def _of_trl(corrected: bool, off_policy: bool, loss_type: str) -> Formula:
    """TRL's term: k3 in the loss, averaged as the loss is, with (`corrected`) or without the importance ratio."""
    expected = "policy||ref" if corrected else "ref||policy"
    if loss_type in TRL_BY_LENGTH:
        expected = f"length-weighted {expected}"
    if off_policy and not corrected:
        expected = f"near {expected}"
    meaning = MEANINGS[expected]
    note = f"k3 in the loss {'with' if corrected else 'without'} its bias correction: expected gradient is {meaning}"
    change = {} if corrected else {"use_bias_correction_kl": True}
    return Formula(note, expected, meaning.partition(":")[0], change, right=corrected)


TRL_BY_LENGTH = ("grpo", "sapo")  # losses that average over each completion
_DEFAULTS = {"estimator": "k3", "placement": "loss", "gradient": "auto", "level": "token"}


def _inner(tree: Mapping[str, Any], section: str, name: str, default: Any) -> Any:
    inner = tree.get(section)
    value = inner.get(name) if isinstance(inner, Mapping) else None
    usable = isinstance(value, str) if isinstance(default, str) else number(value) is not None
    return value if value and usable else default


def _measured(options: Mapping[str, Any], pairing: Pairing) -> str:
    """The expected gradient of a pairing without a row: summed over the vocabulary at synthetic states."""
    import torch

    from keel.doctor.expected import measure_term
    from keel.kl import KLOptions

    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(8, 11, generator=generator, dtype=torch.float64)
    moved = reference + torch.randn(8, 11, generator=generator, dtype=torch.float64)
    measured = measure_term(moved, reference, KLOptions.model_validate({**options, "allow_biased": True}), pairing)
    return measured.name if measured.name in MEANINGS and measured.factor > 0 else "wrong"


__all__ = ["Formula", "formula_of"]
