"""Build a configuration's tasks, renderer, judge, reference and teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.types import Problem
from keel.config import Config, TaskOptions, kl_pairing, kl_terms
from keel.envs import Task
from keel.envs.dataset import PromptsTooLong
from keel.envs.judge import Judge
from keel.envs.registry import build_task, reads_data
from keel.envs.rewards import wrap
from keel.kl import controller_from_options
from keel.models.head import causal_lm
from keel.models.load import find_loader
from keel.models.options import LoadedModel
from keel.reference import Reference
from keel.reference.base import is_server
from keel.reference.kinds import build_reference, build_teacher
from keel.reference.server import check_server
from keel.rollout.render import Renderer
from keel.trainer.integrity import check_model
from keel.trainer.state import Anchor

RewardFunction = Callable[..., Any]


def build_named_task(spec: TaskOptions | str, config: Config | None = None) -> Task:
    """Build `task`, or one entry of `eval.tasks` or `warmstart.task`: a name, or a name with parameters.

    A task that reads data but has no `data` parameter gets the configuration's `data` if it has the name of the run's
    task.
    """
    name, params = (spec, {}) if isinstance(spec, str) else (spec.name, spec.params)
    if config is not None and name == config.task.name and "data" not in params and reads_data(name):
        params = {**params, "data": config.data.source}
    return build_task(name, **params)


def drop_long_prompts(config: Config, tokenizer: Any, problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose prompts are within `data.max_prompt_length`; all of them unless `data.truncation` is drop."""
    return list(filter(_fits(config, tokenizer), problems)) if config.data.truncation == "drop" else list(problems)


def _fits(config: Config, tokenizer: Any) -> Callable[[Problem], bool]:
    renderer, limit = build_renderer(config, tokenizer), config.data.max_prompt_length
    return lambda problem: limit is None or len(renderer.prompt(problem)) <= limit


def without_long_prompts(
    config: Config, tokenizer: Any, task: Task, *, required: bool = True
) -> tuple[Task, list[str]]:
    """For `data.truncation: drop`, the task without prompts that are too long, and a note with their number.

    With `required`, a task that generates its problems is refused. For a task that reads data, prompts with control
    tokens are refused here, before any is sampled.
    """
    if config.data.truncation != "drop":
        _check_rows(build_renderer(config, tokenizer), task)
        return task, []
    limit = config.data.max_prompt_length
    try:
        filtered = task.filter_problems(_fits(config, tokenizer))
    except PromptsTooLong as error:
        raise KeelError(f"{error}: raise data.max_prompt_length, which is {limit}") from None
    if filtered is None and required:
        raise KeelError(
            f"data.truncation=drop needs a task that reads data, which {task.name!r} is not: use left or error"
        )
    remaining, dropped = filtered or (task, 0)
    note = f"{dropped} problems are left out, because their prompts exceed data.max_prompt_length={limit}"
    return remaining, [note] if dropped else []


def _check_rows(renderer: Renderer, task: Task) -> None:
    def checked(problem: Problem) -> bool:
        renderer.check(problem)
        return True

    if not renderer.allow_control_tokens:
        task.filter_problems(checked)


def build_renderer(config: Config, tokenizer: Any) -> Renderer:
    """The renderer of prompts; an unknown template is refused here."""
    data = config.data
    return Renderer(
        tokenizer,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        allow_control_tokens=data.allow_control_tokens,
    )


def build_judge(config: Config, task: Task, reward: RewardFunction | None = None) -> Judge:
    """The judge of the configured rewards (by default the task's own), or of the function given in Python."""
    if reward is not None:
        return Judge([wrap(reward)], config.reward)
    entries = reward_entries(config)
    if config.loss.policy_weight == 0 and task.prompts_only and [entry["name"] for entry in entries] == ["task"]:
        entries = [{"name": "none"}]  # distillation needs only prompts
    return Judge.of(task, entries, config.reward)


def reward_entries(config: Config) -> list[dict[str, Any]]:
    """`rewards:` as plain data."""
    return [part.model_dump() for part in config.rewards]


def check_teachers(config: Config) -> None:
    """Refuse a teacher (such as another run's checkpoint) that is missing, or was damaged after it was saved."""
    for section, (model, params) in config.teachers.items():
        for name in [model] if isinstance(model, str) else model.values():
            if is_server(name):
                check_server(name, params.get("headers"), f"{section}.model")
                continue
            try:
                find_loader(name)
                check_model(Path(name).expanduser())
            except KeelError as error:
                raise KeelError(f"{section}.model: {error}") from None


def check_task_teachers(section: str, model: str | Mapping[str, str], task: Task) -> None:
    """Check that teachers by task name every task of the run, and no other."""
    if isinstance(model, str):
        return
    labels = task.labels()
    for label in labels:
        if label not in model:
            raise KeelError(
                f"{section}.model has no teacher for the task {label}: give one for each of {', '.join(labels)}"
            )
    for label in model:
        if label not in labels:
            raise unknown(f"task of {section}.model", label, labels)


def teacher_of(config: Config, loaded: LoadedModel) -> Reference | None:
    """The teacher of `kl.teacher`; None if none is configured, or its KL is neither used nor measured."""
    term = config.kl.teacher
    if term is None or not (term.penalizes or config.kl.measure_every > 0):
        return None
    return build_teacher("kl.teacher", loaded, term.model, **term.params)


def reference_of(config: Config, loaded: LoadedModel) -> Any:
    """The configured reference of the current policy; None if no KL is used or measured."""
    needed = config.needs_reference or config.kl.collect_max is not None
    rows = causal_lm(loaded.model).get_output_embeddings().weight.shape[0]
    for option, term in kl_terms(config.kl).items():
        if term.estimator.startswith("topk") and term.topk >= rows:
            raise KeelError(
                f"{option}.topk is {term.topk}, but the vocabulary has {rows} tokens: set it below {rows}, or use "
                f"{option}.estimator=exact"
            )
    return build_reference(config.reference.kind, loaded, **config.reference.params) if needed else None


def teacher_anchor(config: Config, teacher: Reference | None, off_policy: bool) -> Anchor | None:
    """The teacher of `kl.teacher` with its KL term and controller, or None."""
    term = config.kl.teacher
    if term is None or teacher is None:
        return None
    pairing = kl_pairing(config, term, off_policy=off_policy)
    return Anchor("teacher", teacher, term, pairing, controller_from_options(term, config.episodes_per_step))
