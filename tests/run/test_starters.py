"""The small starters: a sound task, solutions that fit the completion, and a supervised start to learn from."""

import json
from pathlib import Path

import pytest

from keel.api import train
from keel.cli import main
from keel.config import load_config
from keel.envs.validity import check
from keel.run.build import build_named_task

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["countdown", "countdown_smollm2"])
def test_a_countdown_starter_is_sound(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.warmstart is not None
    for spec in (config.task, *config.warmstart.task):
        check(build_named_task(spec, config))


@pytest.mark.parametrize(("name", "teacher"), [("distill", "default"), ("distill_smollm2", "countdown_smollm2")])
def test_a_distillation_starter_names_the_end_of_its_teachers_run(name: str, teacher: str) -> None:
    config, taught = (load_config(CONFIGS / f"{each}.yaml") for each in (name, teacher))
    end = Path(taught.run.dir) / taught.run.name / "checkpoints" / f"step-{taught.run.max_steps}"
    assert config.reference.params["model"] == str(end)
    assert taught.run.max_steps % taught.checkpoint.every == 0
    assert config.task == taught.task
    assert config.warmstart == taught.warmstart
    assert (config.loss.policy_weight, config.kl.estimator) == (0.0, "exact")
    assert config.rollout.max_completion_length == taught.rollout.max_completion_length


@pytest.mark.parametrize("name", ["countdown", "code"])
def test_every_solution_of_a_small_starter_fits_its_completion(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    task = build_named_task(config.task, config)
    problems = [*task.sample(500, seed=0, step=0), *task.held_out(500)]
    longest = max(len(task.gold(problem)) + 1 for problem in problems)  # a token a character, and the end
    assert longest <= config.rollout.max_completion_length
    assert len(task.held_out(config.eval.samples)) == config.eval.samples


@pytest.mark.slow
def test_a_run_of_programs_records_each_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["warmstart.steps=2", "warmstart.batch_size=4", "run.max_steps=2", "rollout.prompts_per_step=2"]
    sizes = ["rollout.num_generations=4", "eval.samples=4", "eval.k=[1]", "checkpoint.every=2", f"run.dir={tmp_path}"]
    result = train(CONFIGS / "code.yaml", overrides=[*options, *sizes])
    records = [json.loads(line) for line in (result.directory / "rollouts.jsonl").read_text().splitlines()]
    assert len(records) >= 16
    for record in records:
        outcomes = record["details"].splitlines()
        assert len(outcomes) == 6 or outcomes[1:] == ["✗ 5 more with this result"] or outcomes == ["no program"]
        assert record["parts"]["passed"] == sum(line.startswith("✓") for line in outcomes) / 6
    assert main(["show", str(result.directory), "--no-color"]) == 0
    assert "f([" in capsys.readouterr().out
    assert "<pre class='details'>" in (result.directory / "report.html").read_text()
