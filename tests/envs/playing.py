"""Episodes played turn by turn, as a rollout plays them, and short runs on environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
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
    answered: list[Any] = list(runner.ready().values())
    assert all(isinstance(failure, CallFailed) for _, failure in runner.close())
    return answered


def short_run(folder: Path, task: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration of four steps on an environment."""
    return {
        "run": {"name": "run", "dir": str(folder), "max_steps": 4},
        "model": {"name": "keel.models.tiny:half_model", "device": "cpu"},
        "task": dict(task),
        "rollout": {
            "prompts_per_step": 3,
            "num_generations": 2,
            "max_turns": 3,
            "max_turn_length": 8,
            "max_completion_length": 48,
        },
        "optim": {"learning_rate": 1.0e-3},
        "eval": {"every": 0, "samples": 4, "k": [1]},
        "log": {"console": "none", "tensorboard": False},
        "checkpoint": {"every": 2},
        **sections,
    }


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run's file, without what a clock decides."""
    timed = ("time/", "speed/", "memory/")
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith(timed)} for record in records]
