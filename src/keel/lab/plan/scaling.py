"""A model of cost for large jobs: memory, bytes and seconds of a step on 8 to 1,024 devices. All of it is computed.

`python -m keel.lab.plan.scaling` prints the table of docs/scaling.md; `--hardware`, `--memory-gib` and the sizes of the
job can be changed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from keel.lab.plan.hardware import GIB, KNOWN, Hardware, find_hardware
from keel.run.footprint import Job, Layout, ModelShape, Passes, held, passing, sent, shape_of

COUNTS = (8, 16, 64, 256, 1024)
MACHINE = 8


@dataclass(frozen=True)
class Links:
    """Bytes a second that a device sends: inside a machine, and to others by its own network card; seconds a hop."""

    inside: float = 360e9  # NVLink of a Hopper GPU, eight tenths of the data sheet's 450 GB/s
    between: float = 40e9  # 400 Gbit/s a device, eight tenths
    hop_s: float = 5e-6


@dataclass(frozen=True)
class Work:
    """A step: problems, completions of each, tokens of a prompt and of a completion, tokens of a microbatch."""

    prompts: int = 1024
    group: int = 8
    prompt: int = 512
    completion: int = 2048
    microbatch: int = 16384

    @property
    def scored(self) -> int:
        """Tokens of a pass over the batch; a prompt is read once a group."""
        return self.prompts * (self.prompt + self.group * self.completion)


@dataclass(frozen=True)
class Model:
    """A shape, and what its passes cost: parameters that a token meets, layers, widths of states, queries, and keys."""

    name: str
    shape: ModelShape
    active: int
    layers: int
    hidden: int
    queries: int
    keys: int

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in self.shape.parameters)


@dataclass(frozen=True)
class Cost:
    """A device's bytes by part, the rows that it samples at a time, bytes sent by part, seconds by part."""

    layout: Layout
    parts: dict[str, int]
    rows: int
    sent: dict[str, int]
    seconds: dict[str, float]
    fits: bool

    @property
    def memory(self) -> int:
        return sum(self.parts.values())


def dense(name: str, **sizes: Any) -> Model:
    """A Llama or Qwen2 shape."""
    from transformers import LlamaConfig

    return _model(name, LlamaConfig(tie_word_embeddings=False, **sizes), lambda shape: 1.0)


def mixture_of_experts(name: str, **sizes: Any) -> Model:
    """A Qwen3-MoE shape."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(tie_word_embeddings=False, **sizes)
    return _model(name, config, lambda shape: config.num_experts_per_tok / config.num_experts if len(shape) == 3 else 1)


def _model(name: str, config: Any, used: Callable[[tuple[int, ...]], float]) -> Model:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shape = shape_of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    embedding = config.vocab_size * config.hidden_size
    active = sum(int(p.numel * used(p.shape)) for p in shape.parameters) - embedding  # looked up, not multiplied
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = size * config.num_attention_heads, size * config.num_key_value_heads
    return Model(name, shape, active, config.num_hidden_layers, config.hidden_size, queries, keys)


def models() -> Iterator[Model]:
    """The shapes of Qwen2.5-7B, Llama 3 70B and Qwen3-30B-A3B."""
    yield dense(
        "7B",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    yield dense(
        "70B",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    yield mixture_of_experts(
        "MoE 30B, 3B active",
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )


def cost(model: Model, layout: Layout, work: Work, hardware: Hardware, links: Links) -> Cost:
    """One step with fp32 weights, bf16 passes, recomputed activations, a frozen reference and a bf16 sampler."""
    devices = layout.devices
    job = Job(pass_item=2, sampler_item=2, reference=True)
    micros = math.ceil(work.scored / work.microbatch / devices)
    passes = Passes(micros, reference=micros, tokens=work.prompts * work.group * work.completion)
    tokens = min(work.microbatch, math.ceil(work.scored / devices))
    # A layer's input is kept of each, and of the one that is recomputed about 20 numbers of the hidden width a token.
    activations = 2 * tokens * model.hidden * (model.layers + 20)
    parts = held(model.shape, job, layout) | passing(model.shape, job, layout, passes) | {"activations": activations}
    traffic = sent(model.shape, job, layout, passes)
    room = 0.9 * hardware.memory_bytes - sum(parts[name] for name in ("weights", "sampler", "reference", "optimizer"))
    own_rows, row_bytes = math.ceil(work.prompts / devices) * work.group, _row_bytes(model, work)
    rows = max(0, min(own_rows, int(room / row_bytes) // work.group * work.group))
    seconds = {
        "rollout": _rollout_seconds(model, work, hardware, own_rows, max(rows, work.group)),
        "passes": _pass_seconds(model, work, hardware, devices),
        **_wire_seconds(model, layout, links, micros, traffic),
    }
    # Gathers run beside the passes, so that the longer of both counts.
    step = seconds["rollout"] + max(seconds["passes"], seconds["wire"]) + seconds["sync"] + seconds["exchange"]
    fits = rows > 0 and sum(parts.values()) <= hardware.memory_bytes
    return Cost(layout, parts, rows, traffic, {**seconds, "step": step}, fits)


def _row_bytes(model: Model, work: Work) -> float:
    """Keys and values in bf16 of a completion at its full length, and its share of the prompt's."""
    return 2 * 2 * model.layers * model.keys * (work.completion + work.prompt / work.group)


def _rollout_seconds(model: Model, work: Work, hardware: Hardware, own_rows: int, rows: int) -> float:
    """Decode steps of `rows` at a time, each of which reads weights and cache or computes, and the prompts' prefill."""
    reading = (2 * model.parameters + rows * _row_bytes(model, work) / 2) / hardware.bytes_per_s
    computing = 2 * model.active * rows / hardware.flops_half
    prefill = 2 * model.active * own_rows / work.group * work.prompt / hardware.flops_half
    return math.ceil(own_rows / rows) * work.completion * max(reading, computing) + prefill


def _pass_seconds(model: Model, work: Work, hardware: Hardware, devices: int) -> float:
    """The reference's pass; the update's forward, that recomputed, and backward, which is two."""
    attention = 2 * model.layers * model.queries * (work.prompt + work.completion)  # a token over half of its row
    return 5 * (2 * model.active + attention) * work.scored / devices / hardware.flops_half


def _wire_seconds(model: Model, layout: Layout, links: Links, micros: int, traffic: dict[str, int]) -> dict[str, float]:
    """Bytes over links, and the hops of each collective's ring."""
    crosses = layout.sharding != "hybrid" and layout.devices > MACHINE
    rate = min(links.inside, MACHINE * links.between) if crosses else links.inside  # a ring a network card
    between = 0.0
    if layout.sharding == "hybrid":  # gradients of the parts are summed over machines
        between = 2 * micros * 4 * model.parameters / layout.shards * (layout.replicas - 1) / layout.replicas
    passes = sum(traffic[name] for name in ("update: gather", "update: gradients", "score: gather"))
    collectives = 4 * micros * (model.layers + 1) if layout.spread else 2
    hops = collectives * ((layout.shards if layout.spread else layout.devices) - 1) * links.hop_s
    return {
        "wire": (passes - between) / rate + between / links.between + hops,
        "sync": traffic["weight sync"] / rate,
        "exchange": (traffic["groups"] + traffic["scores"]) / links.between,
    }


def candidates(devices: int) -> list[Layout]:
    """The layouts of a number of devices."""
    hybrid = [Layout(devices, "hybrid", MACHINE)] if devices > MACHINE else []
    return [Layout(devices), *hybrid, Layout(devices, "full", devices)]


def best(model: Model, devices: int, work: Work, hardware: Hardware, links: Links) -> Cost:
    """The layout with the shortest step among those that fit, or the one that needs the least memory."""
    costs = [cost(model, layout, work, hardware, links) for layout in candidates(devices)]
    fitting = [one for one in costs if one.fits]
    return min(fitting, key=lambda one: one.seconds["step"]) if fitting else min(costs, key=lambda one: one.memory)


COLUMNS = (
    *("model", "devices", "sharding", "GiB a device", "of it sampler", "rows at a time", "GB sent"),
    *("rollout s", "passes s", "wire s", "sync s", "step s"),
)


def table(work: Work, hardware: Hardware, links: Links, counts: Sequence[int] = COUNTS) -> str:
    """A row for each model and number of devices, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    for model in models():
        for devices in counts:
            one = best(model, devices, work, hardware, links)
            figures = [one.seconds[name] for name in ("rollout", "passes", "wire", "sync", "step")]
            times = [f"{figure:.3g}" for figure in figures] if one.fits else ["does not fit", *[""] * 4]
            sizes = [f"{one.memory / GIB:.0f}", f"{one.parts['sampler'] / GIB:.0f}", str(one.rows)]
            row = [model.name, str(devices), one.layout.sharding, *sizes, f"{sum(one.sent.values()) / 1e9:.0f}", *times]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m keel.lab.plan.scaling", description=__doc__)
    parser.add_argument("--hardware", default="h200", choices=list(KNOWN))
    parser.add_argument("--memory-gib", type=float)
    for name, value in vars(Work()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args(arguments))
    work = replace(Work(), **{name: given[name] for name in vars(Work())})
    print(table(work, find_hardware(given["hardware"], given["memory_gib"]), Links()))


if __name__ == "__main__":
    main()
