"""What a task is. Tasks are made by name in `keel.envs.registry`, one file each."""

from keel.envs.base import Task, TaskWrapper
from keel.envs.episode import Episode

__all__ = ["Episode", "Task", "TaskWrapper"]
