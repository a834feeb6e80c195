"""The two places where vLLM samples, behind one interface: in this process, or behind a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from keel.rollout.vllm.rows import Drawing, Row, Sampled

_NOT_OF_LOGITS = re.compile(  # names, versions, ids of tokens, and what only training or the caller reads
    r"_.*|architectures|auto_map|dtype|torch_dtype|transformers_version|use_cache|return_dict|output_.*|id2label|"
    r"label2id|problem_type|chunk_size_feed_forward|is_encoder_decoder|initializer_range|summary_.*|.*_token_ids?|"
    r".*dropout.*|.*_pdrop"
)


def model_facts(config: Any) -> dict[str, Any]:
    """What decides logits beside the weights, from a transformers configuration, as JSON has it; its kind first."""
    text = config.get_text_config()
    options = json.loads(json.dumps(text.to_dict(), default=str))
    return {"model_type": text.model_type, **dict(_flat(options))}


def first_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first name that two models' facts differ in; a version that lacks an option has it off."""
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

    def load(self, policy: nn.Module) -> None:
        """Take over the policy's weights, and prove it."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free memory for the update."""

    def events(self) -> list[tuple[str, str]]:
        """What has happened since the last call: code and message."""
        return []

    def close(self) -> None:
        """End it."""
