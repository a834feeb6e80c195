"""Does a sampler hold the policy's weights? Digests of both, tensor by tensor, for any trainer around vLLM."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.adapters import is_lora
from keel.models.head import causal_lm
from keel.models.sharding import full_tensor
from keel.rollout.engine import StaleWeights
from keel.rollout.vllm.transfer import PartDigests, adapter_of, checkpoint_weights, merge_worker_digests
from keel.rollout.vllm.worker import KeelWorker

logger = logging.getLogger("keel")
KEPT = 8  # steps whose digests are remembered, to say which weights the sampler holds instead
NAMED = 3  # tensors that a message names


class Sampler:
    """What is read of a vLLM: its parts under a checkpoint's names, their digests, the adapter in a slot, its type."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self.dtype: torch.dtype = getattr(torch, call("keel_dtype")[0])

    @classmethod
    def colocated(cls, llm: Any) -> Sampler:
        """A `vllm.LLM` whose worker is in this process, as TRL's colocated one is."""
        try:
            runner = llm.llm_engine.model_executor.driver_worker.model_runner
            model = runner.model
        except AttributeError as error:
            raise KeelError(
                f"this vLLM keeps its model elsewhere than the versions that keel.integrations.sync knows ({error}): "
                "pip install 'vllm==0.32.*', or check by log-probabilities (keel.lab.traces.check_drawn)"
            ) from None
        refuse_shards(model)
        worker = _Worker(runner)
        return cls(lambda method, *args: [getattr(worker, method)(*args)])

    @classmethod
    def served(cls, url: str) -> Sampler:
        """A `vllm serve` that was started with VLLM_SERVER_DEV_MODE=1 and Keel's worker extension."""
        import httpx2

        def call(method: str, *args: Any) -> list[Any]:
            body = {"method": method, "args": list(args)}
            try:
                answer = httpx2.post(f"{url.rstrip('/')}/collective_rpc", json=body, timeout=600.0)
            except httpx2.HTTPError as error:
                raise KeelError(f"{url} does not answer ({error}): is the server up?") from None
            if answer.status_code != 200:
                raise KeelError(
                    f"{url} does not tell its weights (status {answer.status_code}): start it with "
                    "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls keel.rollout.vllm.worker.KeelWorker"
                )
            return list(answer.json()["results"])

        return cls(call)

    def parts(self) -> list[str]:
        parts = [part for worker in self._call("keel_parts") for part in worker]
        if shard := next((part for part in parts if "|" in part), None):
            raise _sharded(shard.partition("|")[0])
        return parts

    def digests(self) -> dict[str, str]:
        return merge_worker_digests(self._call("keel_digests"))

    def adapter(self, slot: int, ranks: Mapping[str, int]) -> dict[str, str]:
        """The digests of an adapter's matrices; none where it is not loaded."""
        return merge_worker_digests(self._call("keel_adapter", slot, dict(ranks)))


class _Worker(KeelWorker):
    """Keel's methods on a worker that lies in this process."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner


def refuse_shards(model: nn.Module) -> None:
    """Tensor-parallel shards are not compared."""
    for path, module in model.named_modules():
        if getattr(module, "tp_size", 1) > 1:
            raise _sharded(path)


def _sharded(name: str) -> KeelError:
    return KeelError(
        f"the sampler holds a shard of {name}: SyncCheck does not compare tensor-parallel shards; set tensor parallel "
        "size 1, or check by log-probabilities (keel.lab.traces.check_drawn)"
    )


def merged_weights(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What a sampler without adapters must hold, under a checkpoint's names: W + BA·α/r where there is a LoRA."""
    inner: Any = causal_lm(policy)
    adapted = {
        f"{path}.base_layer.weight": module for path, module in inner.named_modules() if hasattr(module, "base_layer")
    }
    for name, parameter in inner.named_parameters():
        if ".lora_" in name:
            continue
        if ".modules_to_save." in name or ".original_module." in name:
            raise KeelError("modules_to_save are not compared by SyncCheck: train without them, or check_drawn")
        value = full_tensor(parameter.detach())
        if (module := adapted.get(name)) is not None:
            for adapter in module.active_adapters:  # as peft merges: in place, in the weight's own type
                value = value.clone().add_(module.get_delta_weight(adapter).detach())
        yield name.replace(".base_layer.", "."), value.to(dtype) if value.is_floating_point() else value


@dataclass(frozen=True)
class SyncResult:
    """One comparison: the tensors that differ, the last step at which all were right, the step that they are of."""

    step: int
    compared: int
    wrong: tuple[str, ...]
    sound_until: int | None = None
    weights_of: int | None = None

    def __str__(self) -> str:
        if not self.wrong:
            return f"step {self.step}: all {self.compared} tensors of the sampler are the policy's"
        named = ", ".join(self.wrong[:NAMED]) + (", …" if len(self.wrong) > NAMED else "")
        since = "since the beginning" if self.sound_until is None else f"since step {self.sound_until + 1}"
        of = "" if self.weights_of is None else f"; they are the policy's of step {self.weights_of}"
        return (
            f"sampler/stale: at step {self.step} {len(self.wrong)} of {self.compared} tensors of the sampler are not "
            f"the policy's, {since}: {named}{of}. Sync the sampler after every update, adapters included"
        )


class SyncLedger:
    """Digests of the policy after each update, and comparisons of a sampler with them.

    `slot` is the adapter's id in a sampler that keeps LoRA beside its base; without one, adapters are merged into it.
    """

    def __init__(self, sampler: Sampler, policy: nn.Module, slot: int | None = None) -> None:
        self.sampler, self.policy, self.slot = sampler, policy, slot
        if slot is not None and not is_lora(policy):
            raise KeelError(f"the sampler's adapter {slot} is to be compared, but the policy has no adapter")
        self._parts = sampler.parts()
        self._expected: OrderedDict[int, dict[str, str]] = OrderedDict()
        self._sound: dict[str, int] = {}

    def note(self, step: int) -> None:
        """Remember the digests that the sampler must have once it is synced with the policy as it is now."""
        held = PartDigests(self._parts, self.policy)
        weights = merged_weights if self.slot is None else checkpoint_weights
        for _ in held.recorded(weights(self.policy, self.sampler.dtype)):
            pass
        digests = {part: held.digests[part] for part in self._parts if part in held.digests}
        if missing := sorted(set(self._parts) - set(digests)):
            raise KeelError(f"the sampler holds {missing[0]}, which the policy has not: it serves another model")
        if self.slot is not None:
            digests |= {
                f"adapter {name}": x for name, x in adapter_of(self.policy, self.sampler.dtype).digests().items()
            }
        self._expected[step] = digests
        while len(self._expected) > KEPT:
            self._expected.popitem(last=False)

    def compare(self, step: int) -> SyncResult:
        """The sampler as it is now against what was noted of that step."""
        if step not in self._expected:
            raise KeelError(f"the policy of step {step} was not noted: call note after every update")
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


def act(result: SyncResult, on_mismatch: Literal["stop", "warn"]) -> None:
    """Stop or warn on a mismatch."""
    if result.wrong and on_mismatch == "stop":
        raise StaleWeights(str(result))
    if result.wrong:
        logger.warning("%s", result)
