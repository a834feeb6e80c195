"""A word-level tokenizer over a closed vocabulary, for small models of synthetic worlds: contexts stay short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from keel.models.tiny import CHAT_TEMPLATE, closed_tokenizer, random_model, tiny_config

LINE = "\n"


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token a word and one a line break; any other word is `<unk>`.

    `decode(encode(x)) == x` for texts of known words with single spaces between them and none around line breaks.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(LINE, "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    join = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), decoders.Replace(Regex(" ?\n ?"), LINE)]
    )
    tokenizer = closed_tokenizer((LINE, *words), split, join)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def word_model(words: Sequence[str], seed: int = 0, *, layers: int = 4, width: int = 128) -> tuple[nn.Module, Any]:
    """A random model of `tiny`'s shape, or smaller, on such a tokenizer: what a loader (`module:attr`) returns."""
    from transformers import LlamaForCausalLM

    tokenizer = word_tokenizer(words)
    config = tiny_config(tokenizer)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, width, 4 * width
    config.head_dim = width // config.num_attention_heads
    return random_model(LlamaForCausalLM, config, seed), tokenizer
