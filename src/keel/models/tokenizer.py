"""Checks and properties of a model and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from keel.base.errors import KeelError


def check_eos(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer without EOS, before the weights are loaded."""
    if tokenizer.eos_token_id is None:
        raise KeelError(
            f"the tokenizer of {name!r} has no EOS token, so completions would never end: "
            "set eos_token in its tokenizer_config.json"
        )


def check_tokenizer(tokenizer: Any, model: nn.Module, name: str) -> tuple[str, ...]:
    """Check EOS and the size of the embedding; set a missing pad token to EOS."""
    notes: tuple[str, ...] = ()
    check_eos(tokenizer, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        notes = (f"the tokenizer of {name!r} has no pad token: {tokenizer.eos_token!r} is used (padding is masked)",)
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise KeelError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens but the model embeds {rows}: "
            "give the tokenizer that belongs to the model, or resize the model's embedding and save it"
        )
    return notes


def context_length(model: nn.Module) -> int | None:
    """The longest sequence the config allows, if it names one."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest of the vocabulary, equal for tokenizers with the same tokens and ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
