"""The kinds of reference: which weights, and when they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

from torch import nn

from keel.base.errors import KeelError
from keel.models.load import LoadedModel
from keel.models.lora import is_lora
from keel.reference.adapter import AdapterWeights, DeltaAverage
from keel.reference.full import FullCopy
from keel.reference.weights import ReferenceWeights, Shard, unwrap


@runtime_checkable
class Reference(Protocol):
    """The policy that the KL is measured against.

    `reset_optimizer` asks the caller to forget the optimizer's moments whenever `update` returned true.
    """

    kind: str
    reset_optimizer: bool

    def model(self) -> AbstractContextManager[nn.Module]:
        """The model to score with, in eval mode and without gradients; the policy is restored after the context."""

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        """Move if it is time, after `step` finished steps, with the KL measured in nats per token; did it move?"""

    def state_dict(self) -> dict[str, Any]:
        """The weights, how often they moved, and their fingerprint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; a fingerprint that does not match afterwards is an error."""

    def fingerprint(self) -> str:
        """A digest of the reference's effective weights."""


Move = Callable[[ReferenceWeights, nn.Module], None]
When = Callable[[int, float | None], bool]


class RuleReference:
    """Weights with a rule: `when(step, measured_kl)` says whether to move, `move(weights, policy)` moves them."""

    def __init__(
        self, kind: str, weights: ReferenceWeights, *, when: When, move: Move, reset_optimizer: bool = False
    ) -> None:
        self.kind = kind
        self.reset_optimizer = reset_optimizer
        self.moves = 0
        self.moved_at: int | None = None
        self._weights, self._when, self._move = weights, when, move

    def model(self) -> AbstractContextManager[nn.Module]:
        return self._weights.model()

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        if not self._when(step, measured_kl):
            return False
        self._move(self._weights, policy)
        self.moves += 1
        self.moved_at = step
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "moves": self.moves,
            "moved_at": self.moved_at,
            "weights": self._weights.tensors(),
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != self.kind:
            raise KeelError(f"the saved reference is {state['kind']!r} but reference.kind is {self.kind!r}: keep one")
        restore = self._weights.backup()
        try:
            self._weights.load(state["weights"])
            self._check_restored(str(state["fingerprint"]))
        except Exception:
            restore()  # a refused checkpoint leaves the reference as it was
            raise
        self.moves, self.moved_at = int(state["moves"]), state["moved_at"]

    def _check_restored(self, expected: str) -> None:
        restored = self.fingerprint()
        if restored != expected:
            raise KeelError(
                f"the restored reference has fingerprint {restored[:12]} but the checkpoint says {expected[:12]}: "
                "its base model or its file has changed; resume with the model the run began with"
            )

    def fingerprint(self) -> str:
        return self._weights.fingerprint()

    def spread(self, shard: Shard) -> None:
        """Spread the weights over the processes, where they are not the policy's own."""
        self._weights.spread(shard)


@dataclass(frozen=True)
class Range:
    """What a parameter may be, in words and as a test; it stands in the parameter's type."""

    expected: str
    holds: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Alpha = Annotated[float, Range("a number in (0, 1]", lambda value: _number(value) and 0 < value <= 1)]
Steps = Annotated[
    int, Range("a whole number of steps, at least 1", lambda v: _number(v) and isinstance(v, int) and v >= 1)
]
Nats = Annotated[float, Range("a positive number of nats per token", lambda value: _number(value) and value > 0)]
Flag = Annotated[bool, Range("true or false", lambda value: isinstance(value, bool))]


def frozen(loaded: LoadedModel, *, offload: Flag = False) -> Reference:
    """The policy as it is now, for ever: a full copy, or under LoRA the starting adapter over the shared base."""
    return RuleReference("frozen", _weights(loaded, offload), when=_never, move=_assign)


def adapter_off(loaded: LoadedModel, *, offload: Flag = False) -> Reference:
    """The policy's base with the adapters off; an adapter that has a past is kept as it is now, as a second one.

    A reference is where the policy starts, so that the KL begins at 0: that is the bare base model for a fresh adapter
    only, and a run says so where it is not. Fresh LoRA costs no memory this way, so there is nothing that `offload`
    would have to move.
    """
    if not is_lora(unwrap(loaded.model)):
        raise KeelError("reference.kind=adapter_off needs LoRA: set model.lora, or use reference.kind=frozen")
    return RuleReference("adapter_off", AdapterWeights(loaded.model, offload=offload), when=_never, move=_assign)


def ema(loaded: LoadedModel, *, alpha: Alpha = 0.6, every: Steps = 512, offload: Flag = False) -> Reference:
    """Every `every` steps: reference ← α policy + (1 − α) reference, of effective weights (under LoRA: of BA).

    The same α and period as TRL's `ref_model_mixup_alpha` and `ref_model_sync_steps` (TR-DPO, arXiv:2404.09656).
    """
    policy = loaded.model
    average = DeltaAverage(policy, offload=offload) if is_lora(unwrap(policy)) else FullCopy(policy, offload=offload)
    return RuleReference("ema", average, when=_every(every), move=lambda weights, policy: weights.blend(policy, alpha))


def snapshot(
    loaded: LoadedModel, *, every: Steps = 100, reset_optimizer: Flag = False, offload: Flag = False
) -> Reference:
    """Every `every` steps the reference becomes the policy, optionally with a fresh optimizer (arXiv:2505.24864)."""
    weights = _weights(loaded, offload)
    return RuleReference("snapshot", weights, when=_every(every), move=_assign, reset_optimizer=reset_optimizer)


def kl_triggered(
    loaded: LoadedModel, *, threshold: Nats = 0.1, reset_optimizer: Flag = False, offload: Flag = False
) -> Reference:
    """The reference becomes the policy whenever the measured KL (nats per token) passes `threshold`."""
    weights = _weights(loaded, offload)
    return RuleReference("kl_triggered", weights, when=_above(threshold), move=_assign, reset_optimizer=reset_optimizer)


def _weights(loaded: LoadedModel, offload: bool) -> ReferenceWeights:
    policy = loaded.model
    return AdapterWeights(policy, offload=offload) if is_lora(unwrap(policy)) else FullCopy(policy, offload=offload)


def _assign(weights: ReferenceWeights, policy: nn.Module) -> None:
    weights.assign(policy)


def _never(step: int, measured_kl: float | None) -> bool:
    return False


def _every(every: int) -> When:
    return lambda step, measured_kl: step > 0 and step % every == 0


def _above(threshold: float) -> When:
    # A step without a measurement, or with a broken one, is no evidence that the policy has moved.
    return lambda step, kl: kl is not None and math.isfinite(kl) and kl > threshold
