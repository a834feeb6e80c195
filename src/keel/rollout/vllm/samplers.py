"""The interface of vLLM samplers: in this process, or behind a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from keel.rollout.vllm.rows import Drawing, Row, Sampled

_NOT_OF_LOGITS = re.compile(  # config keys that do not affect logits
    r"_.*|architectures|auto_map|dtype|torch_dtype|transformers_version|use_cache|return_dict|output_.*|id2label|"
    r"label2id|problem_type|chunk_size_feed_forward|is_encoder_decoder|initializer_range|summary_.*|.*_token_ids?|"
    r".*dropout.*|.*_pdrop"
)


def model_facts(config: Any) -> dict[str, Any]:
    """The transformers options that affect logits, as JSON data; model_type first."""
    text = config.get_text_config()
    options = json.loads(json.dumps(text.to_dict(), default=str))
    return {"model_type": text.model_type, **dict(_flat(options))}


def first_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first option in which two models differ; a missing option counts as off."""
    return next((name for name in {**own, **theirs} if (own.get(name) or None) != (theirs.get(name) or None)), None)


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if _NOT_OF_LOGITS.fullmatch(name):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class SamplerInfo(NamedTuple):
    """A sampler's context length and vocabulary size."""

    context: int
    vocabulary: int


class VllmSampler:
    """Samples rows and returns them in the order in which they end; loads weights."""

    info: SamplerInfo
    notes: tuple[str, ...] = ()  # notes for the run
    read_back: int = 0  # number of tensors verified after the last load

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        """Start sampling rows, in addition to running ones."""
        raise NotImplementedError

    def finished(self) -> list[Sampled]:
        """Wait for and return rows that ended since the last call."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel all running rows."""

    def interrupt(self) -> None:
        """Make `finished` raise `Interrupted` in a waiting thread, if possible."""

    def load(self, policy: nn.Module) -> None:
        """Load the policy's weights and verify them."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free memory for the update."""

    def events(self) -> list[tuple[str, str]]:
        """Events since the last call, as (code, message)."""
        return []

    def close(self) -> None:
        """Close the sampler."""
