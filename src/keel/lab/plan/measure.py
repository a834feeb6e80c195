"""Seconds of a step, measured here: real steps of a random model of the job's shape, a part of it where all is long."""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from keel.base.types import Completion, Group, Reward
from keel.config import Config
from keel.lab.plan.shapes import random_model, weights_dtype, with_layers
from keel.models.load import LoadedModel, load_model
from keel.rollout import Request, SamplingParams
from keel.rollout.native.decode import SharedPrefixDecoder
from keel.rollout.native.scheduler import Passes
from keel.run.build import build_run, build_warmstart
from keel.trainer.optim import Optimizer
from keel.trainer.sft import sft_step
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step

PHASES = ("rollout", "score", "update", "sync")
STEP_S, ROLLOUT_S = 2.5, 2.5  # about what one real step and one rollout may take
_REPEAT_S = 0.6  # short work is repeated for this long, and its median taken
_LATE = 24  # columns before the end at which a decode step over a long cache is timed: room for a CUDA graph
_DECODE_STEPS = 4  # decode steps timed at each end of the cache


@dataclass(frozen=True)
class Job:
    """What a step has: its model, its prompts by their tokens, the passes of its rollout, the groups of a microbatch,
    the seconds of score and update as they are counted, and the share of them that is the layers'.
    """

    config: Config
    tokenizer: Any
    shape: Any
    prompts: Sequence[int]
    passes: Passes
    micro_groups: int
    counted_s: float
    layer_share: float

    @property
    def layers(self) -> int:
        return int(self.shape.num_hidden_layers)

    @property
    def groups(self) -> int:
        """Groups of one update."""
        return math.ceil(self.config.rollout.prompts_per_step / self.config.optim.minibatches)

    @property
    def full(self) -> Sample:
        return Sample(self.layers, self.groups, self.config.rollout.num_generations)


class Sample(NamedTuple):
    """The part of a job that is run: so many layers, groups an update, completions a group."""

    layers: int
    groups: int
    completions: int


@dataclass(frozen=True)
class Measured:
    """Seconds of a step by phase and in all, of one supervised update of the warm start, and what was run for them."""

    seconds: dict[str, float]
    warmstart_s: float
    sample: Sample

    def extent(self, job: Job) -> str:
        """What was run, of what there is."""
        return _describe(self.sample, job)


def measure(job: Job, report: Callable[[str], None] = lambda text: None) -> Measured:
    """Run a part of the job that takes a few seconds, and scale it to the whole: linear in groups and in layers."""
    sample = choose_sample(job)
    report(f"measuring {_describe(sample, job)}")
    seconds, warmstart_s = _measure_depth(job, sample, several=True)
    if sample.layers < job.layers:
        fewer = max(1, sample.layers // 2)
        report(f"measuring {fewer} of {job.layers} layers")
        shallow, shallow_warmstart_s = _measure_depth(job, sample._replace(layers=fewer), several=False)
        depths = (fewer, sample.layers, job.layers)
        seconds = {name: _extended(shallow[name], value, *depths) for name, value in seconds.items()}
        warmstart_s = _extended(shallow_warmstart_s, warmstart_s, *depths)
    return Measured({**seconds, "step": sum(seconds.values())}, warmstart_s, sample)


def _extended(small_s: float, large_s: float, small: int, large: int, whole: int) -> float:
    """On along the line through two sizes; never less than the larger took, never more than in proportion to it."""
    line = large_s + (large_s - small_s) * (whole - large) / (large - small)
    return min(max(line, large_s), large_s * whole / large)


def _describe(sample: Sample, job: Job) -> str:
    parts = [
        f"{count} of {of} {name}"
        for count, of, name in zip(sample, job.full, ("layers", "groups an update", "completions a group"), strict=True)
        if count < of
    ]
    return ", ".join(parts) or "a whole step"


def choose_sample(job: Job) -> Sample:
    """The largest part of a step that is counted to take about `STEP_S`; the smallest where none does."""
    candidates = list(_candidates(job))
    return next((sample for sample in candidates if _counted_s(job, sample) <= STEP_S), candidates[-1])


def _candidates(job: Job) -> Iterator[Sample]:
    """From the whole of a step down: fewer groups, then fewer layers, then fewer completions."""
    full = job.full
    groups = full.groups
    while True:
        yield full._replace(groups=groups)
        if groups <= 2:
            break
        groups = max(2, groups // 2)
        groups -= groups % (2 * job.micro_groups) if groups > 2 * job.micro_groups else 0  # half of it is whole micros
    layers = full.layers
    while layers > 2:
        layers = max(2, layers // 2)
        yield Sample(layers, groups, full.completions)
    completions = full.completions
    while completions > 2:
        completions = max(2, completions // 2)
        yield Sample(layers, min(groups, 1), completions)


def _counted_s(job: Job, sample: Sample) -> float:
    """The counted seconds of a part."""
    layers = 1 - job.layer_share * (1 - sample.layers / job.layers)
    return job.counted_s * layers * sample.groups / job.groups * _token_share(job, sample.completions)


def _token_share(job: Job, completions: int) -> float:
    """Tokens of a group with so many completions, of all."""
    prompt = statistics.fmean(job.prompts)
    length = job.config.rollout.max_completion_length
    return (prompt + completions * length) / (prompt + job.config.rollout.num_generations * length)


def _measure_depth(job: Job, sample: Sample, *, several: bool) -> tuple[dict[str, float], float]:
    """Seconds of a whole step and of a supervised update with the sample's layers; `several` sizes tell fixed costs
    from those of each group."""
    loaded = _load(job, sample.layers)
    try:
        run = build_run(job.config, loaded).run
        rollout_s = _rollout_s(job, run)
        largest = _step_s(job, run, sample)
        if several and 1 < sample.groups < job.groups:
            half = sample.groups // 2
            smaller = _step_s(job, run, sample._replace(groups=half))
            sizes = (half, sample.groups, job.groups)
            seconds = {name: _extended(smaller[name], largest[name], *sizes) for name in largest}
        else:
            seconds = {name: value * job.groups / sample.groups for name, value in largest.items()}
        whole = 1 / _token_share(job, sample.completions)
        seconds = {name: value * (1.0 if name == "sync" else whole) for name, value in seconds.items()}
        seconds["rollout"] += rollout_s
        return seconds, _warmstart_s(job, loaded, sample)
    finally:
        del loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _load(job: Job, layers: int) -> LoadedModel:
    """A random model of so many layers, prepared as loading prepares the real one."""
    config, shape = job.config, with_layers(job.shape, layers)

    def load(options: Any, *, seed: int, **_: Any) -> Any:
        cuda = options.device != "cpu" and torch.cuda.is_available()
        dtype = weights_dtype(config, shape, "cuda" if cuda else "cpu")
        with torch.random.fork_rng(devices=None if cuda else []), torch.device("cuda" if cuda else "cpu"):
            torch.manual_seed(seed)
            return random_model(shape, config, dtype=dtype), job.tokenizer, ()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(config.model, seed=config.run.seed, loader=load)


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The median of a few runs, fewer where one takes long."""
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < _REPEAT_S:
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompt(job: Job, number: int) -> tuple[int, ...]:
    return tuple(_tokens(job, job.prompts[number % len(job.prompts)], seed=number))


def _tokens(job: Job, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    high = min(len(job.tokenizer), int(job.shape.vocab_size))
    return torch.randint(min(10, high - 1), high, (count,), generator=generator).tolist()


def _rollout_s(job: Job, run: TrainingRun) -> float:
    """Seconds of sampling, all waves: a real wave, cut short where it is long, and what its other tokens add."""
    length, device = job.config.rollout.max_completion_length, run.policy.device
    prompts, rows = max(job.passes.prefills, key=lambda counts: counts[1])
    requests = [Request(f"plan/{i}", _prompt(job, i)) for i in range(prompts)]
    per_prompt = math.ceil(rows / prompts)

    def sample(tokens: int) -> Callable[[], Any]:
        sampling = SamplingParams.of(
            job.config.rollout, ignore_eos=True, max_completion_length=tokens, num_generations=per_prompt, stop=()
        )
        return lambda: run.engine.generate(requests, sampling)

    probe = min(length, 40 if device.type == "cuda" else 5)  # shorter ones do not run as graphs
    sample(probe)()  # kernels are chosen, memory is taken
    first_s = _seconds(sample(1), device)
    if length == 1:
        return first_s * sum(count for count, _ in job.passes.prefills) / prompts
    probe_s = _seconds(sample(probe), device, repeats=1)
    token_s = max(probe_s - first_s, 1e-9) / max(probe - 1, 1)
    tokens = length if token_s * (length - 1) <= ROLLOUT_S else max(probe, min(length, int(ROLLOUT_S / token_s)))
    decoding_s = _seconds(sample(tokens), device) - first_s
    if tokens < length:
        growth_s = _growth_s(job, run, requests, per_prompt)  # a step more with each token in the cache
        decoding_s = decoding_s * (length - 1) / (tokens - 1) + growth_s * (length - 1) * (length - tokens) / 2
    by_row = device.type == "cpu"  # where a step costs by the row; on a GPU few rows cost what many do
    steps = sum(count / rows if by_row else 1.0 for count in job.passes.steps) / (length - 1)
    return first_s * sum(count for count, _ in job.passes.prefills) / prompts + decoding_s * steps


def _growth_s(job: Job, run: TrainingRun, requests: Sequence[Request], per_prompt: int) -> float:
    """How much longer a decode step takes for each token in the cache: one at its begin and one near its end."""
    length = job.config.rollout.max_completion_length
    new_decoder = getattr(run.engine, "_new_decoder", None)
    decoder = None if new_decoder is None else new_decoder()
    if not isinstance(decoder, SharedPrefixDecoder) or length <= 2 * _LATE:
        return 0.0
    device, rows = run.policy.device, len(requests) * per_prompt
    tokens = torch.ones(rows, dtype=torch.long, device=device)

    def steps() -> None:
        for _ in range(_DECODE_STEPS):
            decoder.step(tokens)

    with torch.no_grad():
        decoder.prefill(
            [r.tokens for r in requests], [i for i in range(len(requests)) for _ in range(per_prompt)], length
        )
        decoder.cache.suffix_kv.zero_()
        decoder.step(tokens)
        early_s = _seconds(steps, device, repeats=1)
        late = length - _LATE - decoder.cache.length
        decoder.cache.advance(late)
        decoder.step(tokens)
        late_s = _seconds(steps, device, repeats=1)
    return max(0.0, late_s - early_s) / _DECODE_STEPS / late


def _step_s(job: Job, run: TrainingRun, sample: Sample) -> dict[str, float]:
    """Seconds of a real step's phases on completions that are given: what is left of its rollout is rendering and
    judging."""
    config, collect = job.config, run.collect
    length = config.rollout.max_completion_length
    prompts_per_step = sample.groups * config.optim.minibatches
    rollout = config.rollout.model_copy(
        update={"prompts_per_step": prompts_per_step, "num_generations": sample.completions}
    )
    drawn = [_tokens(job, length, seed) for seed in range(8)]
    given = [
        Completion(
            tuple(tokens),
            (True,) * length,
            (-1.0,) * length,
            (-1.0,) * length,
            job.tokenizer.decode(tokens),
            "length",
        )
        for tokens in drawn
    ]

    def completions() -> tuple[Completion, ...]:
        return tuple(given[i % len(given)] for i in range(sample.completions))

    def collected(problems: Any, **when: Any) -> list[Group]:
        several = config.rollout.max_turns > 1  # an episode answers what the model says: it is not rehearsed
        judged = (
            [Group(p, (), completions()) for p in problems]
            if several
            else collect(problems, sampling=SamplingParams.of(rollout), **when)  # type: ignore[call-arg]
        )
        rewards = tuple(Reward(float(i % 2)) for i in range(sample.completions))  # a signal, whatever the judge said
        return [
            replace(g, prompt_tokens=_prompt(job, i), completions=completions(), rewards=rewards)
            for i, g in enumerate(judged)
        ]

    part: Any = replace(run, rollout=rollout, collect=collected, queue=None)
    state = State(kl=run.controller.init())
    run.engine.generate = lambda requests, sampling, **_: [list(completions()) for _ in requests]  # type: ignore[method-assign]
    lines: list[dict[str, float]] = []
    try:
        train_step(part, state)  # kernels are chosen, moments are made
        while len(lines) < 3 and sum(line["time/total_s"] for line in lines) < _REPEAT_S:
            lines.append(train_step(part, state).metrics)
    finally:
        del run.engine.generate  # an engine that holds its own method is not let go
    phases = {name: statistics.median(line[f"time/{name}_s"] for line in lines) for name in PHASES}
    total = statistics.median(line["time/total_s"] for line in lines)
    return {**phases, "other": max(0.0, total - sum(phases.values()))}


def _warmstart_s(job: Job, loaded: LoadedModel, sample: Sample) -> float:
    """Seconds of one supervised update: a part of a batch, as large as the part of a step."""
    if job.config.warmstart is None:
        return 0.0
    examples, options, optim = build_warmstart(job.config, loaded)
    batch = examples(0)
    share = 1.0 if sample == job.full else min(1.0, max(1, len(batch) // 8) / len(batch))
    groups = batch[: max(1, round(share * len(batch)))]
    optimizer = Optimizer(loaded.model, options.optim)
    sft_step(loaded, groups, optimizer, options, optim)
    taken = _seconds(lambda: sft_step(loaded, groups, optimizer, options, optim), loaded.device)
    return taken * len(batch) / len(groups)


__all__ = ["Job", "Measured", "Sample", "choose_sample", "measure"]
