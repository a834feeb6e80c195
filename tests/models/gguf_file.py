"""A small GGUF file, written by the gguf package from a random Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, WIDTH, HIDDEN, LAYERS = 4, 2, 32, 64, 2
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """The 256 byte symbols of byte-level BPE after two special tokens, and the merges' results."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|end|>", "<|start|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "ab"]


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of rotary rows: pairs (i, i + d/2) of each head stand beside each other."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).transpose(1, 2).reshape(rows, cols)


def write(path: Path, seed: int = 0) -> LlamaForCausalLM:
    """The model, once the file holds it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3] + [1] * (len(vocabulary()) - 2))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if "q_proj" in name:
            weight = interleaved(weight, HEADS)
        if "k_proj" in name:
            weight = interleaved(weight, KV_HEADS)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name.replace("model.layers", "blk"), weight.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
