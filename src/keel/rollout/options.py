"""Options of sampling: `rollout`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.options import (
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PluginOptions,
    PositiveFloat,
    PositiveInt,
    Temperature,
)


class EngineOptions(PluginOptions):
    """An engine and its own parameters."""

    name: str = Field(min_length=1, description="The engine: native, vllm, or a user's module:attr.")


class VllmOptions(Options):
    """The place where vLLM runs, and its resources."""

    mode: Literal["colocate", "server"] = Field(
        default="colocate",
        description="colocate: vLLM runs in the training process and sleeps during the update; server: it runs in "
        "keel serve.",
    )
    url: tuple[str, ...] | str | None = Field(
        default=None,
        description="Address of the server, such as http://127.0.0.1:8000; servers in a list share the problems.",
    )
    secret: str | None = Field(
        default=None, description="The server's shared secret, preferably $NAME of an environment variable."
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Number of GPUs over which one server's model is split (keel serve)."
    )
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Share of a GPU's memory for vLLM's weights and KV cache; null is 0.3 when "
        "colocated, else the default of keel serve.",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Largest number of tokens of prompt and completion; null is the model's context."
    )
    transfer: Literal["http", "nccl"] = Field(
        default="http",
        description="How full weights are sent to a server. http: as files; nccl: from GPU to GPU, to a server of "
        "keel serve --transfer nccl (experimental: not run on a GPU yet). Adapters are always sent as files.",
    )
    cuda_graphs: bool = Field(
        default=True, description="Let vLLM compile and use CUDA graphs: a slower start, faster steps."
    )
    wait_s: PositiveFloat = Field(
        default=120.0, description="Seconds to wait for a server that is lost or does not answer."
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())


class RolloutOptions(Options):
    """How completions are sampled."""

    engine: EngineOptions | str = Field(
        default="native", description="Engine that samples: native, vllm, or a user's module:attr, or {name, …}."
    )
    prompts_per_step: PositiveInt = Field(
        default=16, description="Problems per step; each gives one group of completions."
    )
    num_generations: PositiveInt = Field(default=8, description="Completions per problem; they form one group.")
    temperature: Temperature = Field(
        default=1.0, description="Sampling temperature; the KL uses the distributions at this temperature."
    )
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Nucleus sampling: total probability of the kept tokens; 1 is off."
    )
    top_k: NonNegativeInt = Field(default=0, description="Number of most probable tokens that are kept; 0 is off.")
    min_p: Fraction = Field(
        default=0.0, description="Keep tokens with at least this share of the largest probability; 0 is off."
    )
    max_completion_length: PositiveInt = Field(
        default=64, description="Largest number of tokens of a completion, over all turns and replies."
    )
    max_turns: PositiveInt = Field(default=1, description="Largest number of model turns in an episode.")
    max_turn_length: PositiveInt | None = Field(
        default=None, description="Largest number of tokens of one turn; null: only max_completion_length applies."
    )
    join_turns: bool = Field(
        default=True,
        description="Answered episodes join those that are still being sampled; false: all episodes are answered "
        "together, which suits slow tools.",
    )
    overlap_tools: bool = Field(
        default=False,
        description="Sample at most half of the unfinished episodes at a time, while the tools of the others run.",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), description="Strings that end a turn.")
    max_batch: PositiveInt | None = Field(
        default=None, description="Completions sampled at a time; null is all of them."
    )
    kv_cache_gib: NonNegativeFloat = Field(
        default=1.0,
        description="Limit in GiB of the KV cache between turns, on the model's device; contexts that do not fit are "
        "prefilled again.",
    )
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="Steps that sampling may run ahead of the updates, in parallel; 0: sample and update in turn.",
    )
    dtype: Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"] = Field(
        default="auto",
        description="Dtype of the sampler's weights; auto is the policy's dtype, or on a GPU optim.precision if that "
        "is set (the sampler then has a copy of the weights).",
    )
    cuda_graphs: bool = Field(
        default=True, description="Decode with CUDA graphs if the model allows it (Llama-shaped, on a GPU)."
    )

    vllm: VllmOptions = Field(default=VllmOptions(), description="Where and how vLLM runs, with rollout.engine=vllm.")

    @property
    def filtered(self) -> bool:
        """Whether top-p, top-k or min-p filter the sampled distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def turns(self) -> dict[str, Any]:
        """The `Collector` arguments for turns, as plain data."""
        return self.model_dump(include={"max_turns", "max_turn_length", "join_turns", "overlap_tools"})

    @property
    def named_engine(self) -> EngineOptions:
        """The engine with its parameters, even if given as a name only."""
        return EngineOptions(name=self.engine) if isinstance(self.engine, str) else self.engine
