"""GPT-2- and Llama-shaped models with random weights and a tokenizer for chess texts, to train from scratch.

Use them as `model.name: keel.recipes.chess.models:chess_small`. GPT-2's own tokenizer would have to be downloaded and
splits FENs irregularly. Here every character is a token; a rank with at most one piece and a square of a move are also
single tokens, so that each rank has a fixed token position if there are few pieces. The vocabulary has 381 tokens
instead of 50,257, which is why the 124M shape has 86 million parameters.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import nn

from keel.models.tiny import CHARACTERS, character_tokenizer, random_model

PIECES = "pnbrqkPNBRQK"
SQUARES = tuple(file + rank for rank in "12345678" for file in "abcdefgh")
EMPTY = "8"
# A rank with one piece: the empty squares before it, the piece, the empty squares after it.
RANKS = tuple(f"{before or ''}{piece}{7 - before or ''}" for piece in PIECES for before in range(8))
SIDES = (" w - - ", " b - - ")  # the side to move, without castling rights and en-passant square
REWARDS = ("0.001", "0.5", "1.0", "-1.0")

GPT2_DROPOUT = 0.1  # dropout of embeddings, attention and residual branches; only with `model.dropout: true`


def chess_tokenizer() -> Any:
    """A tokenizer of characters and of longer tokens for ranks, squares and rewards; `decode(encode(x)) == x`.

    A prompt and its completion have the same tokens separately and joined, because no token crosses the symbols at
    which a prompt ends.
    """
    one_of = "|".join(sorted(map(re.escape, RANKS), key=len, reverse=True))
    square = "[a-h][1-8]"
    patterns = (
        f"/(?:{one_of}|{EMPTY})(?=[/ ])",
        f"(?:^|(?<=[ +]))(?:{one_of})(?=[/ ])",
        "|".join(SIDES),
        f"(?:^|(?<=[ +])){square}(?={square}[qrbn]?(?:[ +]|$))",
        f"(?<=[ +]{square}){square}(?=[qrbn]?(?:[ +]|$))|(?<=^{square}){square}(?=[qrbn]?(?:[ +]|$))",
        f"(?<=\\+)(?:{'|'.join(map(re.escape, REWARDS))})(?=\\+)",
        r"[\s\S]",
    )
    longer = (*RANKS, *(f"/{rank}" for rank in (EMPTY, *RANKS)), *SIDES, *SQUARES, *REWARDS)
    return character_tokenizer((*CHARACTERS, *longer), "|".join(patterns))


def llama(
    *, layers: int, width: int, heads: int, seed: int = 0, attn_implementation: str = "sdpa"
) -> tuple[nn.Module, Any]:
    """A Llama of this shape over the chess tokens; equal seeds give equal weights.

    A new position is mostly a copy of the old one at a constant distance, which rotary embeddings represent directly;
    learned absolute embeddings must learn it for each position.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = chess_tokenizer()
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **_common(tokenizer, width),
    )
    return random_model(LlamaForCausalLM, config, seed, attn_implementation), tokenizer


def gpt2(
    *, layers: int, width: int, heads: int, positions: int, seed: int = 0, attn_implementation: str = "sdpa"
) -> tuple[nn.Module, Any]:
    """A GPT-2 of this shape; equal seeds give equal weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = chess_tokenizer()
    config = GPT2Config(
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=GPT2_DROPOUT,
        embd_pdrop=GPT2_DROPOUT,
        attn_pdrop=GPT2_DROPOUT,
        **_common(tokenizer, width),
    )
    return random_model(GPT2LMHeadModel, config, seed, attn_implementation), tokenizer


def _common(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        # GPT-2's 0.02 is for width 768; narrower models need a larger value
        "initializer_range": 0.02 * (768 / width) ** 0.5,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


# 0.4 million parameters: learns positions of three pieces in minutes on two cores
chess_tiny = partial(gpt2, layers=3, width=96, heads=4, positions=512)
chess_llama = partial(llama, layers=3, width=96, heads=4)  # 0.5 million
chess_small = partial(gpt2, layers=4, width=160, heads=5, positions=512)  # 1.4 million, for two cores and an hour
chess_30m = partial(gpt2, layers=9, width=512, heads=8, positions=512)  # for a GPU and minutes
chess_124m = partial(gpt2, layers=12, width=768, heads=12, positions=1024)  # the body of GPT-2 124M
# for positions of three pieces
chess_llama_2x64 = partial(llama, layers=2, width=64, heads=4)
chess_llama_2x128 = partial(llama, layers=2, width=128, heads=8)
chess_gpt2_2x128 = partial(gpt2, layers=2, width=128, heads=8, positions=64)
chess_gpt2_3x64 = partial(gpt2, layers=3, width=64, heads=8, positions=64)
