"""Dropout off in the model that runs, and the model's own values in the config that is saved with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OWN = "_dropout_of_its_own"  # on the model itself, so that a deep copy and a merged base know their values too
_OTHER_HEADS = ("summary_", "classifier_")  # configs name them for every model, a language model's pass has none


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: modules, the numbers that attention reads at each call, and the config.

    Some models read their config at each call, so it has to be 0 as well; `own_dropout` puts its values back to save.
    """
    for holder, key, _ in _numbers(model):
        setattr(holder, key, 0.0)
    own = [(config, key, value) for config in _configs(model) for key, value in _dropouts(config)]
    for config, key, _ in own:
        setattr(config, key, 0.0)
    setattr(model, _OWN, (*getattr(model, _OWN, ()), *(one for one in own if one[2] > 0.0)))


def has_dropout(model: nn.Module) -> bool:
    """Whether any dropout is above 0, so that training mode differs from evaluation mode."""
    values = [value for _, _, value in _numbers(model)]
    values += [v for config in _configs(model) for key, v in _dropouts(config) if not key.startswith(_OTHER_HEADS)]
    return any(value > 0.0 for value in values)


@contextmanager
def own_dropout(model: nn.Module) -> Iterator[None]:
    """The config as the model came with it, dropout values included, until the context is left; for saving."""
    own = getattr(model, _OWN, ())
    live = [getattr(config, key) for config, key, _ in own]
    try:
        for config, key, value in own:
            setattr(config, key, value)
        yield
    finally:
        for (config, key, _), value in zip(own, live, strict=True):
            setattr(config, key, value)


def _numbers(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Every dropout probability in a module of the model, with its place."""
    return [
        (module, key, value)
        for module in model.modules()
        for key, value in (
            *_dropouts(module),
            *([("p", module.p)] if isinstance(module, nn.modules.dropout._DropoutNd) else []),
        )
    ]


def _configs(model: nn.Module) -> list[Any]:
    """The model's config and those inside it, as of a model of several parts."""
    found: list[Any] = []
    waiting = [getattr(model, "config", None)]
    while waiting:
        config = waiting.pop()
        if config is not None and hasattr(config, "__dict__"):
            found.append(config)
            waiting += [
                value for key, value in vars(config).items() if key.endswith("_config") and hasattr(value, "to_dict")
            ]
    return found


def _dropouts(holder: Any) -> list[tuple[str, float]]:
    return [(key, value) for key, value in vars(holder).items() if "drop" in key and isinstance(value, float)]
