"""Tasks: one file each, by name."""

from keel.tasks.arithmetic import arithmetic
from keel.tasks.base import Task
from keel.tasks.countdown import countdown
from keel.tasks.mixture import Mixture, mixture
from keel.tasks.registry import TASKS, build_task, check_task
from keel.tasks.validity import check

__all__ = ["TASKS", "Mixture", "Task", "arithmetic", "build_task", "check", "check_task", "countdown", "mixture"]
