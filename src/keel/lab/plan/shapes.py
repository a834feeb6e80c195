"""The planned device, and the models of a run on it as meta tensors; weights are never read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from keel.base.errors import KeelError, first_line, unknown
from keel.base.parts import import_object, is_import_path
from keel.config import Config
from keel.models.dropout import disable_dropout
from keel.models.fuse import fused_kind
from keel.models.head import causal_lm, is_lora
from keel.models.load import load_tokenizer
from keel.models.lora import add_lora, lora_forward
from keel.models.options import LoadedModel
from keel.models.precision import DTYPES
from keel.models.prefix_attention import RecomputeContext
from keel.models.tiny import tiny_config, tiny_tokenizer
from keel.run.parts import build_named_task, build_renderer

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A device's memory in bytes; `workspace_bytes` are cuBLAS's workspaces of forward and backward passes."""

    name: str
    kind: str
    memory_bytes: int
    workspace_bytes: int = 0


_HOPPER, _OTHERS = 2 * 32 * 2**20, 2 * 8519680  # bytes of torch's cuBLAS workspaces

KNOWN: dict[str, Hardware] = {
    "h200": Hardware("H200", "cuda", int(139 * GIB), _HOPPER),
    "h100": Hardware("H100 80 GB", "cuda", int(79 * GIB), _HOPPER),
    "a100": Hardware("A100 80 GB", "cuda", int(79 * GIB), _OTHERS),
    "l40s": Hardware("L40S", "cuda", int(44 * GIB), _OTHERS),
    "rtx4090": Hardware("RTX 4090", "cuda", int(23.5 * GIB), _OTHERS),
}


def find_hardware(name: str = "auto") -> Hardware:
    """Hardware by name, or this machine (its GPU, else its CPU); `NAME:GIB` overrides the memory."""
    name, colon, gib = name.partition(":")
    if name == "auto":
        hardware = _gpu() if torch.cuda.is_available() else _cpu()
    elif name == "cpu":
        hardware = _cpu()
    elif name in KNOWN:
        hardware = KNOWN[name]
    else:
        raise unknown("hardware", name, [*KNOWN, "cpu", "auto"])
    return replace(hardware, memory_bytes=_memory_bytes(name, gib)) if colon else hardware


def _memory_bytes(name: str, gib: str) -> int:
    try:
        memory = float(gib)
    except ValueError:
        memory = math.nan
    if not 0 < memory < math.inf:
        raise KeelError(f"--hardware {name}:{gib}: give the memory in GiB after the colon, such as {name}:24")
    return int(memory * GIB)


def _gpu() -> Hardware:
    properties = torch.cuda.get_device_properties(0)
    near = next((hw for key, hw in KNOWN.items() if key in properties.name.lower().replace(" ", "")), KNOWN["a100"])
    return replace(near, name=properties.name, memory_bytes=int(properties.total_memory))


def _cpu() -> Hardware:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
    return Hardware("this CPU", "cpu", memory)


def fuse_as_on_cuda(model: nn.Module) -> None:
    """Make half-precision norms, gated MLPs and LoRA layers save the same tensors for backward as their fused forms.

    Layers in fp32 are unchanged: under autocast their fused forms save about as much.
    """
    forwards = {"norm": _norm, "mlp": _mlp, "lora": lora_forward}
    for module in model.modules():
        forward = forwards.get(fused_kind(module) or "")
        if forward is not None and next(module.parameters()).dtype in (torch.float16, torch.bfloat16):
            module.forward = MethodType(forward, module)


class VocabularyKernels:
    """Allocate the same tensors as the kernels of `keel.models.vocab_kernels`."""

    @staticmethod
    def stats(*_: Any) -> None:
        """Allocate no tensor: the kernel writes into given ones."""

    @staticmethod
    def gradient(logits: Tensor, *_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
        return logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)


def _norm(self: Any, x: Tensor) -> Tensor:
    out: Tensor = _Norm.apply(x, self.weight)
    return out


def _mlp(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(_GatedSilu.apply(self.gate_proj(x), self.up_proj(x)))
    return down


class _Norm(torch.autograd.Function):
    """Save the input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(grad), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _GatedSilu(torch.autograd.Function):
    """Save both inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(grad), torch.empty_like(grad)


_SAMPLED_PROBLEMS = 16  # number of problems whose prompts are measured


def model_source(config: Config) -> tuple[Any, Any]:
    """The tokenizer, and the transformers config that a model is built from."""
    name = config.model.name
    if name == "tiny":
        tokenizer = tiny_tokenizer()
        return tokenizer, tiny_config(tokenizer)
    if is_import_path(name):
        model, tokenizer = import_object(name, "model loader")()
        return tokenizer, causal_lm(model).config
    return load_tokenizer(name), _read_shape(name, config)


def _read_shape(name: str, config: Config) -> Any:
    from transformers import AutoConfig

    try:
        path = Path(name).expanduser()
        if name.endswith(".gguf"):
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(
            str(path) if path.is_dir() else name, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # errors of transformers have no common base here
        raise KeelError(f"cannot read the shape of {name!r}: {first_line(error)}; check model.name") from error


def random_model(shape: Any, config: Config, **options: Any) -> nn.Module:
    """A model of this shape with random weights."""
    from transformers import AutoModelForCausalLM

    attention = config.model.attn_implementation
    model: nn.Module = AutoModelForCausalLM.from_config(shape, attn_implementation=attention, **options)
    return model


def policy_shape(config: Config, tokenizer: Any, shape: Any, hardware: Hardware) -> LoadedModel:
    """The policy with the dtype, dropout, adapters and mode that it has after loading."""
    model: Any = _empty_model(shape, config, weights_dtype(config, shape, hardware.kind))
    if not config.model.dropout:
        disable_dropout(model)
    dtype = next(model.parameters()).dtype
    lora = config.model.lora
    if lora is not None:
        model = add_lora(model, lora.model_copy(update={"adapter": None}), seed=0)
    if hardware.kind == "cuda":
        fuse_as_on_cuda(model)
    if config.model.gradient_checkpointing:
        # the dry run's own autocast does not cover the backward pass
        again = RecomputeContext(CudaAutocast) if hardware.kind == "cuda" else RecomputeContext()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": again})
    adapters_drop = lora is not None and lora.dropout > 0
    model.train(config.model.gradient_checkpointing or config.model.dropout or adapters_drop)
    eos = int(tokenizer.eos_token_id)
    return LoadedModel(
        model, tokenizer, config.model.name, None, (eos,), eos, torch.device("cpu"), dtype, lora, (), True
    )


def reference_shape(config: Config, loaded: LoadedModel, shape: Any) -> nn.Module | None:
    """The model that scores as the reference: none, the policy itself under LoRA, or a second one."""
    if not (config.needs_reference or config.kl.collect_max is not None):
        return None
    if is_lora(loaded.model):
        return loaded.model
    return _empty_model(shape, config, loaded.dtype).requires_grad_(False)


def weights_dtype(config: Config, shape: Any, device: str) -> torch.dtype:
    """The dtype that loading chooses: the configured one, else fp32 on a CPU and the checkpoint's own elsewhere."""
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype]
    checkpoint_dtype = getattr(shape, "dtype", None)
    return checkpoint_dtype if device != "cpu" and isinstance(checkpoint_dtype, torch.dtype) else torch.float32


def _empty_model(shape: Any, config: Config, dtype: torch.dtype) -> nn.Module:
    model = random_model(shape, config)
    causal_lm(model).config.pad_token_id = None  # transformers would search tokens without values for padding
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


def prompt_lengths(config: Config, tokenizer: Any) -> list[int]:
    """Tokens of a few prompts of the task, within data.max_prompt_length."""
    renderer, limit = build_renderer(config, tokenizer), config.data.max_prompt_length
    problems = build_named_task(config.task, config).sample(_SAMPLED_PROBLEMS, seed=config.run.seed, step=0)
    lengths = [len(renderer.prompt(problem)) for problem in problems]
    return [min(length, limit or length) for length in lengths]


class CudaAutocast(TorchFunctionMode):
    """Emulate the functions that autocast runs in fp32 on CUDA but not on a CPU, such as powers in GPT-2's GELU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


_NORMS = {"group_norm", "layer_norm", "log_softmax", "logsumexp", "norm", "softmax"}
_SUMS = {"cumprod", "cumsum", "prod", "sum"}
_POWERS = {"__pow__", "__rpow__", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt"}
_IN_FP32 = _NORMS | _SUMS | _POWERS | {"softplus"}


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
