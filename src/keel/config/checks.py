"""Combinations that cannot work are refused before any model loads; those that may surprise become advice."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.base.imports import import_object
from keel.base.redact import secrets_in
from keel.config.resolve import kl_pairing
from keel.config.schema import Config, TaskOptions
from keel.kl import advise, check_kl, controller_of
from keel.loggers.build import check_loggers
from keel.losses import check_loss, get_loss, scale_rewards
from keel.reference import check_reference
from keel.verify.own import estimator_facts

DATA_OF_TASKS = ("path", "split", "columns", "on_broken")  # the rest of `data` says how prompts are rendered


def check(config: Config, *, installed: bool = True) -> None:
    """Refuse what cannot work, one line each; nothing here loads a model.

    `installed=False` asks what the configuration means, not whether this machine has the packages for it.
    """
    for part in (_loss, _kl, _reference, _model, _rollout, _optim, _tasks, _evaluation):
        part(config)
    _doctor(config)
    if installed:
        _packages(config)


def _packages(config: Config) -> None:
    """Optional packages that an option needs."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    if config.model.quantization is not None:
        raise KeelError(f"model.quantization={config.model.quantization} needs bitsandbytes: pip install bitsandbytes")
    if config.optim.optimizer == "adamw8bit":
        raise KeelError("optim.optimizer=adamw8bit needs bitsandbytes: pip install bitsandbytes, or use adamw")


def _doctor(config: Config) -> None:
    """Thresholds by name, each a number."""
    from keel.base.thresholds import load_thresholds

    load_thresholds(config.doctor.thresholds.params)


def _loss(config: Config) -> None:
    loss, group = config.loss, config.rollout.num_generations
    check_loss(loss)
    if group < 2 and loss.baseline != "none":
        raise KeelError(
            f"rollout.num_generations is {group}: loss.baseline={loss.baseline} compares completions of a problem, "
            "so give at least 2, or set loss.baseline=none"
        )
    if group < 2 and scale_rewards(loss) == "group":
        raise KeelError("loss.scale_rewards=group needs rollout.num_generations of at least 2: one has no deviation")
    if not get_loss(loss.loss_type).has_ratio and config.off_policy:
        raise KeelError(
            f"loss.loss_type={loss.loss_type} has no ratio and is right for one update a batch only: set "
            "loss.num_iterations=1 and optim.minibatches=1, or use grpo"
        )


def _kl(config: Config) -> None:
    kl = config.kl
    check_kl(kl, estimator_facts(kl.estimator))
    kl_pairing(config)
    if kl.budget is not None and kl.budget.action == "rollback" and config.guards.max_rollbacks == 0:
        raise KeelError(
            "kl.budget.action=rollback with guards.max_rollbacks=0 allows no rollback: set kl.budget.action=stop, or "
            "guards.max_rollbacks to 1 or more"
        )
    if kl.measure_every == 0 and config.reference.kind == "kl_triggered":
        raise KeelError("reference.kind=kl_triggered needs the measured KL, but kl.measure_every is 0: set it to 1")
    controller_of(kl, config.episodes_per_step)


def _reference(config: Config) -> None:
    check_reference(config.reference.kind, **config.reference.params)
    if config.reference.kind == "adapter_off" and config.model.lora is None:
        raise KeelError("reference.kind=adapter_off needs LoRA: set model.lora, or use reference.kind=frozen")


def _model(config: Config) -> None:
    model = config.model
    if model.scorer != "native":
        from keel.models.scorer import build_scorer

        build_scorer(model.scorer)
        if config.kl.needs_exact:
            raise KeelError(
                "the exact KL reads hidden states, which model.scorer does not give: use model.scorer=native, or "
                "kl.exact=false and a sampled estimator such as k3"
            )
    if model.quantization is not None and model.lora is None:
        raise KeelError(
            f"model.quantization={model.quantization} needs LoRA, quantized weights do not train: set model.lora"
        )
    if model.quantization is not None and config.optim.offload:
        raise KeelError("optim.offload has no use with model.quantization: adapters are small; leave it out")


def _rollout(config: Config) -> None:
    from keel.rollout.registry import ENGINES, check_name, find_engine

    rollout = config.rollout
    if rollout.temperature == 0:
        raise KeelError(
            "rollout.temperature is 0: greedy completions of a problem are all the same and teach nothing; "
            "set it above 0 (1.0 is usual), or eval.temperature=0 for greedy evaluation"
        )
    check_name(rollout.engine)
    for name in ("kept_gib", "cuda_graphs") if rollout.engine not in ENGINES else ():
        if getattr(rollout, name) != type(rollout).model_fields[name].default:
            raise KeelError(
                f"rollout.{name} is for the native engine: leave it out with rollout.engine={rollout.engine}"
            )
    if rollout.engine not in ENGINES:
        find_engine(rollout.engine)
    if config.optim.minibatches > rollout.prompts_per_step:
        raise KeelError(
            f"optim.minibatches is {config.optim.minibatches} but a step has {rollout.prompts_per_step} groups "
            "(rollout.prompts_per_step): an update needs at least one"
        )


def _optim(config: Config) -> None:
    optim = config.optim
    if any(beta >= 1 for beta in optim.betas):
        raise KeelError(f"optim.betas is {list(optim.betas)}: both must be below 1")
    end = optim.decay_steps or config.run.max_steps
    if optim.schedule != "constant" and optim.warmup_steps >= end:
        raise KeelError(
            f"optim.warmup_steps is {optim.warmup_steps} but the {optim.schedule} decay ends at step {end}: lower it"
        )
    if optim.schedule == "constant" and optim.decay_steps is not None:
        raise KeelError("optim.decay_steps has no meaning with optim.schedule=constant: use linear or cosine")


def task_specs(config: Config) -> Iterator[tuple[str, TaskOptions]]:
    """Every task that the configuration names, with the option that names it."""
    yield "task", config.task
    for option, tasks in (("eval.tasks", config.eval.tasks), ("warmstart.task", _warmstart_tasks(config))):
        for index, task in enumerate(tasks):
            yield f"{option}[{index}]", TaskOptions(name=task) if isinstance(task, str) else task


def _warmstart_tasks(config: Config) -> tuple[TaskOptions | str, ...]:
    return config.warmstart.task if config.warmstart else ()


def _tasks(config: Config) -> None:
    from keel.envs import check_task

    for option, task in task_specs(config):
        try:
            check_task(task.name, task.params)
        except KeelError as error:
            raise KeelError(f"{option}: {error}") from None
    _data(config)
    for index, part in enumerate(config.rewards):
        _reward(f"rewards[{index}]", part.name, {key: v for key, v in part.params.items() if key != "label"})
    check_loggers(config.log)


def _data(config: Config) -> None:
    """Data that the task would not read is refused: a task reads it by a parameter called `data`."""
    data, untouched, name = config.data, type(config.data)(), config.task.name
    given = [n for n in DATA_OF_TASKS if getattr(data, n) != getattr(untouched, n)]
    if given and not takes_data(name):
        raise KeelError(
            f"data.{given[0]} is given, but task {name} makes its own problems: leave it out, or set task.name=dataset"
        )
    if name == "dataset" and data.path is None and "data" not in config.task.params:
        raise KeelError("task dataset needs data.path: a file, a folder or a hub name")
    if given and "data" in config.task.params:
        raise KeelError(f"data.{given[0]} and task.data both name data: keep one")
    if data.truncation != "error" and data.max_prompt_length is None:
        raise KeelError(f"data.truncation={data.truncation} needs data.max_prompt_length: give the limit in tokens")


def takes_data(task: str) -> bool:
    """Whether a task reads data: whether its factory has a parameter called `data`."""
    from keel.envs import TASKS

    factory = TASKS[task] if task in TASKS else import_object(task, "task.name")
    return callable(factory) and "data" in inspect.signature(factory).parameters


def _reward(option: str, name: str, params: Mapping[str, Any]) -> None:
    from keel.envs.rewards import check_reward

    try:
        check_reward(name, params)
    except KeelError as error:
        raise KeelError(f"{option}: {error}") from None


def _evaluation(config: Config) -> None:
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    if temperature == 0 and max(config.eval.k) > 1:
        raise KeelError(
            f"eval.k asks for pass@{max(config.eval.k)} but eval.temperature is 0, where all completions are the same: "
            "set eval.k=[1], or a temperature above 0"
        )


def advice(config: Config) -> list[str]:
    """What is allowed and may surprise, one sentence each."""
    kl, notes = config.kl, []
    if kl.penalizes:
        pairing = kl_pairing(config)
        if pairing.expected_gradient != "policy||ref":
            notes.append(pairing.note)
        scale = scale_rewards(config.loss)
        if kl.placement == "reward" and scale != "none":
            notes.append(
                f"kl.placement=reward with loss.scale_rewards={scale}: the penalty is divided by the "
                "rewards' deviation σ, so the effective coefficient is β/σ, and where a group's rewards agree σ is the "
                "penalty's own and β drops out; set loss.scale_rewards=none or kl.placement=advantage"
            )
    notes += advise(config.loss.loss_type, kl.beta)
    if config.rollout.top_p < 1 or config.rollout.top_k > 0 or config.rollout.min_p > 0:
        notes.append(
            "top_p, top_k or min_p cut the sampled distribution: rollouts are not the policy's own samples, and KL "
            "and ratios are biased by what is cut; training is meant for 1.0, 0 and 0.0"
        )
    if config.model.dropout or (config.model.lora is not None and config.model.lora.dropout > 0):
        notes.append("dropout is on: policy and reference differ from the first step, so the KL does not start at 0")
    if written := dict.fromkeys(name for name, _ in secrets_in(config.to_dict())):
        notes.append(
            f"{', '.join(written)} looks like a secret that is written out: config.yaml keeps it, readable by you "
            "alone, and it is masked wherever it is shown; write $NAME instead, and put it into the environment"
        )
    return notes


__all__ = ["advice", "check", "import_object", "takes_data", "task_specs"]
