"""The same environment, row and turns in TRL's GRPOTrainer and in Keel: tokens, masks, calls and rewards are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from envs import trl_environments as envs
from keel.envs.registry import build_task
from keel.envs.tool_calls import write_call
from keel.rollout.render import Renderer
from keel.trainer.sft import episode_example

pytestmark = pytest.mark.peers
HERE = envs.__name__


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with the control tokens and the template of Qwen2.5."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({byte: number for number, byte in enumerate(bytes_)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **control)
    made.chat_template = qwen2_5_chat_template
    return made


def in_trl(
    out: Path, row: dict[str, Any], turns: Sequence[str], factory: Any, reward: Callable[..., Any] | None
) -> tuple[list[int], list[int], list[bool], float, Any]:
    """Prompt, completion, which of its tokens are trained, reward and environment of an episode with these turns."""
    tokens = tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )
    options = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 2000, "max_steps": 1}
    quiet = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out), **options, **quiet),
        train_dataset=Dataset.from_list([row] * 2),
        processing_class=tokens,
        environment_factory=factory,
    )
    said, rewards = iter(turns), list[torch.Tensor]()

    def sampled(prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        turn = tokens(f"{next(said)}<|im_end|>")["input_ids"]
        return [turn for _ in prompt_ids], None

    calculate = trainer._calculate_rewards

    def calculated(*arguments: Any, **named: Any) -> torch.Tensor:
        rewards.append(calculate(*arguments, **named))
        return rewards[-1]

    trainer._generate_single_turn, trainer._calculate_rewards = sampled, calculated
    batch = trainer._generate_and_score_completions([dict(row) for _ in range(2)])
    prompt = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()].tolist()
    kept = batch["completion_mask"][0].bool()
    trained = batch["tool_mask"][0][kept].bool().tolist()
    total = rewards[0][0].nansum().item()
    return prompt, batch["completion_ids"][0][kept].tolist(), trained, total, trainer.environments[0]


def call(name: str, **arguments: Any) -> str:
    return write_call(name, arguments, "json", [])


CASES: dict[str, tuple[str, dict[str, Any], list[str], str | None]] = {
    "calls": ("Digits", {"digit": 4}, [call("guess", digit=7), f"I say {call('guess', digit=4)}", "found"], None),
    "two calls": ("Digits", {"digit": 4}, [f"{call('guess', digit=7)}\n{call('guess', digit=5)}", "?"], None),
    "no call": ("Digits", {"digit": 4}, ["four"], None),
    "coroutines": ("MIXED", {"environment": "coins"}, [call("toss"), call("toss"), "two"], None),
    "the other": ("MIXED", {"environment": "digits", "digit": 1}, [call("guess", digit=1), "one"], None),
    "a reward function": ("Unpaid", {"word": "a"}, [call("say", word="a"), call("say", word="a"), "x"], "both"),
    "both rewards": ("Digits", {"digit": 4}, [call("guess", digit=4), "x"], "length"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_an_episode_is_the_same_in_trl(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    factory, columns, turns, reward = CASES[case]
    row = {"prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}], **columns}
    judge = None if reward is None else getattr(envs, reward)
    prompt, completion, trained, total, env = in_trl(tmp_path, row, turns, getattr(envs, factory), judge)

    file = tmp_path / "rows.jsonl"
    other = {**row, "prompt": [{"role": "user", "content": "Another."}]}
    file.write_text("".join(json.dumps(record) + "\n" for record in (row, other)))
    rows = {"name": "dataset", "held_out": 1, "data": {"path": str(file), "columns": {"answer": None}}}
    task = build_task(f"trl:{HERE}:{factory}", task=rows, **({} if reward is None else {"reward": f"{HERE}:{reward}"}))
    said = iter(turns)
    task = replace(task, player=lambda env, observation: next(said))
    both = [*task.sample(1, seed=0, step=0), *task.held_out(1)]
    (problem,) = (problem for problem in both if problem.info["asked"] == row["prompt"])
    renderer = Renderer(tokenizer())
    assert list(renderer.prompt(problem)) == prompt
    (ours,) = episode_example(task, problem, prompt, renderer.tokenizer, renderer.reply).completions
    assert list(ours.tokens) == completion
    assert list(ours.action) == trained
    assert task.reward(problem, turns).total == total
    assert total or case in ("no call", "two calls")
    assert type(env).__name__ == {"MIXED": "Coins" if case == "coroutines" else "Digits"}.get(factory, factory)
