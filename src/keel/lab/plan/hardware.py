"""Memory of known GPUs and of this machine."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import torch

from keel.base.errors import KeelError, unknown

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A device's memory in bytes; `workspace_bytes` are cuBLAS's workspaces of forward and backward passes."""

    name: str
    kind: str
    memory_bytes: int
    workspace_bytes: int = 0


_HOPPER, _OTHERS = 2 * 32 * 2**20, 2 * 8519680  # bytes of torch's cuBLAS workspaces

KNOWN: dict[str, Hardware] = {
    "h200": Hardware("H200", "cuda", int(139 * GIB), _HOPPER),
    "h100": Hardware("H100 80 GB", "cuda", int(79 * GIB), _HOPPER),
    "a100": Hardware("A100 80 GB", "cuda", int(79 * GIB), _OTHERS),
    "l40s": Hardware("L40S", "cuda", int(44 * GIB), _OTHERS),
    "rtx4090": Hardware("RTX 4090", "cuda", int(23.5 * GIB), _OTHERS),
}


def find_hardware(name: str = "auto") -> Hardware:
    """Hardware by name, or this machine (its GPU, else its CPU); `NAME:GIB` overrides the memory."""
    name, colon, gib = name.partition(":")
    if name == "auto":
        hardware = _gpu() if torch.cuda.is_available() else _cpu()
    elif name == "cpu":
        hardware = _cpu()
    elif name in KNOWN:
        hardware = KNOWN[name]
    else:
        raise unknown("hardware", name, [*KNOWN, "cpu", "auto"])
    return replace(hardware, memory_bytes=_memory_bytes(name, gib)) if colon else hardware


def _memory_bytes(name: str, gib: str) -> int:
    try:
        memory = float(gib)
    except ValueError:
        memory = math.nan
    if not 0 < memory < math.inf:
        raise KeelError(f"--hardware {name}:{gib}: give the memory in GiB after the colon, such as {name}:24")
    return int(memory * GIB)


def _gpu() -> Hardware:
    properties = torch.cuda.get_device_properties(0)
    near = next((hw for key, hw in KNOWN.items() if key in properties.name.lower().replace(" ", "")), KNOWN["a100"])
    return replace(near, name=properties.name, memory_bytes=int(properties.total_memory))


def _cpu() -> Hardware:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
    return Hardware("this CPU", "cpu", memory)
