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
    """Where vLLM samples, and what it may take."""

    mode: Literal["colocate", "server"] = Field(
        default="colocate",
        description="In the process of the training, sleeping during the update; or a server (keel serve).",
    )
    url: tuple[str, ...] | str | None = Field(
        default=None, description="Address of the server, such as http://127.0.0.1:8000; several share the problems."
    )
    secret: str | None = Field(
        default=None, description="The server's shared secret, best as $NAME of an environment variable."
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="GPUs that one sampler is spread over (keel serve)."
    )
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Share of a GPU's memory for the sampler's weights, keys and values; null: 0.3 in the process, "
        "keel serve's own.",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Tokens of prompt and completion together; null is the model's own."
    )
    transfer: Literal["http", "nccl"] = Field(
        default="http",
        description="How full weights go to a server: http as files; nccl to other GPUs (experimental: not run on a "
        "GPU yet), for a server of keel serve --transfer nccl. Adapters always go as files.",
    )
    cuda_graphs: bool = Field(
        default=True, description="vLLM compiles and decodes by CUDA graphs: a slower start, faster steps."
    )
    wait_s: PositiveFloat = Field(
        default=120.0, description="Seconds that the training waits for a server that is lost or does not answer."
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())


class RolloutOptions(Options):
    """How completions are sampled."""

    engine: EngineOptions | str = Field(
        default="native", description="Engine that samples: native, vllm, or a user's module:attr, also as {name, …}."
    )
    prompts_per_step: PositiveInt = Field(
        default=16, description="Problems a step; each gives one group of completions."
    )
    num_generations: PositiveInt = Field(default=8, description="Completions a problem, compared with each other.")
    temperature: Temperature = Field(default=1.0, description="Sampling temperature; KL is between policies at it.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus probability kept; 1 is off.")
    top_k: NonNegativeInt = Field(default=0, description="Most probable tokens kept; 0 is off.")
    min_p: Fraction = Field(default=0.0, description="Least probability kept, as a share of the largest; 0 is off.")
    max_completion_length: PositiveInt = Field(
        default=64, description="Longest completion in tokens, over all turns and the messages between them."
    )
    max_turns: PositiveInt = Field(default=1, description="Most turns of the model in an episode.")
    max_turn_length: PositiveInt | None = Field(
        default=None, description="Longest turn of the model in tokens; null: only max_completion_length counts."
    )
    join_turns: bool = Field(
        default=True,
        description="Episodes that were answered join those still speaking; false: all are answered together, which "
        "suits slow tools.",
    )
    overlap_tools: bool = Field(
        default=False,
        description="Sampling goes on while slow tools work; which episodes share a pass then depends on the clock, so "
        "that the last digits of a run vary.",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), description="Texts that end a turn.")
    max_batch: PositiveInt | None = Field(
        default=None, description="Completions sampled at a time; null for all of them."
    )
    kept_gib: NonNegativeFloat = Field(
        default=1.0,
        description="GiB of the model's device for keys and values between turns; what finds no room is read again.",
    )
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="Steps that sampling may be ahead of the updates, which goes on beside them; 0: one after the "
        "other.",
    )
    dtype: Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"] = Field(
        default="auto",
        description="Type of the weights that sample; auto: on a GPU that of the training passes (a copy, under "
        "optim.precision), elsewhere the policy's own.",
    )
    cuda_graphs: bool = Field(
        default=True, description="Decode by CUDA graphs where the model allows it (Llama-shaped, on a GPU)."
    )

    vllm: VllmOptions = Field(default=VllmOptions(), description="Where vLLM samples, with rollout.engine=vllm.")

    @property
    def filtered(self) -> bool:
        """Whether top-p, top-k or min-p cut the distribution that is sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def turns(self) -> dict[str, Any]:
        """What a `Collector` takes of it beside the sampling, as plain data."""
        return self.model_dump(include={"max_turns", "max_turn_length", "join_turns", "overlap_tools"})

    @property
    def named_engine(self) -> EngineOptions:
        """The engine with its parameters, also where it is a name alone."""
        return EngineOptions(name=self.engine) if isinstance(self.engine, str) else self.engine
