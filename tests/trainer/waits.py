"""How often a host would wait for a device, counted on a CPU: reads of values that such a device would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.base.types import Completion, Group, Problem, Reward

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique, aten._unique2, aten.unique_dim}
READS |= {aten.unique_consecutive, aten.repeat_interleave, aten.equal}
MODULES = ("models.pack", "models.prefix_attention", "models.rope", "trainer.batch", "trainer.step")


def on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and getattr(x, "_on_device", False)


class Waits(TorchDispatchMode):
    """Counts the reads of tensors that came from `mark`, or from an operation on one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
        super().__init__()
        self.reads: list[str] = []
        for parameter in model.parameters():
            self.mark(parameter)
        for name in MODULES:
            monkeypatch.setattr(f"keel.{name}.to_device", lambda x, device: self.mark(x.clone()))
        for name in ("tolist", "cpu", "numpy", "__array__"):
            monkeypatch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))

    def mark(self, x: Tensor) -> Tensor:
        x._on_device = True  # type: ignore[attr-defined]
        return x

    def _counted(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_device(x):
                self.reads.append(name)
            return inner(x, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_leaves((args, kwargs))
        marked = any(map(on_device, inputs))
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        )
        if marked and (by_mask or func.overloadpacket in READS):
            self.reads.append(str(func))
        out = func(*args, **(kwargs or {}))
        if marked:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.mark(x)
        return out


MADE_UP = "guards.on_step0_kl=warn"  # log-probabilities that no engine has said


def fixed_groups(rewards: Sequence[Sequence[float]] = ((0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (1.0, 0.0))) -> list[Group]:
    """Groups of one shape, twelve tokens to a row: 48, 24 and 12 tokens a microbatch cut four of them in 1, 2 and 4."""
    return [
        Group(
            Problem(str(number), "."),
            tuple(range(5 + number, 11 + number)),
            tuple(_completion(7 * number + 3 * i, "length" if number == 2 else "eos") for i in range(len(totals))),
            tuple(Reward(total, {"letters": total}) for total in totals),
        )
        for number, totals in enumerate(rewards)
    ]


def _completion(first: int, stop_reason: str) -> Completion:
    logp = (-1.5, -2.0, -0.5, -3.0)
    return Completion(tuple(range(first + 5, first + 9)), (True, True, False, True), logp, logp, "text", stop_reason)
