"""What a plan counts on: memory and speed of known accelerators, and of this machine by a short measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import torch

from keel.base.errors import unknown

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """Memory in bytes; operations a second that matrix products really reach, in half and single precision; bytes a
    second from memory; `layer_s` is the time to launch one layer's kernels; `workspace_bytes` are cuBLAS's workspaces,
    once for forward passes and once for backward ones. `here` is true of this machine's own device.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_half: float
    flops_single: float
    bytes_per_s: float
    layer_s: float
    workspace_bytes: int = 0
    here: bool = False


_HOPPER, _OTHERS = 2 * 32 * 2**20, 2 * 8519680  # torch's cuBLAS workspaces

# Speeds are what dense products reach in practice (about six tenths of the data sheets'), not peaks.
KNOWN: dict[str, Hardware] = {
    "h200": Hardware("H200", "cuda", int(139 * GIB), 480e12, 40e12, 3.8e12, 4e-4, _HOPPER),
    "h100": Hardware("H100 80 GB", "cuda", int(79 * GIB), 450e12, 40e12, 2.6e12, 4e-4, _HOPPER),
    "a100": Hardware("A100 80 GB", "cuda", int(79 * GIB), 200e12, 15e12, 1.6e12, 4e-4, _OTHERS),
    "l40s": Hardware("L40S", "cuda", int(44 * GIB), 200e12, 50e12, 0.7e12, 4e-4, _OTHERS),
    "rtx4090": Hardware("RTX 4090", "cuda", int(23.5 * GIB), 140e12, 50e12, 0.8e12, 4e-4, _OTHERS),
}


def find_hardware(name: str = "auto", memory_gib: float | None = None) -> Hardware:
    """By name, or this machine: its GPU where there is one, else its CPU, measured for a fraction of a second."""
    if name == "auto":
        hardware = _gpu() if torch.cuda.is_available() else _cpu()
    elif name == "cpu":
        hardware = _cpu()
    elif name in KNOWN:
        hardware = KNOWN[name]
    else:
        raise unknown("hardware", name, [*KNOWN, "cpu", "auto"])
    return hardware if memory_gib is None else replace(hardware, memory_bytes=int(memory_gib * GIB))


def _gpu() -> Hardware:
    properties = torch.cuda.get_device_properties(0)
    near = next((hw for key, hw in KNOWN.items() if key in properties.name.lower().replace(" ", "")), KNOWN["a100"])
    return replace(near, name=properties.name, memory_bytes=int(properties.total_memory), here=True)


def _cpu() -> Hardware:
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    speed = 2 * 512**3 / _fastest(lambda: a @ b)
    block = torch.empty(2**24)
    rate = 2 * block.nbytes / _fastest(lambda: block.clone())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
    return Hardware("this CPU", "cpu", memory, speed, speed, rate, 2e-4, here=True)


def _fastest(work: object, seconds: float = 0.1) -> float:
    assert callable(work)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
