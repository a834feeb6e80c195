"""The interface of tasks and episodes. `keel.envs.registry` builds tasks by name; each has its own file."""

from keel.envs.base import Task, TaskWrapper
from keel.envs.episode import Episode

__all__ = ["Episode", "Task", "TaskWrapper"]
