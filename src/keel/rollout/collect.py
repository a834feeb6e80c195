"""Collect: problems in, judged groups out, over one turn or several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.envs.base import Task
from keel.envs.judge import CallFailed, Judge
from keel.envs.toolbox import keeping
from keel.rollout.engine import Engine, check_engine, turn_by_turn
from keel.rollout.render import Renderer, Reply, fit
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams


@dataclass
class _Episode:
    """One completion on its way: everything after the prompt, and the model's turns so far."""

    group: int
    sample: int
    tokens: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)
    filtered_logp: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # turns and replies, in order
    stop_reason: str = ""
    broken: bool = False

    def act(self, turn: Completion) -> None:
        self.tokens += turn.tokens
        self.action += turn.action
        self.sample_logp += turn.sample_logp
        self.filtered_logp += turn.filtered_logp
        self.turns.append(turn.text)
        self.said.append(turn.text)
        self.stop_reason = turn.stop_reason

    def hear(self, message: Reply, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.action += [False] * len(tokens)
        self.sample_logp += [0.0] * len(tokens)
        self.filtered_logp += [0.0] * len(tokens)
        self.said += [message] if isinstance(message, str) else [one["content"] for one in message]

    def completion(self, counts: Mapping[str, float]) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            action=tuple(self.action),
            sample_logp=tuple(self.sample_logp),
            filtered_logp=tuple(self.filtered_logp),
            text="\n".join(self.said),
            stop_reason=self.stop_reason,
            counts=counts,
        )


@keeping()
def collect(
    engine: Engine,
    task: Task,
    problems: Sequence[Problem],
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    attempt: int = 0,
    step: int = 0,
    max_turns: int = 1,
    max_turn_length: int | None = None,
    join_turns: bool = True,
    judge: Judge | None = None,
    chat_template: str = "auto",
    system_prompt: str | None = None,
    max_prompt_length: int | None = None,
    truncation: str = "error",
) -> list[Group]:
    """One judged group a problem, in order, except groups that the judge skips (its `failures` name them).

    Several turns: after each of the model's, the task's `respond` is asked for the environment's message, whose tokens
    are appended with action False. `max_completion_length` is the budget of a whole episode, messages included; one
    that a message would overrun ends there with stop_reason `length`. `max_turn_length` is the budget of one turn: a
    turn that it cuts off is answered like any other. An episode that would go on after `max_turns` has the stop_reason
    `turns`. Tokens are only ever appended, never encoded again, and noise goes on at the position where it stopped.
    Episodes do not wait for each other: one that is answered goes on beside those still in an earlier turn. Without
    `join_turns` they do, and all are answered together.
    """
    check_engine(engine)
    if max_turns < 1:
        raise KeelError(f"rollout.max_turns is {max_turns}: it must be at least 1")
    if max_turns > 1 and not task.several_turns:
        raise KeelError(f"rollout.max_turns is {max_turns}, but task {task.name!r} has no respond: set it to 1")
    _check_keys(problems)
    judge = judge or Judge.of(task)
    renderer = Renderer(tokenizer, chat_template=chat_template, system_prompt=system_prompt)
    whole = [renderer.prompt(problem) for problem in problems]
    prompts = [fit(t, max_prompt_length, truncation, p.key) for t, p in zip(whole, problems, strict=True)]
    noise = {"seed": seed, "attempt": attempt, "step": step}
    limit = None if max_turn_length is None else min(max_turn_length, sampling.max_completion_length)
    _check_room(engine, problems, prompts, sampling)
    asked = [Request(p.key, tokens, max_new=limit) for p, tokens in zip(problems, prompts, strict=True)]
    group_of = {problem.key: group for group, problem in enumerate(problems)}
    episodes: dict[tuple[int, int], _Episode] = {}

    def answer(turns: Sequence[Turn]) -> list[Request]:
        heard = []
        for turn in turns:
            place = group_of[turn.request.key], turn.sample
            heard.append(episodes.setdefault(place, _Episode(*place)))
            heard[-1].act(turn.completion)
        if max_turns == 1:
            return []
        open_ = [e for e in heard if len(e.tokens) < sampling.max_completion_length]
        replies = judge.respond_all(task, [(problems[e.group], e.sample, e.turns) for e in open_])
        pairs = zip(open_, replies, strict=True)
        live = [e for e, reply in pairs if _go_on(e, problems[e.group], reply, renderer, sampling, max_turns)]
        return [_request(e, problems[e.group], prompts[e.group], sampling, limit) for e in live]

    converse = engine.converse if join_turns and max_turns > 1 else partial(turn_by_turn, engine)
    converse(asked, sampling, answer, **noise)
    marked = [_marked(p, len(t) - len(kept)) for p, t, kept in zip(problems, whole, prompts, strict=True)]
    return _judged(task, marked, prompts, [episodes[place] for place in sorted(episodes)], judge, step)


def _go_on(
    episode: _Episode,
    problem: Problem,
    message: Reply | CallFailed | None,
    renderer: Renderer,
    sampling: SamplingParams,
    max_turns: int,
) -> bool:
    """Append the environment's message; False where the episode is over."""
    if isinstance(message, CallFailed):
        episode.broken = True
        return False
    if message is None:
        return False
    if len(episode.turns) >= max_turns:
        episode.stop_reason = "turns"
        return False
    tokens = renderer.reply(problem, message, episode.tokens[-1] if episode.tokens else None)
    if len(episode.tokens) + len(tokens) >= sampling.max_completion_length:
        episode.stop_reason = "length"
        return False
    episode.hear(message, tokens)
    return True


def _request(
    episode: _Episode, problem: Problem, prompt: tuple[int, ...], sampling: SamplingParams, limit: int | None
) -> Request:
    used = len(episode.tokens)
    left = sampling.max_completion_length - used
    return Request(
        key=problem.key,
        tokens=(*prompt, *episode.tokens),
        samples=(episode.sample,),
        start=used,
        max_new=left if limit is None else min(left, limit),
    )


def _judged(
    task: Task,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    episodes: Sequence[_Episode],
    judge: Judge,
    step: int,
) -> list[Group]:
    groups = []
    of_group: list[list[_Episode]] = [[] for _ in problems]
    for episode in episodes:
        of_group[episode.group].append(episode)
    for problem, prompt, members in zip(problems, prompts, of_group, strict=True):
        rewards = judge.judge(problem, [e.turns for e in members], {e.sample for e in members if e.broken})
        if rewards is not None:
            groups.append(Group(problem, prompt, tuple(_finished(e, task, problem) for e in members), rewards))
    if problems and not groups:
        last = judge.failures[-1]
        raise KeelError(f"every group of step {step} was skipped, the last for reward {last}")
    return groups


def _finished(episode: _Episode, task: Task, problem: Problem) -> Completion:
    """The episode as it is trained on; with several turns, or tools, with the figures that its task counts."""
    if not task.several_turns:
        return episode.completion({})
    return episode.completion({"turn/count": float(len(episode.turns)), **_counts(episode, task, problem)})


def _counts(episode: _Episode, task: Task, problem: Problem) -> dict[str, float]:
    """What the task counts of an episode (`counts`), as finite numbers; none of one that broke."""
    if episode.broken:
        return {}
    try:
        found = {str(name): float(count) for name, count in task.counts(problem, tuple(episode.turns)).items()}
    except Exception as error:  # a user's task may raise anything
        said = next(iter(str(error).strip().splitlines()), "")
        raise KeelError(f"counts of task {task.name!r} raised {type(error).__name__}: {said}") from error
    odd = next((name for name, count in found.items() if not math.isfinite(count)), None)
    if odd is not None:
        raise KeelError(f"counts of task {task.name!r} gave {odd}={found[odd]}: it must be a finite number")
    return found


def _marked(problem: Problem, cut: int) -> Problem:
    """The problem, with the number of prompt tokens that were cut off noted in its info."""
    if not cut:
        return problem
    info: Mapping[str, Any] = {**problem.info, "prompt_tokens_cut": cut}
    return replace(problem, info=info)


def _check_room(
    engine: Engine, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> None:
    """Refuse an episode that could outgrow the model's context in a later turn, before the first is sampled."""
    context = engine.context
    for problem, prompt in zip(problems, prompts, strict=True):
        if context is not None and len(prompt) < context < len(prompt) + sampling.max_completion_length:
            raise KeelError(
                f"problem {problem.key!r}: {len(prompt)} prompt tokens and {sampling.max_completion_length} new ones "
                f"exceed the model's context of {context}: set rollout.max_completion_length to "
                f"{context - len(prompt)} or less"
            )


def _check_keys(problems: Sequence[Problem]) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.key in seen:
            raise KeelError(f"two problems of a batch have the key {problem.key!r}: they would get the same noise")
        seen.add(problem.key)
