"""Models whose passes are not those they were taught with, types too small for them, and odd ones that are right."""

from __future__ import annotations

from random import Random
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from faults.base import edited, lookalike, operator, option
from faults.engines import has_lora
from faults.models import LOADERS, Tensors, has_layers, loaded, with_json, with_loader, with_tensors
from faults.models_field import writes_several_words
from faults.models_more import with_matrices
from faults.models_more_hooks import is_schooled
from faults.models_wild import NOISE
from faults.school import version_of

Config = dict[str, Any]
VERSION = version_of(__file__)


def moved(tensors: Tensors, factor: float) -> Tensors:
    """The same model: what one matrix of every feed-forward gives is larger by the factor, and the next undoes it."""
    factors = {"up_proj": factor, "down_proj": 1 / factor}
    return {name: v * next((f for part, f in factors.items() if part in name), 1.0) for name, v in tensors.items()}


# Models that no folder can hold


def _rotary_lost(key: str) -> tuple[nn.Module, Any]:
    """The frequencies of the positions are no part of a checkpoint, and stay what the memory held: zeros."""
    model, tokenizer = loaded(key)
    rotary: Any = model.get_submodule("model.rotary_emb")
    rotary.inv_freq.zero_()
    return model, tokenizer


def _norms_after(key: str) -> tuple[nn.Module, Any]:
    """What a layer's two norms should take in is what they give out: they come after attention and feed-forward."""
    model, tokenizer = loaded(key)

    def after(norm: Any) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            normed = functional.rms_norm(first, norm.weight.shape, norm.weight.to(first.dtype), norm.variance_epsilon)
            return (normed, *out[1:]) if isinstance(out, tuple) else normed

        return hook

    for layer in model.get_submodule("model.layers").children():
        for norm, block in (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")):
            layer.get_submodule(block).register_forward_hook(after(layer.get_submodule(norm)))
            layer.get_submodule(norm).register_forward_hook(lambda module, given, out: given[0])
    return model, tokenizer


LOADERS.update(rotary_lost=_rotary_lost, norms_after=_norms_after)


@operator(
    "model/rotary-buffer-lost",
    "The model was made without memory and filled from its checkpoint, which has no rotary frequencies: all are zero.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def rotary_buffer_lost(config: Config, random: Random) -> Config:
    return with_loader(config, "rotary_lost")


@operator(
    "model/norms-after-the-blocks",
    "The code is of a family that norms what a block gives, and the checkpoint of one that norms what it takes.",
    *NOISE,
    "prompt/format",
    fits=has_layers,
)
def norms_after_the_blocks(config: Config, random: Random) -> Config:
    return with_loader(config, "norms_after")


# Types


@operator(
    "model/overflows-in-half",
    "A checkpoint whose activations need the range of bfloat16 is read as float16: they are infinite.",
    "scoring/non-finite",
    "reward/failed",
    fits=lambda config: has_lora(config) and option(config, "optim.precision") is None,
)
def overflows_in_half(config: Config, random: Random) -> Config:
    return edited(with_tensors(config, lambda t: moved(t, 2.0**16), VERSION, "overflow"), {"model.dtype": "float16"})


# Scales


@operator(
    "model/residual-multiplier-lost",
    "The checkpoint is of a family that takes a quarter of what every block adds, and is read as one that takes all.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def residual_multiplier_lost(config: Config, random: Random) -> Config:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor * 4 if "o_proj" in name or "down_proj" in name else tensor

    return with_matrices(config, change, VERSION, "residual")


# Healthy


@lookalike("feed-forwards whose scale was moved from one matrix to the next", is_schooled)
def healthy_moved_scale(config: Config, random: Random) -> Config:
    """As where activations are smoothed for a quantiser; the units are in another order, too."""

    def change(tensors: Tensors) -> Tensors:
        def turned(name: str, v: Tensor) -> Tensor:
            if "gate_proj" in name or "up_proj" in name:
                return v.flip(0)
            return v.flip(1) if "down_proj" in name else v

        return {name: turned(name, v) for name, v in moved(tensors, 2.0).items()}

    return with_tensors(config, change, VERSION, "moved")


@lookalike("padding and truncation of an earlier script in tokenizer.json", is_schooled)
def healthy_saved_padding(config: Config, random: Random) -> Config:
    """Saved with the tokenizer; every call of it says what it wants, and this is not asked again."""

    def change(content: dict[str, Any]) -> None:
        content["truncation"] = {"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {"strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None}
        content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}

    return with_json(config, "tokenizer.json", change, VERSION, "padding")
