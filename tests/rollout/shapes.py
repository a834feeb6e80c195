"""Small random models of several architectures and a byte tokenizer, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import models as zoo

VOCABULARY = 260
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 96, "bos_token_id": 256, "eos_token_id": 257}
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, **COMMON}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, **WIDE}


def _configs() -> dict[str, Any]:
    return {
        "llama": zoo.llama.LlamaConfig(**GROUPED),
        "gpt2": zoo.gpt2.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=96, **COMMON),
        "qwen2": zoo.qwen2.Qwen2Config(**GROUPED),
        "qwen3": zoo.qwen3.Qwen3Config(**GROUPED),
        "gpt_neox": zoo.gpt_neox.GPTNeoXConfig(rotary_pct=0.5, **WIDE),
        "gemma": zoo.gemma.GemmaConfig(**GROUPED),
        "mistral": zoo.mistral.MistralConfig(sliding_window=8, **GROUPED),
        "gemma2": zoo.gemma2.Gemma2Config(sliding_window=8, attn_logit_softcapping=2.0, **GROUPED),
        "mamba": zoo.mamba.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, eos_token_id=257),
    }


LLAMA_STEP = ("llama", "qwen2", "qwen3")
SHARED = (*LLAMA_STEP, "gpt2", "gpt_neox", "gemma")
PLAIN = ("mistral", "gemma2", "mamba")


def tokenizer() -> Any:
    """One token a byte, so that every string can be stopped at and every token decodes to something."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**{letter: i for i, letter in enumerate(alphabet)}, "<bos>": 256, "<eos>": 257, "<pad>": 258}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def model(name: str, seed: int = 0, sharpen: float = 8.0) -> Any:
    """A random model whose logits are spread out: at initialisation they would all be nearly equal."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(_configs()[name])
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpen if parameter.shape[0] == VOCABULARY else 4.0)
            elif name in ("qwen2", "gpt2", "gpt_neox"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def prompts(count: int = 4, seed: int = 1) -> list[tuple[int, ...]]:
    """Ragged prompts, the first a single token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 5, 17, 11, 23, 3][:count]
    return [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in lengths]


def full_logp(made: Any, context: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Log-probabilities of `tokens` after `context` by one plain forward: the oracle."""
    with torch.no_grad():
        logits = made.eval()(input_ids=torch.tensor([[*context, *tokens]]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits[len(context) - 1 : -1] / temperature, -1)
    return logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
