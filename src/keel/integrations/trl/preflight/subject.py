"""The trainer to examine: built by the user's function, refused if its results would be unreliable."""

from __future__ import annotations

import copy
import random
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer

from keel.base.errors import KeelError, first_line
from keel.base.imports import import_object
from keel.doctor.weights import backup
from keel.integrations.versions import TRL

# What TRL changes in place while it generates and computes a loss, several containers deep.
_DEEP = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")


def load_trainer(spec: str) -> Any:
    """Build the trainer by the function `module:attr`; refuse one that cannot be examined."""
    build = import_object(spec, "--trl")
    try:
        trainer = build()
    except KeelError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        line = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {first_line(error)}, in {line.filename}, line {line.lineno}"
        raise KeelError(f"--trl {spec!r} could not build its trainer: {reason}") from error
    check_trainer(trainer, f"--trl {spec!r}")
    return trainer


def check_trainer(trainer: Any, label: str = "the trainer") -> None:
    """Refuse objects that are no trainer of TRL, and settings that were not tested."""
    if not isinstance(trainer, GRPOTrainer):
        raise KeelError(
            f"{label} gave a {type(trainer).__name__}: return a trl.GRPOTrainer or a KeelGRPOTrainer from a function "
            "without arguments"
        )
    TRL.check_names(GRPOTrainer)
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "several processes": trainer.accelerator.num_processes > 1,
        "fp16": trainer.args.mixed_precision == "fp16",
        "use_liger_kernel": trainer.args.use_liger_kernel,
        "a model of pictures": trainer._is_vlm,
        "vllm_mode='server'": trainer.use_vllm and trainer.vllm_mode == "server",
    }
    for what, present in refused.items():
        if present:
            raise KeelError(
                f"{label} gave a trainer with {what}, which the preflight was not tested with: build it without, "
                "in one process, and look at that one"
            )


def trainable(trainer: Any) -> list[Tensor]:
    """The weights that an update may move."""
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Restore weights, gradients, optimizer, random states, modes and counters afterwards.

    What a user's own reward, tool or environment has counted or written is out of reach.
    """
    weights, every = trainable(trainer), list(trainer.model.parameters())
    wanted = [weight.requires_grad for weight in every]
    kept, gradients = backup(weights), [weight.grad for weight in weights]
    modules = [m for root in (trainer.model, trainer.ref_model) if root is not None for m in root.modules()]
    modes = [(module, module.training) for module in modules]
    attributes, contents = dict(vars(trainer)), _contents(trainer)
    state, optimizer = copy.deepcopy(vars(trainer.state)), _optimizer_state(trainer.optimizer)
    loaders, numbers = len(trainer.accelerator._dataloaders), _random_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before, gradient in zip(weights, kept, gradients, strict=True):
                weight.copy_(before)
                weight.grad = gradient
        for weight, before in zip(every, wanted, strict=True):
            weight.requires_grad_(before)
        for module, mode in modes:
            module.training = mode
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for container, before in contents:
            _refill(container, before)
        vars(trainer.state).clear()
        vars(trainer.state).update(state)
        _restore_optimizer(trainer.optimizer, optimizer)
        del trainer.accelerator._dataloaders[loaders:]
        _restore_random(numbers)


def _contents(trainer: Any) -> list[tuple[Any, Any]]:
    """Every container of the trainer, with a copy of its content."""
    kinds = (list, dict, set, deque)
    held = {name: value for name, value in vars(trainer).items() if isinstance(value, kinds)}
    return [(value, copy.deepcopy(value) if name in _DEEP else copy.copy(value)) for name, value in held.items()]


def _refill(container: Any, before: Any) -> None:
    """Restore a container's content."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(before)


def _optimizer_state(optimizer: Any) -> Any:
    if optimizer is None:
        return None
    moments = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    return moments, [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _restore_optimizer(optimizer: Any, saved: Any) -> None:
    if optimizer is None:
        return
    moments, groups = saved
    optimizer.state.clear()
    optimizer.state.update(moments)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = np.random.get_state()  # noqa: NPY002  # users' rewards draw from it
    return random.getstate(), numpy, torch.get_rng_state(), cuda


def _restore_random(numbers: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = numbers
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def patched(trainer: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of this trainer within the context."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(trainer).pop(name, None)
        vars(trainer).update(before)


__all__ = ["check_trainer", "load_trainer", "patched", "trainable", "untouched"]
