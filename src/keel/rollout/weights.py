"""The weights an engine decodes with: the policy's own, or a copy that knows whether it is still the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keel.errors import KeelError
from keel.models.fingerprint import fingerprint


def is_adapted(model: nn.Module) -> bool:
    """Whether the model is wrapped by peft."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def _active_adapters(model: nn.Module) -> list[str]:
    active: Any = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def effective_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight of the model that merging the active adapters would give: W + scale · BA.

    Computed tensor by tensor from what the policy holds, and without touching it: merging the policy itself and
    unmerging it afterwards would leave rounding behind in the weights being trained.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    base: Any = policy.get_base_model()  # type: ignore[operator]
    replaced: dict[str, Any] = {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
            replaced[name] = module
    for name, module in base.named_modules(remove_duplicate=False):
        owner = next((prefix for prefix in replaced if name == prefix or name.startswith(prefix + ".")), None)
        if owner is None:
            for leaf, tensor in _own_tensors(module):
                yield f"{name}.{leaf}" if name else leaf, tensor
        elif owner == name:
            for leaf, tensor in _merged_tensors(name, replaced[name]):
                yield f"{name}.{leaf}", tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _merged_tensors(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(module, "modules_to_save"):
        active = module.active_adapters[0] if module.active_adapters else None
        saved = active is not None and active in module.modules_to_save
        source = module.modules_to_save[active] if saved else module.original_module
        yield from source.state_dict(keep_vars=True).items()
        return
    for leaf, tensor in _own_tensors(module.get_base_layer()):
        if leaf == "weight" and not module.merged and not module.disable_adapters:
            for adapter in module.active_adapters:
                if getattr(module, "use_dora", {}).get(adapter):
                    raise KeelError(f"{name} is a DoRA layer, which cannot be merged here: build the engine unmerged")
                if adapter in module.scaling:
                    tensor = tensor + module.get_delta_weight(adapter).to(tensor.dtype)
        yield leaf, tensor


class WeightCopy:
    """A copy of the policy in another dtype or place, merged or with its adapters beside it, updated in place."""

    def __init__(
        self, policy: nn.Module, *, dtype: torch.dtype | None, device: torch.device | str | None, merge: bool
    ) -> None:
        self.dtype, self.device = dtype, device
        self.merge = merge and is_adapted(policy)
        self.version: int | None = None
        self.model: Any = None
        self.sync(policy, None)

    def _rebuild(self, policy: nn.Module) -> Any:
        twin: Any = copy.deepcopy(policy)
        if self.merge:
            twin = twin.merge_and_unload()
        twin = twin.to(device=self.device, dtype=self.dtype).eval()
        return twin.requires_grad_(False)

    def _source(self, policy: nn.Module) -> dict[str, Tensor]:
        if self.merge:
            return dict(effective_weights(policy))
        return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}

    @torch.no_grad()
    def sync(self, policy: nn.Module, version: int | None) -> None:
        """Make the copy equal to the policy, in place where both have the same tensors."""
        if self.model is None:
            self.model = self._rebuild(policy)
        source = self._source(policy)
        mine = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        other = not self.merge and source.keys() != mine.keys()
        if other or any(name not in source or source[name].shape != tensor.shape for name, tensor in mine.items()):
            self.model = self._rebuild(policy)  # an adapter was added or the architecture changed
        else:
            for name, tensor in mine.items():
                tensor.copy_(source[name])
        if is_adapted(self.model):
            self.model.base_model.set_adapter(_active_adapters(policy))
            self.model.requires_grad_(False)
        self.version = version
        self._source_print = fingerprint(policy)
        self._own_print = fingerprint(self.model)
        if not self.merge:
            expected = self._source_print if self.dtype is None else fingerprint(policy, dtype=self.dtype)
            assert self._own_print == expected, "the engine's copy does not equal the policy after sync"

    def is_stale(self, policy: nn.Module) -> bool:
        """Whether the policy has moved since the last sync, or somebody has changed the copy."""
        return fingerprint(policy) != self._source_print or fingerprint(self.model) != self._own_print
