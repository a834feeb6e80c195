"""`keel plan`: memory and time of a step before anything runs, by a dry run of the real passes on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from keel.config import Config, load_config
from keel.lab.plan.dry_run import StepCost, decoding_traits, dry_run, full_microbatches, rollout_passes
from keel.lab.plan.hardware import Hardware
from keel.lab.plan.measure import Job, measure
from keel.lab.plan.ranks import DEVICES, RankPlan, rank_plans
from keel.lab.plan.shapes import materialize, model_source, policy_shape, prompt_lengths, reference_shape
from keel.models.head import causal_lm
from keel.models.load import LoadedModel
from keel.models.memory import PassBytes, fitting_tokens
from keel.rollout.native.scheduler import Traits
from keel.trainer.memory import OutOfMemory, is_out_of_memory

GIB = 2**30
_GRAPHED = 0.25  # of a layer's launch where decode steps are CUDA graphs: 2.1 ms for 9.5 ms were measured on an H200
_SAMPLING_LAYERS = 6  # sampling a token is about as many small operations as this many layers


@dataclass(frozen=True)
class Plan:
    """Bytes by part, peaks by phase, and seconds of one step; `parts` are the update's, which is mostly the peak.

    `host` are bytes in main memory beside the device (offloaded parts); on a CPU they count in the peaks. The largest
    pass of the update has `pass_tokens` tokens. `run` are seconds of the whole run. `timing` says what the seconds are:
    measured here, or computed and why; `computed` are a step's in any case. `ranks` are each layout on several devices.
    """

    parameters: int
    trainable: int
    parts: dict[str, int]
    phases: dict[str, int]
    host: int
    seconds: dict[str, float]
    computed: dict[str, float]
    run: dict[str, float]
    timing: str
    flops: float
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
        """The same as plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hardware", "ranks")}
        ranks = [rank.as_dict() for rank in self.ranks]
        return {**plain, "peak": self.peak, "fits": self.fits, "hardware": vars(self.hardware), "ranks": ranks}


def plan(
    config: Config,
    hardware: Hardware,
    prompt_tokens: int | None = None,
    *,
    devices: Sequence[int] = DEVICES,
    measured: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The worst step of a run: every completion as long as it may be, every prompt as long as the longest seen.

    The reference's pass and the update's are the real ones, run on tensors that have shapes and no memory, so that
    their peaks are counted rather than guessed. Times are counted operations over the hardware's speed, or, `measured`
    and where the hardware is this machine's, those of real passes on it; `report` is told what runs. On a GPU passes
    are as large as its memory allows, as a run makes them.
    """
    return _plan(config, hardware, prompt_tokens, devices, measured, report)


def _plan(
    config: Config,
    hardware: Hardware,
    prompt_tokens: int | None,
    devices: Sequence[int],
    measured: bool,
    report: Callable[[str], None],
    *,
    sized: bool = False,
) -> Plan:
    tokenizer, shape = model_source(config)
    lengths = [prompt_tokens] if prompt_tokens else prompt_lengths(config, tokenizer)
    prompt = max(lengths)
    with torch.device("meta"):  # shapes alone: nothing is allocated and nothing is read
        loaded = policy_shape(config, tokenizer, shape, hardware)
        reference = reference_shape(config, loaded, shape)
    micros = full_microbatches(config, loaded, prompt, hardware)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for model in {id(m): m for m in (loaded.model, reference) if m is not None}.values():
            materialize(model)
        cost = dry_run(config, loaded, reference, micros, hardware, prompt)
    seconds = _seconds(config, loaded, hardware, cost)
    computed = Plan(
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        trainable=sum(p.numel() for p in loaded.model.parameters() if p.requires_grad),
        parts=cost.parts,
        phases=cost.phases,
        host=cost.host,
        seconds=seconds,
        computed=seconds,
        run=_run_seconds(config, hardware, seconds, 0.0),
        timing="computed from counted operations",
        flops=sum(cost.flops.values()),
        pass_tokens=cost.pass_tokens,
        prompt_tokens=prompt,
        hardware=hardware,
        ranks=rank_plans(config, loaded, cost, hardware, devices),
    )
    fitting = _fitting_tokens(computed, config)
    if not sized and hardware.kind != "cpu" and fitting < min(computed.pass_tokens, config.optim.microbatch_tokens):
        smaller = load_config(config, [f"optim.microbatch_tokens={fitting}"])
        sized_plan = _plan(smaller, hardware, prompt_tokens, devices, measured, report, sized=True)
        # Where weights are spread, passes are as configured.
        pairs = zip(computed.ranks, sized_plan.ranks, strict=True)
        return replace(sized_plan, ranks=tuple(own if own.layout.spread else other for own, other in pairs))
    obstacle = _obstacle(config, computed)
    if not measured or obstacle:
        return replace(computed, timing=f"{computed.timing}{f': {obstacle}' if measured else ''}")
    passes = rollout_passes(config, decoding_traits(config, loaded, hardware))
    job = Job(
        config=config,
        tokenizer=tokenizer,
        shape=shape,
        prompts=lengths,
        passes=passes,
        micro_groups=max(1, len(micros[0].packed.tokens) // config.rollout.num_generations),
        counted_s=seconds["score"] + seconds["update"],
        layer_share=_layer_share(loaded),
    )
    del loaded, reference
    try:
        result = measure(job, report)
    except Exception as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        return replace(computed, timing=f"{computed.timing}: memory ran out when a step was tried")
    return replace(
        computed,
        seconds=result.seconds,
        run=_run_seconds(config, hardware, result.seconds, result.warmstart_s),
        timing=f"measured here on random weights, {result.extent(job)}",
    )


def _fitting_tokens(plan: Plan, config: Config) -> int:
    """Tokens of the largest pass that fits beside the rest, by the count that a run goes by."""
    parts = plan.parts
    free = plan.hardware.memory_bytes - sum(parts[name] for name in ("weights", "sampler", "reference", "workspaces"))
    moments = 0 if config.optim.offload else parts["optimizer"]
    passes = PassBytes(parts["gradients"], parts["activations"] / plan.pass_tokens)
    return fitting_tokens(free, passes, moments + parts["reference states"])


def _obstacle(config: Config, computed: Plan) -> str | None:
    """Why nothing of this job can be measured here, if so."""
    hardware, device = computed.hardware, config.model.device
    if not hardware.here:
        return f"{hardware.name} is not measured here"
    if not computed.fits:
        return "a step does not fit"
    if (hardware.kind == "cpu") != (device == "cpu" or not torch.cuda.is_available()):
        return f"model.device={device} is not the planned device"
    if config.rollout.named_engine.name != "native":
        return f"rollout.engine={config.rollout.named_engine.name} is not measured"
    return "model.quantization is not measured" if config.model.quantization is not None else None


def _layer_share(loaded: LoadedModel) -> float:
    """The share of a pass that is the layers': by parameters, those of the head beside them."""
    model = causal_lm(loaded.model)
    head = model.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    layers -= 0 if model.get_output_embeddings().weight is model.get_input_embeddings().weight else head
    return max(0.0, layers / (layers + head))


def _run_seconds(config: Config, hardware: Hardware, seconds: dict[str, float], warmstart_s: float) -> dict[str, float]:
    """The whole run: its supervised start, its steps, and its evaluations, which are rollouts of so many rows."""
    steps, every, evaluation = config.run.max_steps, config.eval.every, config.eval
    count = 1 + (steps // every + bool(steps % every) if every else 1)
    samples = 1 if evaluation.temperature == 0 else max(evaluation.k)
    rows = (1 + len(evaluation.tasks)) * evaluation.samples * samples / config.episodes_per_step
    parts = {
        "warm start": 0.0 if config.warmstart is None else config.warmstart.steps * warmstart_s,
        "steps": steps * seconds["step"],
        "evaluations": count * seconds["rollout"] * (rows if hardware.kind == "cpu" else max(1.0, rows)),
    }
    return {**parts, "all": sum(parts.values())}


def make_it_fit(config: Config, hardware: Hardware, prompt_tokens: int | None = None) -> list[tuple[list[str], Plan]]:
    """What can be changed until a step fits, one thing after another, each with the plan it leads to.

    The list ends with the first that fits, or with the last resort.
    """
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
    """Overrides that save memory, from the cheapest in time to the dearest."""
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


def _seconds(config: Config, loaded: LoadedModel, hardware: Hardware, cost: StepCost) -> dict[str, float]:
    """Operations over speed, and `layer_s` for each layer that is launched.

    A decode step reads weights and cache once, or computes, whichever takes longer. A backward pass launches twice what
    a forward pass does.
    """
    flops, parts = cost.flops, cost.parts
    single, half = hardware.flops_single, hardware.flops_half
    speed = single if loaded.dtype == torch.float32 else half
    scoring = speed if config.optim.precision in ("auto", "float32") else half
    model = causal_lm(loaded.model)
    layers = model.config.num_hidden_layers
    traits = decoding_traits(config, loaded, hardware)
    passes = rollout_passes(config, traits)
    computing = 2.0 * sum(p.numel() for p in model.parameters()) / speed
    reading = (parts["weights"] + parts["cache"] / 2) / hardware.bytes_per_s
    launched = len(passes.steps) * layers + (len(passes.steps) + len(passes.prefills)) * _SAMPLING_LAYERS
    launching = launched * hardware.layer_s * (_GRAPHED if traits.graphed else 1.0)
    micros = cost.micros * config.optim.minibatches
    seconds = {
        "rollout": sum(max(computing * rows, reading) for rows in passes.steps) + launching + flops["rollout"] / speed,
        "score": 0.0,
        "update": flops["update"] / scoring
        + micros * config.loss.num_iterations * 3 * layers * hardware.layer_s
        + 4 * parts["optimizer"] / hardware.bytes_per_s,
    }
    if "reference" in flops:
        seconds["score"] = flops["reference"] / scoring + micros * layers * hardware.layer_s
    return {**seconds, "step": sum(seconds.values())}


__all__ = ["GIB", "Plan", "make_it_fit", "plan"]
