"""The two places where vLLM samples, behind one interface: in this process, or behind a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from keel.rollout.vllm.rows import Drawing, Row, Sampled


class SamplerInfo(NamedTuple):
    """What a sampler says of itself."""

    name: str  # as messages call it
    dtype: str
    context: int
    vocabulary: int
    architecture: str
    max_lora_rank: int  # 0 where it takes no adapters


class Sampler:
    """Rows in, completions out, in the order in which they end; and weights in."""

    info: SamplerInfo

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        """Begin to sample rows, beside those that run."""
        raise NotImplementedError

    def finished(self) -> list[Sampled]:
        """Rows that have ended since the last call, once there is one."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give up all rows that run."""

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


def check_model(info: SamplerInfo, architecture: str, vocabulary: int) -> str | None:
    """What is wrong with a sampler of another model; None where it fits."""
    if info.architecture != architecture:
        return f"serves a {info.architecture} and the policy is a {architecture}"
    if info.vocabulary != vocabulary:
        return f"has {info.vocabulary} tokens and the policy {vocabulary}"
    return None
