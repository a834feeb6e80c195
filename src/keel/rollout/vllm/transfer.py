"""Transfer weights to a sampler: checkpoint names, safetensors files, and digests to verify them."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.fingerprint import fingerprint_tensors
from keel.models.head import causal_lm, is_lora
from keel.models.sharding import full_tensor
from keel.rollout.engine import ModelMismatch, StaleWeights

SHARD_BYTES = 2**30  # bytes of one file


def process_folder(kind: str) -> Path:
    """Create a temporary folder for this process, and remove the folders of processes that no longer run."""
    namespace = Path("/proc/self/ns/pid")  # process ids are unique per machine and PID namespace
    where = f"{platform.node()}-{namespace.stat().st_ino if namespace.exists() else 0}"
    prefix = f"keel-{kind}-{where}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        process = folder.name.removeprefix(prefix).partition("-")[0]
        if process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a folder of another user
        return True
    return True


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor, or `size` of its rows (`dim` 0) or columns (`dim` 1) from `start` on."""

    name: str
    dim: int | None = None
    start: int = 0
    size: int = 0

    def __str__(self) -> str:
        return self.name if self.dim is None else f"{self.name}|{self.dim}|{self.start}|{self.size}"

    @classmethod
    def parse(cls, text: str) -> Part:
        name, *numbers = text.split("|")
        return cls(name, *map(int, numbers))

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the whole tensor."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.size)

    def digest(self, tensor: Tensor) -> str:
        """The digest of `tensor`, the values of this part."""
        return fingerprint_tensors([(str(self), tensor.contiguous())])


def checkpoint_weights(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The policy's unsharded base weights in the sampler's dtype, by checkpoint names. All processes must iterate.

    Tied weights come once. Models whose checkpoint layout differs from the model are refused.
    """
    inner: Any = causal_lm(policy)
    for name, parameter in inner.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        value = full_tensor(parameter.detach())
        yield name.replace(".base_layer.", "."), value.to(dtype) if value.is_floating_point() else value


def tied_names(policy: nn.Module) -> dict[str, str]:
    """Alternative names of tied weights, mapped to the name that is sent."""
    everything = causal_lm(policy).named_parameters(remove_duplicate=False)
    named = [(name.replace(".base_layer.", "."), id(parameter)) for name, parameter in everything]
    first: dict[int, str] = {}
    return {name: first[key] for name, key in named if first.setdefault(key, name) != name}


def save_shards(named: Iterable[tuple[str, Tensor]], folder: Path, limit: int = SHARD_BYTES) -> list[Path]:
    """Write tensors to safetensors files of about `limit` bytes, in order."""
    from safetensors.torch import save_file

    paths: list[Path] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        if shard:
            paths.append(folder / f"weights-{len(paths):05d}.safetensors")
            save_file(shard, str(paths[-1]))
            shard.clear()

    for name, tensor in named:
        shard[name] = tensor.to("cpu").contiguous().clone()
        if sum(part.numel() * part.element_size() for part in shard.values()) >= limit:
            flush()
    flush()
    return paths


def read_weights(source: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, or of all those in a folder."""
    from safetensors import safe_open

    for path in sorted(Path(source).glob("*.safetensors")) or [Path(source)]:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 — not a dictionary
                yield name, file.get_tensor(name)


def merge_worker_digests(workers: Iterable[dict[str, str]]) -> dict[str, str]:
    """Merge the digests of all workers; equal parts must have equal digests."""
    digests: dict[str, str] = {}
    for worker in workers:
        if other := next((part for part in worker if digests.get(part, worker[part]) != worker[part]), None):
            raise StaleWeights(f"two workers of the sampler hold different weights of {other}: restart the sampler")
        digests |= worker
    return digests


def check_buffers(policy: nn.Module) -> None:
    """Refuse a model with persistent buffers, which are neither sent nor read back."""
    for path, module in causal_lm(policy).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                raise KeelError(
                    f"the model has the buffer {f'{path}.{name}'.lstrip('.')} beside its parameters, which Keel does "
                    "not send to vLLM: use rollout.engine=native"
                )


def check_digests(held: dict[str, str], expected: dict[str, str], sampler: str, *, sent: bool = True) -> int:
    """Compare a sampler's digests with the policy's; return their number, or raise if any differ.

    `sent` means that the policy's weights were sent; otherwise the sampler has loaded its own.
    """
    foreign = sorted(set(held) - set(expected))
    missing = foreign or sorted(set(expected) - set(held))
    if missing:
        raise (ModelMismatch if foreign or not sent else StaleWeights)(
            f"{sampler} has other tensors than the policy, such as {missing[0]}, so its weights cannot be verified: "
            "start it on this model"
        )
    wrong = [name for name in held if held[name] != expected[name]]
    if not wrong:
        return len(held)
    differ = f"{len(wrong)} of {len(held)} tensors differ, the first is {wrong[0]}"
    if sent:
        raise StaleWeights(
            f"{sampler} does not have the policy's weights after they were sent: {differ}; its samples would come from "
            "another policy"
        )
    raise ModelMismatch(
        f"{sampler} serves another base model than the one under the policy's adapter: {differ}; start it on the "
        "run's model"
    )


def adapter_digest(matrix: Tensor) -> str:
    """The digest of an adapter's matrix, without its name."""
    return fingerprint_tensors([("", matrix.contiguous())])


@dataclass(frozen=True)
class Adapter:
    """The policy's active adapter in vLLM's form: A and B·scaling by layer, in the sampler's dtype."""

    name: str
    matrices: dict[str, tuple[Tensor, Tensor]]

    @property
    def ranks(self) -> dict[str, int]:
        return {layer: a.shape[0] for layer, (a, _) in self.matrices.items()}

    def digests(self) -> dict[str, str]:
        return {
            f"{layer}.{kind}": adapter_digest(matrix)
            for layer, (a, b) in self.matrices.items()
            for kind, matrix in (("A", a), ("B", b))
        }


def lora_rank(policy: Any) -> int:
    """The largest rank of the policy's adapters; 0 without any."""
    if not is_lora(policy):
        return 0
    configs = policy.peft_config.values()
    return max(rank for config in configs for rank in (config.r, *(config.rank_pattern or {}).values()))


def adapter_of(policy: Any, dtype: torch.dtype) -> Adapter:
    """The active adapter; refuses one that vLLM cannot load."""
    name = policy.active_adapters[0]
    settings = policy.peft_config[name]
    for option in ("modules_to_save", "use_dora", "lora_bias"):
        if getattr(settings, option, None) and getattr(settings, option) != "none":
            raise KeelError(f"the adapter has {option}, which vLLM does not load: use rollout.engine=native")
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for path, module in causal_lm(policy).named_modules():
        if name in getattr(module, "lora_A", {}):
            a, b = (full_tensor(getattr(module, kind)[name].weight.detach()).to(dtype) for kind in ("lora_A", "lora_B"))
            matrices[path] = (a, b if module.scaling[name] == 1 else b * module.scaling[name])
    return Adapter(name, matrices)


class PartDigests:
    """The expected digests of a sampler's parts, recorded from the sent weights."""

    def __init__(self, parts: Iterable[str], policy: nn.Module) -> None:
        tied = tied_names(policy)
        self._by_name: dict[str, list[Part]] = {}
        for part in map(Part.parse, parts):
            self._by_name.setdefault(tied.get(part.name, part.name), []).append(part)
        self.digests: dict[str, str] = {}

    def recorded(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors and record the digests of their parts. A tensor without parts is recorded as a whole."""
        self.digests = {}
        for name, tensor in named:
            for part in self._by_name.get(name, [Part(name)]):
                self.digests[str(part)] = part.digest(part.of(tensor))
            yield name, tensor


def save_adapter(policy: Any, folder: Path) -> Path:
    """Write the active adapter in peft's format to a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    name = policy.active_adapters[0]
    policy.save_pretrained(str(folder), selected_adapters=[name])
    return folder if name == "default" else folder / name
