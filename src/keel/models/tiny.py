"""`tiny`: a Llama model of about a million random weights with a character-level tokenizer, created at load.

`word_model` has a word-level tokenizer over a closed vocabulary, which keeps the contexts of synthetic tasks short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SIGNS = "×÷−±≤≥≠≈√π²³°∞∑"
CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127))) + SIGNS

# Each turn ends in EOS, as with instruct models: the end of a turn also stops generation.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character: printable ASCII, newline, tab and some maths symbols.

    Other characters are `<unk>`.

    `decode(encode(x)) == x` for every x over `CHARACTERS`. The tokenizer adds no BOS, because the chat template
    writes it.
    """
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def character_tokenizer(tokens: Iterable[str], pattern: str = r"[\s\S]") -> PreTrainedTokenizerFast:
    """A tokenizer with these tokens. `pattern` matches one token of a text; unknown tokens are `<unk>`."""
    from tokenizers import Regex, decoders, pre_tokenizers

    return closed_tokenizer(tokens, pre_tokenizers.Split(Regex(pattern), "isolated"), decoders.Fuse())


def closed_tokenizer(tokens: Iterable[str], pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer over a closed vocabulary, without merges: special tokens, roles, then `tokens`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    distinct = dict.fromkeys((PAD, BOS, EOS, UNK, *ROLES, *tokens))  # duplicates would push ids past the embedding
    vocab = {token: index for index, token in enumerate(distinct)}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer, core.decoder = pre_tokenizer, decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def tiny_config(tokenizer: Any) -> Any:
    """A Llama config with 4 layers, width 128, 4 heads and 2 KV heads: 1.0 million parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa") -> tuple[nn.Module, Any]:
    """The model and its tokenizer; equal seeds give equal weights."""
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    return random_model(LlamaForCausalLM, tiny_config(tokenizer), seed, attn_implementation), tokenizer


def half_model(seed: int = 0, attn_implementation: str = "sdpa") -> tuple[nn.Module, Any]:
    """A student model: `tiny` with 2 instead of 4 layers (half a million parameters), and its tokenizer."""
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    config.num_hidden_layers = 2
    return random_model(LlamaForCausalLM, config, seed, attn_implementation), tokenizer


def random_model(architecture: Any, config: Any, seed: int, attn_implementation: str = "sdpa") -> nn.Module:
    """A model with random weights. Equal seeds give equal weights. The caller's RNG state is unchanged."""
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model: nn.Module = architecture(config)
    return model


LINE = "\n"


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token per word and line break; any other word is `<unk>`.

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
    """A random Llama with a word tokenizer, by default of `tiny`'s shape; for loaders `module:attr`."""
    from transformers import LlamaForCausalLM

    tokenizer = word_tokenizer(words)
    config = tiny_config(tokenizer)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, width, 4 * width
    config.head_dim = width // config.num_attention_heads
    return random_model(LlamaForCausalLM, config, seed), tokenizer
