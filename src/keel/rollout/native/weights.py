"""The weights of an engine: a copy of the policy's weights that detects when it is stale."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.fingerprint import adapter_state, persistent_buffers
from keel.models.head import adapter_layers, is_lora
from keel.models.load import cast_parameters
from keel.models.sharding import full_tensor
from keel.rollout.native.fused import join_projections

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy_adapter_state(twin: Any, policy: Any) -> None:
    """Copy the state of adapters (active, disabled, merged) and their scaling.

    The state is set layer by layer, because peft's `set_adapter` would unmerge.
    """
    for (_, mine), (_, source) in zip(adapter_layers(twin), adapter_layers(policy), strict=True):
        for field in ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"):
            if field in vars(source):
                setattr(mine, field, copy.copy(vars(source)[field]))
    for mine, source in ((twin, policy), (twin.base_model, policy.base_model)):
        if "active_adapter" in vars(source):
            mine.active_adapter = copy.copy(source.active_adapter)


class WeightCopy:
    """A copy of the policy in another dtype or on another device, updated in place."""

    def __init__(self, policy: nn.Module, *, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.dtype, self.device = dtype, device
        self.model: Any = None
        self.sync(policy)

    def _rebuild(self, policy: nn.Module) -> Any:
        twin: Any = copy.deepcopy(policy)
        twin.zero_grad(set_to_none=True)
        twin = cast_parameters(twin, self.dtype, self.device).eval().requires_grad_(False)
        if next(twin.parameters()).is_cuda:
            join_projections(twin)
        return twin

    def _fits(self, source: dict[str, Tensor]) -> bool:
        """Whether the copy has the same tensors as the policy. False if an adapter or a module was added."""
        if self.model is None:
            return False
        mine = _tensors(self.model)
        return source.keys() == mine.keys() and all(source[name].shape == tensor.shape for name, tensor in mine.items())

    @torch.no_grad()
    def sync(self, policy: nn.Module) -> None:
        """Make the copy equal to the policy; in place if both have the same tensors."""
        _check_not_merged_and_off(policy)
        source = _tensors(policy)
        self._adapters: list[str] | None = (
            None  # the policy's state at the last sync; None (stale) if a step below fails
        )
        if not self._fits(source):
            self.model = self._rebuild(policy)
        for name, tensor in _tensors(self.model).items():
            tensor.copy_(full_tensor(source[name]))
        if is_lora(self.model):
            _copy_adapter_state(self.model, policy)
            self.model.requires_grad_(False)
        if self._differs(policy, source):
            raise KeelError("the engine's copy does not equal the policy after sync: build a new engine from it")
        self._adapters = sorted(adapter_state(policy))

    def _differs(self, policy: nn.Module, source: dict[str, Tensor]) -> bool:
        """Whether any bit of the copy, or its adapters' state, differs from the policy.

        Non-persistent buffers may differ. All comparisons are queued before a result is read, to wait for a GPU once.
        """
        if sorted(adapter_state(self.model)) != sorted(adapter_state(policy)):
            return True
        kept = {name for name, _ in (*self.model.named_parameters(), *persistent_buffers(self.model))}
        unequal: dict[torch.device, list[Tensor]] = {}
        for name, tensor in _tensors(self.model).items():
            if name in kept:
                expected = full_tensor(source[name]).to(tensor.device, tensor.dtype)
                unequal.setdefault(tensor.device, []).append((_bits(tensor) != _bits(expected)).any())
        return any(bool(torch.stack(flags).any()) for flags in unequal.values())

    @torch.no_grad()
    def is_stale(self, policy: nn.Module) -> bool:
        """Whether policy or copy changed since the last sync."""
        if self._adapters != sorted(adapter_state(policy)):
            return True
        source = _tensors(policy)
        return not self._fits(source) or self._differs(policy, source)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that equal NaNs compare as equal."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _inactive_adapters(model: nn.Module) -> set[str]:
    """Name prefixes `layer.lora_A.<adapter>` of adapters that are not active."""
    prefixes = set()
    for prefix, layer in adapter_layers(model):
        for kind in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            holder = getattr(layer, kind, None)
            names = holder if isinstance(holder, nn.ModuleDict | nn.ParameterDict) else ()
            prefixes |= {f"{prefix}.{kind}.{name}" for name in names if name not in layer.active_adapters}
    return prefixes


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that affect a model's output. Inactive adapters, such as a reference's, are excluded."""
    idle = tuple(f"{prefix}." for prefix in _inactive_adapters(model))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if not idle or not f"{name}.".startswith(idle)}


def _check_not_merged_and_off(policy: nn.Module) -> None:
    """Refuse adapters that are merged and disabled, because peft would unmerge them in the next forward."""
    for name, layer in adapter_layers(policy):
        if layer.disable_adapters and getattr(layer, "merged_adapters", ()):
            raise KeelError(f"the adapter of {name} is both merged and disabled: call unmerge_adapter() first")


def weights_layout(model: nn.Module) -> tuple[Any, ...]:
    """A key that changes when a weight is replaced or an adapter is switched. Captured graphs are then invalid."""
    adapters = tuple(
        (str(layer.active_adapters), layer.disable_adapters, str(getattr(layer, "merged_adapters", ())))
        for _, layer in adapter_layers(model)
    )
    scales = tuple(str(getattr(layer, "scaling", None)) for _, layer in adapter_layers(model))
    return tuple((id(p), p.data_ptr()) for p in model.parameters()), adapters, scales


def weights_version(model: nn.Module) -> tuple[Any, ...]:
    """A key that changes with the layout and with writes to weights. Cached KV is then invalid.

    It contains torch's count of writes to each tensor. Writes through `.data` are not counted; Keel has none.
    """
    return tuple(p._version for p in model.parameters()), *weights_layout(model)
