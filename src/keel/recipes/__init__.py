"""Recipes: a task with its data, models and commands, built on the public API alone (docs/extending.md)."""
