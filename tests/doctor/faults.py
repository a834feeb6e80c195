"""Faults of models, scorers, engines, tasks and rewards, each through a public extension point of the configuration."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from doctor.schooled import TASK, fresh_model, nearness, schooled_model, taught
from keel.base.types import Completion, Problem, Reward
from keel.envs import Episode, Task, TaskWrapper
from keel.envs.registry import build_task
from keel.models.scorer import ScoreRows
from keel.models.tiny import tiny_tokenizer
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

# Scorers


def scored(model: nn.Module, rows: ScoreRows, temperature: float, **inputs: Any) -> Tensor:
    """A correct scorer, unless `inputs` override the model's inputs."""
    kwargs = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids, **inputs}
    logits = model(input_ids=rows.tokens, **kwargs).logits[:, :-1].float() / temperature
    picked = logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None]).squeeze(-1)
    return rows.completion(picked)


def right(model, rows, *, temperature):
    return scored(model, rows, temperature)


def _on_row(rows: ScoreRows, values: Tensor) -> Tensor:
    """`[B, T]` values of the completions, placed into full rows `[B, L]`."""
    line = torch.zeros_like(rows.tokens)
    for row, (start, marks) in enumerate(zip(rows.prompt_lengths.tolist(), values.long(), strict=True)):
        width = min(len(marks), line.shape[1] - start)
        line[row, start : start + width] = marks[:width]
    return line


def loss_mask_as_attention(model, rows, *, temperature):
    return scored(model, rows, temperature, attention_mask=_on_row(rows, rows.action_mask))


def _left(rows: ScoreRows) -> tuple[Tensor, Tensor, list[int]]:
    """The rows with left padding: tokens, mask, and the offset of each row."""
    tokens, mask, moves = torch.zeros_like(rows.tokens), torch.zeros_like(rows.tokens), []
    for row, length in enumerate(rows.attention_mask.sum(1).tolist()):
        move = rows.tokens.shape[1] - length
        tokens[row, move:], mask[row, move:] = rows.tokens[row, :length], 1
        moves.append(move)
    return tokens, mask, moves


def _scored_left(model, rows, temperature, **inputs: Any) -> Tensor:
    tokens, _, moves = _left(rows)
    logits = model(input_ids=tokens, **inputs).logits.float() / temperature
    logp = logits.log_softmax(-1)
    picked = logp[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    back = [functional.pad(line[move:], (0, move)) for line, move in zip(picked, moves, strict=True)]
    return rows.completion(torch.stack(back))


def left_padding_that_is_seen(model, rows, *, temperature):
    return _scored_left(model, rows, temperature)


def left_padding_done_right(model, rows, *, temperature):
    _, mask, _ = _left(rows)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return _scored_left(model, rows, temperature, attention_mask=mask, position_ids=positions)


def rolled(model, rows, *, temperature):
    return right(model, rows, temperature=temperature).roll(1, 0) * rows.completion_mask


def by_length(model, rows, *, temperature):
    order = rows.completion_mask.sum(-1).argsort(stable=True)
    return right(model, rows, temperature=temperature)[order] * rows.completion_mask


def shared_between_rows(model, rows, *, temperature):
    scores = right(model, rows, temperature=temperature)
    return (0.9 * scores + 0.1 * scores.mean(0)) * rows.completion_mask


def summed(model, rows, *, temperature):
    """Every token gets the log-probability of its whole sequence."""
    return scored(model, rows, temperature).sum(-1, keepdim=True).expand(rows.action_mask.shape)


def noisy(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    return logp + 0.05 * torch.randn_like(logp)


def detached(model, rows, *, temperature):
    return scored(model, rows, temperature).detach()


_REMEMBERED: dict[bytes, torch.Tensor] = {}


def remembered(model, rows, *, temperature):
    """Correct for the weights of the first call with these tokens; later calls return the cached values."""
    logp = scored(model, rows, temperature)
    key = rows.tokens.numpy().tobytes() + rows.attention_mask.numpy().tobytes()
    return logp - logp.detach() + _REMEMBERED.setdefault(key, logp.detach())


def in_bfloat16(model, rows, *, temperature):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return scored(model, rows, temperature)


def last_token_zero(model, rows, *, temperature):
    """The last token scores 0, as with a label of −100."""
    logp, places = scored(model, rows, temperature), torch.arange(rows.completion_mask.shape[1])
    return logp * (places + 1 < rows.completion_mask.sum(-1, keepdim=True))


# Models


def not_finite() -> tuple[Any, Any]:
    model, tokenizer = schooled_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    return model, tokenizer


def with_dropout() -> tuple[Any, Any]:
    """The schooled model with attention dropout in its config, which `model.dropout: true` leaves on."""
    model, tokenizer = schooled_model()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model, tokenizer


def absolute() -> tuple[Any, Any]:
    """A GPT-2 of two layers. Its positions are learned, so that wrong position ids change the scores."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny_tokenizer()
    shape = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **ends, **drops)), tokenizer


def schooled_absolute() -> tuple[Any, Any]:
    model, tokenizer = taught(120, make=absolute)
    return copy.deepcopy(model), tokenizer


def random_weights() -> tuple[Any, Any]:
    return fresh_model()


# Engines


class Wrapped(Engine):
    """The native engine with one thing changed."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model = model
        self.native = NativeEngine(model, tokenizer)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        self.native.sync(policy, version)

    def ask(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def noise(self, noise: dict[str, int]) -> dict[str, int]:
        return noise

    def change(self, request: Request, completion: Completion, sampling: SamplingParams) -> Completion:
        return completion

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        generated = self.native.generate(requests, self.ask(sampling), **self.noise(noise))
        pairs = zip(requests, generated, strict=True)
        return [self.change_group(request, group, sampling) for request, group in pairs]

    def change_group(self, request: Request, group: Sequence[Completion], sampling: SamplingParams) -> list[Completion]:
        return [self.change(request, completion, sampling) for completion in group]

    def rescored(
        self, model: nn.Module, request: Request, group: Sequence[Completion], temperature: float
    ) -> list[Completion]:
        """The group with log-probabilities of `model` from one pass. Padding on the right has no effect."""
        width = max(len(completion.tokens) for completion in group)
        padded = [(*completion.tokens, *(0,) * (width - len(completion.tokens))) for completion in group]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([(*request.tokens, *row) for row in padded])).logits
        logp = (logits[:, len(request.tokens) - 1 : -1].float() / temperature).log_softmax(-1)
        rows = logp.gather(-1, torch.tensor(padded)[..., None]).squeeze(-1).tolist()
        return [replace(c, sample_logp=tuple(row[: len(c.tokens)])) for c, row in zip(group, rows, strict=True)]


class HiddenTopK(Wrapped):
    def ask(self, sampling):
        return replace(sampling, top_k=2)


class ReportsFiltered(Wrapped):
    """Samples with top_p=0.7 and reports the filtered log-probabilities as sample_logp."""

    def ask(self, sampling):
        return replace(sampling, top_p=0.7)

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=completion.filtered_logp)


class FiltersUnsaid(Wrapped):
    """Samples with the configured filters and reports the unfiltered log-probabilities as filtered_logp."""

    def change(self, request, completion, sampling):
        return replace(completion, filtered_logp=completion.sample_logp)


class OnlyAfterFilters(Wrapped):
    logp_after_filters = True

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=completion.filtered_logp)


class InBfloat16(Wrapped):
    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.native = NativeEngine(model, tokenizer, dtype=torch.bfloat16)


class NoLogp(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(float("nan"),) * len(completion.tokens))


class SameNoise(Wrapped):
    def noise(self, noise):
        return {"seed": 0, "attempt": 0, "step": 0}


class Copies(Wrapped):
    def generate(self, requests, sampling, **noise):
        return [[group[0]] * len(group) for group in super().generate(requests, sampling, **noise)]


class TrainsTools(Wrapped):
    """Inserts tool output into the completion and marks it as sampled."""

    tool_output = " (tool: 5)"
    scored = False

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.extra = tuple(tokenizer.encode(self.tool_output))

    def ask(self, sampling):
        return replace(sampling, max_completion_length=sampling.max_completion_length - len(self.extra))

    def change(self, request, completion, sampling):
        tokens = (*self.extra, *completion.tokens)
        logp = [0.0] * len(self.extra)
        if self.scored:
            written = replace(completion, tokens=self.extra)
            logp = self.rescored(self.model, request, [written], sampling.temperature)[0].sample_logp
        return replace(
            completion,
            tokens=tokens,
            action=(True,) * len(tokens),
            sample_logp=(*logp, *completion.sample_logp),
            filtered_logp=(*logp, *completion.filtered_logp),
        )

    def generate(self, requests, sampling, **noise):
        longer = [replace(request, tokens=(*request.tokens, *self.extra)) for request in requests]
        generated = self.native.generate(longer, self.ask(sampling), **noise)
        pairs = zip(requests, generated, strict=True)
        return [[self.change(request, c, sampling) for c in group] for request, group in pairs]


# Tasks and rewards


def never_a_number(problem: Problem, text: str) -> float:
    return float("nan")


def raises(problem: Problem, text: str) -> float:
    raise ZeroDivisionError("division by zero")


def cliff(problem: Problem, text: str) -> Reward:
    """−1 for a text that is no number, 1 for the right answer, 0.2 for other numbers: a reward with a cliff."""
    fine = text.strip().isdigit()
    return Reward((1.0 if text.strip() == problem.answer else 0.2) if fine else -1.0, parsed=fine)


@dataclass(frozen=True)
class Shouted(TaskWrapper):
    """The schooled task with a character at the end of gold answers that the model never writes."""

    @property
    def inner(self) -> Task:
        return build_task(str(TASK["name"]), **{k: v for k, v in TASK.items() if k != "name"})

    def gold(self, problem: Problem) -> str:
        return f"{self.inner.gold(problem)}!"


def steep(problem: Problem, text: str) -> Reward:
    """−1 for everything but the right answer with that character."""
    return Reward(1.0 if text.strip() == f"{problem.answer}!" else -1.0, parsed=text.strip().isdigit())


def reversed_sign(problem: Problem, text: str) -> Reward:
    reward = nearness(problem, text)
    return replace(reward, total=-reward.total)


def always_the_same(problem: Problem, text: str) -> Reward:
    return Reward(0.5)


_turn = itertools.count()


def by_the_clock(problem: Problem, text: str) -> Reward:
    """A reward that changes with every call."""
    return Reward(nearness(problem, text).total + 0.1 * (next(_turn) % 3))


def unreadable(problem: Problem, text: str) -> Reward:
    return replace(nearness(problem, text), parsed=False)


@dataclass(frozen=True)
class Odd(Task):
    """The schooled task with one thing changed."""

    kind: str
    name: str = "odd"

    @property
    def inner(self) -> Any:
        return build_task(str(TASK["name"]), **{k: v for k, v in TASK.items() if k != "name"})

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        if self.kind == "leak":
            held_out = [replace(p, key=f"{p.key}/{step}") for p in self.inner.held_out(2)]
            problems = [*held_out, *problems[2:]]
        if self.kind == "bos":
            problems = [replace(p, prompt=f"<bos><bos>{p.prompt}") for p in problems]
        return problems

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        problems = self.inner.held_out(count, seed=seed)
        if self.kind == "format":
            problems = [replace(p, prompt=f"Question: {p.prompt}") for p in problems]
        if self.kind == "bos":
            problems = [replace(p, prompt=f"<bos><bos>{p.prompt}") for p in problems]
        return problems

    def gold(self, problem: Problem) -> str:
        return self.inner.gold(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return nearness(problem, turns[-1])


def leaking() -> Odd:
    return Odd("leak")


def another_format() -> Odd:
    return Odd("format")


def doubled_bos() -> Odd:
    return Odd("bos")


@dataclass(frozen=True)
class Talking(Odd):
    """Asks the same question again after the first turn."""

    def start(self, problem: Problem) -> Episode:
        return Asking(problem)


class Asking(Episode):
    def __init__(self, problem: Problem) -> None:
        self.problem, self.turns = problem, list[str]()

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        return str(self.problem.prompt) if len(self.turns) < 2 else None

    def reward(self) -> Reward:
        return nearness(self.problem, self.turns[-1])


def talking() -> Talking:
    return Talking("talk", "talking")
