"""Disable dropout in the running model and keep the original values in its saved config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ORIGINAL = "_original_dropout"  # an attribute of the model, so that deep copies keep it
_OTHER_HEADS = ("summary_", "classifier_")  # heads that a causal LM does not have


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0 in modules, attention and the config, which some models read at each call.

    `original_dropout` restores the config for saving.
    """
    for _, module, key, _ in module_dropouts(model):
        setattr(module, key, 0.0)
    settings = [(config, key, value) for config in _configs(model) for key, value in _dropouts(config)]
    for config, key, _ in settings:
        setattr(config, key, 0.0)
    nonzero = [setting for setting in settings if setting[2] > 0.0]
    setattr(model, _ORIGINAL, (*getattr(model, _ORIGINAL, ()), *nonzero))


def has_dropout(model: nn.Module) -> bool:
    """Whether any dropout is above 0."""
    values = [value for _, _, _, value in module_dropouts(model)]
    values += [v for config in _configs(model) for key, v in _dropouts(config) if not key.startswith(_OTHER_HEADS)]
    return any(value > 0.0 for value in values)


@contextmanager
def original_dropout(model: nn.Module) -> Iterator[None]:
    """Within this context, the config has its original dropout, for saving."""
    settings = getattr(model, _ORIGINAL, ())
    current = [getattr(config, key) for config, key, _ in settings]
    try:
        for config, key, value in settings:
            setattr(config, key, value)
        yield
    finally:
        for (config, key, _), value in zip(settings, current, strict=True):
            setattr(config, key, value)


def module_dropouts(model: nn.Module) -> list[tuple[str, nn.Module, str, float]]:
    """Every dropout probability in the modules: the module's path, the module, the attribute, the value."""
    return [
        (path, module, key, value)
        for path, module in model.named_modules()
        for key, value in (
            *_dropouts(module),
            *([("p", module.p)] if isinstance(module, nn.modules.dropout._DropoutNd) else []),
        )
    ]


def _configs(model: nn.Module) -> list[Any]:
    """The model's config and the sub-configs inside it."""
    configs: list[Any] = []
    queue = [getattr(model, "config", None)]
    while queue:
        config = queue.pop()
        if config is not None and hasattr(config, "__dict__"):
            configs.append(config)
            queue += [
                value for key, value in vars(config).items() if key.endswith("_config") and hasattr(value, "to_dict")
            ]
    return configs


def _dropouts(holder: Any) -> list[tuple[str, float]]:
    return [(key, value) for key, value in vars(holder).items() if "drop" in key and isinstance(value, float)]
