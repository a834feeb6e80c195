"""Plan the memory of a step with a dry run of the real passes on fake tensors, on one device and on several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from keel.config import Config, load_config
from keel.lab.plan.dry_run import DryRun, StepCost, full_microbatches, rollout_passes
from keel.lab.plan.shapes import Hardware, materialize, model_source, policy_shape, prompt_lengths, reference_shape
from keel.models.memory import PassBytes, fitting_tokens
from keel.models.options import LoadedModel
from keel.rollout.native.scheduler import Traits
from keel.run.layout import (
    DeviceLayout,
    ModelShape,
    RunMemory,
    choose_layout,
    layouts,
    resident_bytes,
    run_memory,
    shape_of,
    transient_bytes,
)

DEVICES = (1, 2, 4, 8)
MACHINE = 8  # assumed number of devices per machine
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
        # In a table for several numbers of devices, those that shard_size does not divide have no chosen layout.
        uneven = config.parallel.sharding == "hybrid" and count % (config.parallel.shard_size or machine)
        chosen: DeviceLayout | None = None
        if not uneven or len(devices) == 1:
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
    stepped = parts["gradients"] / cost.parts["gradients"]  # the device's share of the trained weights
    fixed, states = cost.parts["workspaces"], cost.parts["reference states"]
    moments_host = cost.parts["optimizer"] if config.optim.offload else 0
    phases = {}
    for name, peak in cost.phases.items():
        scoring = name in ("reference", "update")
        lasting = (*_HELD, "gradients") if name in ("update", "optimizer step") else _HELD
        # in later phases the reference is offloaded again
        away = min(moments_host, cost.host) if name == "reference" else cost.host
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


@dataclass(frozen=True)
class Plan:
    """Bytes by part during the update (usually the peak), and peak bytes by phase.

    `host` is the size of offloaded parts in main memory; on a CPU they count in the peaks. `pass_tokens` is the size of
    the largest pass of the update. `ranks` has the layouts on several devices.
    """

    parameters: int
    trainable: int
    parts: dict[str, int]
    phases: dict[str, int]
    host: int
    pass_tokens: int
    prompt_tokens: int
    hardware: Hardware
    ranks: tuple[RankPlan, ...]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.hardware.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hardware", "ranks")}
        ranks = [rank.as_dict() for rank in self.ranks]
        return {**plain, "peak": self.peak, "fits": self.fits, "hardware": vars(self.hardware), "ranks": ranks}


def plan(
    config: Config, hardware: Hardware, prompt_tokens: int | None = None, *, devices: Sequence[int] = DEVICES
) -> Plan:
    """Plan the largest step: completions of maximum length, prompts as long as the longest sampled one.

    The real passes of the reference and the update run on fake tensors, so their peaks are counted, not estimated. On a
    GPU the pass size is fitted to the memory, as in a run.
    """
    counted = _counted(config, hardware, prompt_tokens, devices)
    fitting = _fitting_tokens(counted, config)
    if hardware.kind == "cpu" or fitting >= min(counted.pass_tokens, config.optim.microbatch_tokens):
        return counted
    smaller = load_config(config, [f"optim.microbatch_tokens={fitting}"])
    sized = _counted(smaller, hardware, prompt_tokens, devices)
    pairs = zip(counted.ranks, sized.ranks, strict=True)  # with sharded weights, passes have the configured size
    return replace(sized, ranks=tuple(own if own.layout.sharded else other for own, other in pairs))


def _counted(config: Config, hardware: Hardware, prompt_tokens: int | None, devices: Sequence[int]) -> Plan:
    """The plan with passes of the configured size."""
    tokenizer, shape = model_source(config)
    prompt = prompt_tokens or max(prompt_lengths(config, tokenizer))
    with torch.device("meta"):  # only shapes: no memory is allocated, no weights are read
        loaded = policy_shape(config, tokenizer, shape, hardware)
        reference = reference_shape(config, loaded, shape)
    micros = full_microbatches(config, loaded, prompt, hardware)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for model in {id(m): m for m in (loaded.model, reference) if m is not None}.values():
            materialize(model)
        cost = DryRun(config, loaded, reference, micros, hardware).run(prompt)
    return Plan(
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        trainable=sum(p.numel() for p in loaded.model.parameters() if p.requires_grad),
        parts=cost.parts,
        phases=cost.phases,
        host=cost.host,
        pass_tokens=cost.pass_tokens,
        prompt_tokens=prompt,
        hardware=hardware,
        ranks=rank_plans(config, loaded, cost, hardware, devices),
    )


def _fitting_tokens(plan: Plan, config: Config) -> int:
    """Tokens of the largest pass that fits in the remaining memory, counted as in a run."""
    parts = plan.parts
    free = plan.hardware.memory_bytes - sum(parts[name] for name in ("weights", "sampler", "reference", "workspaces"))
    moments = 0 if config.optim.offload else parts["optimizer"]
    passes = PassBytes(parts["gradients"], parts["activations"] / plan.pass_tokens)
    return fitting_tokens(free, passes, moments + parts["reference states"])


def make_it_fit(config: Config, hardware: Hardware, prompt_tokens: int | None = None) -> list[tuple[list[str], Plan]]:
    """Cumulative option changes that save memory, each with its plan, up to the first plan that fits."""
    tried: list[tuple[list[str], Plan]] = []
    by_option: dict[str, str] = {}
    for override in _remedies(config):
        by_option[override.partition("=")[0]] = override
        overrides = list(by_option.values())
        tried.append((overrides, plan(load_config(config, overrides), hardware, prompt_tokens)))
        if tried[-1][1].fits:
            return tried
    return tried


def _remedies(config: Config) -> Iterator[str]:
    """Overrides that save memory, those with the smallest cost in time first."""
    tokens = config.optim.microbatch_tokens
    for size in (tokens // 2, tokens // 4, tokens // 8):
        if size >= 256:
            yield f"optim.microbatch_tokens={size}"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    frozen_copy = config.reference.kind in ("auto", "frozen") and config.model.lora is None and config.needs_reference
    if frozen_copy and not config.reference.params.get("offload"):
        yield "reference.offload=true"
    if not config.optim.offload:
        yield "optim.offload=true"
    (_, rows), *later = rollout_passes(config, Traits()).prefills
    if not later and rows >= 4 * config.rollout.num_generations:
        yield f"rollout.max_batch={rows // 4}"
    if config.model.lora is None:
        yield "model.lora={r: 16}"
