"""The protocol of references, and the built-in class: weights with a rule for when they move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from keel.base.errors import KeelError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from keel.reference.server import ServerTeacher
    from keel.reference.weights import ReferenceWeights, Sharder


@runtime_checkable
class Reference(Protocol):
    """The policy that the KL is measured against.

    `reset_optimizer` asks the caller to reset the optimizer's moments when `update` returns true.
    """

    kind: str
    reset_optimizer: bool

    def model(self) -> AbstractContextManager[nn.Module]:
        """The model to score with, in eval mode and without gradients; the policy is restored after the context."""

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        """Move if due after `step` finished steps; `measured_kl` is in nats per token. Returns whether it moved."""

    def state_dict(self) -> dict[str, Any]:
        """The weights, how often they moved, and their fingerprint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises an error if the fingerprint does not match afterwards."""

    def fingerprint(self) -> str:
        """A digest of the reference's effective weights."""


Move = Callable[["ReferenceWeights", "nn.Module"], None]
When = Callable[[int, float | None], bool]


class RuleReference:
    """Weights with a rule: `when(step, measured_kl)` decides whether to move, `move(weights, policy)` moves them.

    `teacher` is the teacher's name, or None if the weights come from the policy. `shared_prefix` says whether it can
    score several completions in one row. `context_length` is its maximum number of tokens. `by_task` maps tasks to
    teachers. `server` is a teacher behind a server. `device` is the teacher's device if it is not the policy's.
    """

    def __init__(
        self,
        kind: str,
        weights: ReferenceWeights,
        *,
        when: When,
        move: Move,
        reset_optimizer: bool = False,
        teacher: str | None = None,
        shared_prefix: bool = True,
        context_length: int | None = None,
        by_task: Mapping[str, RuleReference] = MappingProxyType({}),
        server: ServerTeacher | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.by_task, self.server, self.device = by_task, server, device
        self.kind, self.teacher, self.shared_prefix, self.context_length = kind, teacher, shared_prefix, context_length
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
            raise KeelError(
                f"the saved reference is {state['kind']!r}, but reference.kind is {self.kind!r}: use the saved kind"
            )
        restore = self._weights.backup()
        try:
            self._weights.load(state["weights"])
            self._check_restored(str(state["fingerprint"]))
        except Exception:
            restore()  # keep the reference if the checkpoint is refused
            raise
        self.moves, self.moved_at = int(state["moves"]), state["moved_at"]

    def _check_restored(self, expected: str) -> None:
        restored = self.fingerprint()
        if restored != expected:
            raise KeelError(
                f"the restored reference has fingerprint {restored[:12]} but the checkpoint has {expected[:12]}: "
                "its base model or its file has changed; resume with the run's initial model"
            )

    def fingerprint(self) -> str:
        return self._weights.fingerprint()

    def shard(self, sharder: Sharder) -> None:
        """Shard the weights over the processes if they are separate from the policy's."""
        self._weights.shard(sharder)


def starts_at_policy(reference: Reference | None) -> bool:
    """True for the built-in kinds without a teacher, whose weights are the policy's before the first update."""
    return isinstance(reference, RuleReference) and reference.teacher is None


def is_server(model: str | Mapping[str, str]) -> bool:
    """Whether the teacher's name, or one of the names by task, is the URL of a server."""
    names = [model] if isinstance(model, str) else model.values()
    return any(name.startswith(("http://", "https://")) for name in names)


def knows_top_only(reference: Reference | None) -> bool:
    """Whether a teacher is behind a server, which returns the log-probabilities of its top tokens only."""
    if not isinstance(reference, RuleReference):
        return False
    return any(each.server is not None for each in (reference, *reference.by_task.values()))


def shortest_context(policy: int | None, *references: Reference | None) -> int | None:
    """The shortest context of policy and references; None without a limit."""
    own = (reference.context_length for reference in references if isinstance(reference, RuleReference))
    return min((length for length in (policy, *own) if length is not None), default=None)


def packs_rows(*references: Reference | None) -> bool:
    """Whether every reference can score several completions in one row."""
    return all(reference.shared_prefix for reference in references if isinstance(reference, RuleReference))
