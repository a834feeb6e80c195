"""Build a run's objects from a checked configuration."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS, World
from keel.config import Config, kl_pairing
from keel.envs import Task
from keel.envs.curriculum import Curriculum
from keel.envs.judge import Judge
from keel.envs.mixture import mixture
from keel.kl import controller_from_options
from keel.models.fingerprint import fingerprint
from keel.models.fuse import fallback_notes
from keel.models.load import load_model
from keel.models.lora import adapter_is_zero
from keel.models.options import LoadedModel
from keel.models.precision import DTYPES, check_bfloat16
from keel.models.scorer import Scorer, build_scorer
from keel.reference import packs_rows
from keel.rollout import Engine, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.options import RolloutOptions
from keel.rollout.play import PlayCollector
from keel.rollout.registry import build_engine
from keel.rollout.render import fit
from keel.run.layout import build_layout, sampler_options, shard_run
from keel.run.parts import (
    RewardFunction,
    build_judge,
    build_named_task,
    build_renderer,
    check_task_teachers,
    check_teachers,
    reference_of,
    teacher_anchor,
    teacher_of,
    without_long_prompts,
)
from keel.trainer.integrity import check_model
from keel.trainer.memory import Remedy, max_pass_tokens, memory_guard
from keel.trainer.optim import Optimizer, Schedule, build_schedule, resolve_amp_dtype
from keel.trainer.options import GuardLimits, OptimOptions, WarmstartOptions
from keel.trainer.overlap import RolloutQueue, StepRollouts
from keel.trainer.sample import sample_rollouts
from keel.trainer.sft import DrawCount, Encode, Examples, file_examples, gold_examples
from keel.trainer.state import TrainingRun


def build_policy(config: Config, weights: Path | None = None, *, probe: bool = True) -> LoadedModel:
    """Load the policy; `weights` is a checkpoint or warm start of this run, used instead of the named model.

    `probe=False` accepts a model whose padded rows change its logits, so that the doctor can examine it.
    """
    model = config.model
    for folder in (model.lora and model.lora.adapter, model.name):  # it may be another run's checkpoint
        if folder and weights is None:
            check_model(Path(folder).expanduser())
    check_teachers(config)  # fail before a warm start
    with memory_guard("loading the policy", lambda: _smaller_policy(config)):
        loaded = load_model(model if weights is None else model.at(weights), seed=config.run.seed, probe=probe)
    return replace(loaded, name=model.name)


def _smaller_policy(config: Config) -> Remedy:
    if DTYPES.get(config.model.dtype, torch.float32).itemsize > 2:
        return Remedy("model.dtype", config.model.dtype, "bfloat16")
    return Remedy("model.quantization", "null", "4bit")


@dataclass(frozen=True)
class Built:
    """A run with its collector and notes for the user."""

    run: TrainingRun
    collector: Collector
    notes: tuple[str, ...]

    @property
    def judge(self) -> Judge:
        return self.collector.judge

    @property
    def sampling(self) -> SamplingParams:
        return self.collector.sampling


def build_run(
    config: Config,
    loaded: LoadedModel,
    *,
    task: Task | None = None,
    reward: RewardFunction | None = None,
    world: World = SINGLE_PROCESS,
) -> Built:
    """Build everything that a step needs. Close `Built.run` after use.

    Unless `reference.model` names a teacher, the reference is the current policy.
    """
    with memory_guard("building the run", lambda: _copies_remedy(config)), ExitStack() as on_error:
        built = _build_run(config, loaded, task, reward, world, on_error)
        on_error.pop_all()
        return built


def _check_same(what: str, digest: str, world: World) -> None:
    """Refuse weights that differ between processes: their gradients could not be summed."""
    digests = world.all_gather(digest) if world.size > 1 else [digest]
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise KeelError(
                f"rank {rank} of {world.size} loaded different {what} than rank 0: use the same files on all ranks, "
                "and a fixed seed in your own loader"
            )


def _copies_remedy(config: Config) -> Remedy:
    """The remedy if copies of the policy do not fit: offload the reference, else load smaller weights."""
    if config.model.lora is None and not config.reference.params.get("offload"):
        return Remedy("reference.offload", "false", "true")
    return _smaller_policy(config)


def _build_run(
    config: Config,
    loaded: LoadedModel,
    task: Task | None,
    reward: RewardFunction | None,
    world: World,
    on_error: ExitStack,
) -> Built:
    build_renderer(config, loaded.tokenizer)  # an unknown template is refused before anything is sampled
    task = task or build_named_task(config.task, config)
    task, dropped = without_long_prompts(config, loaded.tokenizer, task)
    for section, (model, _) in config.teachers.items():
        check_task_teachers(section, model, task)
    judge = build_judge(config, task, reward)
    amp_dtype = resolve_amp_dtype(config.optim, loaded.dtype, loaded.device)
    sampler = sampler_options(config, loaded.device.type, amp_dtype)
    check_bfloat16("rollout.dtype", DTYPES.get(sampler.dtype), loaded.device, "rollout.dtype=float16")
    if world.size > 1:
        _check_same(f"weights of {loaded.name!r}", fingerprint(loaded.model), world)
    layout = build_layout(config, loaded, world)
    ahead = config.rollout.max_staleness > 0
    tokenizer = deepcopy(loaded.tokenizer) if ahead else loaded.tokenizer  # fast tokenizers are not thread-safe
    engine_world = world.new_group() if ahead else world  # collectives of a sync must not mix with the other thread's
    engine = build_engine(sampler, loaded.model, tokenizer, own_weights=layout.sharded or ahead, world=engine_world)
    on_error.callback(engine.close)
    _check_ahead(config, engine, loaded, layout.sharded)
    scorer = build_scorer(config.model.scorer)
    differs = _sampler_differs(config, engine, amp_dtype, scorer)
    reference, teacher = reference_of(config, loaded), teacher_of(config, loaded)
    for other in (teacher, reference if "reference" in config.teachers else None):
        if other is not None:
            _check_same("weights of the teacher", other.fingerprint(), world)
    off_policy = config.off_policy or bool(differs)
    if layout.sharded:  # engine and reference were built from unsharded weights
        if engine.shares_weights:
            raise KeelError(
                f"rollout.engine={config.rollout.named_engine.name} samples with the policy's own weights, which are "
                "sharded over processes: use native, or parallel.sharding=none"
            )
        shard_run(layout, loaded, (reference, teacher), world, amp_dtype)
    collector = replace(build_collector(config, engine, task, loaded.tokenizer, judge, world), release=True)
    run = TrainingRun(
        policy=loaded,
        task=task,
        engine=engine,
        collect=collector.collect,
        reference=reference,
        optimizer=Optimizer(
            loaded.model, config.optim, learning_rate_schedule(config), amp_dtype=amp_dtype, world=world
        ),
        controller=controller_from_options(config.kl, config.episodes_per_step),
        loss=config.loss,
        kl=config.kl,
        pairing=kl_pairing(config, off_policy=off_policy),
        rollout=config.rollout,
        reward=config.reward,
        optim=config.optim,
        guards=config.guards,
        seed=config.run.seed,
        shared_prefix=loaded.shared_prefix and scorer is None and packs_rows(reference, teacher),
        amp_dtype=amp_dtype,
        limits=GuardLimits.of(config.guards, config.doctor.thresholds.params),
        scorer=scorer,
        world=world,
        teacher=teacher_anchor(config, teacher, off_policy),
        curriculum=config.data.curriculum,
    )
    if ahead:
        run.queue = _queue(config, run, collector, tokenizer, engine_world)
    if scorer is None and not layout.sharded:
        exact = sum(anchor.kl.needs_exact for anchor in run.anchors)
        cached_tokens = exact * config.episodes_per_step * config.rollout.max_completion_length
        run.fitting_tokens = max_pass_tokens(
            loaded, run.optimizer, run.autocast, shared_prefix=run.shared_prefix, cached_tokens=cached_tokens
        )
    packing = [] if loaded.packing_note is None else [loaded.packing_note]
    notes = (*packing, *task.notes, *dropped, *_turn_notes(config, task), *_adapter_notes(config, run))
    if differs and config.loss.mismatch.kind == "none":
        notes += (f"{differs}, and loss.mismatch.kind=none does not correct for it: set it to truncate",)
    if loaded.device.type == "cuda":
        notes += device_notes(run, sampler)
    return Built(run, collector, notes)


def device_notes(run: TrainingRun, sampler: RolloutOptions) -> tuple[str, ...]:
    """Notes on a GPU run: dtypes, fallbacks, smaller passes, cuDNN's attention."""
    weights = run.policy.dtype
    dtype = DTYPES.get(sampler.dtype, weights)
    copied = f"rollout.dtype: the sampler has a copy of the weights in {_name(dtype)}; the policy's weights are"
    fallbacks = () if run.scorer is not None else fallback_notes(run.policy.model, run.amp_dtype)
    fits, configured = run.microbatch_tokens, run.optim.microbatch_tokens
    short = f"optim.microbatch_tokens is {configured}, but passes have at most {fits}: larger ones do not fit in memory"
    cudnn_on = torch.backends.cuda.cudnn_sdp_enabled()
    cudnn_off = "cuDNN's attention is disabled in this process, because it compiles a plan for every new length"
    return (
        *(() if dtype == weights else (f"{copied} {_name(weights)}",)),
        *run.engine.notes,
        *fallbacks,
        *(() if fits == configured else (short,)),
        *(() if cudnn_on else (cudnn_off,)),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sampler_differs(
    config: Config, engine: Engine, amp_dtype: torch.dtype | None, scorer: Scorer | None
) -> str | None:
    """Why the sampler's distribution may differ from the trainer's; None if it does not."""
    name = config.rollout.named_engine.name
    if config.rollout.filtered:
        return "rollout.top_p, top_k or min_p truncate the sampler's distribution"
    if not engine.shares_weights:
        return f"rollout.engine={name} has its own copy of the weights and its own kernels"
    if amp_dtype is not None:
        return f"training passes run in {_name(amp_dtype)} and rollout.engine={name} does not"
    return None if scorer is None else f"model.scorer={config.model.scorer} scores what rollout.engine={name} samples"


def _turn_notes(config: Config, task: Task) -> list[str]:
    """A note if a multi-turn task is limited to one turn."""
    if not task.multi_turn or config.rollout.max_turns > 1:
        return []
    return [
        f"task {task.name!r} has several turns, but rollout.max_turns is 1: no tool call is answered; set "
        "rollout.max_turns above 1"
    ]


def _adapter_notes(config: Config, run: TrainingRun) -> list[str]:
    """A note on adapter_off with a trained adapter: the reference is then not the base model."""
    if config.reference.kind != "adapter_off" or run.reference is None or adapter_is_zero(run.policy.model):
        return []
    return [
        "reference.kind=adapter_off: the adapter is not zero, because it is continued or warm-started. The reference "
        "is therefore a copy of this adapter, as with auto and frozen, not the base model"
    ]


def build_collector(
    config: Config, engine: Engine, task: Task, tokenizer: Any, judge: Judge, world: World = SINGLE_PROCESS
) -> Collector:
    """Build the collector of groups. Episodes that call the engine themselves get an endpoint."""
    collector = PlayCollector if task.plays else Collector
    return collector(
        engine,
        task,
        build_renderer(config, tokenizer),
        SamplingParams.of(config.rollout),
        judge,
        seed=config.run.seed,
        **config.rollout.turns,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        world=world,
    )


def _queue(config: Config, run: TrainingRun, collector: Collector, tokenizer: Any, world: World) -> RolloutQueue:
    """The sampling thread, with its own tokenizer, failure record and connections."""
    judge = collector.judge.for_thread()
    own_collector = replace(collector, renderer=build_renderer(config, tokenizer), judge=judge, world=world)

    def sample(attempt: int, step: int, curriculum: Curriculum) -> StepRollouts:
        rollouts = sample_rollouts(run, own_collector.collect, world, attempt, step, curriculum)
        return replace(rollouts, failures=tuple(judge.drain()))

    queue = RolloutQueue(
        run.engine,
        run.policy.model,
        sample,
        collector.judge.failures.extend,
        max_staleness=config.rollout.max_staleness,
        world=run.world,
        thread_world=world,
    )
    queue.restore({}, 0)  # the engine was built from the policy's current weights
    return queue


def _check_ahead(config: Config, engine: Engine, loaded: LoadedModel, sharded: bool) -> None:
    """Refuse to sample ahead with weights shared with the policy, or on the GPU of the update."""
    staleness, name = config.rollout.max_staleness, config.rollout.named_engine.name
    if staleness == 0:
        return
    given = f"rollout.max_staleness={staleness}"
    if engine.shares_weights:
        raise KeelError(
            f"rollout.engine={name} samples with the policy's own weights, which change while {given} samples: use "
            "native or vllm, or rollout.max_staleness=0"
        )
    here = name == "native" or (name == "vllm" and config.rollout.vllm.mode == "colocate")
    if here and loaded.device.type == "cuda":
        raise KeelError(
            f"{given} with rollout.engine={name} would sample on the GPU that the update uses, which saves no time: "
            "use rollout.engine=vllm with rollout.vllm.mode=server, or rollout.max_staleness=0"
        )
    if sharded and staleness > 1:
        raise KeelError(
            f"{given} keeps copies of the weights, which are sharded over processes: use rollout.max_staleness=1, or "
            "parallel.sharding=none"
        )


def learning_rate_schedule(config: Config, decay_steps: int | None = None) -> Schedule:
    """The learning-rate schedule; `decay_steps` replaces the configured end of its decay."""
    optim = config.optim if decay_steps is None else config.optim.model_copy(update={"decay_steps": decay_steps})
    updates = config.loss.num_iterations * optim.minibatches
    return build_schedule(optim, config.run.max_steps, updates_per_step=updates)


class SftInputs(NamedTuple):
    """The inputs of `sft`: examples, the `warmstart` section, and `optim` for the size and precision of passes."""

    examples: Examples
    options: WarmstartOptions
    optim: OptimOptions


def build_warmstart(
    config: Config, loaded: LoadedModel, task: Task | None = None, draws: DrawCount | None = None
) -> SftInputs:
    """Examples and settings of the SFT warm start; `draws` counts problems without a demonstration."""
    start = config.warmstart
    if start is None:
        raise KeelError("the configuration has no warmstart section: add one, such as warmstart: {steps: 200}")
    renderer = build_renderer(config, loaded.tokenizer)

    def encode(problem: Any) -> tuple[int, ...]:
        return fit(renderer.prompt(problem), config.data.max_prompt_length, config.data.truncation, problem.key)

    encoder: Encode = encode
    shared: dict[str, Any] = {
        "batch_size": start.batch_size,
        "seed": config.run.seed,
        "allow_control_tokens": config.data.allow_control_tokens,
    }
    if start.path is not None:
        examples = file_examples(start.path, encoder, loaded.tokenizer, **shared)
    else:
        tasks = [build_named_task(spec, config) for spec in start.task]
        run_task = task or build_named_task(config.task, config)
        remaining = [
            without_long_prompts(config, loaded.tokenizer, part, required=False)[0] for part in tasks or [run_task]
        ]
        source: Any = mixture(remaining) if len(remaining) > 1 else remaining[0]
        examples = gold_examples(source, encoder, loaded.tokenizer, reply=renderer.reply, draws=draws, **shared)
    passes = config.optim.model_dump(
        include={"microbatch_tokens", "precision"}
    )  # other options of `optim` are for the run
    return SftInputs(examples, start, OptimOptions(**passes))


__all__ = [
    "Built",
    "SftInputs",
    "build_collector",
    "build_judge",
    "build_named_task",
    "build_policy",
    "build_renderer",
    "build_run",
    "build_warmstart",
]
