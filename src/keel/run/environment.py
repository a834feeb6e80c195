"""The environment of a run (versions, device, threads, commit), for env.json and bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import keel
from keel.config import Config
from keel.config.load import flatten_options

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "numpy", "pydantic"),
    *("rich", "typer", "tensorboard", "wandb", "bitsandbytes", "vllm"),
)


def environment() -> dict[str, Any]:
    """The environment as plain data; unknown values are null."""
    return {
        "keel": keel.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
    }


def package_versions() -> dict[str, str | None]:
    """Versions of packages that may affect a run's results; null if not installed."""
    return {name: _version(name) for name in PACKAGES}


def settings_of(config: Config) -> dict[str, Any]:
    """Versions and options, which must be equal on all processes of a run."""
    versions = {"Keel": keel.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    return {**versions, "transformers": _version("transformers"), **dict(flatten_options("", config.to_dict()))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, if keel runs from one."""
    if not (Path(__file__).parents[3] / "pyproject.toml").is_file():
        return None
    try:
        process = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None if process.returncode == 0 else None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
