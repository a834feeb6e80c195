"""LoRA: create or continue an adapter with peft, and compute its layers in bfloat16 without fp32 copies.

peft keeps A and B in fp32 and converts the input of every layer for them. In a 7B model these copies take about as
much memory as all other activations, and each adapter costs six kernels. `lora_forward` computes y = W x + s · B (A x)
in bfloat16 and sums the gradients of A and B in fp32. float16 keeps peft's forward: small gradients would underflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from keel.base.errors import KeelError, first_line
from keel.models.flash_prefix import flash_dtype
from keel.models.fused_linear import product
from keel.models.head import adapter_layers, is_plain_linear
from keel.models.options import LoraOptions


def check_adapter(options: LoraOptions | None) -> None:
    """Refuse a missing adapter folder before a model is loaded for it."""
    if options is None or options.adapter is None:
        return
    folder = Path(options.adapter).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise KeelError(
            f"no adapter at lora.adapter={options.adapter!r}: the folder needs an adapter_config.json; "
            "give the folder that save_pretrained wrote, or leave lora.adapter out to train a new adapter"
        )


def add_lora(model: nn.Module, options: LoraOptions, *, seed: int = 0) -> nn.Module:
    """Wrap the model with peft and one trainable adapter; the base weights are frozen.

    A new adapter has B = 0, so the wrapped model computes exactly the same as the base. Equal seeds give equal A. The
    caller's RNG state is unchanged.
    """
    from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model

    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if options.adapter is None:
                targets = options.targets if isinstance(options.targets, str) else list(options.targets)
                config = LoraConfig(
                    r=options.r,
                    lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only divides it
                    lora_dropout=options.dropout,
                    target_modules=targets,
                    task_type=TaskType.CAUSAL_LM,
                )
                return get_peft_model(model, config)
            folder = str(Path(options.adapter).expanduser())
            saved = PeftConfig.from_pretrained(folder)
            if not isinstance(saved, LoraConfig):
                raise KeelError(f"the adapter at {options.adapter!r} has type {saved.peft_type}: give a LoRA adapter")
            check_bias(saved, f"the adapter at {options.adapter!r}")
            saved.lora_dropout = options.dropout
            saved.inference_mode = False
            return PeftModel.from_pretrained(model, folder, config=saved, is_trainable=True)
    except KeelError:
        raise
    except Exception as error:  # a wrong type in adapter_config.json, a broken file of weights: many types
        what = f"the adapter at {options.adapter!r}" if options.adapter else f"lora.targets={options.targets!r}"
        raise KeelError(f"{what} does not fit the model: {first_line(error)}") from error


def check_bias(config: Any, what: str) -> None:
    """Refuse LoRA that trains biases of the base, because the reference uses the same base."""
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise KeelError(f"{what} has bias={bias!r}, which trains biases of the base model: use LoRA with bias='none'")


def check_unmerged(model: nn.Module) -> None:
    """Refuse a merged adapter: disabling it would unmerge it, which leaves rounding errors in the base."""
    for name, layer in adapter_layers(model):
        if getattr(layer, "merged", False):
            raise KeelError(f"the policy's adapter is merged into its base ({name}): call unmerge_adapter() first")


def lora_options_of(model: nn.Module, options: LoraOptions) -> LoraOptions:
    """The effective options. A continued adapter keeps its own rank, alpha and targets."""
    config: Any = next(iter(model.peft_config.values()))  # type: ignore[operator]
    targets = config.target_modules if isinstance(config.target_modules, str) else tuple(sorted(config.target_modules))
    return options.model_copy(update={"r": config.r, "alpha": config.lora_alpha, "targets": targets})


def adapter_is_zero(model: nn.Module) -> bool:
    """Whether the active adapter is the identity: every B is 0 and there are no modules_to_save."""
    for _, layer in adapter_layers(model):
        for name in layer.active_adapters:
            if hasattr(layer, "modules_to_save") and name in layer.modules_to_save:
                return False
            for factors in (getattr(layer, "lora_B", {}), getattr(layer, "lora_embedding_B", {})):
                if name in factors:
                    weight = factors[name] if isinstance(factors[name], torch.Tensor) else factors[name].weight
                    if bool(weight.detach().any()):
                        return False
    return True


def _untie(model: Any) -> bool:
    """Untie the weights of adapted layers from other modules; returns whether any was tied.

    An adapter on a tied head changes only the head. If it were merged into the shared weight, it would also change the
    input embedding.
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
    """Merge the adapters into the base weights. Do not use the passed model afterwards."""
    untied = _untie(model)
    merged = model.merge_and_unload()
    if untied:
        merged.config.tie_word_embeddings = False
    return merged


TRIAL_SHARE = 0.5  # size of the adapters' output in a trial, as a share of the layer's output; training gives less
_LARGEST_STD = 10.0  # upper limit of the std of B in a trial


class LowRank(NamedTuple):
    """A LoRA layer: its base layer, and A `[r, in]`, B `[out, r]` and the scale s of its active adapter."""

    base: nn.Module
    down: Tensor
    up: Tensor
    scale: float


def low_rank(module: Any) -> LowRank | None:
    """The adapter of a layer if exactly one is active and it is plain and unmerged; otherwise None."""
    if not is_lora_linear(module) or module.disable_adapters or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or active[0] in module.lora_variant or module.lora_bias.get(active[0]):
        return None
    name = active[0]
    if not all(is_plain_linear(holder[name]) for holder in (module.lora_A, module.lora_B)):
        return None
    if module.training and not isinstance(module.lora_dropout[name], nn.Identity):
        return None
    return LowRank(module.base_layer, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def is_lora_linear(module: Any) -> bool:
    """Whether a module is peft's LoRA around a linear layer, quantised or not."""
    kind = type(module)
    return kind.__module__.startswith("peft.tuners.lora.") and kind.__name__.startswith("Linear")


def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The bfloat16 forward of a LoRA layer; the class's own forward if the layer or dtype is unsupported."""
    dtype = flash_dtype(x)
    adapter = None if args or kwargs or dtype != torch.bfloat16 else low_rank(self)
    if adapter is None:
        result: Tensor = type(self).forward(self, x, *args, **kwargs)
        return result
    y: Tensor = adapter.base(x)
    own = y.to(dtype) if is_plain_linear(adapter.base) else y.to(dtype, copy=True)  # a hook or a kernel may hold it
    return add_low_rank(own.contiguous(), x, adapter).to(y.dtype)


def add_low_rank(y: Tensor, x: Tensor, adapter: LowRank) -> Tensor:
    """y + s · B (A x), in place; differentiable with respect to y, x, A and B."""
    if not torch.is_grad_enabled():
        return _add(y, x.to(y.dtype), adapter.down, adapter.up, adapter.scale)[0]
    out: Tensor = _AddLowRank.apply(y, x, adapter.down, adapter.up, adapter.scale)
    return out


def _add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y + s · B (A x) in place, and A x."""
    inner = x.flatten(0, -2) @ down.to(x.dtype).t()
    rows = y.view(-1, y.shape[-1])
    rows.addmm_(inner, up.to(x.dtype).t(), alpha=scale)
    return y, inner


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        half = x.to(y.dtype)
        out, inner = _add(y, half, down.detach(), up.detach(), scale)
        ctx.mark_dirty(y)
        ctx.save_for_backward(half, inner, down, up)
        ctx.scale, ctx.input_dtype = scale, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, down, up = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        d_inner = (rows @ up.to(rows.dtype)) * ctx.scale
        d_x = d_down = d_up = None
        if ctx.needs_input_grad[1]:
            d_x = product(d_inner, down.to(rows.dtype), ctx.input_dtype).view_as(x)
        if ctx.needs_input_grad[2]:
            d_down = product(d_inner.t(), x.flatten(0, -2), down.dtype)
        if ctx.needs_input_grad[3]:
            d_up = product(rows.t(), inner, up.dtype) * ctx.scale
        return grad, d_x, d_down, d_up, None


@contextmanager
def trial_adapters(model: nn.Module, share: float = TRIAL_SHARE) -> Iterator[None]:
    """Within this context, the model is in evaluation mode, and plain LoRA adapters with B = 0 have seeded values.

    An adapter with B = 0 changes nothing, so a fast path that left it out would pass every trial. All bits are restored
    afterwards.
    """
    before: list[tuple[Tensor, Tensor]] = []
    generators: dict[torch.device, torch.Generator] = {}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # in training mode a layer with dropout has no fast path to try
    try:
        for _, layer in adapter_layers(model):
            adapter = low_rank(layer)
            if adapter is None or type(adapter.up) is not nn.Parameter or bool(adapter.up.detach().any()):
                continue
            before.append((adapter.up, adapter.up.detach().clone()))
            device = adapter.up.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
            with torch.no_grad():
                adapter.up.normal_(std=_trial_std(adapter, share), generator=generator)
        yield
    finally:
        with torch.no_grad():
            for weight, values in before:
                weight.copy_(values)
        for module, mode in modes:
            module.training = mode


def _trial_std(adapter: LowRank, share: float) -> float:
    """The std of B at which the adapter's output is `share` of its layer's output, for independent inputs."""
    weight = getattr(adapter.base, "weight", None)
    known = isinstance(weight, Tensor) and weight.is_floating_point()
    size = float(weight[:64].detach().float().std()) if known and weight is not None else 0.02
    inner = float(adapter.down.detach().float().std()) * len(adapter.down) ** 0.5 * adapter.scale
    return min(share * size / max(inner, 1e-12), _LARGEST_STD)
