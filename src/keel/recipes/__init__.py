"""Recipes: tasks with their data, models and commands, built only on the public API (docs/extending.md)."""
