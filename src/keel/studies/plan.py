"""`keel plan`: memory and time of a step before anything runs, by a rehearsal of the real passes on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from keel.build import build_named_task, build_optimizer
from keel.config import Config, load_config
from keel.errors import KeelError
from keel.models.head import Head, body_of, causal_lm, evaluating
from keel.models.load import DTYPES, LoadedModel, first_line, import_attr, is_users_own
from keel.models.logprobs import hidden_states, score_hidden
from keel.models.lora import add_lora, is_lora, lora_settings
from keel.models.pack import PackedBatch, microbatches, pack
from keel.models.tiny import tiny_model
from keel.models.tokenizer import load_tokenizer
from keel.rollout.render import Renderer
from keel.studies.hardware import Hardware
from keel.studies.live import LiveBytes
from keel.types import Completion, Group, Problem, Reward

GIB = 2**30
_SAMPLED = 16  # problems whose prompts tell how long prompts are


@dataclass(frozen=True)
class Plan:
    """Bytes by part, peaks by phase, and seconds of one step; `parts` are the update's, which is mostly the peak.

    `host` are bytes in main memory beside the device (offloaded parts); on a CPU they count in the peaks.
    """

    parameters: int
    trainable: int
    parts: dict[str, int]
    phases: dict[str, int]
    host: int
    seconds: dict[str, float]
    flops: float
    prompt_tokens: int
    hardware: Hardware

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.hardware.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "hardware"}
        return {**plain, "peak": self.peak, "fits": self.fits, "hardware": vars(self.hardware)}


@dataclass(frozen=True)
class _FullLength(PackedBatch):
    """A packed batch whose completions all have the full length: what is scored does not depend on the data."""

    def scored(self) -> tuple[Tensor, Tensor]:
        return self.gather.flatten(), self.tokens.flatten()

    def spread(self, values: Tensor) -> Tensor:
        return values.view(self.tokens.shape)


def plan(config: Config, hardware: Hardware, prompt_tokens: int | None = None) -> Plan:
    """The worst step of a run: every completion as long as it may be, every prompt as long as the longest seen.

    The reference's pass and the update's are the real ones, run on tensors that have shapes and no memory, so that
    their peaks are counted rather than guessed; times are counted operations over the hardware's speed. With gradient
    checkpointing the count is too high: fake tensors of recomputed layers are freed later than real ones.
    """
    tokenizer, build = _source(config)
    prompt = prompt_tokens or _prompt_tokens(config, tokenizer)
    with torch.device("meta"):  # shapes alone: nothing is allocated and nothing is read
        dtype = _dtype(config, build, hardware)
        loaded = _loaded(config, tokenizer, _cast(build(), dtype))
        reference = _reference(config, loaded, build)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for model in {id(m): m for m in (loaded.model, reference) if m is not None}.values():
            _on_device(model)
        return _rehearse(config, loaded, reference, hardware, prompt)


def make_it_fit(config: Config, hardware: Hardware, prompt_tokens: int | None = None) -> list[tuple[list[str], Plan]]:
    """What can be changed until a step fits, one thing after another, each with the plan it leads to.

    The list ends with the first that fits, or with the last resort.
    """
    tried: list[tuple[list[str], Plan]] = []
    given: dict[str, str] = {}
    for override in _remedies(config):
        given[override.partition("=")[0]] = override
        overrides = list(given.values())
        tried.append((overrides, plan(load_config(config, overrides), hardware, prompt_tokens)))
        if tried[-1][1].fits:
            return tried
    return tried


def _remedies(config: Config) -> Iterator[str]:
    """From the cheapest in time to the dearest."""
    tokens = config.optim.microbatch_tokens
    for size in (tokens // 2, tokens // 4, tokens // 8):
        if size >= 256:
            yield f"optim.microbatch_tokens={size}"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    kept = config.reference.kind in ("auto", "frozen") and config.model.lora is None and config.needs_reference
    if kept and not config.reference.params.get("offload"):
        yield "reference.offload=true"
    if not config.optim.offload:
        yield "optim.offload=true"
    if config.model.lora is None:
        yield "model.lora={r: 16}"


# ------------------------------------------------------------------------------------------- the parts


def _source(config: Config) -> tuple[Any, Callable[[], nn.Module]]:
    """The tokenizer, and what makes the model's shape; weights are never read."""
    name = config.model.name
    if name == "tiny":
        return tiny_model()[1], lambda: tiny_model(attn_implementation=config.model.attn_implementation)[0]
    if is_users_own(name):
        made, tokenizer = import_attr(name, "model loader")()
        shape = causal_lm(made).config
        del made
        return tokenizer, lambda: _from_config(shape, config)
    tokenizer = load_tokenizer(name)
    return tokenizer, lambda: _from_config(_read_shape(name, config), config)


def _read_shape(name: str, config: Config) -> Any:
    from transformers import AutoConfig

    try:
        path = Path(name).expanduser()
        if name.endswith(".gguf"):
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(
            str(path) if path.is_dir() else name, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # what transformers raises here has no common base
        raise KeelError(f"cannot read the shape of {name!r}: {first_line(error)}; check model.name") from error


def _from_config(shape: Any, config: Config) -> nn.Module:
    from transformers import AutoModelForCausalLM

    made: nn.Module = AutoModelForCausalLM.from_config(shape, attn_implementation=config.model.attn_implementation)
    return made


def _dtype(config: Config, build: Callable[[], nn.Module], hardware: Hardware) -> torch.dtype:
    """As loading chooses it: fp32 on a CPU, the checkpoint's own elsewhere, unless one is named."""
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype]
    own = getattr(causal_lm(build()).config, "dtype", None)
    return own if hardware.kind != "cpu" and isinstance(own, torch.dtype) else torch.float32


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def _on_device(model: nn.Module) -> None:
    """Tensors of the model's shapes that claim to be on a device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _loaded(config: Config, tokenizer: Any, model: Any) -> LoadedModel:
    dtype = next(model.parameters()).dtype
    settings = lora_settings(config.model.lora.model_dump() if config.model.lora else None)
    if settings is not None:
        model = add_lora(model, replace(settings, adapter=None), seed=0)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(config.model.gradient_checkpointing)
    eos = int(tokenizer.eos_token_id)
    return LoadedModel(
        model, tokenizer, config.model.name, None, (eos,), eos, torch.device("cpu"), dtype, settings, (), True
    )


def _reference(config: Config, loaded: LoadedModel, build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that scores as the reference: none, the policy itself under LoRA, or a second one."""
    if not (config.needs_reference or config.kl.collect_max is not None):
        return None
    if is_lora(loaded.model):
        return loaded.model
    return _cast(build(), loaded.dtype).requires_grad_(False)


def _prompt_tokens(config: Config, tokenizer: Any) -> int:
    """The longest of a few prompts of the task, within data.max_prompt_length."""
    data = config.data
    renderer = Renderer(tokenizer, chat_template=data.chat_template, system_prompt=data.system_prompt)
    problems = build_named_task(config.task, config).sample(_SAMPLED, seed=config.run.seed, step=0)
    longest = max(len(renderer.prompt(problem)) for problem in problems)
    return min(longest, data.max_prompt_length or longest)


# ------------------------------------------------------------------------------------------- the rehearsal


def _rehearse(
    config: Config, loaded: LoadedModel, reference: nn.Module | None, hardware: Hardware, prompt: int
) -> Plan:
    model, parts = loaded.model, dict[str, int]()
    live = LiveBytes()
    parts["weights"] = live.hold((*model.parameters(), *model.buffers()))
    parts["reference"] = 0 if reference is None else live.hold((*reference.parameters(), *reference.buffers()))
    optimizer = build_optimizer(config, loaded)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.inner.step()
    optimizer.inner.zero_grad(set_to_none=True)
    parts["optimizer"] = live.hold(
        x for state in optimizer.inner.state.values() for x in state.values() if torch.is_tensor(x)
    )
    micros = _micros(config, loaded, prompt)
    host = _offloaded(config, parts, hardware)
    live.now -= host
    phases: dict[str, int] = {}
    flops: dict[str, float] = {}

    def phase(name: str) -> AbstractContextManager[Any]:
        return _Phase(name, live, phases, flops)

    kept: list[Tensor] = []
    if reference is not None:
        with phase("reference"), evaluating(reference):
            hidden = hidden_states(reference, micros[0])
            score_hidden(hidden, _head(reference), micros[0], temperature=config.rollout.temperature)
            if config.kl.needs_exact:
                every = micros * config.optim.minibatches
                kept = [hidden, *(hidden.new_empty(micro.tokens.numel(), hidden.shape[1]) for micro in every[1:])]
            del hidden
        flops["reference"] *= len(micros) * config.optim.minibatches
    parts["reference states"] = sum(x.untyped_storage().nbytes() for x in kept)
    with phase("update"):
        for number, micro in enumerate(micros[:2]):  # with the second, gradients are there beside the activations
            _backward(config, loaded, reference, micro, kept[number] if kept else None)
        parts["gradients"] = sum(p.grad.untyped_storage().nbytes() for p in trainable if p.grad is not None)
    flops["update"] *= len(micros) / min(2, len(micros)) * config.optim.minibatches * config.loss.num_iterations
    with phase("optimizer step"):
        optimizer.inner.step()
    optimizer.inner.zero_grad(set_to_none=True)
    kept.clear()
    with phase("rollout"), torch.no_grad():
        cache = _rollout(config, loaded, prompt)
    parts["activations"] = (
        phases["update"]
        - sum(parts[name] for name in ("weights", "reference", "optimizer", "reference states", "gradients"))
        + host
    )
    parts["cache"] = cache
    return Plan(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trainable),
        parts=parts,
        phases=phases,
        host=host,
        seconds=_seconds(config, loaded, hardware, flops, parts, prompt),
        flops=sum(flops.values()),
        prompt_tokens=prompt,
        hardware=hardware,
    )


class _Phase:
    """Counts a phase's peak and operations."""

    def __init__(self, name: str, live: LiveBytes, phases: dict[str, int], flops: dict[str, float]) -> None:
        self.name, self.live, self.phases, self.flops = name, live, phases, flops
        self.counter = FlopCounterMode(display=False)

    def __enter__(self) -> None:
        self.live.peak = self.live.now
        self.live.__enter__()
        self.counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.counter.__exit__(*error)
        self.live.__exit__(*error)
        self.phases[self.name] = self.live.peak
        self.flops[self.name] = float(self.counter.get_total_flops())


def _head(model: nn.Module) -> Head:
    """The head as it stands: its scale and soft cap cost no memory, and measuring them needs real numbers."""
    return Head(causal_lm(model).get_output_embeddings(), 1.0, None)


def _offloaded(config: Config, parts: dict[str, int], hardware: Hardware) -> int:
    """Bytes that wait in main memory during the update; on a CPU it is the same memory."""
    if hardware.kind == "cpu":
        return 0
    reference = parts["reference"] if config.reference.params.get("offload") else 0
    return reference + (parts["optimizer"] if config.optim.offload else 0)


def _micros(config: Config, loaded: LoadedModel, prompt: int) -> list[PackedBatch]:
    """The microbatches of one update at full length, as `pack_step` cuts them."""
    rollout, length = config.rollout, config.rollout.max_completion_length
    tokens = (1,) * length
    one = Completion(tokens, (True,) * length, (0.0,) * length, (0.0,) * length, "", "length")
    count = rollout.num_generations
    members = [
        Group(Problem(str(i), "."), (1,) * prompt, (one,) * count, (Reward(0.0),) * count)
        for i in range(math.ceil(rollout.prompts_per_step / config.optim.minibatches))
    ]
    packed: list[PackedBatch] = []
    for part in microbatches(members, config.optim.microbatch_tokens, shared_prefix=True):
        row = min(max(prompt + len(g.completions) * (length - 1) for g in part), config.optim.microbatch_tokens)
        batch = pack(part, loaded.pad_id, shared_prefix=True, max_row_tokens=row)
        packed.append(_FullLength(**{f.name: getattr(batch, f.name) for f in fields(PackedBatch)}))
    return packed


def _backward(
    config: Config, loaded: LoadedModel, reference: nn.Module | None, micro: PackedBatch, kept: Tensor | None
) -> None:
    exact = kept is not None and reference is not None
    scores = score_hidden(
        hidden_states(loaded.model, micro),
        _head(loaded.model),
        micro,
        temperature=config.rollout.temperature,
        entropy=True,
        exact_kl=exact,
        ref_policy=exact,
        ref_hidden=kept,
        ref_head=_head(reference) if reference is not None else None,
    )
    loss = scores.logp.sum() + (scores.exact_kl.sum() if scores.exact_kl is not None else 0.0)
    loss.backward()


def _rollout(config: Config, loaded: LoadedModel, prompt: int) -> int:
    """Keys and values of one wave, each prompt's once, held while its prompts are read; returns their bytes."""
    rollout, shape = config.rollout, causal_lm(loaded.model).config
    rows = min(rollout.prompts_per_step * rollout.num_generations, rollout.max_batch or math.inf)
    groups = math.ceil(rows / rollout.num_generations)
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    layers = shape.num_hidden_layers
    prefix = torch.empty(layers, 2, groups, heads, prompt, size, dtype=loaded.dtype)
    body = body_of(loaded.model)
    hidden = body(input_ids=torch.ones(groups, prompt, dtype=torch.long), use_cache=False)[0]
    del hidden
    own = torch.empty(layers, 2, int(rows), heads, rollout.max_completion_length, size, dtype=loaded.dtype)
    logits = torch.empty(int(rows), shape.vocab_size, dtype=torch.float32)
    sampled = logits.log_softmax(-1)
    total = prefix.untyped_storage().nbytes() + own.untyped_storage().nbytes()
    del logits, sampled
    return total


# ------------------------------------------------------------------------------------------- time


def _seconds(
    config: Config,
    loaded: LoadedModel,
    hardware: Hardware,
    flops: dict[str, float],
    parts: dict[str, int],
    prompt: int,
) -> dict[str, float]:
    """Operations over speed; a decode step reads weights and cache once, or computes, whichever takes longer."""
    rollout = config.rollout
    half = config.optim.precision in ("bfloat16", "float16") or loaded.dtype != torch.float32
    speed = hardware.flops_half if half else hardware.flops_single
    rows = rollout.prompts_per_step * rollout.num_generations
    waves = math.ceil(rows / (rollout.max_batch or rows))
    active = sum(p.numel() for p in causal_lm(loaded.model).parameters())
    computing = 2.0 * active * rows / speed
    reading = waves * (parts["weights"] + parts["cache"] / 2) / hardware.bytes_per_s
    decode = rollout.max_completion_length * (max(computing, reading) + waves * hardware.launch_s)
    seconds = {
        "rollout": decode + flops["rollout"] / speed,
        "reference": flops.get("reference", 0.0) / speed,
        "update": flops["update"] / speed + 4 * parts["optimizer"] / hardware.bytes_per_s,
    }
    return {**seconds, "step": sum(seconds.values())}


__all__ = ["GIB", "Plan", "make_it_fit", "plan"]
