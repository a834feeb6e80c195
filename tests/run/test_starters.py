"""The countdown starters: a sound task, solutions that fit the completion, and a supervised start to learn from."""

from pathlib import Path

import pytest

from keel.config import load_config
from keel.envs import check
from keel.run.build import build_named_task

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["countdown", "countdown_smollm2"])
def test_a_countdown_starter_is_sound(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.warmstart is not None
    for spec in (config.task, *config.warmstart.task):
        check(build_named_task(spec, config))


def test_every_solution_of_the_small_starter_fits_its_completion() -> None:
    config = load_config(CONFIGS / "countdown.yaml")
    task = build_named_task(config.task, config)
    problems = [*task.sample(500, seed=0, step=0), *task.held_out(500)]
    longest = max(len(task.gold(problem)) + 1 for problem in problems)  # a token a character, and the end
    assert longest <= config.rollout.max_completion_length
    assert len(task.held_out(config.eval.samples)) == config.eval.samples
