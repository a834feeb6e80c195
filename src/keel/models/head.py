"""The parts of a causal LM: wrappers, body (tokens to hidden states), head (hidden states to logits), adapters.

Scoring runs the body once and the head in chunks. It must therefore repeat the operations after the model's output
embedding: a scale (Cohere, Granite), a soft cap (Gemma) or, in most models, nothing. Configs name these settings
differently, so they are measured on the model itself. Adapters are found from the layers, without importing peft.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError

LogitsOf = Callable[[Tensor], Tensor]

_heads: WeakKeyDictionary[nn.Module, tuple[int, float, float | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Head:
    """logits = scale · W h, or cap · tanh(scale · W h / cap), in at least fp32.

    `module` is the output embedding, or the module around it if that also transforms the hidden states (BERT).
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        return shape_logits(at_least_fp32(self.module(hidden)), self.scale, self.softcap)

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias if the module is a plain linear layer; None with adapters, quantised weights or hooks."""
        module = self.module
        return (module.weight, module.bias) if is_plain_linear(module) else None


@dataclass(frozen=True)
class JoinedHeads:
    """The heads of several models, each with its hidden size. A hidden state ends with the index of its model."""

    heads: tuple[tuple[LogitsOf, int], ...]


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is nn.Linear without adapter, quantisation or hooks."""
    return type(module) is nn.Linear and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert half precision to fp32 and leave fp64 unchanged."""
    return x.float() if torch.finfo(x.dtype).bits < 32 else x


def shape_logits(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Apply the scale, then the soft cap; without either, return `raw` itself."""
    scaled = raw if scale == 1.0 else raw * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def causal_lm(model: nn.Module) -> Any:
    """The transformers model inside the wrappers of peft, torch.compile and data parallelism."""
    outer: Any = model
    while True:
        inner = getattr(outer, "_orig_mod", None)
        if inner is None and hasattr(outer, "peft_config") and hasattr(outer, "get_base_model"):
            if any(getattr(config, "is_prompt_learning", False) for config in outer.peft_config.values()):
                raise KeelError("prompt-learning adapters are not supported: use LoRA, or train all weights")
            inner = outer.get_base_model()
        if inner is None and isinstance(getattr(outer, "module", None), nn.Module):
            inner = outer.module
        if inner is None or inner is outer:
            return outer
        outer = inner


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode is restored afterwards.

    `no_grad` instead of `inference_mode`, because autograd may later use tensors that the forward caches (rotary
    tables). Evaluation mode also disables gradient checkpointing, which would drop the KV cache.
    """
    modes = [(module, module.training) for module in model.modules()]
    if any(mode for _, mode in modes):
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


def body_of(model: nn.Module) -> nn.Module:
    """The transformer without its head: its output is the last hidden state, final norm included."""
    causal: Any = causal_lm(model)
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    named = (causal.get_decoder() if hasattr(causal, "get_decoder") else None, getattr(causal, "base_model", None))
    for body in (*named, getattr(causal, "model", None)):
        # ModernBERT's get_decoder returns its head. Llama 4's base_model_prefix does not name the body.
        if isinstance(body, nn.Module) and body is not causal and body is not head:
            return body
    raise KeelError(f"cannot find the transformer body of {type(causal).__name__}: give the class a method get_decoder")


def transformer_blocks(body: nn.Module) -> list[nn.Module]:
    """The transformer's layers, found as its ModuleList with the most parameters; empty without one."""
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=()))


def takes_positions(body: nn.Module) -> bool:
    """Whether the body accepts explicit position ids; recurrent and ALiBi models do not."""
    parameters = inspect.signature(body.forward).parameters
    return "position_ids" in parameters


def head_of(model: nn.Module) -> Head:
    """The model's head; scale and soft cap are measured once per model by a forward of four tokens."""
    causal: Any = causal_lm(model)
    module = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if module is None:
        raise KeelError(f"{type(causal).__name__} has no output embedding: only causal language models can be scored")
    if causal not in _heads:
        _heads[causal] = _locate_head(causal, module)
    depth, scale, softcap = _heads[causal]
    return Head(_enclosing_modules(causal, module)[depth], scale, softcap)


def _enclosing_modules(causal: Any, module: nn.Module) -> list[nn.Module]:
    """The output embedding and the modules around it, innermost first, without the model itself."""
    path = next(name for name, part in causal.named_modules() if part is module).split(".")
    return [causal.get_submodule(".".join(path[:length])) for length in range(len(path), 0, -1)]


def _locate_head(causal: Any, module: nn.Module) -> tuple[int, float, float | None]:
    """Return (number of modules around the output embedding that belong to the head, scale, soft cap)."""
    body = body_of(causal)
    heads = [part for part in _enclosing_modules(causal, module) if not any(inner is body for inner in part.modules())]
    for depth, part in enumerate(heads):
        try:
            return (depth, *_measure(causal, part))
        except (KeelError, TypeError, RuntimeError, IndexError, AttributeError):  # a container has no forward
            if depth == len(heads) - 1:
                break
    return (0, *_measure(causal, module))


def frozen_head(model: nn.Module) -> Head:
    """The head in its current state, for a reference whose adapters change before its head is applied.

    The head is applied to the identity matrix, so that its LoRA and its hooks (as for an EMA of adapters) are folded
    into one weight. A plain linear head is returned without a copy.
    """
    head = head_of(model)
    if head.linear() is not None:
        return head
    inner = getattr(head.module, "base_layer", getattr(head.module, "original_module", None))
    adapters_off = getattr(head.module, "disable_adapters", False) and not getattr(head.module, "merged", False)
    if adapters_off and isinstance(inner, nn.Linear) and not _hooked(head.module) and not _hooked(inner):
        return replace(head, module=inner)
    original: Any = getattr(head.module, "weight", None)
    if original is None:  # the head has several layers: copy it in its current state
        return replace(head, module=copy.deepcopy(head.module).requires_grad_(False))
    vocabulary, width = original.shape
    with evaluating(head.module):
        like = next(p for p in head.module.parameters() if p.is_floating_point())
        bias = head.module(like.new_zeros(1, width))
        weight = head.module(torch.eye(width, dtype=like.dtype, device=like.device)) - bias
        module = nn.Linear(width, vocabulary, device=like.device, dtype=weight.dtype)
        module.weight.copy_(weight.T)
        module.bias.copy_(bias[0])
    return replace(head, module=module.requires_grad_(False))


def config_numbers(model: nn.Module) -> dict[str, float]:
    """The positive numbers of the text model's config, by name."""
    config: Any = getattr(causal_lm(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }


def _measure(causal: Any, module: nn.Module) -> tuple[float, float | None]:
    """Find the scale and soft cap among the config's numbers that reproduce the model's own logits.

    The hidden states are scaled up until logits reach ±50, because a soft cap hardly changes small logits.
    """
    enlarged: list[Tensor] = []

    def enlarge(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0]
        size = module(hidden).float().std()
        hidden = hidden * (50.0 / size.clamp_min(1e-6)).to(hidden.dtype)
        enlarged.append(hidden)
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    ids = torch.arange(4, device=causal.get_input_embeddings().weight.device)[None]
    hook = body_of(causal).register_forward_hook(enlarge)
    try:
        with evaluating(causal):
            logits = causal(input_ids=ids, use_cache=False).logits.float()
            if not enlarged:
                raise KeelError(
                    f"{type(causal).__name__} does not call its own decoder: set model.scorer to your own function "
                    "(module:attr)"
                )
            raw = module(enlarged[-1]).float()
    finally:
        hook.remove()

    numbers = config_numbers(causal)
    caps = [value for name, value in numbers.items() if "soft" in name and "cap" in name]
    scales = [value for name, value in numbers.items() if any(part in name for part in ("logit", "multiplier", "scal"))]
    scales += [value / numbers["hidden_size"] for name, value in numbers.items() if "dim_model_base" in name]  # MiniCPM
    candidates = [(s, cap) for cap in [None, *caps] for s in [1.0, *scales, *(1.0 / value for value in scales)]]
    peak = logits.abs().max().clamp_min(1e-6)
    errors = [float((shape_logits(raw, *candidate) - logits).abs().max() / peak) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if not errors[best] <= (1e-3 if module_dtype(causal) == torch.float32 else 5e-2):
        raise KeelError(
            f"Keel cannot reproduce the logits of {type(causal).__name__} from its hidden states (best guess off by "
            f"{errors[best]:.1e} of the largest logit): set model.scorer to your own function (module:attr)"
        )
    return candidates[best]


def module_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_lora(model: nn.Module) -> bool:
    """Whether peft wrapped this model."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def adapter_prefixes(model: nn.Module) -> tuple[set[str], set[str]]:
    """Name prefixes `layer.lora_A.<adapter>` of a peft model's inactive and active adapters; empty for other models."""
    inactive: set[str] = set()
    active: set[str] = set()
    for prefix, layer in adapter_layers(model):
        effective = set(effective_adapters(layer))
        for kind in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            holder = getattr(layer, kind, None)
            if isinstance(holder, nn.ModuleDict | nn.ParameterDict):
                for adapter in holder:
                    (active if adapter in effective else inactive).add(f"{prefix}.{kind}.{adapter}")
    return inactive, active


def effective_adapters(layer: Any) -> list[str]:
    """The adapters whose weights a layer's next forward reads in addition to the base weights.

    Merged adapters are already part of the base weights. If the adapters are disabled, the forward unmerges them and so
    reads their weights.
    """
    merged = list(getattr(layer, "merged_adapters", ()))
    if layer.disable_adapters:
        return merged
    return [] if merged else list(layer.active_adapters)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and modules of the layers that have peft's attributes of adapters."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters"):
            yield name, module
