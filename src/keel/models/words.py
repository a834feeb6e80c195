"""A word-level tokenizer over a closed vocabulary, for small models of made-up worlds: short contexts, no spelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from keel.models.tiny import BOS, CHAT_TEMPLATE, EOS, PAD, ROLES, UNK, tiny_config

LINE = "\n"


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token a word and one a line break; any other word is `<unk>`.

    `decode(encode(x)) == x` for texts of known words with single spaces between them and none around line breaks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(dict.fromkeys((PAD, BOS, EOS, UNK, *ROLES, LINE, *words)))}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(LINE, "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    core.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), decoders.Replace(Regex(" ?\n ?"), LINE)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def word_model(words: Sequence[str], seed: int = 0, *, layers: int = 4, width: int = 128) -> tuple[nn.Module, Any]:
    """A random model of `tiny`'s shape, or smaller, on such a tokenizer: what a loader (`module:attr`) returns."""
    from transformers import LlamaForCausalLM

    tokenizer = word_tokenizer(words)
    config = tiny_config(tokenizer)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, width, 4 * width
    config.head_dim = width // config.num_attention_heads
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer
