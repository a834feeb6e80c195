"""Warm starts that were made before, on this machine's disk: a run or preflight that would make one again takes it.

An entry is one file, `<cache>/keel/warmstarts/<digest>`: the sha256 of what follows, and the weights. `<cache>` is
`$XDG_CACHE_HOME`, or `~/.cache`. `KEEL_WARMSTART_CACHE=0` switches it off.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.base.world import SINGLE_PROCESS, World
from keel.models.fingerprint import fingerprint
from keel.models.loaded import LoadedModel
from keel.run.build import Supervised
from keel.run.environment import package_versions
from keel.trainer.checkpoint import rng_state
from keel.trainer.sft import Report, sft

SWITCH = "KEEL_WARMSTART_CACHE"
MOST_BYTES = 2**30  # of all entries; the one that was used least recently goes first
LONGEST_LOOK_S = 10.0  # at the examples; where this is not enough, nothing is taken and nothing is kept
_TRUSTED = ("torch", "transformers", "peft", "keel")  # their versions say what their modules compute
_SETTINGS = ("OMP_", "MKL_", "KMP_", "ATEN_", "TORCH_", "PYTORCH_", "DNNL_", "ONEDNN_", "OPENBLAS_")


class Started(NamedTuple):
    """How a warm start ended: its last loss, and the file that it was taken from, None where it was made."""

    loss: float
    taken: Path | None = None


class _Found(Exception):
    """Ends a warm start after its first step: the weights after the last one are there."""


def cached_sft(
    loaded: LoadedModel, start: Supervised, report: Report | None = None, world: World = SINGLE_PROCESS
) -> Started:
    """`sft`, or the weights that the same one ended in before, put into the model: equal in every bit.

    The first step is always made. Its loss, its gradient norm and the weights after it are a part of the digest, beside
    all examples, the options, Keel's source, versions and settings of the libraries, and the CPU. What could still
    differ is made anew: on a GPU, over several processes, compiled, with modules of the user's own, or where random
    numbers are drawn, as by dropout.
    """
    folder = _folder()
    alone = world.size == 1 and start.options.steps > 1
    key = _key_before(loaded, start) if alone and folder is not None else None
    if folder is None or key is None:
        return Started(sft(loaded, *start, report, world))
    model, before = loaded.model, _random_state()
    path: Path | None = None
    found: dict[str, Any] | None = None

    def reported(step: int, line: Mapping[str, float]) -> None:
        nonlocal path, found
        if step == 1 and _random_state() == before:
            first = sorted((name, float(value).hex()) for name, value in line.items())
            path = folder / _digest([key, first, fingerprint(model)])
            found = _read(path)
            if found is not None:
                raise _Found
        if report is not None:
            report(step, line)

    try:
        loss = sft(loaded, *start, reported, world)
    except _Found:
        assert found is not None
        for name, tensor in _changing(model).items():
            tensor.copy_(found["weights"][name])
        return Started(found["loss"], path)
    if path is not None and _random_state() == before:
        _write(path, {"loss": loss, "weights": _changing(model)})
    return Started(loss)


def _folder() -> Path | None:
    if os.environ.get(SWITCH) == "0":
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # nobody's home
        return (Path(base) if base else Path.home() / ".cache") / "keel" / "warmstarts"
    return None


def _key_before(loaded: LoadedModel, start: Supervised) -> str | None:
    """A digest of all that decides a warm start and is known before it; None where that is not all that decides."""
    model = loaded.model
    if any(type(module).__module__.partition(".")[0] not in _TRUSTED for module in model.modules()):
        return None
    if loaded.device.type != "cpu" or any(module._compiled_call_impl is not None for module in model.modules()):
        return None
    if (examples := _digest_of_examples(start)) is None:
        return None
    config = getattr(model, "config", None)
    return _digest(
        [
            *(1, _source(), package_versions(), platform.python_version(), _machine()),
            *(fingerprint(model), str(model), model.training, sorted(_changing(model)), str(loaded.lora)),
            *(None if config is None else config.to_dict(), getattr(config, "_attn_implementation", None)),
            *(loaded.pad_id, loaded.context_length, loaded.shared_prefix, start.options.model_dump()),
            *(start.optim.model_dump(), examples),
        ]
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_examples(start: Supervised) -> str | None:
    """Of the tokens of every batch, and which of them are learned; None where that takes too long."""
    before, digest, began = _random_state(), hashlib.sha256(), time.monotonic()
    for step in range(start.options.steps):
        for group in start.examples(step):
            learned = [(completion.tokens, completion.action) for completion in group.completions]
            digest.update(repr((group.prompt_tokens, learned)).encode())
        if time.monotonic() - began > LONGEST_LOOK_S:
            return None
    return digest.hexdigest() if _random_state() == before else None


def _random_state() -> str:
    states = [state.tolist() if isinstance(state, Tensor) else state for state in rng_state().values()]
    return hashlib.sha256(repr(states).encode()).hexdigest()


@cache
def _source() -> str:
    """Of Keel's own code: a version alone does not say what was edited."""
    root = Path(keel.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _machine() -> list[Any]:
    """What chooses between kernels that round otherwise: the CPU, torch's build, threads and settings."""
    lines = []
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        names = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU", "Features")
        lines = [line for line in first.splitlines() if line.startswith(names)]
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    backends = torch.backends
    return [
        *(platform.system(), platform.machine(), platform.processor(), lines, settings),
        *(torch.__config__.show(), torch.__config__.parallel_info(), torch.get_num_threads()),
        *(backends.cpu.get_cpu_capability(), backends.mkldnn.enabled, torch.get_float32_matmul_precision()),
        *(str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled()),
    ]


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """What a warm start may change: the weights that are trained, and buffers."""
    every = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # tied ones once
    return {name: x for name, x in model.state_dict().items() if name in trained or name not in every}


def _read(path: Path) -> dict[str, Any] | None:
    """An entry that is as it was written; a damaged one is removed."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
        os.utime(path)
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest().encode() == checksum:
        entry: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return entry
    with suppress(OSError):
        path.unlink()
    return None


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    """Keep an entry if the disk takes it, and remove those that are too many then."""
    if sum(tensor.nbytes for tensor in entry["weights"].values()) > MOST_BYTES // 2:
        return
    file = io.BytesIO()
    torch.save(dict(entry), file)
    content = file.getvalue()
    with suppress(OSError, KeelError):  # a warm start that is not kept is made again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, mode=0o600)
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Down to `MOST_BYTES`; another process may be doing the same."""
    entries = []
    for path in folder.iterdir():
        with suppress(OSError):
            entries.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


__all__ = ["SWITCH", "Started", "cached_sft"]
