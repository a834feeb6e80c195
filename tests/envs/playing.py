"""Episodes played turn by turn, as a rollout plays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.base.types import Problem
from keel.envs.calls import CallFailed, HungCalls
from keel.envs.episode import EpisodeRunner, close_sync, step_sync
from keel.envs.toolbox import Toolbox, ToolEpisode


def episode_of(task: Any, problem: Problem, turns: Sequence[str]) -> tuple[Any, Any]:
    """A new episode of a task, or of a toolbox, after these turns; and its reply to the last of them."""
    episode = ToolEpisode(task, problem) if isinstance(task, Toolbox) else task.start(problem)
    reply: Any = None
    for text in turns:
        reply = step_sync(episode, text)
        if reply is None:
            break
    close_sync(episode)
    return episode, reply


def reply(task: Any, problem: Problem, turns: Sequence[str]) -> Any:
    return episode_of(task, problem, turns)[1]


def counts(task: Any, problem: Problem, turns: Sequence[str]) -> Mapping[str, float]:
    counted: Mapping[str, float] = episode_of(task, problem, turns)[0].counts()
    return counted


def replies(task: Any, turns: Sequence[tuple[Problem, str]], timeout_s: float | None = 30.0) -> list[Any]:
    """The replies to the first turns of many episodes, all at the same time; the failure in the place of one."""
    runner = EpisodeRunner(task.start, timeout_s, HungCalls())
    runner.submit([((number, 0), problem, text) for number, (problem, text) in enumerate(turns)])
    answered: list[Any] = list(runner.ready(wait="all").values())
    assert all(isinstance(failure, CallFailed) for _, failure in runner.close())
    return answered
