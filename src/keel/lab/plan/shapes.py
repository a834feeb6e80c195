"""The models of a run as shapes: parameters with a size and a dtype and no memory; weights are never read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keel.base.errors import KeelError, first_line
from keel.base.imports import import_object, is_import_path
from keel.config import Config
from keel.lab.plan.counters import CudaAutocast
from keel.lab.plan.hardware import Hardware
from keel.models.head import causal_lm
from keel.models.load import DTYPES, LoadedModel, disable_dropout
from keel.models.lora import add_lora, is_lora
from keel.models.prefix_attention import AttendAgain
from keel.models.tiny import tiny_model
from keel.models.tokenizer import load_tokenizer
from keel.run.build import build_named_task, build_renderer

Build = Callable[[], nn.Module]
_SAMPLED_PROBLEMS = 16  # problems whose prompts tell how long prompts are


def model_source(config: Config) -> tuple[Any, Build]:
    """The tokenizer, and a function that builds the model."""
    name = config.model.name
    if name == "tiny":
        return tiny_model()[1], lambda: tiny_model(attn_implementation=config.model.attn_implementation)[0]
    if is_import_path(name):
        model, tokenizer = import_object(name, "model loader")()
        shape = causal_lm(model).config
        del model
        return tokenizer, lambda: _from_config(shape, config)
    tokenizer = load_tokenizer(name)
    return tokenizer, lambda: _from_config(_read_shape(name, config), config)


def _read_shape(name: str, config: Config) -> Any:
    from transformers import AutoConfig

    try:
        path = Path(name).expanduser()
        if name.endswith(".gguf"):
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(
            str(path) if path.is_dir() else name, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # what transformers raises here has no common base
        raise KeelError(f"cannot read the shape of {name!r}: {first_line(error)}; check model.name") from error


def _from_config(shape: Any, config: Config) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(shape, attn_implementation=config.model.attn_implementation)
    return model


def policy_shape(config: Config, tokenizer: Any, build: Build, hardware: Hardware) -> LoadedModel:
    """The policy as loading leaves it: its type, dropout, adapters and mode."""
    model: Any = _shape(build, _dtype(config, build, hardware))
    if not config.model.dropout:
        disable_dropout(model)
    dtype = next(model.parameters()).dtype
    lora = config.model.lora
    if lora is not None:
        model = add_lora(model, lora.model_copy(update={"adapter": None}), seed=0)
    if config.model.gradient_checkpointing:
        # the dry run's own autocast does not reach into the backward pass
        again = AttendAgain(CudaAutocast) if hardware.kind == "cuda" else AttendAgain()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": again})
    adapters_drop = lora is not None and lora.dropout > 0
    model.train(config.model.gradient_checkpointing or config.model.dropout or adapters_drop)
    eos = int(tokenizer.eos_token_id)
    return LoadedModel(
        model, tokenizer, config.model.name, None, (eos,), eos, torch.device("cpu"), dtype, lora, (), True
    )


def reference_shape(config: Config, loaded: LoadedModel, build: Build) -> nn.Module | None:
    """The model that scores as the reference: none, the policy itself under LoRA, or a second one."""
    if not (config.needs_reference or config.kl.collect_max is not None):
        return None
    if is_lora(loaded.model):
        return loaded.model
    return _shape(build, loaded.dtype).requires_grad_(False)


def _dtype(config: Config, build: Build, hardware: Hardware) -> torch.dtype:
    """As loading chooses it: fp32 on a CPU, the checkpoint's own elsewhere, unless one is named."""
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype]
    checkpoint_dtype = getattr(causal_lm(build()).config, "dtype", None)
    return checkpoint_dtype if hardware.kind != "cpu" and isinstance(checkpoint_dtype, torch.dtype) else torch.float32


def _shape(build: Build, dtype: torch.dtype) -> nn.Module:
    model = build()
    causal_lm(model).config.pad_token_id = None  # transformers would look for it among tokens that have no numbers
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def materialize(model: nn.Module) -> None:
    """Replace meta tensors by fake ones on a device; tied ones stay tied."""
    materialized: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in materialized:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                materialized[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            module._parameters[name] = materialized[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def longest_prompt(config: Config, tokenizer: Any) -> int:
    """The longest of a few prompts of the task, within data.max_prompt_length."""
    renderer, limit = build_renderer(config, tokenizer), config.data.max_prompt_length
    problems = build_named_task(config.task, config).sample(_SAMPLED_PROBLEMS, seed=config.run.seed, step=0)
    longest = max(len(renderer.prompt(problem)) for problem in problems)
    return min(longest, limit or longest)
