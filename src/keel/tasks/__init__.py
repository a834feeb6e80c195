"""Tasks: one file each, by name."""

from keel.tasks.base import Task

__all__ = ["Task"]
