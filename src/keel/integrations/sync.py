"""Compare a vLLM sampler's weights with the policy's by a digest of each tensor, in any trainer."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.head import causal_lm, is_lora
from keel.models.sharding import full_tensor
from keel.rollout.engine import StaleWeights
from keel.rollout.vllm.transfer import PartDigests, adapter_of, checkpoint_weights
from keel.rollout.vllm.worker import KeelWorker

logger = logging.getLogger("keel")
MAX_STEPS = 8  # number of steps whose digests are kept, to identify the step of a stale sampler's weights
MAX_NAMES = 3  # largest number of tensors that a message names


class Sampler:
    """Reads from vLLM the checkpoint names and digests of its tensors, the adapter in a slot, and the dtype."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self.dtype: torch.dtype = getattr(torch, call("keel_dtype")[0])

    @classmethod
    def colocated(cls, llm: Any) -> Sampler:
        """A `vllm.LLM` whose worker is in this process, for example TRL's colocated vLLM."""

        def call(method: str, *args: Any) -> list[Any]:
            try:
                runner = llm.llm_engine.model_executor.driver_worker.model_runner
                refuse_shards(runner.model)
                return [getattr(_SyncWorker(runner), method)(*args)]
            except AttributeError as error:
                raise KeelError(
                    f"the model was not found inside this version of vLLM ({error}): pip install 'vllm==0.32.*', or "
                    "compare log-probabilities with keel.lab.traces.check_drawn"
                ) from None

        return cls(call)

    @classmethod
    def served(cls, *urls: str) -> Sampler:
        """One or more `vllm serve` processes, started with VLLM_SERVER_DEV_MODE=1 and Keel's worker extension."""
        import httpx2

        def ask(url: str, method: str, args: tuple[Any, ...]) -> list[Any]:
            body = {"method": method, "args": list(args)}
            try:
                answer = httpx2.post(f"{url.rstrip('/')}/collective_rpc", json=body, timeout=600.0)
            except httpx2.HTTPError as error:
                raise KeelError(f"{url} does not answer ({error}): is the server up?") from None
            if answer.status_code != 200:
                raise KeelError(
                    f"{url} does not report its weights (status {answer.status_code}): start it with "
                    "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls keel.rollout.vllm.worker.KeelWorker (verl: "
                    "keel.integrations.verl.worker.SyncWorker)"
                )
            return list(answer.json()["results"])

        return cls(lambda method, *args: [result for url in urls for result in ask(url, method, args)])

    def parts(self) -> list[str]:
        parts = [part for worker in self._call("keel_parts") for part in worker]
        if shard := next((part for part in parts if "|" in part), None):
            raise _sharded(shard.partition("|")[0])
        return parts

    def digests(self) -> dict[str, str]:
        return _agreed(self._call("keel_digests"))

    def adapter(self, slot: int, ranks: Mapping[str, int]) -> dict[str, str]:
        """The digests of an adapter's matrices; empty if the adapter is not loaded."""
        return _agreed(self._call("keel_adapter", slot, dict(ranks)))


def _agreed(workers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The digests that are equal on all workers. Omitted tensors count as wrong."""
    first, *others = workers
    return {name: digest for name, digest in first.items() if all(other.get(name) == digest for other in others)}


class _SyncWorker(KeelWorker):
    """Keel's methods on a worker in this process."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner


def refuse_shards(model: nn.Module) -> None:
    """Raise for tensor-parallel shards, because they cannot be compared."""
    for path, module in model.named_modules():
        if getattr(module, "tp_size", 1) > 1:
            raise _sharded(path)


def _sharded(name: str) -> KeelError:
    return KeelError(
        f"the sampler has only a tensor-parallel shard of {name}, which SyncCheck cannot compare: set the "
        "tensor-parallel size to 1, or compare log-probabilities with keel.lab.traces.check_drawn"
    )


def merged_weights(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors, by checkpoint name, that a sampler without adapters must have. Adapters are merged as in peft."""
    inner: Any = causal_lm(policy)
    adapted = {path: module for path, module in inner.named_modules() if hasattr(module, "base_layer")}
    for name, parameter in inner.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        path, of_base, leaf = name.rpartition(".base_layer.")
        value = full_tensor(merged_parameter(adapted[path], leaf) if of_base else parameter.detach())
        name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name.replace(".base_layer.", "."))
        yield name, value.to(dtype) if value.is_floating_point() else value


@torch.no_grad()
def merged_parameter(layer: Any, leaf: str) -> Tensor:
    """A parameter of an adapted layer with its adapters merged. The layer's bits are restored afterwards."""
    base = layer.get_base_layer()
    if layer.merged:
        return base.get_parameter(leaf).detach()
    own = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    layer.merge()
    value = base.get_parameter(leaf).detach().clone()
    layer.unmerge()
    for name, parameter in base.named_parameters():
        parameter.data.copy_(own[name])
    return value


@dataclass(frozen=True)
class SyncResult:
    """The result of one comparison.

    `wrong` are the tensors that differ. `sound_until` is the last step without a difference. `weights_of` is the step
    whose weights the sampler has instead, if known.
    """

    step: int
    compared: int
    wrong: tuple[str, ...]
    sound_until: int | None = None
    weights_of: int | None = None

    def __str__(self) -> str:
        if not self.wrong:
            return f"step {self.step}: all {self.compared} tensors of the sampler are the policy's"
        named = ", ".join(self.wrong[:MAX_NAMES]) + (", …" if len(self.wrong) > MAX_NAMES else "")
        since = "since the beginning" if self.sound_until is None else f"since step {self.sound_until + 1}"
        of = "" if self.weights_of is None else f"; they equal the policy's tensors of step {self.weights_of}"
        return (
            f"sampler/stale: at step {self.step}, {len(self.wrong)} of {self.compared} tensors of the sampler differ "
            f"from the policy's, {since}: {named}{of}. Sync the sampler after every update, adapters included"
        )


class SyncLedger:
    """Stores digests of the policy after each update and compares a sampler with them.

    `slot` is the adapter's id in a sampler that stores LoRA separately from the base weights. Without a slot, the
    sampler must have the adapters merged into its weights.
    """

    def __init__(self, sampler: Sampler, policy: nn.Module, slot: int | None = None) -> None:
        self.sampler, self.policy, self.slot = sampler, policy, slot
        if slot is not None and not is_lora(policy):
            raise KeelError(
                f"adapter {slot} of the sampler cannot be compared, because the policy has no adapter: leave it out"
            )
        self._parts = sampler.parts()
        self._expected: OrderedDict[int, dict[str, str]] = OrderedDict()
        self._sound: dict[str, int] = {}

    def note(self, step: int) -> None:
        """Store the digests that the sampler must have after a sync with the current policy."""
        if any(hasattr(parameter, "ds_id") for parameter in self.policy.parameters()):
            raise KeelError(
                "SyncCheck cannot read weights that DeepSpeed ZeRO-3 has sharded: use stage 2, or compare "
                "log-probabilities with keel.lab.traces.check_drawn"
            )
        held = PartDigests(self._parts, self.policy)
        weights = merged_weights if self.slot is None else checkpoint_weights
        for _ in held.recorded(weights(self.policy, self.sampler.dtype)):
            pass
        digests = held.digests
        for name in sorted(set(self._parts) ^ set(digests)):
            has, lacks = ("policy", "sampler") if name in digests else ("sampler", "policy")
            raise KeelError(f"the {has} has a tensor {name}, but the {lacks} has not: the sampler serves another model")
        if self.slot is not None:
            digests |= {
                f"adapter {name}": x for name, x in adapter_of(self.policy, self.sampler.dtype).digests().items()
            }
        self._expected[step] = digests
        while len(self._expected) > MAX_STEPS:
            self._expected.popitem(last=False)

    def compare(self, step: int) -> SyncResult:
        """Compare the current sampler with the digests of that step."""
        if step not in self._expected:
            raise KeelError(f"there are no digests of the policy at step {step}: call note after every update")
        held, expected = self._held(), self._expected[step]
        wrong = tuple(name for name in expected if held.get(name) != expected[name])
        for name in expected:
            if name not in wrong:
                self._sound[name] = step
        until = min((self._sound.get(name, -1) for name in wrong), default=-1)
        of = next(
            (s for s, past in reversed(self._expected.items()) if all(held.get(n) == past[n] for n in wrong)), None
        )
        return SyncResult(step, len(expected), wrong, None if until < 0 else until, of if wrong else None)

    def _held(self) -> dict[str, str]:
        held = self.sampler.digests()
        if self.slot is not None:
            ranks = adapter_of(self.policy, self.sampler.dtype).ranks
            held |= {f"adapter {name}": x for name, x in self.sampler.adapter(self.slot, ranks).items()}
        return held


def stop_or_warn(result: SyncResult, on_mismatch: Literal["stop", "warn"]) -> None:
    """Raise `StaleWeights` or log a warning on a mismatch."""
    if result.wrong and on_mismatch == "stop":
        raise StaleWeights(str(result))
    if result.wrong:
        logger.warning("%s", result)
