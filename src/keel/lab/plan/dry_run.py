"""A dry run of one step on fake tensors, with memory by part and peaks by phase."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.types import Completion, Group, Problem, Reward
from keel.config import Config
from keel.lab.plan.shapes import CudaAutocast, Hardware, VocabularyKernels
from keel.models.chunked import default_chunk, simulate_kernels
from keel.models.head import Head, body_of, causal_lm, evaluating
from keel.models.memory import LiveBytes
from keel.models.options import LoadedModel
from keel.models.pack import PackedBatch, pack
from keel.models.precision import DTYPES
from keel.models.prefix_attention import RowStructure, may_use_prefix_attention, simulate_cuda_memory
from keel.models.scorer import hidden_states_in_one_pass, score_hidden
from keel.rollout.native.graph import has_fixed_rotations
from keel.rollout.native.llama import is_llama_shaped
from keel.rollout.native.scheduler import NOISE_AHEAD, RolloutPasses, Traits, prefill_chunks, simulate
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.run.layout import sampler_options
from keel.trainer.batch import split
from keel.trainer.optim import Optimizer, resolve_amp_dtype


@dataclass(frozen=True)
class FullLength(PackedBatch):
    """A packed batch with completions of full length, so that the scored positions do not depend on data."""

    def scored(self) -> tuple[Tensor, Tensor]:
        return self.gather.flatten(), self.tokens.flatten()

    def scatter(self, values: Tensor) -> Tensor:
        return values.view(self.tokens.shape)


@dataclass(frozen=True)
class Micro:
    """A microbatch and its prefix structure, as real tensors, because fake tensors have no values."""

    packed: FullLength
    structure: RowStructure


@dataclass
class StepCost:
    """Memory of a step: bytes by part, peak bytes by phase, bytes offloaded to main memory.

    `micros` is the number of passes, `pass_tokens` the size of the largest.
    """

    parts: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    host: int = 0
    micros: int = 0
    pass_tokens: int = 0


def full_microbatches(config: Config, loaded: LoadedModel, prompt: int, hardware: Hardware) -> list[Micro]:
    """The microbatches of one update at full length, as `pack_step` splits them."""
    rollout, length = config.rollout, config.rollout.max_completion_length
    tokens = (1,) * length
    completion = Completion(tokens, (True,) * length, (0.0,) * length, (0.0,) * length, "", "length")
    count = rollout.num_generations
    groups = [
        Group(Problem(str(i), "."), (1,) * prompt, (completion,) * count, (Reward(0.0),) * count)
        for i in range(math.ceil(rollout.prompts_per_step / config.optim.minibatches))
    ]
    packed: list[Micro] = []
    for part in split(groups, config.optim.microbatch_tokens, shared_prefix=True, even=hardware.kind == "cuda"):
        row = min(max(prompt + len(g.completions) * (length - 1) for g in part), config.optim.microbatch_tokens)
        batch = pack(part, loaded.pad_id, shared_prefix=True, max_row_tokens=row)
        full = FullLength(**{f.name: getattr(batch, f.name) for f in fields(PackedBatch)})
        structure = RowStructure(full)
        _ = structure.groups  # computed now, because fake tensors have no values
        packed.append(Micro(full, structure))
    return packed


class DryRun:
    """A dry run of a step after the first one, so that the optimizer's moments are allocated."""

    def __init__(
        self,
        config: Config,
        loaded: LoadedModel,
        reference: nn.Module | None,
        micros: list[Micro],
        hardware: Hardware,
    ) -> None:
        self.config, self.loaded, self.reference = config, loaded, reference
        self.micros, self.hardware = micros, hardware
        self.amp_dtype = resolve_amp_dtype(config.optim, loaded.dtype, loaded.device)
        self.traits = decoding_traits(config, loaded, hardware)
        self.live = LiveBytes()
        pass_tokens = max(micro.packed.input_ids.numel() for micro in micros)
        self.cost = StepCost(micros=len(micros), pass_tokens=pass_tokens)

    def run(self, prompt: int) -> StepCost:
        """The cost of a step with prompts of `prompt` tokens."""
        config, live, cost, model = self.config, self.live, self.cost, self.loaded.model
        parts, reference = cost.parts, self.reference
        parts["weights"] = live.hold((*model.parameters(), *model.buffers()))
        parts["sampler"] = self._sampler_bytes()
        live.now += parts["sampler"]
        parts["reference"] = 0 if reference is None else live.hold((*reference.parameters(), *reference.buffers()))
        master_bytes = self._master_bytes()
        parts["reference"] += master_bytes
        live.now += master_bytes
        optimizer = Optimizer(model, config.optim)
        trainable = [p for p in model.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.inner.step()
        optimizer.inner.zero_grad(set_to_none=True)
        moments = [x for state in optimizer.inner.state.values() for x in state.values() if torch.is_tensor(x)]
        parts["optimizer"] = live.hold(moments)
        parts["workspaces"] = self.hardware.workspace_bytes
        live.now += parts["workspaces"]
        offloaded_reference, offloaded_moments = self._offloaded()
        cost.host = offloaded_reference + offloaded_moments
        live.now -= cost.host
        ref_hidden: list[Tensor] = []
        if reference is not None:
            with self._phase("reference", onloaded=offloaded_reference):
                ref_hidden = self._score_reference(reference)
        parts["reference states"] = sum(x.untyped_storage().nbytes() for x in ref_hidden)
        with self._phase("update"):
            if self._rehearsed() == [1]:
                for parameter in trainable:
                    parameter.grad = torch.zeros_like(parameter)
            for number in self._rehearsed():
                self._backward(self.micros[number], ref_hidden[number] if ref_hidden else None)
            parts["gradients"] = sum(p.grad.untyped_storage().nbytes() for p in trainable if p.grad is not None)
        with self._phase("optimizer step", onloaded=offloaded_moments):
            optimizer.inner.step()
        optimizer.inner.zero_grad(set_to_none=True)
        ref_hidden.clear()
        passes = rollout_passes(config, self.traits)
        prompts, rows = (max(counts) for counts in zip(*passes.prefills, strict=True))
        with self._phase("rollout"), torch.no_grad():
            cache = self._rollout(prompt, prompts, rows, len(passes.prefills))
        held = ("weights", "sampler", "reference", "optimizer", "workspaces", "reference states", "gradients")
        parts["activations"] = cost.phases["update"] - sum(parts[name] for name in held) + cost.host
        parts["cache"] = cache
        return cost

    def _rehearsed(self) -> list[int]:
        """The microbatches that determine the peak of the update.

        From the second on, gradients exist beside activations. The first is included if it is the only or larger one.
        """
        sizes = [micro.packed.tokens.numel() for micro in self.micros[:2]]
        return [1] if len(sizes) == 2 and sizes[1] >= sizes[0] else list(range(len(sizes)))

    def _sampler_bytes(self) -> int:
        """Bytes of the sampler's copy of the weights, if it has another dtype."""
        dtype = sampler_options(self.config, self.hardware.kind, self.amp_dtype).dtype
        if dtype == "auto" or DTYPES[dtype] == self.loaded.dtype:
            return 0
        return DTYPES[dtype].itemsize * sum(p.numel() for p in self.loaded.model.parameters())

    def _master_bytes(self) -> int:
        """Bytes of the fp32 master copy of an EMA reference with half-precision weights."""
        half = self.loaded.dtype in (torch.bfloat16, torch.float16)
        if self.reference is None or self.loaded.lora is not None or self.config.reference.kind != "ema" or not half:
            return 0
        return 4 * sum(p.numel() for p in self.reference.parameters())

    @contextmanager
    def _phase(self, name: str, onloaded: int = 0) -> Iterator[None]:
        """Count a phase's peak bytes; `onloaded` bytes are moved from main memory for its duration."""
        self.live.now += onloaded
        self.live.peak = self.live.now
        cuda = self.hardware.kind == "cuda"
        autocast = CudaAutocast() if cuda and self.amp_dtype is not None else nullcontext()
        with self.live, autocast, ExitStack() as simulated:
            if cuda:
                simulated.enter_context(simulate_cuda_memory())
                simulated.enter_context(simulate_kernels(VocabularyKernels))
            yield
        self.live.now -= onloaded
        self.cost.phases[name] = self.live.peak

    def _offloaded(self) -> tuple[int, int]:
        """Bytes of the reference (all but its head) and of the moments in main memory; a CPU has no other memory."""
        if self.hardware.kind == "cpu":
            return 0, 0
        offloaded = 0
        offload = self.config.reference.params.get("offload") and self.loaded.lora is None
        if offload and self.reference is not None:
            head = {id(p) for p in causal_lm(self.reference).get_output_embeddings().parameters()}
            tensors = (*self.reference.parameters(), *self.reference.buffers())
            offloaded = sum(x.nbytes for x in tensors if id(x) not in head)
        return offloaded, self.cost.parts["optimizer"] if self.config.optim.offload else 0

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.amp_dtype is None else torch.autocast("cpu", dtype=self.amp_dtype)

    def _hidden(self, model: nn.Module, micro: Micro) -> Tensor:
        """The hidden states. Allowed prefix attention is assumed: only real weights show whether it is exact."""
        by_structure = may_use_prefix_attention(body_of(model), micro.packed)
        return hidden_states_in_one_pass(model, micro.packed, micro.structure if by_structure else None)

    def _chunk(self, head: Head) -> int:
        """The number of tokens per chunk that scoring uses on the planned device."""
        weight = getattr(head.module, "weight", None)
        vocabulary = len(weight) if weight is not None else 2**17
        return default_chunk(vocabulary, torch.device(self.hardware.kind), self.hardware.memory_bytes)

    def _score_reference(self, reference: nn.Module) -> list[Tensor]:
        """One microbatch's pass; with exact KL it returns the hidden states, which all microbatches keep in memory."""
        micro, head = self.micros[0], _head(reference)
        with evaluating(reference), self._autocast():
            hidden = self._hidden(reference, micro)
            score_hidden(
                hidden,
                head,
                micro.packed,
                temperature=self.config.rollout.temperature or 1.0,
                chunk_tokens=self._chunk(head),
            )
        if not self.config.kl.needs_exact:
            return []
        all_micros = self.micros * self.config.optim.minibatches
        return [hidden, *(hidden.new_empty(m.packed.tokens.numel(), hidden.shape[1]) for m in all_micros[1:])]

    def _backward(self, micro: Micro, ref_hidden: Tensor | None) -> None:
        reference, head = self.reference, _head(self.loaded.model)
        exact = ref_hidden is not None and reference is not None
        with self._autocast():
            scores = score_hidden(
                self._hidden(self.loaded.model, micro),
                head,
                micro.packed,
                temperature=self.config.rollout.temperature or 1.0,
                entropy=True,
                exact_kl=exact,
                ref_policy=exact,
                ref_hidden=ref_hidden,
                ref_head=_head(reference) if reference is not None else None,
                chunk_tokens=self._chunk(head),
            )
        loss = scores.logp.sum() + (scores.exact_kl.sum() if scores.exact_kl is not None else 0.0)
        loss.backward()

    def _rollout(self, prompt: int, prompts: int, rows: int, waves: int) -> int:
        """One wave: prefill of each distinct prompt, then a decode step of all rows; returns the KV cache's bytes."""
        from transformers.cache_utils import DynamicCache

        rollout, shape = self.config.rollout, causal_lm(self.loaded.model).config
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        length, layers = rollout.max_completion_length, shape.num_hidden_layers
        model = self.loaded.model
        with evaluating(model):
            caches: list[list[tuple[Tensor, Tensor]]] = []
            for count in prefill_chunks(prompts, prompt):
                prefilled: Any = DynamicCache(config=shape)
                ids = torch.ones(count, prompt, dtype=torch.long)
                body_of(model)(input_ids=ids, past_key_values=prefilled, use_cache=True)
                caches.append([(layer.keys, layer.values) for layer in prefilled.layers])
                del prefilled
            prefix = caches[0] if len(caches) == 1 else [_joined(layer) for layer in zip(*caches, strict=True)]
            del caches
            suffix_kv = torch.empty(layers, 2, rows, heads, length, size, dtype=self.loaded.dtype)
            joins = waves > 1 or (rollout.max_turns > 1 and rollout.join_turns)
            joins = joins and math.isfinite(self.traits.join_steps(rows))
            moved = torch.empty_like(suffix_kv) if joins else suffix_kv[:0]  # a join copies the KV cache
            prefix_bytes = sum(x.untyped_storage().nbytes() for pair in prefix for x in pair)
            cache = prefix_bytes + suffix_kv.untyped_storage().nbytes()
            turn_cache = torch.empty(self._turn_cache_bytes(cache, waves), dtype=torch.uint8)
            noise = None
            if rollout.temperature:
                keys = torch.ones(NOISE_AHEAD, rows, dtype=torch.long)
                noise = gumbel(keys, keys, sum(block_shape(shape.vocab_size)))[0]
            scores = torch.empty(rows, shape.num_attention_heads, prompt + length, dtype=self.loaded.dtype)
            weights = scores.softmax(-1, dtype=torch.float32).to(self.loaded.dtype)
            del scores, weights
            logits = torch.empty(rows, shape.vocab_size, dtype=self.loaded.dtype)
            draw(logits, SamplingParams(temperature=rollout.temperature), noise)
        return cache + moved.nbytes + turn_cache.nbytes

    def _turn_cache_bytes(self, cache: int, waves: int) -> int:
        """Bytes of the KV cache between turns: the rows of all waves at full length, up to `kv_cache_gib`."""
        rollout = self.config.rollout
        if rollout.max_turns == 1:
            return 0
        return min(int(rollout.kv_cache_gib * 2**30), cache * waves)


def _joined(pairs: tuple[tuple[Tensor, Tensor], ...]) -> tuple[Tensor, Tensor]:
    return torch.cat([keys for keys, _ in pairs]), torch.cat([values for _, values in pairs])


def _head(model: nn.Module) -> Head:
    """The head without its scale and soft cap: they take no memory, and measuring them needs real weights."""
    return Head(causal_lm(model).get_output_embeddings(), 1.0, None)


def decoding_traits(config: Config, loaded: LoadedModel, hardware: Hardware) -> Traits:
    """The decoder of the planned device. Shared prompts are assumed: only real weights show whether they are exact."""
    model = causal_lm(loaded.model)
    graphs = hardware.kind == "cuda" and config.rollout.cuda_graphs
    return Traits(hardware.kind, True, graphs and is_llama_shaped(model) and has_fixed_rotations(model))


def rollout_passes(config: Config, traits: Traits) -> RolloutPasses:
    """The passes of a step's rollout at full length, by the engine's own scheduler."""
    rollout = config.rollout
    requests = [(rollout.num_generations, rollout.max_completion_length)] * rollout.prompts_per_step
    return simulate(requests, rollout.max_batch, traits)
