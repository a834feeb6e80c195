"""Supervised fine-tuning (SFT): the warm start of a run, and `keel sft`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from keel.base.errors import KeelError
from keel.base.files import json_lines
from keel.base.metrics import Metrics, Sum, merge, values
from keel.base.types import Completion, Group, Problem
from keel.base.world import SINGLE_PROCESS, World
from keel.envs import Task
from keel.envs.base import play_turns
from keel.envs.problems import seeded_rng
from keel.kl import masked_mean
from keel.models.fused_linear import cast_weights_once
from keel.models.head import body_of
from keel.models.options import LoadedModel
from keel.models.pack import microbatches, pack
from keel.models.prefix_attention import uses_flash
from keel.models.scorer import score_tokens
from keel.models.sharding import call_with_full_weights, is_sharded
from keel.models.tokenizer import ControlTokens, control_token_refused
from keel.trainer.memory import Remedy, max_pass_tokens, memory_guard, smaller_passes, smaller_weights
from keel.trainer.optim import Optimizer, build_schedule, resolve_amp_dtype
from keel.trainer.options import OptimOptions, WarmstartOptions

Encode = Callable[[Problem], tuple[int, ...]]
Reply = Callable[[Problem, Any, int | None], tuple[int, ...]]  # the tokens between two turns
Examples = Callable[[int], list[Group]]  # from a step to its batch; an example is a group of one completion
Report = Callable[[int, Mapping[str, float]], None]

WARMSTART_SEED_OFFSET = 7_919_000_003  # the warm start must draw other problems than training
MAX_CONSECUTIVE_SKIPS = 500  # consecutive problems without a demonstration before an error


@dataclass
class DrawCount:
    """The numbers of problems that a warm start has drawn and skipped in each step."""

    steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # (drawn, skipped) of each step

    @property
    def drawn(self) -> int:
        return sum(drawn for drawn, _ in self.steps.values())

    @property
    def skipped(self) -> int:
        return sum(skipped for _, skipped in self.steps.values())

    @property
    def notes(self) -> list[str]:
        if not self.skipped:
            return []
        counts = f"{self.skipped} of {self.drawn} drawn problems"
        return [f"warm start: the task marks {counts} as unusable for SFT; other problems replace them"]


def sft(
    loaded: LoadedModel,
    examples: Examples,
    options: WarmstartOptions,
    optim: OptimOptions,
    report: Report | None = None,
    world: World = SINGLE_PROCESS,
) -> float:
    """Minimise −mean(log π(completion | prompt) + entropy_coef · H) over completion tokens; return the last loss.

    The mean is over all completion tokens of the batch, so the split into microbatches does not change the update.
    Prompts are not trained on. Only `microbatch_tokens` and `precision` of `optim` are used. Each process of `world`
    trains on its share of the batch.
    """
    schedule = build_schedule(options.optim, options.steps)
    amp_dtype = resolve_amp_dtype(optim, loaded.dtype, loaded.device)
    optimizer = Optimizer(loaded.model, options.optim, schedule, amp_dtype=amp_dtype, world=world)
    autocast, structured = partial(_autocast, loaded, amp_dtype), uses_structured_mask(loaded)
    sharded = is_sharded(loaded.model)
    fitting = None if sharded else max_pass_tokens(loaded, optimizer, autocast, shared_prefix=structured)
    if fitting is not None and fitting < optim.microbatch_tokens:
        optim = optim.model_copy(update={"microbatch_tokens": fitting})
    loss = 0.0
    for step in range(options.steps):
        groups = examples(step)
        with memory_guard(f"step {step + 1} of the SFT warm start", partial(_remedy, loaded, groups, optim)):
            line = sft_step(loaded, groups, optimizer, options, optim)
        loss = line["loss/total"]
        if report is not None:
            report(step + 1, line)
    return loss


def sft_step(
    loaded: LoadedModel,
    groups: Sequence[Group],
    optimizer: Optimizer,
    options: WarmstartOptions,
    optim: OptimOptions,
) -> dict[str, float]:
    """Make one update on one batch of examples; return its metrics."""
    _check_lengths(groups, loaded.context_length)
    tokens, amp_dtype = _trained_tokens(groups), resolve_amp_dtype(optim, loaded.dtype, loaded.device)
    shared = uses_structured_mask(loaded)
    with _autocast(loaded, amp_dtype):
        one_row = shared and uses_flash(body_of(loaded.model))
    context, longest_row = loaded.context_length, sys.maxsize if one_row else None
    info: Metrics = {"loss/total": Sum(0.0)}
    world = optimizer.world
    parts = microbatches(world.shard(groups), optim.microbatch_tokens, shared_prefix=shared, one_row=one_row)
    passes = max(world.all_gather(len(parts))) if is_sharded(loaded.model) else len(parts)
    idle = [groups[:1]] * (passes - len(parts))  # dummy batches match FSDP's collectives
    for number, part in enumerate(cast_weights_once([*parts, *idle])):
        packed = pack(part, loaded.pad_id, shared_prefix=shared, max_row_tokens=longest_row, context_length=context).to(
            loaded.device
        )
        with _autocast(loaded, amp_dtype):
            scores = call_with_full_weights(loaded.model, score_tokens, packed, entropy=options.entropy_coef > 0)
        gain = scores.logp if scores.entropy is None else scores.logp + options.entropy_coef * scores.entropy
        weight = _trained_tokens(part) / max(tokens, 1) if number < len(parts) else 0.0
        loss = -masked_mean(gain, packed.action_mask) * weight
        optimizer.backward(loss)
        info = merge(info, {"loss/total": Sum(loss.detach().double())})
    return values(optimizer.step(info))


def _autocast(loaded: LoadedModel, amp_dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if amp_dtype is None else torch.autocast(loaded.device.type, dtype=amp_dtype)


def _remedy(loaded: LoadedModel, groups: Sequence[Group], optim: OptimOptions) -> Remedy:
    lengths = [len(group.prompt_tokens) + len(c.tokens) for group in groups for c in group.completions]
    largest = min(optim.microbatch_tokens, len(lengths) * max(lengths))
    return smaller_passes(loaded, optim.microbatch_tokens, largest, max(lengths)) or smaller_weights(loaded)


def uses_structured_mask(loaded: LoadedModel) -> bool:
    """Whether to use Keel's attention mask. transformers' mask code waits for the GPU to detect padding."""
    return loaded.shared_prefix and loaded.device.type == "cuda"


def _trained_tokens(groups: Sequence[Group]) -> int:
    """The number of tokens in the loss."""
    return sum(sum(completion.action) for group in groups for completion in group.completions)


def _check_lengths(groups: Sequence[Group], context: int | None) -> None:
    """Refuse an example that is longer than the model's context."""
    for group in groups:
        prompt, length = len(group.prompt_tokens), max(len(c.tokens) for c in group.completions)
        if context is None or prompt + length <= context:
            continue
        room = context - length
        shorter = f", or cut prompts: data.max_prompt_length={room} and data.truncation=left" if room > 0 else ""
        raise KeelError(
            f"the demonstration of {group.problem.key!r} has {length} tokens, including tool replies, and its prompt "
            f"has {prompt}: together they exceed the model's context of {context}. Leave it out of the warm start's "
            f"data, shorten it, or use a model with a longer context{shorter}"
        )


_controls = lru_cache(maxsize=2)(ControlTokens)


def _turn_tokens(text: str, tokenizer: Any, key: str, allow_control_tokens: bool) -> tuple[int, ...]:
    """Encode a turn of the model and append the end-of-sequence token.

    Control tokens in the text are refused, because they would train the model to write other roles' turns. Think and
    tool-call tokens, such as `<think>`, are allowed.
    """
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not allow_control_tokens and (forged := _controls(tokenizer).forged(ids, text, by_model=True)) is not None:
        raise control_token_refused(forged, f"the demonstration of {key!r}")
    return (*ids, int(tokenizer.eos_token_id))


def make_example(
    prompt: Sequence[int], completion: str, tokenizer: Any, key: str = "", *, allow_control_tokens: bool = False
) -> Group:
    """An SFT example: prompt tokens, and the completion with the end-of-sequence token."""
    ids = _turn_tokens(completion, tokenizer, key, allow_control_tokens)
    zeros = (0.0,) * len(ids)
    learned = Completion(ids, (True,) * len(ids), zeros, zeros, completion, "eos")
    return Group(Problem(key, ""), tuple(prompt), (learned,))


def gold_examples(
    task: Task,
    encode: Encode,
    tokenizer: Any,
    *,
    batch_size: int,
    seed: int,
    reply: Reply | None = None,
    draws: DrawCount | None = None,
    allow_control_tokens: bool = False,
) -> Examples:
    """Batches of a task's training problems with their gold answers; held-out problems are excluded.

    Examples of a multi-turn task are whole episodes. The environment's replies, rendered by `reply`, are context and
    not trained on. `draws` counts the problems without a demonstration.
    """
    counted = draws or DrawCount()
    several, allowed = task.multi_turn and reply is not None, {"allow_control_tokens": allow_control_tokens}

    def example(problem: Problem) -> Group:
        if several:
            return episode_example(task, problem, encode(problem), tokenizer, reply, **allowed)
        return make_example(encode(problem), task.gold(problem), tokenizer, problem.key, **allowed)

    def batch(step: int) -> list[Group]:
        return [example(problem) for problem in _demonstrations(task, batch_size, seed, step, counted)]

    return batch


def _demonstrations(task: Task, batch_size: int, seed: int, step: int, draws: DrawCount) -> list[Problem]:
    """The step's training problems. Problems without a demonstration are replaced by new ones."""
    first = task.sample(batch_size, seed=seed + WARMSTART_SEED_OFFSET, step=step)
    further = (task.sample(batch_size, seed=seed + number * WARMSTART_SEED_OFFSET, step=step) for number in count(2))
    pool, chosen, skipped, in_a_row = chain(first, chain.from_iterable(further)), list[Problem](), 0, 0
    while len(chosen) < len(first):
        problem = next(pool)
        if task.usable_for_sft(problem):
            chosen.append(problem)
            in_a_row = 0
            continue
        skipped += 1
        in_a_row += 1
        if in_a_row == MAX_CONSECUTIVE_SKIPS:
            raise KeelError(
                f"task {task.name!r}: none of {in_a_row} problems drawn for the warm start has a usable demonstration: "
                "change its parameters (multihop: a higher top_n), or give examples with warmstart.path"
            )
    draws.steps[step] = (len(chosen) + skipped, skipped)
    return chosen


def episode_example(
    task: Task,
    problem: Problem,
    prompt: Sequence[int],
    tokenizer: Any,
    reply: Any,
    *,
    allow_control_tokens: bool = False,
) -> Group:
    """An SFT example of a gold episode: the model's turns, each with the end-of-sequence token, and the replies.

    The tokens equal those of a rollout with the same turns.
    """
    turns = task.gold_turns(problem)
    ids: list[int] = []
    action: list[bool] = []
    replies = _replies(task, problem, turns)
    for number, turn in enumerate(turns, start=1):
        turn_ids = _turn_tokens(turn, tokenizer, problem.key, allow_control_tokens)
        ids += turn_ids
        action += [True] * len(turn_ids)
        if number == len(turns):
            break
        reply_ids = reply(problem, replies[number - 1], ids[-1])
        ids += reply_ids
        action += [False] * len(reply_ids)
    zeros = (0.0,) * len(ids)
    learned = Completion(tuple(ids), tuple(action), zeros, zeros, "\n".join(turns), "eos")
    return Group(Problem(problem.key, ""), tuple(prompt), (learned,))


def _replies(task: Task, problem: Problem, turns: Sequence[str]) -> list[Any]:
    """The environment's reply to each turn except the last."""
    with play_turns(task, problem, turns[:-1]) as (_, replies):
        if None in replies:
            raise KeelError(f"task {task.name!r}: the gold episode of {problem.key!r} ends after turn {len(replies)}")
    return replies


def file_examples(
    path: str, encode: Encode, tokenizer: Any, *, batch_size: int, seed: int, allow_control_tokens: bool = False
) -> Examples:
    """Batches of a JSONL file's `prompt` (text or messages) and `completion`, reshuffled each epoch."""
    file = Path(path).expanduser()
    groups = [
        make_example(
            encode(Problem(key, record["prompt"])),
            record["completion"],
            tokenizer,
            key,
            allow_control_tokens=allow_control_tokens,
        )
        for key, record in _read_examples(file)
    ]

    def batch(step: int) -> list[Group]:
        members = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            epoch, index = divmod(position, len(groups))
            members.append(groups[_order(len(groups), seed, epoch)[index]])
        return members

    return batch


@lru_cache(maxsize=2)  # a batch may span two epochs
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    seeded_rng("sft", seed, epoch).shuffle(order)
    return tuple(order)


def _read_examples(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's location, such as `mine.jsonl:3`, and its prompt and completion."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise KeelError(f"cannot read warmstart.path={path}: {error.strerror}; give a JSONL file") from error
    count = 0
    for number, record in json_lines(lines, strict=True):
        texts = {} if isinstance(record, str) else record
        if not (isinstance(texts.get("completion"), str) and isinstance(texts.get("prompt"), str | list)):
            raise KeelError(f"{path}, line {number}: each line must be an object with a prompt and a completion text")
        count += 1
        yield f"{path.name}:{number}", texts
    if not count:
        raise KeelError(f"{path} contains no example: write one JSON object with prompt and completion per line")
