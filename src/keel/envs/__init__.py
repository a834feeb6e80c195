"""Tasks: one file each, by name."""

from keel.envs.arithmetic import arithmetic
from keel.envs.base import Task, TaskWrapper
from keel.envs.countdown import countdown
from keel.envs.episode import Episode
from keel.envs.mixture import Mixture, mixture
from keel.envs.registry import TASKS, build_task, check_task
from keel.envs.validity import check

__all__ = [
    "TASKS",
    "Episode",
    "Mixture",
    "Task",
    "TaskWrapper",
    "arithmetic",
    "build_task",
    "check",
    "check_task",
    "countdown",
    "mixture",
]
