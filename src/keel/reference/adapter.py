"""Reference weights that share the policy's base: adapters off, a second frozen adapter, or averaged updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.base.errors import KeelError
from keel.models.fingerprint import effective_weights, fingerprint, fingerprint_tensors
from keel.models.head import evaluating, is_lora
from keel.models.lora import adapter_is_zero, check_bias, check_unmerged
from keel.models.options import LoadedModel
from keel.reference.weights import FullCopy, OffloadedTensors, ReferenceWeights, Sharder, unwrap


class AdapterWeights:
    """The policy's base with no adapter (adapters off) or a second, frozen adapter.

    If the policy's adapter is zero (fresh LoRA), the adapters are switched off and nothing is stored. Otherwise
    (continued or warm-started) a copy of it is stored as a second adapter. Both equal the policy at that time, so the
    measured KL starts at 0. With `base` the adapters are always switched off, so the base model is the reference.
    """

    def __init__(self, policy: nn.Module, *, offload: bool = False, base: bool = False) -> None:
        self._model: Any = unwrap(policy)
        if not is_lora(self._model):
            raise KeelError("this reference needs LoRA: set model.lora, or use reference.kind=frozen")
        self._policy_adapter: str = self._model.active_adapters[0]
        check_bias(self._model.peft_config[self._policy_adapter], "the policy's adapter")
        check_unmerged(self._model)
        self._offload = offload
        self._offloaded: OffloadedTensors | None = None
        self._name: str | None = None
        if not base and not adapter_is_zero(self._model):
            self.assign(policy)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        check_unmerged(self._model)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._model))
            stack.enter_context(self._offloaded.on_device() if self._offloaded else nullcontext())
            stack.enter_context(_adapters_off(self._model) if self._name is None else self._switched(self._name))
            yield self._model

    def assign(self, policy: nn.Module) -> None:
        from peft import get_peft_model_state_dict

        self._check_same(policy)
        state = get_peft_model_state_dict(self._model, adapter_name=self._policy_adapter, save_embedding_layers=False)
        self.load(state)

    def blend(self, policy: nn.Module, alpha: float) -> None:
        raise NotImplementedError("the average of two adapters has a higher rank: use DeltaAverage")

    def tensors(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        if self._name is None:
            return {}
        state = get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=False)
        return {key: value.detach().clone() for key, value in state.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        from peft import set_peft_model_state_dict

        if not tensors:
            self._drop()
            return
        if self._name is None:
            self._add()
        assert self._name is not None
        try:
            result: Any = set_peft_model_state_dict(self._model, dict(tensors), adapter_name=self._name)
        except RuntimeError as error:
            raise KeelError(
                "the saved reference adapter and this policy's adapter have different shapes: resume with the "
                "run's own model.lora"
            ) from error
        if result.unexpected_keys:
            raise KeelError(
                f"the saved reference adapter does not fit this policy, which has no {result.unexpected_keys[0]}"
            )

    def fingerprint(self) -> str:
        with self.model() as model:
            return fingerprint(model)

    def backup(self) -> Callable[[], None]:
        return partial(self.load, self.tensors())

    def shard(self, sharder: Sharder) -> None:
        """Nothing to do: the base is the policy's, and adapters are not sharded."""

    def _add(self) -> None:
        """Add a second, frozen adapter; the policy's stays active and trainable."""
        name, count = "reference", 1
        while name in self._model.peft_config:
            name, count = f"reference_{count}", count + 1
        config = copy.deepcopy(self._model.peft_config[self._policy_adapter])
        config.inference_mode = True
        with _restoring_requires_grad(self._model), torch.random.fork_rng():
            self._model.add_adapter(name, config)
            self._model.set_adapter(self._policy_adapter)
        self._name = name
        added = [parameter for key, parameter in self._model.named_parameters() if name in key.split(".")]
        for parameter in added:
            parameter.requires_grad_(False)
        if self._offload:
            self._offloaded = OffloadedTensors(added)

    def _drop(self) -> None:
        if self._name is not None:
            with _restoring_requires_grad(self._model):
                self._model.delete_adapter(self._name)
            self._name, self._offloaded = None, None

    @contextmanager
    def _switched(self, name: str) -> Iterator[None]:
        """Activate the adapter `name`. Restore the policy's adapter and all requires_grad flags at the end."""
        with _restoring_requires_grad(self._model):
            try:
                self._model.set_adapter(name, inference_mode=True)
                yield
            finally:
                self._model.set_adapter(self._policy_adapter)

    def _check_same(self, policy: nn.Module) -> None:
        if unwrap(policy) is not self._model:
            raise KeelError("this reference was built from another policy: build it from this one")
        check_unmerged(self._model)


class DeltaAverage:
    """A moving average of the effective update ΔW = (α/r) B A, as one dense matrix per target layer.

    Averaging A and B separately gives mean(B) mean(A), which is not the mean of BA. The rank of the mean of BA grows
    with every move, so it is stored as a dense fp32 matrix, as large as the layer's weight. Its product with the
    input is added to the base layer's output. Before the first move, `AdapterWeights` stores the initial policy.
    """

    def __init__(self, policy: nn.Module, *, offload: bool = False) -> None:
        self._start = AdapterWeights(policy, offload=offload)
        self._model: Any = unwrap(policy)
        self._adapter: str = self._model.active_adapters[0]
        self._layers = dict(_linear_layers(self._model, self._adapter))
        self._storage_device = torch.device("cpu") if offload else None
        self._deltas: dict[str, Tensor] = {}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        if not self._deltas:
            with self._start.model() as model:
                yield model
            return
        check_unmerged(self._model)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._model))
            stack.enter_context(_adapters_off(self._model))
            for name, layer in self._layers.items():
                weight = layer.get_base_layer().weight
                hook = layer.register_forward_hook(_add_delta(self._deltas[name].to(weight.device, weight.dtype)))
                stack.callback(hook.remove)
            yield self._model

    @torch.no_grad()
    def assign(self, policy: nn.Module) -> None:
        self._start.assign(policy)
        self._deltas = {}

    @torch.no_grad()
    def blend(self, policy: nn.Module, alpha: float) -> None:
        self._start._check_same(policy)
        if not self._deltas:
            with self._start.model():
                self._deltas = {name: self._stored(_update(layer)) for name, layer in self._layers.items()}
        for name, layer in self._layers.items():
            average = self._deltas[name]
            average.lerp_(_update(layer).to(average.device), alpha)

    def tensors(self) -> dict[str, Tensor]:
        deltas = {f"delta/{name}": delta.clone() for name, delta in self._deltas.items()}
        return deltas or {f"start/{name}": tensor for name, tensor in self._start.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        deltas = {key.removeprefix("delta/"): value for key, value in tensors.items() if key.startswith("delta/")}
        if deltas and set(deltas) != set(self._layers):
            raise KeelError("the saved reference belongs to another model, because its layers have other names")
        self._start.load({k.removeprefix("start/"): v for k, v in tensors.items() if k.startswith("start/")})
        device = next(self._model.parameters()).device
        self._deltas = {name: self._stored(delta.to(device, copy=True)) for name, delta in deltas.items()}

    def fingerprint(self) -> str:
        if not self._deltas:
            return self._start.fingerprint()
        with _adapters_off(self._model):
            base = list(effective_weights(self._model))
        return fingerprint_tensors([*base, *((f"{name}|delta", delta) for name, delta in self._deltas.items())])

    def backup(self) -> Callable[[], None]:
        return partial(self.load, self.tensors())

    def shard(self, sharder: Sharder) -> None:
        """Nothing to do: the base is the policy's, and the average is not sharded."""

    def _stored(self, delta: Tensor) -> Tensor:
        return delta if self._storage_device is None else delta.to(self._storage_device)


@contextmanager
def _restoring_requires_grad(model: nn.Module) -> Iterator[None]:
    """Restore the requires_grad flags, because peft changes them when adapters are switched."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _adapters_off(model: Any) -> Iterator[None]:
    with _restoring_requires_grad(model), model.disable_adapter():
        yield


def _linear_layers(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """The plain LoRA layers. Raises for other adapters, which cannot be averaged in this form."""
    from peft.tuners.lora import Linear

    for name, module in model.named_modules():
        if not hasattr(module, "adapter_layer_names"):
            continue
        # DoRA and other variants do not add a matrix to the weights.
        plain = isinstance(module, Linear) and adapter in module.lora_A and adapter not in module.lora_variant
        if not plain or module.lora_bias.get(adapter):
            raise KeelError(
                f"reference.kind=ema cannot average the adapter of {name}: it is not plain LoRA on a linear layer; "
                "use reference.kind=snapshot, or LoRA on linear layers only"
            )
        yield name, module


def _update(layer: Any) -> Tensor:
    """(α/r) B A of the active adapter `[out, in]`, fp32; zeros while adapters are off."""
    name = layer.active_adapters[0]
    a, b = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
    if layer.disable_adapters:
        return b.new_zeros(b.shape[0], a.shape[1])
    return torch.addmm(b.new_zeros(()), b, a, beta=0, alpha=layer.scaling[name])


def _add_delta(delta: Tensor) -> Any:
    """A forward hook: output + x ΔWᵀ."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + functional.linear(inputs[0].to(delta.dtype), delta).to(output.dtype)

    return hook


def has_adapter(policy: nn.Module) -> bool:
    """Whether the policy has a LoRA adapter."""
    return is_lora(unwrap(policy))


def copied(policy: nn.Module, offload: bool) -> ReferenceWeights:
    """A copy of the current policy's weights."""
    return AdapterWeights(policy, offload=offload) if has_adapter(policy) else FullCopy(policy, offload=offload)


def base_of(loaded: LoadedModel, model: str) -> ReferenceWeights | None:
    """The policy's base without its adapters, if `model` names it; else None."""
    if model != loaded.name or not has_adapter(loaded.model):
        return None
    return AdapterWeights(loaded.model, base=True)


def averaged(policy: nn.Module, offload: bool) -> ReferenceWeights:
    """A copy that can be averaged with the policy. Adapters are averaged by their products BA."""
    return DeltaAverage(policy, offload=offload) if has_adapter(policy) else FullCopy(policy, offload=offload)
