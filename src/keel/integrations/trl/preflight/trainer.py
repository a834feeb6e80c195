"""Build the trainer by the user's function, refuse unsupported settings, and restore it afterwards."""

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
from keel.base.parts import import_object
from keel.doctor.subject import backup
from keel.integrations.versions import TRL

# Nested containers that TRL changes in place while it generates and computes a loss.
_DEEP = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")


def load_trainer(spec: str) -> Any:
    """Build the trainer by the function `module:attr`. Raises for a trainer that cannot be examined."""
    build = import_object(spec, "--trl")
    try:
        trainer = build()
    except KeelError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        line = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {first_line(error)}, in {line.filename}, line {line.lineno}"
        raise KeelError(f"--trl {spec!r} could not build its trainer: {reason}") from error
    check_trainer(trainer, f"the result of --trl {spec!r}")
    return trainer


def check_trainer(trainer: Any, label: str = "the trainer") -> None:
    """Refuse objects that are not a TRL trainer, and settings that were not tested."""
    if not isinstance(trainer, GRPOTrainer):
        raise KeelError(
            f"{label} is a {type(trainer).__name__}: return a trl.GRPOTrainer or a KeelGRPOTrainer from a function "
            "without arguments"
        )
    TRL.check_names(GRPOTrainer)
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "several processes": trainer.accelerator.num_processes > 1,
        "fp16": trainer.args.mixed_precision == "fp16",
        "use_liger_kernel": trainer.args.use_liger_kernel,
        "a vision-language model": trainer._is_vlm,
        "vllm_mode='server'": trainer.use_vllm and trainer.vllm_mode == "server",
    }
    for what in (what for what, present in refused.items() if present):
        raise KeelError(
            f"{label} uses {what}, which the preflight does not support: build a trainer without it, in one process, "
            "and check that one"
        )


def trainable(trainer: Any) -> list[Tensor]:
    """The weights that an update may change."""
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Restore weights, gradients, optimizer, random states, modes and counters afterwards.

    The state of a user's own rewards, tools and environments cannot be restored.
    """
    weights, optimizer = trainable(trainer), trainer.optimizer
    kept, gradients = backup(weights), [weight.grad for weight in weights]
    wanted = [(weight, weight.requires_grad) for weight in trainer.model.parameters()]
    modules = [m for root in (trainer.model, trainer.ref_model) if root is not None for m in root.modules()]
    modes = [(module, module.training) for module in modules]
    attributes, state = dict(vars(trainer)), copy.deepcopy(vars(trainer.state))
    held = [(n, value) for n, value in attributes.items() if isinstance(value, list | dict | set | deque)]
    contents = [(value, (copy.deepcopy if name in _DEEP else copy.copy)(value)) for name, value in held]
    groups = [] if optimizer is None else optimizer.param_groups
    same = {id(p): p for group in groups for p in group["params"]}  # do not copy the parameters themselves
    own = None if optimizer is None else copy.deepcopy((optimizer.state, groups), same)
    loaders = len(trainer.accelerator._dataloaders)
    numbers, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # rewards may use it
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        with torch.no_grad():
            for weight, before, gradient in zip(weights, kept, gradients, strict=True):
                weight.copy_(before)
                weight.grad = gradient
        for weight, flag in wanted:
            weight.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
        for value, before in [(vars(trainer), attributes), (vars(trainer.state), state), *contents]:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(before)
        if own is not None:
            optimizer.state, optimizer.param_groups = own
        del trainer.accelerator._dataloaders[loaders:]
        random.setstate(numbers)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def patched(owner: Any, **parts: Any) -> Iterator[None]:
    """Replace attributes of this object within the context."""
    before = {name: vars(owner)[name] for name in parts if name in vars(owner)}
    vars(owner).update(parts)
    try:
        yield
    finally:
        for name in parts:
            vars(owner).pop(name, None)
        vars(owner).update(before)


__all__ = ["check_trainer", "load_trainer", "patched", "trainable", "untouched"]
