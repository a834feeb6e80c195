"""The shapes of models that people train, cut to a few layers, with random weights and prompts of ragged lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from keel.base.types import Group, Problem, Reward
from keel.config import load_config
from keel.envs import Task
from keel.models.load import Loaded, load_model
from keel.run.build import build_run
from keel.trainer.state import TrainingRun

# Name: type, hidden size, MLP's, heads, KV heads, head size, vocabulary, tied embeddings.
SHAPES = {
    "SmolLM2-135M": ("llama", 576, 1536, 9, 3, 64, 49152, True),
    "SmolLM2-360M": ("llama", 960, 2560, 15, 5, 64, 49152, True),
    "SmolLM2-1.7B": ("llama", 2048, 8192, 32, 32, 64, 49152, True),
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 12, 2, 128, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 16, 2, 128, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 4, 128, 152064, False),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 32, 8, 128, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 32, 8, 128, 151936, False),
    "Llama-3.2-1B": ("llama", 2048, 8192, 32, 8, 64, 128256, True),
    "Llama-3.2-3B": ("llama", 3072, 8192, 24, 8, 128, 128256, True),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 8, 128, 128256, False),
    "Mistral-7B": ("mistral", 4096, 14336, 32, 8, 128, 32768, False),
    "Gemma-2B": ("gemma", 2048, 16384, 8, 1, 256, 256000, True),
    "tiny": ("llama", 64, 96, 4, 2, 16, 128, True),
}
_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WORDS = [f"w{number}" for number in range(100)]


def config_of(name: str, layers: int) -> Any:
    kind, *sizes, tied = SHAPES[name]
    extra: dict[str, Any] = {"tie_word_embeddings": tied, "max_position_embeddings": 8192, "num_hidden_layers": layers}
    if kind == "mistral":
        extra["sliding_window"] = None
    if name.startswith("Llama-3"):
        factor = 8.0 if name == "Llama-3.1-8B" else 32.0
        extra["rope_parameters"] = {**_LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **dict(zip(_NAMES, sizes, strict=True)), **extra, **tokens)


def model_of(config: Any, dtype: torch.dtype, device: str, seed: int = 0) -> nn.Module:
    """Random weights; norms and biases, which a fresh model has all alike, differ too."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@dataclass(frozen=True)
class Ragged(Task):
    """Prompts of 20 to 300 random words; every second completion is right."""

    name: str = "ragged"
    lengths: tuple[int, int] = (20, 300)

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        rng = random.Random(f"{seed}/{step}")
        return [
            Problem(f"{seed}/{step}/{i}", " ".join(rng.choices(WORDS, k=rng.randint(*self.lengths))))
            for i in range(count)
        ]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self.sample(count, seed=seed, step=-1)

    def gold(self, problem: Problem) -> str:
        return "w1"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(len(turns[-1]) % 2), {}, parsed=True)


@dataclass
class Setting:
    """A run, and the models that it is compared with: they have the weights that its policy began with."""

    run: TrainingRun
    notes: tuple[str, ...]
    twin: Callable[[], nn.Module]

    def exact(self, *, adapters: bool = False) -> nn.Module:
        """Transformers' model in fp32."""
        return self._with(adapters, self.twin().float())

    def plain(self, *, adapters: bool = False) -> nn.Module:
        """Transformers' model in the run's dtype."""
        return self._with(adapters, self.twin())

    def _with(self, adapters: bool, model: nn.Module) -> nn.Module:
        return adapted(model, self.run) if adapters else model


LORA = {"r": 8, "alpha": 16, "targets": "all-linear"}


def build(
    name: str,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 4,
    lora: bool = False,
    trained: bool = False,
    checkpointing: bool = False,
    estimator: str = "k3",
    seed: int = 0,
) -> Setting:
    """A run as `keel train` builds it; `trained` adapters are not zero."""
    config = config_of(name, layers)
    spelled = str(dtype).removeprefix("torch.")
    model = {"name": "tiny", "device": device, "dtype": spelled, "gradient_checkpointing": checkpointing}
    options = load_config(
        {
            "run": {"seed": seed},
            "model": model | ({"lora": LORA} if lora else {}),
            "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 96},
            "kl": {"beta": 0.01, "estimator": estimator},
            "task": {"name": "arithmetic"},
            "optim": {"microbatch_tokens": 2048, "learning_rate": 1e-3},
        }
    )
    loaded = load_model(
        options.model, seed=seed, loader=lambda *_, **__: Loaded(model_of(config, dtype, device, seed), tokenizer())
    )
    if trained:
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for parameter_name, parameter in loaded.model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.02)
    built = build_run(options, loaded, task=Ragged())
    return Setting(built.run, built.notes, lambda: model_of(config, dtype, device, seed))


def adapted(model: nn.Module, run: TrainingRun) -> nn.Module:
    """The model under a copy of the run's adapters, in its own dtype."""
    from keel.models.lora import add_lora

    other = add_lora(model, run.policy.lora, seed=0)
    theirs = dict(run.policy.model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.data = theirs[name].detach().to(next(model.parameters()).dtype).clone()
    return other.eval()


def own_logp(model: nn.Module, groups: Sequence[Group]) -> Tensor:
    """Log-probabilities of all completion tokens by plain forwards, a row each; differentiable."""
    parts = []
    for group in groups:
        for completion in group.completions:
            row = torch.tensor([group.prompt_tokens + completion.tokens], device=next(model.parameters()).device)
            first = len(group.prompt_tokens)
            logits = model(input_ids=row, use_cache=False).logits[0, first - 1 : -1].float()
            parts.append(torch.log_softmax(logits, -1).gather(-1, row[0, first:, None]).squeeze(-1))
    return torch.cat(parts)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
