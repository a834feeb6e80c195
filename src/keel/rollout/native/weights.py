"""The weights of an engine: a copy of the policy's that detects when it is stale."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.adapters import adapter_layers, inactive_adapters, is_lora
from keel.models.fingerprint import adapter_state, persistent_buffers
from keel.models.head import causal_lm, evaluating, module_dtype
from keel.models.load import cast_parameters
from keel.models.lora import adapter_is_zero
from keel.models.noise import Errors, estimated, has_experts, in_dtype, judge
from keel.models.sharding import call_with_full_weights, full_tensor, is_sharded
from keel.rollout.native.fused import join_projections

_UNMERGED = "build the engine with merge=False"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def merged_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight with the active adapters merged: W + scale · BA.

    Computed tensor by tensor without changing the policy: merging and unmerging the policy would round its weights.
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
            for leaf, tensor in _direct_tensors(module):
                yield f"{name}.{leaf}" if name else leaf, tensor
        elif owner == name:
            for leaf, tensor in _merged_tensors(name, replaced[name]):
                yield f"{name}.{leaf}", tensor


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _merged_tensors(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(module, "modules_to_save"):
        active = module.active_adapters[0] if module.active_adapters and not module.disable_adapters else None
        saved = active is not None and active in module.modules_to_save
        source = module.modules_to_save[active] if saved else module.original_module
        yield from source.state_dict(keep_vars=True).items()
        return
    _check_mergeable(name, module)
    for leaf, tensor in _direct_tensors(module.get_base_layer()):
        if leaf == "weight" and not module.merged and not module.disable_adapters:
            for adapter in module.active_adapters:
                if adapter in module.scaling:
                    with torch.autocast(tensor.device.type, enabled=False):  # which would round the adapter's product
                        tensor = full_tensor(tensor) + module.get_delta_weight(adapter).to(tensor.dtype)
        yield leaf, tensor


def _check_mergeable(name: str, module: Any) -> None:
    """Refuse a layer whose adapter is not a matrix added to its weight."""
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, LoraLayer) or hasattr(module, "parameter_name"):
        raise KeelError(f"{name} has an adapter that is not LoRA on a layer's weight and cannot be merged: {_UNMERGED}")
    for adapter in module.active_adapters:
        if adapter in module.lora_variant:
            kind = "DoRA" if module.use_dora.get(adapter) else type(module.lora_variant[adapter]).__name__
            raise KeelError(f"{name} is a {kind} layer, which cannot be merged here: {_UNMERGED}")
        if module.lora_bias.get(adapter):
            raise KeelError(f"{name} has LoRA with a bias (lora_bias), which cannot be merged here: {_UNMERGED}")


def _untie(model: Any) -> bool:
    """Untie the weights of adapted layers from other modules; returns whether any was tied.

    An adapter on a tied head changes only the head; merged into the shared weight it would also change the input
    embedding.
    """
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    untied = False
    for _, layer in adapter_layers(model):
        inner = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None
        for leaf, parameter in list(inner._parameters.items()) if inner is not None else ():
            if parameter is not None and holders[id(parameter)] > 1:
                holders[id(parameter)] -= 1
                setattr(inner, leaf, nn.Parameter(parameter.detach().clone(), requires_grad=False))
                untied = True
    return untied


def merge(model: Any) -> Any:
    """Merge the adapters into the base's weights; the model passed in must not be used again."""
    untied = _untie(model)
    merged = model.merge_and_unload()
    if untied:
        merged.config.tie_word_embeddings = False
    return merged


def _copy_adapter_state(twin: Any, policy: Any) -> None:
    """Copy which adapters are active, disabled and merged, and their scaling.

    Set layer by layer, since peft's `set_adapter` would unmerge.
    """
    for (_, mine), (_, source) in zip(adapter_layers(twin), adapter_layers(policy), strict=True):
        for field in ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"):
            if field in vars(source):
                setattr(mine, field, copy.copy(vars(source)[field]))
    for mine, source in ((twin, policy), (twin.base_model, policy.base_model)):
        if "active_adapter" in vars(source):
            mine.active_adapter = copy.copy(source.active_adapter)


class WeightCopy:
    """A copy of the policy in another dtype or on another device, merged or with its adapters, updated in place."""

    def __init__(
        self, policy: nn.Module, *, dtype: torch.dtype | None, device: torch.device | str | None, merge: bool
    ) -> None:
        self.dtype, self.device = dtype, device
        self.merge = merge and is_lora(policy)
        self.model: Any = None
        self._accepted = 0  # syncs of a merged adapter that is not zero
        self.sync(policy)

    def _rebuild(self, policy: nn.Module) -> Any:
        twin: Any = copy.deepcopy(policy)
        twin.zero_grad(set_to_none=True)
        if self.merge:
            twin = merge(twin)
        twin = cast_parameters(twin, self.dtype, self.device).eval().requires_grad_(False)
        if next(twin.parameters()).is_cuda:
            join_projections(twin)
        return twin

    def _source(self, policy: nn.Module) -> dict[str, Tensor]:
        if self.merge:
            return dict(merged_weights(policy))
        return _tensors(policy)

    def _fits(self, source: dict[str, Tensor]) -> bool:
        """Whether the copy has the policy's tensors; false after an adapter was added or the architecture changed."""
        if self.model is None:
            return False
        mine = _tensors(self.model)
        if not self.merge and source.keys() != mine.keys():
            return False
        return all(name in source and source[name].shape == tensor.shape for name, tensor in mine.items())

    @torch.no_grad()
    def sync(self, policy: nn.Module) -> None:
        """Make the copy equal to the policy, in place if both have the same tensors."""
        _check_not_merged_and_off(policy)
        source = self._source(policy)
        self._adapters: list[str] | None = (
            None  # the policy's state at the last sync; None (stale) if a step below fails
        )
        if not self._fits(source):
            self.model = self._rebuild(policy)
            self._accepted = 0
        for name, tensor in _tensors(self.model).items():
            tensor.copy_(full_tensor(source[name]))
        if is_lora(self.model):
            _copy_adapter_state(self.model, policy)
            self.model.requires_grad_(False)
        self._verify(policy, source)
        self._adapters = sorted(adapter_state(policy))

    def _verify(self, policy: nn.Module, source: dict[str, Tensor]) -> None:
        """Compare the copy with the policy bit by bit, and judge a merged copy's logits.

        They are judged while the adapter is zero and at the syncs 1, 2, 4, 8 and so on afterwards: a wrong merge of
        zeros is no different from a right one.
        """
        if self._differs(policy, source):
            raise KeelError("the engine's copy does not equal the policy after sync: build a new engine from it")
        if not self.merge:
            return
        count = self._accepted + (not adapter_is_zero(policy))
        if count & (count - 1) == 0:
            fault = judge(partial(_merge_errors, policy, self.model), routed=has_experts(policy))
            if fault is not None:
                raise KeelError(f"these adapters cannot be merged: of the merged copy {fault}; {_UNMERGED}")
        self._accepted = count

    def _differs(self, policy: nn.Module, source: dict[str, Tensor]) -> bool:
        """Whether any bit of the copy, or its adapters' state, differs from the policy.

        Non-persistent buffers may differ. All comparisons are queued before any is read, to wait for a GPU only once.
        """
        if not self.merge and sorted(adapter_state(self.model)) != sorted(adapter_state(policy)):
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
        try:
            source = self._source(policy)
        except KeelError:  # an adapter that can no longer be merged
            return True
        return not self._fits(source) or self._differs(policy, source)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that affect a model's output; inactive adapters, such as a reference's, are excluded."""
    idle = tuple(f"{prefix}." for prefix in inactive_adapters(model))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if not idle or not f"{name}.".startswith(idle)}


def _check_not_merged_and_off(policy: nn.Module) -> None:
    """Refuse merged adapters that are switched off: peft would unmerge them in the next forward."""
    for name, layer in adapter_layers(policy):
        if layer.disable_adapters and getattr(layer, "merged_adapters", ()):
            raise KeelError(f"the adapter of {name} is merged and switched off at once: call unmerge_adapter() first")


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _merge_errors(policy: nn.Module, merged: nn.Module, seed: int) -> Errors:
    """Errors of the merged copy's logits and of the policy's with its adapters apart, in the narrower dtype of both."""
    vocabulary = causal_lm(policy).config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(seed))

    def logits(model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        with evaluating(model), torch.autocast(device.type, enabled=False):
            return call_with_full_weights(model, _logits, ids.to(device)).float().cpu().flatten(0, 1)

    dtype = min(module_dtype(merged), module_dtype(policy), key=lambda dtype: dtype.itemsize)
    if is_sharded(policy):  # which keeps its dtype
        return estimated(logits(merged), logits(policy), torch.finfo(dtype).eps)
    with in_dtype(policy, dtype):
        plain = logits(policy)
    with in_dtype(policy, torch.float32):
        return Errors.of(logits(merged), plain, logits(policy))
