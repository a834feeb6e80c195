"""The SFT warm start of a run, and the disk cache of warm starts that runs and preflights of this machine share.

A run saves its warm start under a digest of its settings. An entry of the cache is one file,
`<cache>/keel/warmstarts/<digest>`: the sha256 of the rest of the file, and the weights. `<cache>` is `$XDG_CACHE_HOME`,
or `~/.cache`. `KEEL_WARMSTART_CACHE=0` switches the cache off.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
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
from keel.config import Config
from keel.config.text import absolute_paths
from keel.envs import Task
from keel.loggers import MultiLogger
from keel.models.fingerprint import fingerprint
from keel.models.options import LoadedModel
from keel.reference import Reference
from keel.run.build import SftInputs, build_policy, build_warmstart
from keel.run.environment import package_versions
from keel.run.layout import build_layout, shard_run
from keel.run.parts import reference_of
from keel.trainer.checkpoint import atomic_folder, full_state_dict, rng_state, save_weights
from keel.trainer.integrity import WARMSTART, checksums, find_damage, with_checksums
from keel.trainer.loop import Interrupt
from keel.trainer.optim import resolve_amp_dtype
from keel.trainer.sft import DrawCount, Report, sft

CACHE_SWITCH = "KEEL_WARMSTART_CACHE"
MAX_CACHE_BYTES = 2**30  # bytes of all entries; the least recently used is removed first
MAX_DIGEST_S = 10.0  # seconds to hash the examples; the cache is not used if it takes longer
_TRUSTED = ("torch", "transformers", "peft", "keel")  # their version determines the results of their modules
_SETTINGS = ("OMP_", "MKL_", "KMP_", "ATEN_", "TORCH_", "PYTORCH_", "DNNL_", "ONEDNN_", "OPENBLAS_")
FOLDER = "warmstart"


class WarmstartResult(NamedTuple):
    """The last loss of a warm start, and the cache file that it came from; None if it was trained."""

    loss: float
    cache_file: Path | None = None


class _CacheHit(Exception):
    """Raised after the first step when the cache holds the final weights."""


def cached_sft(
    loaded: LoadedModel, start: SftInputs, report: Report | None = None, world: World = SINGLE_PROCESS
) -> WarmstartResult:
    """Run `sft`, or load bit-identical final weights from the cache.

    The first step always runs. The digest covers its loss, its gradient norm and the weights after it, all examples,
    the options, Keel's source, versions and settings of libraries, and the CPU. The cache is not used where results
    may still differ: on a GPU, with several processes, compiled models, user modules, or random numbers (dropout).
    """
    folder = _folder()
    alone = world.size == 1 and start.options.steps > 1
    key = _cache_key(loaded, start) if alone and folder is not None else None
    if folder is None or key is None:
        return WarmstartResult(sft(loaded, *start, report, world))
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
                raise _CacheHit
        if report is not None:
            report(step, line)

    try:
        loss = sft(loaded, *start, reported, world)
    except _CacheHit:
        assert found is not None
        for name, tensor in _trainable_state(model).items():
            tensor.copy_(found["weights"][name])
        return WarmstartResult(found["loss"], path)
    if path is not None and _random_state() == before:
        _write(path, {"loss": loss, "weights": _trainable_state(model)})
    return WarmstartResult(loss)


def _folder() -> Path | None:
    if os.environ.get(CACHE_SWITCH) == "0":
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # no home directory
        return (Path(base) if base else Path.home() / ".cache") / "keel" / "warmstarts"
    return None


def _cache_key(loaded: LoadedModel, start: SftInputs) -> str | None:
    """A digest of a warm start's inputs; None if other factors could affect the result."""
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
            *(1, _source(), package_versions(), platform.python_version(), _hardware()),
            *(fingerprint(model), str(model), model.training, sorted(_trainable_state(model)), str(loaded.lora)),
            *(None if config is None else config.to_dict(), getattr(config, "_attn_implementation", None)),
            *(loaded.pad_id, loaded.context_length, loaded.shared_prefix, start.options.model_dump()),
            *(start.optim.model_dump(), examples),
        ]
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_examples(start: SftInputs) -> str | None:
    """A digest of every batch's tokens and action masks; None if that takes over `MAX_DIGEST_S` or uses global RNGs."""
    before, digest, began = _random_state(), hashlib.sha256(), time.monotonic()
    for step in range(start.options.steps):
        for group in start.examples(step):
            learned = [(completion.tokens, completion.action) for completion in group.completions]
            digest.update(repr((group.prompt_tokens, learned)).encode())
        if time.monotonic() - began > MAX_DIGEST_S:
            return None
    return digest.hexdigest() if _random_state() == before else None


def _random_state() -> str:
    states = [state.tolist() if isinstance(state, Tensor) else state for state in rng_state().values()]
    return hashlib.sha256(repr(states).encode()).hexdigest()


@cache
def _source() -> str:
    """A digest of Keel's source code, which may be edited without a new version."""
    root = Path(keel.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _hardware() -> list[Any]:
    """The CPU, torch's build, threads and settings: they select kernels and thus rounding."""
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


def _trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a warm start may change: trained weights and buffers."""
    every = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # tied weights once
    return {name: x for name, x in model.state_dict().items() if name in trained or name not in every}


def _read(path: Path) -> dict[str, Any] | None:
    """Read an entry if its checksum matches; remove a damaged one."""
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
    """Write an entry if possible, and remove old ones above the limit."""
    if sum(tensor.nbytes for tensor in entry["weights"].values()) > MAX_CACHE_BYTES // 2:
        return
    file = io.BytesIO()
    torch.save(dict(entry), file)
    content = file.getvalue()
    with suppress(OSError, KeelError):  # without an entry the warm start is trained again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, mode=0o600)
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Remove entries down to `MAX_CACHE_BYTES`; other processes may do so concurrently."""
    entries = []
    for path in folder.iterdir():
        with suppress(OSError):
            entries.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MAX_CACHE_BYTES:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


def warmstart_folder(run: Path, config: Any) -> Path:
    """The folder of this configuration's warm start in the run's folder, named by a digest of its settings.

    The run's scorer and curriculum do not affect it. Files enter the digest by size and modification time, since
    hashing a whole model would be slow.
    """
    plain = absolute_paths(config.to_dict())
    plain["model"].pop("scorer")
    plain["data"]["curriculum"] = None
    files = [plain["model"]["name"], *_as_list(plain["data"]["path"]), *_as_list(plain["warmstart"]["path"])]
    sections = {name: plain[name] for name in ("model", "warmstart", "task", "data")}
    settings = {**sections, "seed": config.run.seed, "files": [_file_stamps(Path(name)) for name in files]}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return run / FOLDER / digest


def _as_list(path: Any) -> list[str]:
    return [] if path is None else [path] if isinstance(path, str) else list(path)


def _file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """(name, size, modification time) of a file or of every file in a folder; empty for a name that is neither."""
    path = path.expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a complete warm start. A folder gets its final name when it is complete."""
    return (folder / WARMSTART).is_file()


def warmstart(
    folder: Path,
    loaded: LoadedModel,
    recipe: Callable[[LoadedModel], SftInputs],
    report: Report | None = None,
    world: World = SINGLE_PROCESS,
) -> WarmstartResult:
    """Train the loaded model in place and save its weights; returns the last loss and the cache file."""
    start = recipe(loaded)
    started = cached_sft(loaded, start, report, world)
    weights = full_state_dict(loaded.model, wanted=world.is_main)
    if world.is_main:
        with atomic_folder(folder) as temporary:
            save_weights(temporary, loaded.model, loaded.tokenizer, weights)
            record = with_checksums({"loss": started.loss, "steps": start.options.steps}, checksums(temporary))
            (temporary / WARMSTART).write_text(record, encoding="utf-8")
    world.barrier()
    return started


def build_start(
    config: Config,
    folder: Path,
    checkpoint: Path | None,
    loggers: MultiLogger,
    task: Task | None,
    interrupt: Interrupt,
    world: World = SINGLE_PROCESS,
) -> LoadedModel:
    """The policy: from the checkpoint, from the warm start (trained now if missing), or the named model."""
    if checkpoint is not None:
        return build_policy(config, checkpoint)
    if config.warmstart is None:
        return build_policy(config)
    start = world.broadcast(warmstart_folder(folder, config))
    complete, wrong = world.broadcast((is_complete(start), find_damage(start) if is_complete(start) else []))
    if wrong:
        message = f"the warm start {start.relative_to(folder)} is damaged: {wrong[0]}; it is trained again"
        loggers.event("checkpoint/damaged", step=0, message=message)
    elif complete:
        loggers.event("warmstart", step=0, message="loaded the warm start of this configuration")
        return build_policy(config, start)
    loaded, began = build_policy(config), time.monotonic()
    steps = config.warmstart.steps
    every = max(1, steps // 5)
    role = "initial policy" if config.reference.params.get("model") else "initial policy and the reference"
    begin = f"{steps} SFT steps of {config.warmstart.batch_size} examples; the result is the {role}"
    loggers.event("warmstart", step=0, message=begin)

    def report(step: int, line: Mapping[str, float]) -> None:
        if interrupt.signal is not None:  # there is nothing to save yet
            raise KeyboardInterrupt
        loss = f"loss {line['loss/total']:.3f}"
        if step % every == 0:
            loggers.event("warmstart", step=0, message=f"SFT step {step}: {loss}")
        loggers.progress("warm start", step, steps, loss)

    layout, draws = build_layout(config, loaded, world), DrawCount()
    if layout.sharded:
        shard_run(layout, loaded, (), world, resolve_amp_dtype(config.optim, loaded.dtype, loaded.device))
    started = warmstart(start, loaded, lambda model: build_warmstart(config, model, task, draws), report, world)
    for note in draws.notes:
        loggers.event("note", step=0, message=note)
    spent = time.monotonic() - began
    done = "done" if started.cache_file is None else f"taken from the cache {started.cache_file}"
    message = f"{done} in {spent:.1f} s, loss {started.loss:.3f}; the result is the {role}"
    loggers.event("warmstart", step=0, message=message)
    # Engine and reference are built from unsharded weights.
    return build_policy(config, start) if layout.sharded else loaded


def start_reference(config: Config, folder: Path) -> Reference | None:
    """The run's initial reference: of its warm start, or of the named model."""
    start = None if config.warmstart is None else warmstart_folder(folder, config)
    if start is not None and (not is_complete(start) or find_damage(start)):
        return None
    return reference_of(config, build_policy(config, start))
