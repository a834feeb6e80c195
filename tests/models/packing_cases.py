"""Small random models of several families and ragged groups: what the packing tests run on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

from keel.base.types import Completion, Group, Problem

VOCABULARY = 61
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "final_logit_softcapping": 2.0}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-eager": lambda: transformers.LlamaConfig(**_SHAPE, attn_implementation="eager"),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2, **_NO_DROPOUT),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=8),
    "mistral-window": lambda: transformers.MistralConfig(**_SHAPE, head_dim=8, sliding_window=16),
    "gemma2": lambda: transformers.Gemma2Config(**_SHAPE, **_GEMMA2),
    "cohere": lambda: transformers.CohereConfig(**_SHAPE, logit_scale=0.25),
    "granite": lambda: transformers.GraniteConfig(**_SHAPE, logits_scaling=4.0),
    "phi": lambda: transformers.PhiConfig(**_SHAPE),  # its head has a bias
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
}


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A random model whose weights are large enough that attention and logits are far from uniform."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_completion(
    length: int, generator: torch.Generator, tool: slice | None = None, vocabulary: int = VOCABULARY
) -> Completion:
    tokens = tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())
    action = [True] * length
    if tool is not None:
        action[tool] = [False] * len(action[tool])
    zeros = (0.0,) * length
    return Completion(tokens, tuple(action), zeros, zeros, "", "eos")


def make_groups(
    shape: Sequence[tuple[int, Sequence[int]]], tool: slice | None = None, vocabulary: int = VOCABULARY
) -> list[Group]:
    """Groups from (prompt length, completion lengths)."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for index, (prompt, lengths) in enumerate(shape):
        prompt_tokens = tuple(torch.randint(vocabulary, (prompt,), generator=generator).tolist())
        completions = tuple(make_completion(length, generator, tool, vocabulary) for length in lengths)
        groups.append(Group(Problem(f"p{index}", ""), prompt_tokens, completions))
    return groups


RAGGED = [(7, (3, 9, 1, 5)), (1, (4,)), (12, (6, 2)), (3, (8, 8, 8))]


def naive_logits(model: nn.Module, groups: Sequence[Group]) -> list[Tensor]:
    """The oracle: each completion alone in a plain row, the model's own logits at the positions that score it."""
    found = []
    for group in groups:
        for completion in group.completions:
            row = torch.tensor([group.prompt_tokens + completion.tokens])
            found.append(model(input_ids=row, use_cache=False).logits[0, len(group.prompt_tokens) - 1 : -1].float())
    return found


def naive_logprobs(model: nn.Module, groups: Sequence[Group], temperature: float = 1.0) -> list[Tensor]:
    return [torch.log_softmax(logits / temperature, dim=-1) for logits in naive_logits(model, groups)]


def naive_logp(model: nn.Module, groups: Sequence[Group], temperature: float = 1.0) -> Tensor:
    """`[N]`: log-probabilities of all completion tokens, group-major."""
    completions = [completion for group in groups for completion in group.completions]
    rows = zip(naive_logprobs(model, groups, temperature), completions, strict=True)
    return torch.cat([row.gather(-1, torch.tensor(c.tokens)[:, None]).squeeze(-1) for row, c in rows])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative in norm, each parameter against the larger of its own norm and a thousandth of the whole gradient's."""
    assert found.keys() == expected.keys()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        scale = torch.maximum(gradient.norm(), 1e-3 * whole)
        assert (found[name] - gradient).norm() <= tolerance * scale, name
