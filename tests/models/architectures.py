"""A small random model of every causal architecture that transformers has, made from its config class alone.

Lengths come from a seed, so that nothing can be tuned to one of them: windows, chunks and the lengths at which rotary
tables switch are small enough that a test crosses all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
CONTEXT = 160
_LARGEST = 4_000_000
_WIDTH, _HEADS, _LAYERS, _HEAD = 32, 4, 4, 8

# What a config may call its sizes. A name that a config does not have is not given to it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_vocab"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width", "embedding_dim"), _WIDTH),
    **dict.fromkeys(("cross_attention_hidden_size", "attention_hidden_size", "qk_dim", "ple_embed_dim"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_head", "kv_channels", "v_head_dim", "linear_head_dim"), _HEAD),
    **dict.fromkeys(("dim_head", "attention_head_size", "mamba_d_head", "mamba_head_dim", "index_head_dim"), _HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), _HEAD),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "rotary_dim"), _HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff"), 48),
    **dict.fromkeys(("d_inner", "ffn_hidden_size", "feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size", "hc_lowrank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), CONTEXT),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "model_max_length"), CONTEXT),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "start_token_id", "sep_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "eod_token_id"), 2),
    "qk_head_dim": 2 * _HEAD,
    "pad_token_id": 0,
    "index_n_heads": 2,
    "zero_expert_num": 2,
    "moe_layer_end_index": _LAYERS - 1,
    "num_kv_shared_layers": 0,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "mamba_expand": 1,
}


@dataclass(frozen=True)
class Variant:
    """An architecture, the kind of its rotary embedding (None: its own) and whether local attention is switched on."""

    name: str
    rope: str | None = None
    window: bool = False

    def __str__(self) -> str:
        return self.name + (f"+{self.rope}" if self.rope else "") + ("+window" if self.window else "")


# Architectures of transformers that cannot be built small, and why.
UNBUILT = {
    "blt": "its byte patcher has 96 million parameters at any size",
    "gemma3n": "its image tower needs the timm package",
    "gemma4_assistant": "its config cannot be made without a target model's",
    "musicgen": "it is a model of sound: its config holds a text encoder, a codec and a decoder",
    "musicgen_melody": "it is a model of sound: its config holds a text encoder, a codec and a decoder",
}


def names() -> list[str]:
    """Every architecture that transformers lists as a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def variants() -> list[Variant]:
    """All that the sweep builds: each architecture as it is, then with other rotary embeddings and local attention."""
    plain = [Variant(name) for name in names() if name not in UNBUILT]
    turned = [Variant(name, _KINDS[i % len(_KINDS)]) for i, name in enumerate(TURNED)]
    switched = [Variant(name, "longrope") for name in ("llama", "phi3", "phimoe", "qwen2", "mistral")]
    local = [Variant(name, window=True) for name in WINDOWED]
    return list(dict.fromkeys([*plain, *turned, *switched, *local]))


_KINDS = ("longrope", "linear", "longrope", "yarn", "dynamic", "longrope", "llama3")
# Whose config takes every kind of rotary embedding, and whose local attention is off by default.
TURNED = [
    "afmoe",
    "apertus",
    "arcee",
    "axk1",
    "bamba",
    "cohere",
    "cohere2",
    "dbrx",
    "deepseek_v3",
    "diffllama",
    "dots1",
    "emu3",
    "ernie4_5",
    "exaone4",
    "falcon",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "gemma2",
    "glm",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "helium",
    "hunyuan_v1_dense",
    "jetmoe",
    "lfm2",
    "llama",
    "llama4_text",
    "minicpm3",
    "minimax",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "zamba2",
]
WINDOWED = ["ministral3", "mixtral", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"]


def _lengths(seed: int) -> dict[str, Any]:
    """Where a model changes its behaviour: another for every seed."""
    draw = random.Random(seed)
    window, chunk = draw.choice((7, 8, 11)), draw.choice((4, 8))
    return {
        **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "local_attention"), window),
        **dict.fromkeys(("attention_chunk_size", "attention_window_size", "keep_window_size"), window),
        "index_topk": 8,
        **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), chunk),
        **dict.fromkeys(("original_max_position_embeddings", "floor_scale"), draw.choice((17, 24, 29))),
    }


_TWICE = {"attention_hidden_size": 2 * _WIDTH}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What an architecture asks for beyond that.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": dict(_ROPE), "sliding_attention": dict(_ROPE)}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"dim_model_base": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [10, 16], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "attention_head_dim": 16,
        **_TWICE,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16,
        **_TWICE,
        "mamba_headdim": 8,
        "mamba_expand": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "roc_bert": {"shape_vocab_size": 50, "pronunciation_vocab_size": 50},
}


def small_config(variant: Variant, seed: int = 0) -> PreTrainedConfig:
    sizes = {**_SIZES, **_lengths(seed), **_OWN.get(variant.name, {})}
    config = _small(CONFIG_MAPPING[variant.name], sizes, variant.window)
    text: Any = config.get_text_config(decoder=True)
    if variant.rope is not None:
        _turn(text, variant.rope, sizes["original_max_position_embeddings"])
    elif "original_max_position_embeddings" in (getattr(text, "rope_parameters", None) or ()):
        text.rope_parameters["original_max_position_embeddings"] = sizes["original_max_position_embeddings"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def _turn(text: Any, kind: str, original: int) -> None:
    """Give a config another kind of rotary embedding; long factors are far from the short ones."""
    before = text.rope_parameters
    partial = before.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    width = getattr(text, "qk_rope_head_dim", None) or int(
        partial * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    )
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": before.get("rope_theta", 10000.0), "factor": 4.0}
    if "partial_rotary_factor" in before:
        settings["partial_rotary_factor"] = before["partial_rotary_factor"]
    if kind in ("yarn", "llama3", "longrope"):
        settings["original_max_position_embeddings"] = original
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * (width // 2), "long_factor": [3.0 + i for i in range(width // 2)]}
        settings |= {"short_mscale": 1.1, "long_mscale": 1.3} if "phimoe" in text.model_type else {}
    text.rope_parameters = settings
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = original


def _small(kind: type[PreTrainedConfig], sizes: dict[str, Any], window: bool) -> PreTrainedConfig:
    plain = kind()
    known = {key for base in kind.__mro__ for key in getattr(base, "__annotations__", {})} | set(plain.to_dict())
    own = {key: value for key, value in sizes.items() if key in known or key in kind.attribute_map}
    own = {key: value for key, value in own.items() if kind.attribute_map.get(key) not in own}
    if not window and getattr(plain, "sliding_window", None) is None:
        own.pop("sliding_window", None)
    if window and "use_sliding_window" in known:
        own |= {"use_sliding_window": True, "max_window_layers": 2}
    if "kv_lora_rank" in known:
        own["num_key_value_heads"] = _HEADS
    for part in kind.sub_configs or {}:
        inner = getattr(plain, part, None)
        if isinstance(inner, PreTrainedConfig) and part not in own:
            own[part] = _small(type(inner), {**sizes, **_OWN.get(inner.model_type, {})}, window).to_dict()
    return kind(**own)


def build(variant: Variant | str, seed: int = 0) -> Any:
    """The model, its weights large enough that attention and logits are far from uniform."""
    variant = Variant(variant) if isinstance(variant, str) else variant
    config = small_config(variant, seed)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > _LARGEST:
        raise ValueError(f"{variant} has {count} parameters at its smallest")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
    return model
