"""Context managers for evaluation mode and for disabling dropout, and the layers that use it."""

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
    """The option that turns dropout off, if the configuration turns it on; otherwise user code applies it."""
    return advice.either(
        advice.setting("set {}", advice.without_dropout(config.to_dict())),
        "a loader or scorer of your own must leave model.eval() on",
        joined="; ",
    )


def is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, with gradients."""
    with evaluating(model), torch.enable_grad():
        yield


@contextmanager
def without_dropout() -> Iterator[None]:
    """Run with every functional dropout as the identity, whatever its `training` argument."""
    names = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    originals = {name: getattr(functional, name) for name in names}
    try:
        for name in names:
            setattr(functional, name, lambda x, *args, **options: x)
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)
