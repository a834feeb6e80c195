"""The two places where vLLM samples, behind one interface: in this process, or behind a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from keel.rollout.vllm.rows import Drawing, Row, Sampled

MODEL_FACTS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)


def model_facts(config: Any) -> dict[str, Any]:
    """What tells models of other shapes apart, from a transformers configuration."""
    return {name: getattr(config, name, None) for name in MODEL_FACTS}


class SamplerInfo(NamedTuple):
    """What a sampler says of itself."""

    context: int
    vocabulary: int


class Sampler:
    """Rows in, completions out, in the order in which they end; and weights in."""

    info: SamplerInfo
    notes: tuple[str, ...] = ()  # what a run with it should say
    read_back: int = 0  # tensors that were read back after the last load, and are the policy's

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        """Begin to sample rows, beside those that run."""
        raise NotImplementedError

    def finished(self) -> list[Sampled]:
        """Rows that have ended since the last call, once there is one."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give up all rows that run."""

    def interrupt(self) -> None:
        """Let `finished`, for which another thread waits, raise `Interrupted`, where it can."""

    def load(self, policy: nn.Module, version: int | None) -> None:
        """Take over the policy's weights, and prove it."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free memory for the update."""

    def events(self) -> list[tuple[str, str]]:
        """What has happened since the last call: code and message."""
        return []

    def close(self) -> None:
        """End it."""
