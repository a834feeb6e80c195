"""Options of the policy (`model`), and the loaded policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Flag, Float, Options, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch
    from torch import nn


class LoraOptions(Options):
    """LoRA: W + (alpha / r)·B·A on each target layer. An existing `adapter` keeps its own r, alpha and targets."""

    r: PositiveInt = Field(default=16, description="Rank r of the LoRA matrices A and B.")
    alpha: PositiveFloat = Field(default=32.0, description="LoRA alpha: the update is multiplied by alpha / r.")
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout probability on the adapter's input; above 0 the KL at step 0 is not 0."
    )
    targets: str | tuple[str, ...] = Field(
        default="all-linear", description="Layers to adapt: all-linear or names of layers."
    )
    adapter: str | None = Field(
        default=None, description="Folder of an existing adapter to continue; null trains a new adapter."
    )


class ModelOptions(Options):
    """The policy."""

    name: str = Field(
        default="tiny", min_length=1, description="tiny, a folder, a hub name, a .gguf file, or a loader module:attr."
    )
    dtype: Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"] = Field(
        default="auto",
        description="Dtype of the weights; auto is float32 on a CPU, else the checkpoint's dtype.",
    )
    device: str = Field(
        default="auto", description="Where the model runs: auto (CUDA if available), cpu, cuda or cuda:N."
    )
    attn_implementation: str = Field(
        default="sdpa", description="Attention implementation of transformers: sdpa, eager, flash_attention_2…"
    )
    lora: LoraOptions | None = Field(default=None, description="LoRA settings; null trains all weights.")
    quantization: Literal["4bit", "8bit"] | None = Field(
        default=None,
        description="Quantization of the frozen base under LoRA (QLoRA; needs bitsandbytes); null is off.",
    )
    dropout: Flag = Field(default=False, description="Keep the model's own dropout; then the KL at step 0 is not 0.")
    gradient_checkpointing: Flag = Field(
        default=False, description="Recompute activations in the backward pass: less memory, about 30 % slower."
    )
    scorer: str = Field(
        default="native",
        description="Function that computes the tokens' log-probabilities: native, or your own module:attr.",
    )
    compile: Flag = Field(default=False, description="Compile the model with torch.compile.")
    trust_remote_code: Flag = Field(default=False, description="Run Python code that comes with the model.")

    def at(self, checkpoint: Path) -> ModelOptions:
        """These options with a checkpoint's weights: as the adapter under LoRA, otherwise as the whole model."""
        if self.lora is None:
            return self.model_copy(update={"name": str(checkpoint)})
        return self.model_copy(update={"lora": self.lora.model_copy(update={"adapter": str(checkpoint)})})


def check_quantization(model: ModelOptions) -> None:
    """Refuse quantized weights without an adapter to train."""
    if model.quantization is not None and model.lora is None:
        raise KeelError(
            f"model.quantization={model.quantization} needs LoRA, because quantized weights are frozen: set model.lora"
        )


@dataclass(frozen=True)
class LoadedModel:
    """A loaded policy, its tokenizer and its properties.

    `eos_ids` are all tokens that end a completion (the tokenizer's and the generation config's). `context_length`
    is None if the config sets no limit. `notes` lists the decisions made for the user. `shared_prefix` says
    whether a row may hold several completions (see `pack`); `packing_note` says why it may not. `missing` weights are
    not in the checkpoint and start at random. `unexpected` weights are not in the model.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    context_length: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    device: torch.device
    dtype: torch.dtype
    lora: LoraOptions | None = None
    notes: tuple[str, ...] = ()
    shared_prefix: bool = False
    packing_note: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
