"""Sample completions for problems, over one turn or several, and judge them as groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.base.world import SINGLE_PROCESS, World
from keel.envs.base import Task
from keel.envs.calls import CallFailed, call_sync
from keel.envs.episode import Episode, EpisodeRunner, Key, Transcript
from keel.envs.judge import Judge
from keel.rollout.engine import Engine, check_engine, turn_by_turn
from keel.rollout.render import Renderer, Reply, fit
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams


@dataclass
class _Trajectory:
    """A completion in progress: the tokens after the prompt, and the model's turns so far."""

    group: int
    sample: int
    tokens: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)
    filtered_logp: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    transcript: list[str] = field(default_factory=list)  # turns and replies, in order
    described: list[dict[str, Any]] = field(default_factory=list)  # the turns in the format of `Completion.turns`
    stop_reason: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False  # its environment raised or hung

    def append_turn(self, turn: Completion, *, only_filtered: bool = False) -> None:
        """Append a turn of the model.

        With `only_filtered`, the engine reports log-probabilities after filters only; unfiltered ones become NaN.
        """
        unknown = [math.nan if action else 0.0 for action in turn.action] if only_filtered else None
        self.tokens += turn.tokens
        self.action += turn.action
        self.sample_logp += turn.sample_logp if unknown is None else unknown
        self.filtered_logp += turn.filtered_logp if unknown is None else turn.sample_logp
        self.turns.append(turn.text)
        self.transcript.append(turn.text)
        self.described.append({"tokens": len(turn.tokens), "reply": 0, "stop_reason": turn.stop_reason, "note": ""})
        self.stop_reason = turn.stop_reason

    def append_reply(self, reply: Reply, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.action += [False] * len(tokens)
        self.sample_logp += [0.0] * len(tokens)
        self.filtered_logp += [0.0] * len(tokens)
        self.transcript += [reply] if isinstance(reply, str) else [message["content"] for message in reply]
        self.described[-1]["reply"] = len(tokens)

    def completion(self, policy_version: int | None, *, several_turns: bool) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            action=tuple(self.action),
            sample_logp=tuple(self.sample_logp),
            filtered_logp=tuple(self.filtered_logp),
            text="\n".join(self.transcript),
            stop_reason=self.stop_reason,
            counts={"turn/count": float(len(self.turns)), **self.counts} if several_turns else {},
            policy_version=policy_version,
            turns=tuple(self.described) if several_turns else (),
        )


@dataclass(frozen=True)
class Collector:
    """Collects judged groups for problems, over one turn or several.

    In a multi-turn task, each completion has an `Episode` of the task, which answers the model's turns. The tokens of
    its replies have action False. Tokens are only appended, never re-encoded, and noise continues at the next position.

    `max_completion_length` is the token budget of an episode, including replies. If a reply does not fit, the episode
    ends with stop_reason `length`. `max_turn_length` is the budget of one turn; a truncated turn is answered like any
    other. If an episode would continue after `max_turns`, it ends with stop_reason `turns`.

    With `join_turns`, an answered episode continues while other episodes are still in an earlier turn. Without it, all
    episodes are answered together. With `overlap_tools`, at most half of the unfinished episodes (and at most
    `max_batch`) are sampled while the tools of the others run. A free slot goes to the answered episode whose turn
    ended first.
    """

    engine: Engine
    task: Task
    renderer: Renderer
    sampling: SamplingParams
    judge: Judge
    seed: int = 0
    max_turns: int = 1
    max_turn_length: int | None = None
    join_turns: bool = True
    overlap_tools: bool = False
    max_prompt_length: int | None = None
    truncation: str = "error"
    release: bool = False  # free the engine's memory after each rollout
    world: World = SINGLE_PROCESS

    def collect(self, problems: Sequence[Problem], *, attempt: int = 0, step: int = 0) -> list[Group]:
        """Collect one judged group per problem, in order. Skipped groups are listed in the judge's `failures`.

        Each process of `world` collects its share of the problems. All processes return all groups and failures.
        """
        check_engine(self.engine)
        check_keys(problems)
        recorded = len(self.judge.failures)
        own = self._groups(self.world.shard(problems), {"seed": self.seed, "attempt": attempt, "step": step})
        groups = of_all(self.world, own, self.judge, recorded, problems)
        if problems and not groups:
            raise KeelError(
                f"every group of step {step} was skipped; the last failure is reward {self.judge.failures[-1]}"
            )
        if problems and not any(any(c.action) for group in groups for c in group.completions):
            failed = self.judge.failures[recorded:]
            why = f"; the last failure is reward {failed[-1]}" if failed else ""
            raise KeelError(
                f"no episode of step {step} called the model: task {self.task.name!r} ended each one before its first "
                f"call{why}"
            )
        if self.release:
            self.engine.release()
        return groups

    def _groups(self, problems: Sequence[Problem], noise: dict[str, int]) -> list[Group]:
        """The judged groups of this process's problems."""
        engine, task, sampling, judge = self.engine, self.task, self.sampling, self.judge
        if self.max_turns < 1:
            raise KeelError(f"rollout.max_turns is {self.max_turns}: it must be at least 1")
        if self.max_turns > 1 and not task.multi_turn:
            raise KeelError(f"rollout.max_turns is {self.max_turns}, but task {task.name!r} has one turn: set it to 1")
        full_prompts = [self.renderer.prompt(problem) for problem in problems]
        longest, cut_by = self.max_prompt_length, self.truncation
        prompts = [fit(t, longest, cut_by, p.key) for t, p in zip(full_prompts, problems, strict=True)]
        budget = sampling.max_completion_length
        limit = None if self.max_turn_length is None else min(self.max_turn_length, budget)
        check_context(engine, problems, prompts, sampling)
        running = unfinished = len(problems) * sampling.num_generations
        at_once, share = self._places(unfinished)
        if share > 1:
            sampling = replace(sampling, max_batch=min(at_once, -(-unfinished // share)) or None)
        requests = [Request(p.key, tokens, max_new=limit) for p, tokens in zip(problems, prompts, strict=True)]
        group_of = {problem.key: group for group, problem in enumerate(problems)}
        trajectories: dict[tuple[int, int], _Trajectory] = {}
        version = engine.version
        runner = EpisodeRunner(task.start, judge.options.timeout_s, judge.hung, judge.stops)

        def answer(turns: Sequence[Turn]) -> list[Request]:
            for turn in turns:
                key = group_of[turn.request.key], turn.sample
                trajectory = trajectories.setdefault(key, _Trajectory(*key))
                _check_appended(turn, prompts[key[0]], trajectory)
                trajectory.append_turn(turn.completion, only_filtered=engine.logp_after_filters and sampling.filtered)
                if task.multi_turn:
                    runner.submit([(key, problems[key[0]], turn.completion.text)])
            return next_requests(len(turns))

        def next_requests(ended: int) -> list[Request]:
            """Return requests for the episodes that fit, in the order in which their turns ended.

            This order does not depend on the run time of tools.
            """
            nonlocal running, unfinished
            running -= ended
            continued: list[Request] = []
            while runner.waiting and (room := min(at_once, -(-unfinished // share)) - running) > 0:
                for key, reply in runner.ready(room).items():
                    trajectory, problem = trajectories[key], problems[key[0]]
                    if isinstance(reply, CallFailed):
                        trajectory.failed = True
                        judge.record(f"{task.name}.{reply.at}", problem, trajectory.sample, reply)
                    elif _append_reply(trajectory, problem, reply, self.renderer, sampling, self.max_turns):
                        continued.append(_request(trajectory, problem, prompts[key[0]], sampling, limit))
                        running += 1
                        continue
                    unfinished -= 1
            return continued

        converse = engine.converse if self.join_turns and self.max_turns > 1 else partial(turn_by_turn, engine)
        try:
            if requests:
                converse(requests, sampling, answer, **noise)
            cut = [len(full) - len(prompt) for full, prompt in zip(full_prompts, prompts, strict=True)]
            noted = [with_prompt_tokens_cut(problem, count) for problem, count in zip(problems, cut, strict=True)]
            finished = [trajectories[key] for key in sorted(trajectories)]
            groups = judged(task, noted, prompts, finished, runner.episodes, judge, version)
        finally:
            failures = runner.close()
        for key, failure in failures:
            judge.record(f"{task.name}.close", problems[key[0]], key[1], failure)
        return groups

    def _places(self, episodes: int) -> tuple[int, int]:
        """Return (n, k): at most n episodes, and at most 1/k of the unfinished ones, are sampled at a time."""
        overlap = self.overlap_tools and self.max_turns > 1
        return (self.sampling.max_batch or episodes, 2) if overlap else (episodes, 1)


def of_all(world: World, groups: list[Group], judge: Judge, recorded: int, problems: Sequence[Problem]) -> list[Group]:
    """Gather all processes' groups, in the order of the problems, and the failures after the first `recorded`."""
    if world.size == 1:
        return groups
    # Send keys instead of problems: the other processes have the contents, which may not be serialisable.
    keyed = [
        replace(group, problem=with_prompt_tokens_cut(Problem(group.problem.key, ""), _prompt_tokens_cut(group)))
        for group in groups
    ]
    parts = world.all_gather((keyed, judge.failures[recorded:]))
    judge.failures[recorded:] = [failure for _, failures in parts for failure in failures]
    by_key = {group.problem.key: group for part, _ in parts for group in part}
    return [
        replace(group, problem=with_prompt_tokens_cut(problem, _prompt_tokens_cut(group)))
        for problem in problems
        if (group := by_key.get(problem.key)) is not None
    ]


def _prompt_tokens_cut(group: Group) -> int:
    return int(group.problem.info.get("prompt_tokens_cut", 0))


def _append_reply(
    trajectory: _Trajectory,
    problem: Problem,
    reply: Reply | None,
    renderer: Renderer,
    sampling: SamplingParams,
    max_turns: int,
) -> bool:
    """Append the environment's reply; False if the episode is over."""
    if reply is None or len(trajectory.tokens) >= sampling.max_completion_length:
        return False
    if len(trajectory.turns) >= max_turns:
        trajectory.stop_reason = "turns" if max_turns > 1 else trajectory.stop_reason
        return False
    room = sampling.max_completion_length - len(trajectory.tokens)
    tokens = renderer.reply(problem, reply, trajectory.tokens[-1] if trajectory.tokens else None, room=room)
    if len(tokens) >= room:
        trajectory.stop_reason = "length"
        return False
    trajectory.append_reply(reply, tokens)
    return True


def _check_appended(turn: Turn, prompt: tuple[int, ...], trajectory: _Trajectory) -> None:
    """Refuse a turn whose context differs from the tokens so far, for example because text was re-encoded."""
    if turn.request.tokens != (*prompt, *trajectory.tokens):
        raise KeelError(
            f"problem {turn.request.key!r}: turn {len(trajectory.turns) + 1} continues other tokens than the prompt "
            "and the turns before it: the engine must return each request with its token ids unchanged"
        )


def _request(
    trajectory: _Trajectory, problem: Problem, prompt: tuple[int, ...], sampling: SamplingParams, limit: int | None
) -> Request:
    used = len(trajectory.tokens)
    left = sampling.max_completion_length - used
    return Request(
        key=problem.key,
        tokens=(*prompt, *trajectory.tokens),
        samples=(trajectory.sample,),
        start=used,
        max_new=left if limit is None else min(left, limit),
    )


def judged(
    task: Task,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    trajectories: Sequence[_Trajectory],
    episodes: Mapping[Key, Episode],
    judge: Judge,
    version: int | None,
) -> list[Group]:
    groups = []
    by_group: list[list[_Trajectory]] = [[] for _ in problems]
    for trajectory in trajectories:
        by_group[trajectory.group].append(trajectory)
    for problem, prompt, members in zip(problems, prompts, by_group, strict=True):
        transcripts = [Transcript.of(t.turns, episodes.get((t.group, t.sample))) for t in members]
        read = partial(_read_episode, task, problem, transcripts, judge, members)
        rewards = judge.judge(problem, transcripts, {t.sample for t in members if t.failed}, read)
        if rewards is not None:
            completions = tuple(t.completion(version, several_turns=task.multi_turn) for t in members)
            groups.append(Group(problem, prompt, completions, rewards))
    return groups


def _read_episode(
    task: Task,
    problem: Problem,
    transcripts: Sequence[Transcript],
    judge: Judge,
    members: Sequence[_Trajectory],
    sample: int,
) -> bool:
    """Read an episode's counters and notes; on failure record it and return False."""
    episode = transcripts[sample].episode
    if episode is None or not task.multi_turn:
        return True
    try:
        counts, notes = call_sync(_counts_and_notes, episode, timeout_s=judge.options.timeout_s, hung=judge.hung)
    except CallFailed as failure:
        judge.record(f"{task.name}.counts", problem, sample, failure)
        return False
    members[sample].counts = counts
    for turn, note in zip(members[sample].described, notes, strict=False):
        turn["note"] = note
    return True


def _counts_and_notes(episode: Episode) -> tuple[dict[str, float], list[str]]:
    return _counts(episode), _notes(episode)


def _notes(episode: Episode) -> list[str]:
    """The notes of an episode. Notes are for display only, so an error in them is returned as the only note."""
    try:
        return [str(note) for note in episode.turn_notes()]
    except Exception as error:
        return [f"turn_notes raised {type(error).__name__}: {error}"]


def _counts(episode: Episode) -> dict[str, float]:
    counts = {str(name): float(count) for name, count in episode.counts().items()}
    odd = next((name for name, count in counts.items() if not math.isfinite(count)), None)
    if odd is not None:
        raise CallFailed("invalid", f"returned {odd}={counts[odd]}: it must be a finite number")
    return counts


def with_prompt_tokens_cut(problem: Problem, cut: int) -> Problem:
    """The problem, with the number of truncated prompt tokens in its info."""
    if not cut:
        return problem
    info: Mapping[str, Any] = {**problem.info, "prompt_tokens_cut": cut}
    return replace(problem, info=info)


def check_context(
    engine: Engine, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> None:
    """Refuse an episode that could exceed the model's context, before sampling."""
    context = engine.context
    for problem, prompt in zip(problems, prompts, strict=True):
        if context is not None and len(prompt) < context < len(prompt) + sampling.max_completion_length:
            raise KeelError(
                f"problem {problem.key!r}: {len(prompt)} prompt tokens and {sampling.max_completion_length} new tokens "
                f"exceed the model's context of {context}: set rollout.max_completion_length to "
                f"{context - len(prompt)} or less"
            )


def check_keys(problems: Sequence[Problem]) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.key in seen:
            raise KeelError(f"two problems of a batch have the key {problem.key!r}: they would get the same noise")
        seen.add(problem.key)
