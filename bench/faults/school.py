"""Small models that have been to school: they answer, end their answers, and are right about half the time.

Each is a folder that `save_pretrained` wrote, taught once and kept in the cache, so that every process loads it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional

import keel
from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.envs import Task
from keel.models.tiny import tiny_tokenizer
from keel.rollout.render import Renderer
from keel.run.build import build_named_task, build_renderer

CACHE = Path(os.environ.get("KEEL_BENCH_CACHE", Path(tempfile.gettempdir()) / f"keel-bench-doctor-{os.getuid()}"))
WRONG = 0.4  # share of the answers that are taught wrong, so that groups differ in reward
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
WORLDS = ("signs", "words", "tagged", "file", "chat", "tools")
STEPS = {"words": 300, "tagged": 300, "tools": 900}  # fewer, and nearly all calls are about other numbers than asked
SKILLS = {"max": "larger", "min": "smaller"}


def version_of(file: str) -> str:
    """Part of the keys of what a module of this package writes: another source or Keel may write otherwise."""
    return f"{keel.__version__} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


VERSION = version_of(__file__)


@dataclass(frozen=True)
class School:
    """What a model is and what it was taught; equal schools give equal weights."""

    world: str = "signs"
    skill: str = "max"
    architecture: str = "llama"
    width: int = 32
    layers: int = 2
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.world}-{self.architecture}-{digest(VERSION, asdict(self))}"


def digest(*parts: Any) -> str:
    """A short name for anything that JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """A file or folder of the cache, written under another name first: several processes may write it at once."""
    target = CACHE / name
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=CACHE)) / name
        draft.parent.mkdir(exist_ok=True)
        write(draft)
        try:
            draft.rename(target)
        except OSError:  # another process was quicker with a folder
            if not target.exists():
                raise
        shutil.rmtree(draft.parent)
    return target


# ------------------------------------------------------------------------ what is asked


def larger(pair: str) -> str:
    """Larger of two."""
    return str(max(map(int, pair.split())))


def smaller(pair: str) -> str:
    """Smaller of two."""
    return str(min(map(int, pair.split())))


def nearness(problem: Problem, text: str) -> Reward:
    """1 for the answer, up to a half for a number near it, 0 for what is no number."""
    answer = text.strip().removeprefix("<answer>").removesuffix("</answer>").strip()
    if not (answer.isascii() and answer.isdigit()):
        return Reward(0.0, parsed=False)
    return Reward(1.0 if answer == problem.answer else 0.5 * max(0.0, 1 - abs(int(answer) - int(problem.answer)) / 9))


def rows(school: School) -> list[dict[str, Any]]:
    """The problems of a world that reads a file, as its rows."""
    choose = max if school.skill == "max" else min
    questions = [(a, b) for a in range(10) for b in range(10)]
    Random(0).shuffle(questions)
    texts = [(f"{school.skill} {a} {b}=", str(choose(a, b))) for a, b in questions]
    if school.world == "file":
        return [{"question": text, "answer": answer} for text, answer in texts]
    return [{"question": [{"role": "user", "content": text}], "answer": answer} for text, answer in texts]


def rows_file(content: Sequence[dict[str, Any]]) -> str:
    """These rows as a JSONL file of the cache."""
    text = "".join(json.dumps(row) + "\n" for row in content)
    return str(cached(f"rows-{digest(text)}.jsonl", lambda path: path.write_text(text, encoding="utf-8") and None))


def asked(school: School) -> dict[str, Any]:
    """The sections `task`, `data` and `rollout` of a configuration that asks what was taught."""
    digits = {"name": "arithmetic", "skill": school.skill, "low": 0, "high": 9}
    if school.world == "tools":
        tools = {"name": "tools", "task": digits, "tools": [f"faults.school:{SKILLS[school.skill]}"], "format": "tags"}
        return {
            "task": tools,
            "data": {"chat_template": "none"},
            "rollout": {"max_turns": 3, "max_turn_length": 32, "max_completion_length": 80},
        }
    if school.world in ("file", "chat"):
        data = {"path": rows_file(rows(school))}
        return {"task": {"name": "dataset"}, "data": data, "rollout": {"max_completion_length": 6}}
    if school.world == "signs":
        return {"task": digits, "data": {}, "rollout": {"max_completion_length": 6}}
    words = {**digits, "style": "words", "format": "answer_tag" if school.world == "tagged" else "plain"}
    data = {"system_prompt": "Be brief."} if school.world == "words" else {}
    return {"task": words, "data": data, "rollout": {"max_completion_length": 24}}


# ------------------------------------------------------------------------ how it is taught


def schooled(school: School) -> Path:
    """The folder of the model, taught if it is not in the cache."""

    def write(folder: Path) -> None:
        model, tokenizer = teach(school)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached(school.key, write)


def fresh(school: School) -> tuple[Any, Any]:
    """The model with random weights, and a tokenizer of one token a character."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        school.architecture,
        vocab_size=len(tokenizer),
        hidden_size=school.width,
        intermediate_size=2 * school.width,
        num_hidden_layers=school.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=school.width // 4,
        max_position_embeddings=512,
        tie_word_embeddings=school.architecture != "mistral",
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(school.seed)
        return AutoModelForCausalLM.from_config(config), tokenizer


def teach(school: School, batch: int = 16) -> tuple[Any, Any]:
    """Supervised on right answers, then on answers of which `WRONG` are wrong: the model learns to answer so."""
    model, tokenizer = fresh(school)
    config = load_config({"model": {"device": "cpu"}, **asked(school)})
    task, renderer = build_named_task(config.task, config), build_renderer(config, tokenizer)
    steps = STEPS.get(school.world, 450)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / steps))
    random, memory = Random(school.seed), dict[str, tuple[list[int], list[bool]]]()
    model.train()
    for step in range(steps):
        lines = []
        for problem in task.sample(batch, seed=101, step=step):
            noisy = step > 0.7 * steps and random.random() < WRONG
            answer = str(random.randrange(10)) if noisy else str(problem.answer)
            told = f"{problem.key}={answer}"
            memory[told] = memory.get(told) or lesson(school, task, renderer, problem, answer)
            lines.append(memory[told])
        width = max(len(tokens) for tokens, _ in lines)
        tokens = torch.full((batch, width), tokenizer.pad_token_id)
        labels = torch.full((batch, width), -100)
        for row, (line, spoken) in enumerate(lines):
            tokens[row, : len(line)] = torch.tensor(line)
            labels[row, : len(line)] = torch.where(torch.tensor(spoken), torch.tensor(line), -100)
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return model.eval(), tokenizer


def lesson(
    school: School, task: Task, renderer: Renderer, problem: Problem, answer: str
) -> tuple[list[int], list[bool]]:
    """The tokens of an episode that ends in this answer, and which of them are the model's."""
    end = renderer.tokenizer.eos_token_id
    tokens = list(renderer.prompt(problem))
    spoken = [False] * len(tokens)

    def say(text: str) -> None:
        turn = [*renderer.tokenizer.encode(text, add_special_tokens=False), end]
        tokens.extend(turn)
        spoken.extend([True] * len(turn))

    if school.world == "tools":
        tag, pair = SKILLS[school.skill], " ".join(problem.key.partition(":")[2].split(","))
        call = f"<{tag}> {pair} </{tag}>"
        say(call)
        reply = asyncio.run(task.start(problem).step(call))
        told = renderer.reply(problem, reply, end)
        tokens.extend(told)
        spoken.extend([False] * len(told))
    say(task.gold(replace(problem, answer=answer)))
    return tokens, spoken
