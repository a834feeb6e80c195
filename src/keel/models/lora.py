"""LoRA with peft: create a new adapter or continue an existing one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keel.base.errors import KeelError, first_line
from keel.models.adapters import adapter_layers
from keel.models.options import LoraOptions


def check_adapter(options: LoraOptions | None) -> None:
    """Refuse a missing adapter folder before a model is loaded for it."""
    if options is None or options.adapter is None:
        return
    folder = Path(options.adapter).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise KeelError(
            f"no adapter at lora.adapter={options.adapter!r}: the folder needs an adapter_config.json; "
            "give the folder that save_pretrained wrote, or leave adapter out for a fresh one"
        )


def add_lora(model: nn.Module, options: LoraOptions, *, seed: int = 0) -> nn.Module:
    """Wrap the model with peft and one trainable adapter; the base weights are frozen.

    A new adapter has B = 0, so the wrapped model computes exactly what the base does. Equal seeds give equal A. The
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
                raise KeelError(f"the adapter at {options.adapter!r} is {saved.peft_type}, not LoRA: give a LoRA one")
            check_bias(saved, f"the adapter at {options.adapter!r}")
            saved.lora_dropout = options.dropout
            saved.inference_mode = False
            return PeftModel.from_pretrained(model, folder, config=saved, is_trainable=True)
    except KeelError:
        raise
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        what = f"the adapter at {options.adapter!r}" if options.adapter else f"lora.targets={options.targets!r}"
        raise KeelError(f"{what} does not fit the model: {first_line(error)}") from error


def check_bias(config: Any, what: str) -> None:
    """Refuse LoRA that trains biases of the base, because the reference uses the same base."""
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise KeelError(f"{what} has bias={bias!r}, which trains the base model itself: use LoRA with bias='none'")


def check_unmerged(model: nn.Module) -> None:
    """Refuse a merged adapter: disabling it would unmerge it, which leaves rounding errors in the base."""
    module: Any
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and getattr(module, "merged", False):
            raise KeelError(f"the policy's adapter is merged into its base ({name}): call unmerge_adapter() first")


def lora_options_of(model: nn.Module, options: LoraOptions) -> LoraOptions:
    """The effective options. A continued adapter keeps its own rank, alpha and targets."""
    config: Any = next(iter(model.peft_config.values()))  # type: ignore[operator]
    targets = config.target_modules if isinstance(config.target_modules, str) else tuple(sorted(config.target_modules))
    return options.model_copy(update={"r": config.r, "alpha": config.lora_alpha, "targets": targets})


def adapter_is_zero(model: nn.Module) -> bool:
    """Whether the active adapter is the identity: every B is 0 and there are no modules_to_save."""
    module: Any
    for module in model.modules():
        if not hasattr(module, "adapter_layer_names"):
            continue
        for name in module.active_adapters:
            if hasattr(module, "modules_to_save") and name in module.modules_to_save:
                return False
            for factors in (getattr(module, "lora_B", {}), getattr(module, "lora_embedding_B", {})):
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
