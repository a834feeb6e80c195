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
    """The right pass, but for what `inputs` say otherwise."""
    kwargs = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids, **inputs}
    logits = model(input_ids=rows.tokens, **kwargs).logits[:, :-1].float() / temperature
    picked = logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None]).squeeze(-1)
    return rows.completion(picked)


def right(model, rows, *, temperature):
    return scored(model, rows, temperature)


def _on_row(rows: ScoreRows, values: Tensor) -> Tensor:
    """`[B, T]` marks of the completion, written into rows `[B, L]`."""
    line = torch.zeros_like(rows.tokens)
    for row, (start, marks) in enumerate(zip(rows.prompt_lengths.tolist(), values.long(), strict=True)):
        width = min(len(marks), line.shape[1] - start)
        line[row, start : start + width] = marks[:width]
    return line


def temperature_with_a_gradient_only(model, rows, *, temperature):
    return scored(model, rows, temperature if torch.is_grad_enabled() else 1.0)


def doubled_without_a_gradient(model, rows, *, temperature):
    return scored(model, rows, temperature) * (1.0 if torch.is_grad_enabled() else 2.0)


def one_place_late_without_a_gradient(model, rows, *, temperature):
    return (right if torch.is_grad_enabled() else one_place_late)(model, rows, temperature=temperature)


def loss_mask_as_attention(model, rows, *, temperature):
    return scored(model, rows, temperature, attention_mask=_on_row(rows, rows.action_mask))


def half_of_the_prompt_hidden(model, rows, *, temperature):
    mask = rows.attention_mask.clone()
    mask[:, :3] = 0
    return scored(model, rows, temperature, attention_mask=mask)


def tools_hidden(model, rows, *, temperature):
    hidden = _on_row(rows, rows.completion_mask & ~rows.action_mask)
    return scored(model, rows, temperature, attention_mask=rows.attention_mask * (1 - hidden))


def _left(rows: ScoreRows) -> tuple[Tensor, Tensor, list[int]]:
    """The same rows padded on the left: tokens, mask, how far each row was moved."""
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


def left_padding_with_wrong_positions(model, rows, *, temperature):
    _, mask, _ = _left(rows)
    positions = torch.arange(rows.tokens.shape[1]).expand_as(rows.tokens)
    return _scored_left(model, rows, temperature, attention_mask=mask, position_ids=positions)


def left_padding_that_is_seen(model, rows, *, temperature):
    return _scored_left(model, rows, temperature)


def left_padding_done_right(model, rows, *, temperature):
    _, mask, _ = _left(rows)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return _scored_left(model, rows, temperature, attention_mask=mask, position_ids=positions)


def positions_from_one(model, rows, *, temperature):
    return scored(model, rows, temperature, position_ids=rows.position_ids + 1)


def all_at_position_zero(model, rows, *, temperature):
    return scored(model, rows, temperature, position_ids=torch.zeros_like(rows.position_ids))


def rolled(model, rows, *, temperature):
    return right(model, rows, temperature=temperature).roll(1, 0) * rows.completion_mask


def by_length(model, rows, *, temperature):
    order = rows.completion_mask.sum(-1).argsort(stable=True)
    return right(model, rows, temperature=temperature)[order] * rows.completion_mask


def shared_between_rows(model, rows, *, temperature):
    scores = right(model, rows, temperature=temperature)
    return (0.9 * scores + 0.1 * scores.mean(0)) * rows.completion_mask


def one_place_late(model, rows, *, temperature):
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask).logits[:, 1:].float() / temperature
    return rows.completion(logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))


def one_place_early(model, rows, *, temperature):
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask).logits.float() / temperature
    early = logits.log_softmax(-1).roll(1, 1)[:, :-1]
    return rows.completion(early.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))


def without_temperature(model, rows, *, temperature):
    return scored(model, rows, 1.0)


def divided_by_length(model, rows, *, temperature):
    return scored(model, rows, temperature) / 3.0


def summed(model, rows, *, temperature):
    """Every token gets the log-probability of its whole sequence."""
    return scored(model, rows, temperature).sum(-1, keepdim=True).expand(rows.action_mask.shape)


def noisy(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    return logp + 0.05 * torch.randn_like(logp)


def detached(model, rows, *, temperature):
    return scored(model, rows, temperature).detach()


def half_detached(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    return logp.detach() + 0.5 * (logp - logp.detach())


def every_other_row_detached(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    kept = (torch.arange(len(logp)) % 2 == 0)[:, None]
    return torch.where(kept, logp, logp.detach())


def likely_tokens_detached(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    return torch.where(logp.exp() > 0.7, logp.detach(), logp)


_REMEMBERED: dict[bytes, torch.Tensor] = {}


def remembered(model, rows, *, temperature):
    """Right values and gradients of the first weights that tokens were met with."""
    logp = scored(model, rows, temperature)
    key = rows.tokens.numpy().tobytes() + rows.attention_mask.numpy().tobytes()
    return logp - logp.detach() + _REMEMBERED.setdefault(key, logp.detach())


def slightly_lower(model, rows, *, temperature):
    """Off by less than 16 bits may round by, whatever the precision."""
    return scored(model, rows, temperature) - 0.04 * rows.completion_mask


def in_training_mode(model, rows, *, temperature):
    """Dropout where the policy is scored, none where the reference is, as two modes of one model have it."""
    mode = model.training
    model.train(torch.is_grad_enabled() or mode)
    try:
        return scored(model, rows, temperature)
    finally:
        model.train(mode)


def in_bfloat16(model, rows, *, temperature):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return scored(model, rows, temperature)


def last_token_zero(model, rows, *, temperature):
    """As a label of −100 at the end has it."""
    logp, places = scored(model, rows, temperature), torch.arange(rows.completion_mask.shape[1])
    return logp * (places + 1 < rows.completion_mask.sum(-1, keepdim=True))


def softmax_in_bfloat16(model, rows, *, temperature):
    """Probabilities and their logarithms keep eight bits: small changes of the prompt are lost."""
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask, position_ids=rows.position_ids).logits
    logp = (logits[:, :-1] / temperature).to(torch.bfloat16).log_softmax(-1)
    return rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1).float())


# Models


class Leaky(nn.Module):
    """A layer whose dropout asks nobody whether the model is in training mode."""

    def __init__(self, inner: nn.Module, only_training: bool) -> None:
        super().__init__()
        self.inner, self.only_training = inner, only_training

    def forward(self, *args: Any, **options: Any) -> Any:
        out = self.inner(*args, **options)
        return functional.dropout(out, 0.1, training=self.training or not self.only_training)


def always_dropping() -> tuple[Any, Any]:
    model, tokenizer = schooled_model()
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp, only_training=False)
    return model, tokenizer


def reversing() -> tuple[Any, Any]:
    """A layer whose gradients are reversed on their way."""
    model, tokenizer = schooled_model()
    for parameter in model.model.layers[0].parameters():
        parameter.register_hook(torch.neg)
    return model, tokenizer


def dropping_in_training() -> tuple[Any, Any]:
    """Sound as long as nobody puts it into training mode."""
    model, tokenizer = schooled_model()
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp, only_training=True)
    return model.eval(), tokenizer


def not_finite() -> tuple[Any, Any]:
    model, tokenizer = schooled_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    return model, tokenizer


class Stubborn(nn.Module):
    """A layer that stays in training mode whatever it is told, and drops there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.share = inner, torch.tensor(0.1)

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(True)

    def forward(self, *args: Any, **options: Any) -> Any:
        return functional.dropout(self.inner(*args, **options), float(self.share), training=self.training)


def stubbornly_dropping() -> tuple[Any, Any]:
    model, tokenizer = schooled_model()
    model.model.layers[1].mlp = Stubborn(model.model.layers[1].mlp)
    return model, tokenizer


def with_dropout() -> tuple[Any, Any]:
    """The schooled model with attention dropout in its config, which `model.dropout: true` leaves on."""
    model, tokenizer = schooled_model()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model, tokenizer


def absolute() -> tuple[Any, Any]:
    """A GPT-2 of two layers: positions are learned, so that a wrong one shows."""
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
        """The group with a model's log-probabilities, in one pass: no token moves those before it."""
        width = max(len(completion.tokens) for completion in group)
        padded = [(*completion.tokens, *(0,) * (width - len(completion.tokens))) for completion in group]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([(*request.tokens, *row) for row in padded])).logits
        logp = (logits[:, len(request.tokens) - 1 : -1].float() / temperature).log_softmax(-1)
        rows = logp.gather(-1, torch.tensor(padded)[..., None]).squeeze(-1).tolist()
        return [replace(c, sample_logp=tuple(row[: len(c.tokens)])) for c, row in zip(group, rows, strict=True)]


class TemperatureNotApplied(Wrapped):
    def change_group(self, request, group, sampling):
        return self.rescored(self.model, request, group, 1.0)


class HiddenTopP(Wrapped):
    def ask(self, sampling):
        return replace(sampling, top_p=0.7)


class HiddenTopK(Wrapped):
    def ask(self, sampling):
        return replace(sampling, top_k=2)


class ReportsFiltered(Wrapped):
    """Samples with a nucleus of its own and reports the log-probabilities after it."""

    def ask(self, sampling):
        return replace(sampling, top_p=0.7)

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=completion.filtered_logp)


class FiltersUnsaid(Wrapped):
    """Samples with the configured filters and passes the log-probabilities before them off as those after them."""

    def change(self, request, completion, sampling):
        return replace(completion, filtered_logp=completion.sample_logp)


class OnlyAfterFilters(Wrapped):
    logp_after_filters = True

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=completion.filtered_logp)


class AnotherTemperature(Wrapped):
    """Samples hotter than it is told and reports what it was told."""

    def ask(self, sampling):
        return replace(sampling, temperature=1.6)

    def change_group(self, request, group, sampling):
        return self.rescored(self.model, request, group, sampling.temperature)


class NeverSynced(Wrapped):
    """Keeps the weights it was built with."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(copy.deepcopy(model), tokenizer)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        pass


class NeverLoaded(NeverSynced):
    """Keeps weights that were drawn at random, as dummy ones of a server are."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))


class SyncedOnce(NeverSynced):
    done = False

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        if not self.done:
            self.native.model.load_state_dict(policy.state_dict())
            self.done = True


class HalfSynced(NeverSynced):
    """Brings half of the tensors up to date."""

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        state = policy.state_dict()
        for name, tensor in itertools.islice(self.native.model.state_dict().items(), 0, None, 2):
            tensor.copy_(state[name])


class StaleButReportsFresh(NeverSynced):
    """Draws with the old weights and reports the log-probabilities of the new ones."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.live = model

    def change_group(self, request, group, sampling):
        return self.rescored(self.live, request, group, sampling.temperature)


class InBfloat16(Wrapped):
    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.native = NativeEngine(model, tokenizer, dtype=torch.bfloat16)


class ShiftedLogp(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(*completion.sample_logp[1:], 0.0))


class BaseTwo(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=tuple(x / 0.6931471805599453 for x in completion.sample_logp))


class Rounded(Wrapped):
    def change(self, request, completion, sampling):
        sample_logp, filtered_logp = (
            tuple(map(float, map(round, x))) for x in (completion.sample_logp, completion.filtered_logp)
        )
        return replace(completion, sample_logp=sample_logp, filtered_logp=filtered_logp)


class ConstantAdded(Wrapped):
    """As where a normaliser is forgotten: as far from the new weights as noise takes the old ones."""

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=tuple(x - 5.0 for x in completion.sample_logp))


class HiddenMinP(Wrapped):
    def ask(self, sampling):
        return replace(sampling, min_p=0.3)


class NoLogp(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(float("nan"),) * len(completion.tokens))


class ZeroLogp(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(0.0,) * len(completion.tokens))


class FirstLogpZero(Wrapped):
    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(0.0, *completion.sample_logp[1:]))


class SameNoise(Wrapped):
    def noise(self, noise):
        return {"seed": 0, "attempt": 0, "step": 0}


class Remembers(Wrapped):
    """Gives back what it wrote after the same prompt before."""

    def generate(self, requests, sampling, **noise):
        answers = vars(self).setdefault("answers", {})
        groups = super().generate(requests, sampling, **noise)
        return [
            answers.setdefault((r.tokens, len(group), r.limit(sampling)), group)
            for r, group in zip(requests, groups, strict=True)
        ]


class Copies(Wrapped):
    def generate(self, requests, sampling, **noise):
        return [[group[0]] * len(group) for group in super().generate(requests, sampling, **noise)]


class NoTwoAlike(Wrapped):
    """Draws three times as many and keeps the first ones that differ."""

    def generate(self, requests, sampling, **noise):
        more = replace(sampling, num_generations=3 * sampling.num_generations)
        return [
            ([*{c.tokens: c for c in reversed(group)}.values()][::-1] + list(group))[: sampling.num_generations]
            for group in super().generate(requests, more, **noise)
        ]


class TrainsTools(Wrapped):
    """Writes a tool's answer into the completion and marks it as sampled."""

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


class TrainsScoredTools(TrainsTools):
    scored = True


# Tasks and rewards


def never_a_number(problem: Problem, text: str) -> float:
    return float("nan")


def raises(problem: Problem, text: str) -> float:
    raise ZeroDivisionError("division by zero")


def cliff(problem: Problem, text: str) -> Reward:
    """−1 for what is no answer, 1 for the right one: the reward of the explosion."""
    fine = text.strip().isdigit()
    return Reward((1.0 if text.strip() == problem.answer else 0.2) if fine else -1.0, parsed=fine)


@dataclass(frozen=True)
class Shouted(TaskWrapper):
    """The schooled task, whose gold answers end with a sign that the model never writes."""

    @property
    def inner(self) -> Task:
        return build_task(str(TASK["name"]), **{k: v for k, v in TASK.items() if k != "name"})

    def gold(self, problem: Problem) -> str:
        return f"{self.inner.gold(problem)}!"


def steep(problem: Problem, text: str) -> Reward:
    """−1 for everything but the right answer with its sign."""
    return Reward(1.0 if text.strip() == f"{problem.answer}!" else -1.0, parsed=text.strip().isdigit())


def reversed_sign(problem: Problem, text: str) -> Reward:
    reward = nearness(problem, text)
    return replace(reward, total=-reward.total)


def always_the_same(problem: Problem, text: str) -> Reward:
    return Reward(0.5)


def hardly_any(problem: Problem, text: str) -> Reward:
    return replace(nearness(problem, text), total=1e-3 * nearness(problem, text).total)


_turn = itertools.count()


def by_the_clock(problem: Problem, text: str) -> Reward:
    """Another reward at every call."""
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
