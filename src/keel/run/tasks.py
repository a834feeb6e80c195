"""Build a configuration's tasks, the renderer of their prompts, and the judge of their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.config import Config, TaskOptions
from keel.envs import Task
from keel.envs.dataset import PromptsTooLong
from keel.envs.judge import Judge
from keel.envs.registry import build_task, reads_data
from keel.envs.rewards import wrap
from keel.rollout.render import Renderer

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

    A task that generates its problems is refused if this is `required`. For a task that reads data, prompts with
    control tokens are refused here, before any is sampled.
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
    note = f"{dropped} problems left out: their prompts are longer than data.max_prompt_length={limit}"
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
