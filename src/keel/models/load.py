"""Load a policy: `tiny`, a folder, a hub name, a GGUF file or a user's own loader."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from keel.base.errors import KeelError, first_line
from keel.base.options import read_options
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.models.dropout import disable_dropout, has_dropout
from keel.models.fuse import fuse_modules
from keel.models.gguf import check_gguf, load_gguf
from keel.models.head import body_of
from keel.models.lora import add_lora, check_adapter, lora_options_of, trial_adapters
from keel.models.options import LoadedModel, ModelOptions, check_quantization
from keel.models.precision import DTYPES, check_bfloat16, has_bfloat16
from keel.models.prefix_attention import RecomputeContext
from keel.models.probe import probe_packing
from keel.models.tiny import tiny_model, tiny_tokenizer
from keel.models.tokenizer import check_eos, check_tokenizer, context_length, eos_ids

logger = logging.getLogger("keel")
_ALIGNMENT = 64  # bytes; the alignment of torch's CPU allocations


class Loaded(NamedTuple):
    """A loader's result. `missing` weights are not in the checkpoint; `unexpected` ones are not in the model."""

    model: Any
    tokenizer: Any
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


Loader = Callable[..., tuple[Any, ...]]  # returns the first fields of Loaded


def load_model(
    model: ModelOptions | str,
    *,
    seed: int = 0,
    probe: bool = True,
    longest: int | None = None,
    loader: Loader | None = None,
    section: str = "model",
    frozen: bool = False,
    **overrides: Any,
) -> LoadedModel:
    """Load and check a model with its tokenizer.

    `model` is `ModelOptions` or a model's name. Other options of the section are keyword arguments:
    `load_model("tiny", device="cpu", lora={"r": 8})`. A loader `module:attr` returns `(model, tokenizer)`. It receives
    `dtype`, `attn_implementation` and `seed` if its signature names them. All dropout is set to 0 unless `dropout` is
    true; saved configs keep the original values. The pad token defaults to EOS. A tokenizer without EOS raises an
    error. The model is in eval mode unless dropout or gradient checkpointing needs train mode.

    `quantization` (4bit, 8bit) needs bitsandbytes and frozen weights: the base under LoRA (QLoRA, arXiv:2305.14314) or
    a model that is `frozen` as a whole. `section` is the config section that errors name. `probe` runs a few short
    forwards to check that the model computes shared-prefix rows correctly; without the probe, every completion is one
    row. `longest` is the longest prompt plus completion (None: the context). The probe ignores larger attention
    windows. `loader` replaces the default loader.
    """
    options = model_options(model, **overrides)
    name, lora = options.name, options.lora
    check_adapter(lora)
    device = _resolve_device(options.device, section)
    dtype, dtype_notes = resolve_dtype(options.dtype, device, section)
    loader = loader or find_loader(name)
    if not frozen:
        check_quantization(options)
    quantization = _quantization_kwargs(options.quantization, loader, device, section)
    read = Loaded(*loader(options, dtype=dtype, seed=seed, quantization=quantization))
    policy, tokenizer, notes = read.model, read.tokenizer, read.notes
    notes += (*dtype_notes, *check_tokenizer(tokenizer, policy, name))
    if not options.dropout:
        disable_dropout(policy)
    elif not has_dropout(policy):
        notes += (f"model.dropout=true changes nothing: every dropout in the config of {name!r} is 0",)
    if quantization is None:
        policy = cast_parameters(policy, dtype if isinstance(dtype, torch.dtype) else None, device)
    if lora is not None:
        policy = add_lora(policy, lora, seed=seed)
        lora = lora_options_of(policy, lora)
    align_parameters(policy)
    if device.type == "cuda":
        fuse_modules(policy)
        # cuDNN builds a plan for every new shape, and sequence lengths always differ.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if options.gradient_checkpointing:
        # The reentrant form drops gradients when the first input needs none, as with a frozen embedding under LoRA.
        policy.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": RecomputeContext()}
        )
    policy.train(options.gradient_checkpointing or options.dropout or (lora is not None and lora.dropout > 0))
    shared_prefix = False
    packing_note: str | None = (
        f"{name!r} was loaded without the packing probe, so each completion is scored in its own row"
    )
    if probe:
        with trial_adapters(policy):
            packing = probe_packing(policy, len(tokenizer), longest=longest)
        shared_prefix, packing_note = packing.ok, None
        if not shared_prefix:
            packing_note = f"{name!r} is scored without shared prompts, which is slower: {packing.reason}"
            notes += (packing_note,)
    if options.compile:
        body_of(policy).compile(dynamic=True)  # scoring calls the body, not the model's own forward
    for note in notes:
        logger.warning(note)
    return LoadedModel(
        model=policy,
        tokenizer=tokenizer,
        name=name,
        context_length=context_length(policy),
        eos_ids=eos_ids(policy, tokenizer),
        pad_id=int(tokenizer.pad_token_id),
        device=device,
        dtype=next(policy.parameters()).dtype,
        lora=lora,
        notes=notes,
        shared_prefix=shared_prefix,
        packing_note=packing_note,
        missing=read.missing,
        unexpected=read.unexpected,
    )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model `name`. A GGUF file or a user's loader also loads the model."""
    if name == "tiny":
        return tiny_tokenizer()
    if name.endswith(".gguf") or is_import_path(name):
        return load_model(name, probe=False, device="cpu").tokenizer
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' errors have no common base class
        source = describe_source(name)
        raise KeelError(f"cannot load a tokenizer from {source}: {first_line(error).rstrip('.')}") from error


def model_options(model: ModelOptions | str, **overrides: Any) -> ModelOptions:
    """`ModelOptions` from options or a model's name, with overrides. torch dtypes and devices are accepted."""
    values = model.model_dump() if isinstance(model, ModelOptions) else {"name": model}
    if isinstance(overrides.get("dtype"), torch.dtype):
        overrides["dtype"] = str(overrides["dtype"]).removeprefix("torch.")
    if isinstance(overrides.get("device", ""), torch.device | None):
        overrides["device"] = str(overrides["device"] or "auto")
    return read_options(ModelOptions, {**values, **overrides}, "model")


def align_parameters(model: nn.Module) -> None:
    """Copy memory-mapped weights into torch's aligned memory.

    On some CPUs the rounding of matmuls depends on the alignment of their operands. A resumed run, with weights mapped
    from a file, would then differ from an uninterrupted run in the last bit.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def cast_parameters(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Convert the model's parameters to `dtype` and move the model to `device`; None changes nothing.

    Buffers keep their dtype. `Module.to(dtype)` would round the rotary frequencies to half precision, which is an error
    of a radian within a few hundred tokens.
    """
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            if gradient is not None:
                parameter.grad = gradient.to(dtype)
    return model if device is None else model.to(device)


def _resolve_device(name: str, section: str) -> torch.device:
    """The named device; `auto` is the accelerator if there is one. Raises for a missing device."""
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise KeelError(f"unknown {section}.device {name!r}: use cpu, cuda, cuda:N or auto") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise KeelError(
            f"{section}.device is {device}, but this machine has {torch.cuda.device_count()} CUDA devices: use cpu or "
            "auto"
        )
    return device


def resolve_dtype(name: str, device: torch.device, section: str = "model") -> tuple[torch.dtype | str, tuple[str, ...]]:
    """The dtype of the weights ("auto": the checkpoint's own), and a note if the GPU lacks bfloat16."""
    if name != "auto":
        fix = "model.dtype=float32 with optim.precision=float16" if section == "model" else f"{section}.dtype=float32"
        check_bfloat16(f"{section}.dtype", DTYPES[name], device, fix)
        return DTYPES[name], ()
    if device.type == "cpu":
        return torch.float32, ()
    if has_bfloat16(device):
        return "auto", ()
    note = "this GPU has no bfloat16, so the weights are float32; optim.precision=float16 would be faster"
    return torch.float32, (note,)


def _quantization_kwargs(bits: str | None, loader: Loader, device: torch.device, section: str) -> dict[str, Any] | None:
    """Arguments of `from_pretrained` for a base in 4 or 8 bits. Raises for unsupported setups."""
    if bits is None:
        return None
    if loader is not _from_transformers:
        raise KeelError(f"{section}.quantization={bits} works only with a transformers folder or a hub name")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise KeelError(
            f"{section}.quantization={bits} needs bitsandbytes, which is not installed: install bitsandbytes, or "
            "leave this option out"
        )
    from transformers import BitsAndBytesConfig

    half = torch.bfloat16 if has_bfloat16(device) else torch.float16
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": half}
    config = BitsAndBytesConfig(**(nf4 if bits == "4bit" else {"load_in_8bit": True}))
    return {"quantization_config": config, "device_map": {"": device}}


def find_loader(name: str) -> Loader:
    """The loader for a model's name. Raises for missing files before loading."""
    path = Path(name).expanduser()
    if name == "tiny":
        return _from_tiny
    if name.endswith(".gguf"):
        check_gguf(path)
        return _from_gguf
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise KeelError(f"the model folder {name} has no config.json: give a folder written by save_pretrained")
        return _from_transformers
    if is_import_path(name):
        import_object(name, "model loader")
        return _from_user
    # A hub name is `name` or `owner/name`. Anything else, or a name inside an existing folder, is a path: a request to
    # the hub would retry for half a minute without a network.
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name
    if is_path or ("/" in name and path.parent.is_dir()):
        raise KeelError(f"no model folder at {name!r}: check the path, or give a hub name, a .gguf file or 'tiny'")
    return _from_transformers


def _from_tiny(model: ModelOptions, *, seed: int, **_: Any) -> Loaded:
    return Loaded(*tiny_model(seed, model.attn_implementation))


def _from_gguf(model: ModelOptions, *, dtype: torch.dtype | str, **_: Any) -> Loaded:
    # Quantised weights have no float dtype; fp32 holds their 16-bit scales exactly.
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    try:
        loaded = load_gguf(Path(model.name).expanduser(), dtype=dtype, attn_implementation=model.attn_implementation)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise error if isinstance(error, KeelError) else _cannot_load(model.name, error) from error
    return Loaded(*loaded)


def _from_user(model: ModelOptions, *, dtype: Any, seed: int, **_: Any) -> Loaded:
    name = model.name
    loader = import_object(name, "model loader")
    offered = {"dtype": dtype, "attn_implementation": model.attn_implementation, "seed": seed}
    result = make_part(f"model loader {name}", loader, **part_arguments(f"model loader {name}", loader, {}, **offered))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise KeelError(f"model loader {name!r} returned {type(result).__name__}: it must return (model, tokenizer)")
    return Loaded(*result)


def _from_transformers(model: ModelOptions, *, dtype: torch.dtype | str, quantization: Any, **_: Any) -> Loaded:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name, attention, trust = model.name, model.attn_implementation, model.trust_remote_code
    source = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    try:
        # Load the small files first, to refuse a wrong tokenizer before downloading the weights.
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        check_eos(tokenizer, name)
        options = {"config": config, "dtype": dtype, "trust_remote_code": trust, **(quantization or {})}
        load: Any = partial(AutoModelForCausalLM.from_pretrained, source, output_loading_info=True, **options)
        try:
            loaded, info = load(attn_implementation=attention)
            return Loaded(loaded, tokenizer, (), *_differences(info))
        except ValueError as error:
            if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
                raise
        loaded, info = load(attn_implementation="eager")
        note = f"{name!r} has no sdpa attention: attn_implementation=eager is used"
        return Loaded(loaded, tokenizer, (note,), *_differences(info))
    except KeelError:
        raise
    except Exception as error:  # transformers' errors have no common base class
        raise _cannot_load(name, error) from error


def _differences(info: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of weights missing in the checkpoint, and missing in the model, from transformers' loading info."""
    missing, unexpected = (tuple(sorted(map(str, info.get(f"{kind}_keys", ())))) for kind in ("missing", "unexpected"))
    return missing, unexpected


def describe_source(name: str) -> str:
    """A model's name as errors show it: as a folder or as a hub name."""
    if Path(name).expanduser().exists():
        return f"the folder {name}"
    return f"{name!r} (not a local folder, so a hub name)"


def _cannot_load(name: str, error: Exception) -> KeelError:
    source = describe_source(name)
    if "trust_remote_code" in str(error):
        return KeelError(
            f"cannot load a model from {source}: it contains Python code, which needs your permission: "
            "read that code, then set model.trust_remote_code=true"
        )
    return KeelError(f"cannot load a model from {source}: {first_line(error).rstrip('.')}; check the name")
