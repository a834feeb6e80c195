"""A step on several devices: the memory of each by layout, from the dry run of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keel.config import Config
from keel.lab.plan.dry_run import StepCost
from keel.lab.plan.hardware import Hardware
from keel.models.loaded import LoadedModel
from keel.run.footprint import (
    DeviceLayout,
    ModelShape,
    RunMemory,
    resident_bytes,
    shape_of,
    transient_bytes,
)
from keel.run.layout import choose_layout, layouts, run_memory

DEVICES = (1, 2, 4, 8)
MACHINE = 8  # devices per machine, if the plan has more
_HELD = ("weights", "sampler", "reference", "optimizer")


@dataclass(frozen=True)
class RankPlan:
    """One device of a layout: bytes by part, peaks by phase; a run uses the `chosen` layout."""

    layout: DeviceLayout
    parts: dict[str, int]
    phases: dict[str, int]
    limit: int
    chosen: bool

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "peak": self.peak, "fits": self.fits}


def rank_plans(
    config: Config, loaded: LoadedModel, cost: StepCost, hardware: Hardware, devices: Sequence[int] = DEVICES
) -> tuple[RankPlan, ...]:
    """Every layout on each number of devices; for one device it is the dry run itself."""
    shape, job = shape_of(loaded.model), run_memory(config, loaded, hardware.kind)
    plans: list[RankPlan] = []
    for count in devices:
        # Processes on a CPU share its memory.
        limit = hardware.memory_bytes // (count if hardware.kind == "cpu" else 1)
        machine = min(count, MACHINE)
        memory = limit if hardware.kind == "cuda" else None
        chosen = choose_layout(config, shape, job, count, machine=machine, memory=memory)
        for layout in layouts(config, shape, count, machine):
            plans.append(_rank(config, shape, job, layout, cost, limit, chosen=layout == chosen))
    return tuple(plans)


def _rank(
    config: Config, shape: ModelShape, job: RunMemory, layout: DeviceLayout, cost: StepCost, limit: int, *, chosen: bool
) -> RankPlan:
    temporary = transient_bytes(shape, job, layout, config.episodes_per_step * config.rollout.max_completion_length)
    shares = _shares(config, cost.micros, layout.devices)
    parts = {name: int(size * shares.get(name, 1.0)) for name, size in cost.parts.items()}
    parts |= {**(resident_bytes(shape, job, layout) if layout.sharded else {}), **temporary}
    stepped = parts["gradients"] / cost.parts["gradients"]  # bytes of the numbers that the optimizer updates
    fixed, states = cost.parts["workspaces"], cost.parts["reference states"]
    moments_host = cost.parts["optimizer"] if config.optim.offload else 0
    phases = {}
    for name, peak in cost.phases.items():
        scoring = name in ("reference", "update")
        lasting = (*_HELD, "gradients") if name in ("update", "optimizer step") else _HELD
        away = (
            min(moments_host, cost.host) if name == "reference" else cost.host
        )  # the reference is offloaded again by then
        besides = fixed + (states if name != "rollout" else 0)
        working = peak - (sum(cost.parts[part] for part in lasting) - away) - besides
        share = shares["activations"] if scoring else shares["cache"] if name == "rollout" else stepped
        now = sum(parts[part] for part in lasting) - (0 if layout.sharded else away)
        besides = fixed + (parts["reference states"] if name != "rollout" else 0)
        phases[name] = now + int(working * share) + besides + (sum(temporary.values()) if scoring else 0)
    return RankPlan(layout, parts, phases, limit, chosen)


def _shares(config: Config, micros: int, devices: int) -> dict[str, float]:
    """The fraction of one device's batch memory that each of several devices needs."""
    rollout = config.rollout
    groups = math.ceil(rollout.prompts_per_step / config.optim.minibatches)
    own = math.ceil(groups / devices)
    together = min(rollout.max_batch or config.episodes_per_step, config.episodes_per_step)
    rows = math.ceil(rollout.prompts_per_step / devices) * rollout.num_generations
    return {
        "activations": min(1.0, own / math.ceil(groups / micros)),
        "reference states": own / groups,
        "cache": min(1.0, rows / together),
    }


def fewest(plans: Sequence[RankPlan]) -> RankPlan | None:
    """The smallest number of devices on which a step fits, in the run's own layout if that fits."""
    fitting = [plan for plan in plans if plan.fits]
    return min(fitting, key=lambda plan: (plan.layout.devices, not plan.chosen), default=None)
