"""The optimizer of a run, with schedule, clipping, a guard against non-finite gradients, and offload."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from keel.base.errors import KeelError
from keel.base.metrics import Mean, Metric, Metrics
from keel.base.world import SINGLE_PROCESS, World
from keel.models.precision import DTYPES, check_bfloat16
from keel.models.sharding import full_tensor, local_tensor
from keel.trainer.options import OptimOptions, warmup_within

Schedule = Callable[[int], float]
MIN_LOSS_SCALE = 1.0  # fp16: an overflow at this loss scale counts as non-finite; DeepSpeed and Megatron use 1 too


def constant(progress: float) -> float:
    """A constant factor of 1."""
    return 1.0


def linear(progress: float) -> float:
    """Linear decay from 1 to 0."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Cosine decay from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def build_schedule(options: OptimOptions, total_steps: int = 1, *, updates_per_step: int = 1) -> Schedule:
    """The factor of the learning rate at each update: a linear warm-up, then the named schedule down to `final_ratio`.

    The first update has a rate above 0. The last update of the warm-up has the full rate. A warm-up longer than the
    decay ends one step before the end of the decay. The schedule counts steps, so several updates per batch do not
    shorten it.
    """
    course, warmup_steps = SCHEDULES[options.schedule], warmup_within(options, total_steps)
    total_steps = options.decay_steps or total_steps
    low = options.final_ratio if options.schedule != "constant" else 0.0

    def factor(update: int) -> float:
        step = update / updates_per_step
        if step < warmup_steps:
            return min(1.0, (step + 1.0 / updates_per_step) / warmup_steps)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return low + (1.0 - low) * course(progress)

    return factor


def _adamw(params: list[Any], device: torch.device, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=device.type in ("cpu", "cuda"), **settings)


def _adamw_8bit(params: list[Any], device: torch.device, **settings: Any) -> torch.optim.Optimizer:
    try:
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise KeelError(
            "optim.optimizer=adamw8bit needs bitsandbytes, which is not installed: install it, or use adamw"
        ) from error
    if device.type != "cuda":
        raise KeelError("optim.optimizer=adamw8bit needs a CUDA device: use optim.optimizer=adamw here")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(params, **settings)
    return optimizer


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw, "adamw8bit": _adamw_8bit}


def resolve_amp_dtype(options: OptimOptions, weights: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of mixed-precision passes; None if passes use the dtype of the weights."""
    name = options.precision
    if name == "auto" or DTYPES[name] == weights:
        return None
    if name == "float32":
        raise KeelError(f"optim.precision=float32 needs model.dtype=float32: the weights are {weights}")
    check_bfloat16("optim.precision", DTYPES[name], device, "optim.precision=float16")
    return DTYPES[name]


class Optimizer:
    """A torch optimizer with a schedule and a guard against non-finite gradients. `step` makes or skips one update.

    A non-finite loss or gradient norm skips optimizer and schedule. Clipping does not remove NaN, and a NaN in the
    moments is permanent. Under fp16, a gradient overflow with a finite loss also halves the loss scale, as in
    `torch.amp.GradScaler`. `offload` keeps the moments on the CPU between updates.
    """

    def __init__(
        self,
        model: nn.Module,
        options: OptimOptions,
        schedule: Schedule | None = None,
        *,
        amp_dtype: torch.dtype | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._names)
        if not self.parameters:
            raise KeelError("the model has no trainable parameters: all are frozen")
        self.options, self.world = options, world
        self.device = self.parameters[0].device
        self.learning_rate, self.schedule = options.learning_rate, schedule or build_schedule(options)
        self.updates, self.factor = 0, 1.0
        self.begin()
        scaled = amp_dtype == torch.float16 and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type) if scaled else None
        if self.scaler:
            self.scaler.scale(torch.zeros((), device=self.device))  # create the scale: ranks without passes unscale too
        self.reset()

    def begin(self) -> None:
        """Begin a step: reset the records of its updates."""
        self.applied_norms: list[float] = []  # gradient norms of applied updates
        self.spiked = 0.0  # the largest norm above the spike limit
        self.nonfinite: str | None = None
        self.stepped = False  # whether weights, moments or loss scale may have changed in this step

    def reset(self) -> None:
        """Reset the moments, for example after a hard reset of the reference (ProRL)."""
        options, groups = self.options, _parameter_groups(self.parameters, self.options.weight_decay)
        make = OPTIMIZERS[options.optimizer]
        self.inner = make(groups, self.device, lr=options.learning_rate, betas=options.betas, eps=options.eps)

    @property
    def moment_bytes(self) -> int:
        """Bytes of moments on the device during a pass. They are allocated by the first update."""
        sizes = (p.numel() * (1 if self.options.optimizer == "adamw8bit" else p.itemsize) for p in self.parameters)
        return 0 if self.options.offload else 2 * sum(sizes)

    @property
    def loss_scale(self) -> float | None:
        """The fp16 loss scale; None without scaling. Reading it waits for the device."""
        return None if self.scaler is None else self.scaler.get_scale()

    def limit_loss_scale(self, lowest: float, highest: float) -> None:
        """Bound the fp16 loss scale, if there is one."""
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            bounded = min(max(scale, lowest), highest)
            if bounded != scale:
                self.scaler.update(bounded)

    @property
    def lr(self) -> float:
        """The learning rate of the next update, including the reduction by rollbacks (`factor`)."""
        return self.learning_rate * self.schedule(self.updates) * self.factor

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the loss; for fp16 the loss is scaled."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(
        self, info: Metrics | None = None, *, spike: float | None = None, skip_spike: bool = False
    ) -> dict[str, Metric]:
        """Make one guarded update from the accumulated gradients; return `info` and the update's metrics as numbers.

        `info` holds the metrics of the accumulated passes, including `loss/total`. The guard decides on the host, so
        each update waits for the device once. A norm above `spike` is recorded. With `skip_spike`, such an update is
        skipped. `nonfinite` is set to the first parameter with a non-finite gradient. An fp16 overflow counts as
        `guard/overflow`, not as `guard/nonfinite`, while the loss scale is above `MIN_LOSS_SCALE`.
        """
        self.stepped = True
        lr, max_norm = self.lr, self.options.max_grad_norm
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self.options.offload:
            self._move_state(self.device)
        self._sum_gradients()
        if self.scaler:
            self.scaler.unscale_(self.inner)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        numbers = self.world.reduce({**(info or {}), "grad/norm": Mean(full_tensor(total), 1.0)})
        norm = numbers["grad/norm"].value
        finite_loss = "loss/total" not in numbers or math.isfinite(numbers["loss/total"].value)
        finite = math.isfinite(norm) and finite_loss
        scale = None if finite else self.loss_scale
        overflow = scale is not None and finite_loss and scale > MIN_LOSS_SCALE
        is_spike = finite and spike is not None and norm > spike
        applied = finite and not (is_spike and skip_spike)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm or math.inf, total)
            self.inner.step()
            _count_writes(self.parameters)
            self.updates += 1
            self.applied_norms.append(norm)
        elif not finite and not overflow:
            self.nonfinite = self.nonfinite or self._first_nonfinite()
        if is_spike:
            self.spiked = max(self.spiked, norm)
        if self.scaler:
            self.scaler.update()
            if not finite:
                self.limit_loss_scale(MIN_LOSS_SCALE, math.inf)
        self.inner.zero_grad(set_to_none=True)
        if self.options.offload:
            self._move_state(torch.device("cpu"))
        clip = min(1.0, max_norm / norm) if applied and max_norm and norm > 0 else float(applied)
        return {
            **numbers,
            "grad/clip_factor": Mean(clip, 1.0),
            "optim/learning_rate": Mean(lr, 1.0),
            "guard/skipped": Mean(float(not applied), 1.0),
            "guard/nonfinite": Mean(float(not finite and not overflow), 1.0),
            "guard/spike": Mean(float(is_spike), 1.0),
            **({} if self.scaler is None else {"guard/overflow": Mean(float(overflow), 1.0)}),
        }

    def _sum_gradients(self) -> None:
        """Sum gradients over processes. A parameter that no process used keeps `grad=None`."""
        if self.world.size == 1:
            return
        replicated = [p for p in self.parameters if not isinstance(p, DTensor)]  # FSDP sums sharded gradients
        used = torch.tensor([float(p.grad is not None) for p in replicated], device=self.device)
        self.world.all_reduce_([used])
        chosen = [p for p, count in zip(replicated, used.tolist(), strict=True) if count]
        for parameter in chosen:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.world.all_reduce_(p.grad for p in chosen if p.grad is not None)

    def _first_nonfinite(self) -> str | None:
        bad = (p for p in self.parameters if p.grad is not None and not bool(local_tensor(p.grad).isfinite().all()))
        parameter = next(bad, None)
        names = self.world.all_gather(None if parameter is None else self._names[parameter])
        return next((name for name in names if name is not None), None)

    def _move_state(self, device: torch.device) -> None:
        for state in self.inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    state[key] = value.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The moments, the number of updates (for the schedule) and the loss scale."""
        scaler = self.scaler.state_dict() if self.scaler else None
        return {"inner": self.inner.state_dict(), "updates": self.updates, "rate": self.learning_rate, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.updates = int(state["updates"])
        self.learning_rate = float(state["rate"])
        if self.scaler and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _count_writes(parameters: Iterable[nn.Parameter]) -> None:
    """Increment the weights' version counters. Caches of weights read them, and fused optimizers do not update them."""
    torch.autograd.graph.increment_version([p for p in parameters if not isinstance(p, DTensor)])


def _parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay applies to matrices, not to norms and biases."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
