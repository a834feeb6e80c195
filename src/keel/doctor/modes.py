"""Modes of a model: evaluation for a while, dropout out of torch itself, and the layers that drop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from keel.config import Config
from keel.doctor import advice
from keel.doctor.findings import Advice
from keel.models.head import evaluating


def no_dropout(config: Config) -> Advice:
    """Off where the configuration turns it on; otherwise a part of one's own does."""
    return advice.either(
        advice.setting("set {}", advice.without_dropout(config.to_dict())),
        "a loader or scorer of your own must leave model.eval() on",
        joined="; ",
    )


def is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, with gradients."""
    with evaluating(model), torch.enable_grad():
        yield


@contextmanager
def without_dropout() -> Iterator[None]:
    """Every functional dropout is the identity inside, whatever its caller thinks of training mode."""
    names = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    originals = {name: getattr(functional, name) for name in names}
    try:
        for name in names:
            setattr(functional, name, lambda x, *args, **options: x)
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)
