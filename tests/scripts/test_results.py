"""bench/results.py: the clock, time to accuracy, CSVs, one training on both sides, and a page of what was run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import results_page
from keel.base.files import encode
from keel.config import load_config
from keel.lab.studies import read_study
from results import CONFIGS, JOBS
from results_sides import Clock, curve, trl_options


@pytest.mark.parametrize("name", JOBS)
def test_every_configuration_is_valid_and_its_first_line_runs_it(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    config = load_config(file)
    assert config.warmstart is not None
    assert file.read_text(encoding="utf-8").startswith(f"# python bench/results.py run {name} ")


def test_the_study_of_the_kl_asks_for_the_skills_that_the_start_was_taught() -> None:
    study = read_study(CONFIGS / "kl_beta.yaml")
    assert [point.config.kl.beta for point in study.points[:4]] == [0, 0.001, 0.01, 0.1]
    assert study.points[4].config.kl.estimator == "exact"
    assert {point.config.kl.controller.name for point in study.points[5:]} == {"dual", "pid"}
    assert study.config.warmstart is not None
    assert len(study.config.eval.tasks) == 4
    assert set(map(str, study.config.eval.tasks)) < set(map(str, study.config.warmstart.task))


@pytest.mark.parametrize("changes", [[], ["loss.loss_type=grpo", "kl.beta=0.04", "kl.reduction=loss", "run.seed=3"]])
@pytest.mark.parametrize("name", ["gsm8k", "countdown"])
def test_keels_own_reading_of_trls_options_is_the_same_training(name: str, changes: list[str]) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", ["warmstart=null", *changes])
    given = trl_options(config)
    scheduler = given.pop("lr_scheduler_type")
    assert (scheduler, config.optim.schedule) == ("constant_with_warmup", "constant")
    read = load_config({}, [f"{option}={value}" for option, value in given.items() if value is not None])
    same = ("prompts_per_step", "num_generations", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
    assert [getattr(read.rollout, key) for key in same] == [getattr(config.rollout, key) for key in same]
    same = (
        "learning_rate",
        "warmup_steps",
        "betas",
        "eps",
        "weight_decay",
        "max_grad_norm",
        "minibatches",
        "precision",
    )
    assert [getattr(read.optim, key) for key in same] == [getattr(config.optim, key) for key in same]
    assert read.optim.minibatches == config.optim.minibatches
    assert (read.run.seed, read.kl.beta) == (config.run.seed, config.kl.beta)
    assert read.loss.loss_type == config.loss.loss_type
    assert read.loss.scale_rewards == ("none" if config.loss.loss_type == "dr_grpo" else "group")
    assert (read.loss.epsilon, read.loss.num_iterations) == (0.2, 1)


@pytest.mark.parametrize("change", ["kl.estimator=exact", "loss.dynamic_sampling=true", "kl.beta=0.1"])
def test_what_trls_side_would_not_do_is_refused(change: str) -> None:
    with pytest.raises(SystemExit, match=r"TRL's side needs"):
        trl_options(load_config(CONFIGS / "countdown.yaml", [change]))


def test_the_clock_leaves_evaluations_out() -> None:
    clock = Clock(every=2)
    assert clock.tick(1, 1.0, now=10.0) == 1.0
    assert clock.tick(2, 1.0, now=11.5) == 2.5  # half a second of logs between the two
    assert clock.tick(3, 1.0, now=99.0) == 4.0  # an evaluation after step 2; the logs take as long as before
    assert clock.tick(4, 2.0, now=101.25) == 6.25
    assert clock.at == {1: 1.0, 2: 2.5, 3: 4.0, 4: 6.25}


def test_time_to_accuracy_is_interpolated() -> None:
    rising = [(0.0, 0.1), (10.0, 0.2), (20.0, 0.15), (40.0, 0.35)]
    assert results_page.time_to(rising, 0.15) == pytest.approx(5.0)  # the first time counts
    assert results_page.time_to(rising, 0.3) == pytest.approx(35.0)
    assert results_page.time_to(rising, 0.05) == 0.0
    assert results_page.time_to(rising, 0.36) is None
    result = results_page.race({("keel", 0): rising, ("trl", 0): [(0.0, 0.1), (80.0, 0.2)]})
    assert result["target"] == pytest.approx(0.225)
    assert result["times"] == {("keel", 0): pytest.approx(27.5), ("trl", 0): None}


def test_a_csv_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        {"name": "gsm8k", "seed": 0, "wall_s": 1.25, "kl": None},
        {"name": "a, b", "seed": 1, "wall_s": 2e-9, "kl": 3},
    ]
    results_page.write_csv(tmp_path / "a.csv", rows)
    assert results_page.read_csv(tmp_path / "a.csv") == rows


def finished(folder: Path, trainer: str, accuracies: tuple[float, float], **more: Any) -> None:
    share = {
        "greedy": 0.1,
        "greedy_low": 0.08,
        "greedy_high": 0.12,
        "pass_1": 0.05,
        "pass_8": 0.3,
        "pass_8_low": 0.2,
        "pass_8_high": 0.4,
    }
    summary = {
        "name": "gsm8k",
        "trainer": trainer,
        "seed": 0,
        "tiny": False,
        "settings": "",
        "beside": 0,
        "minutes": 1.0,
        "steps": 10,
        "train_s": 60.0,
    }
    summary |= {"doctor": "healthy", "start": share, "end": {**share, "problems": 1319, "kl_exact": 0.01}, **more}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(encode(summary))
    steps = [{"step": 3, "reward/mean": 0.5, "reward/zero_variance_fraction": 0.25}]
    lines = [{"step": 10 * i, "pass@1": a, "ci95": [0, 1]} for i, a in enumerate(accuracies)]
    results_page.write_csv(folder / "curve.csv", curve(lines, steps, {0: 0.0, 10: 60.0}))


def test_a_table_of_new_runs_keeps_what_was_told_of_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for folder, seed, end in (("first", 1, 0.2), ("second", 0, 0.3), ("again", 1, 0.4)):
        finished(tmp_path / folder / "keel", "keel", (0.1, end), seed=seed, minutes=10 * end)
        results_page.table([tmp_path / folder], out)
    assert [(run["seed"], run["minutes"]) for run in results_page.read_csv(out / "runs.csv")] == [(0, 3.0), (1, 4.0)]
    curves = [(row["seed"], row["accuracy"]) for row in results_page.read_csv(out / "curves.csv")]
    assert curves == [(0, 0.1), (0, 0.3), (1, 0.1), (1, 0.4)]


@pytest.mark.slow
def test_the_page_tells_of_what_was_run_and_nothing_else(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    finished(runs / "tiny", "keel", (0.1, 0.9), tiny=True)
    results_page.table([runs], out)
    with pytest.raises(SystemExit, match="holds no results"):
        results_page.page([out], tmp_path / "results.md")
    finished(runs / "keel-seed0", "keel", (0.1, 0.2))
    results_page.table([runs], out)
    results_page.page([out], tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| Keel, GRPO | 0 | 1.0 | 0 | 10 | healthy | 10.0 % [8.0, 12.0] |" in text
    assert "healthy" in text
    for absent in ("Countdown", "Time to accuracy", "TRL", "KL term"):
        assert absent not in text
    (out / "notes.txt").write_text("## By hand\n")
    results_page.page([out], tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text().endswith("\n## By hand\n")
    finished(runs / "trl-seed0", "trl", (0.1, 0.16))
    results_page.table([runs], out)
    results_page.page([out], tmp_path / "results.md")
    results_page.plot([out], tmp_path)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "Time to accuracy: 15.0 %, midway between the start (10.0 %) and Keel's end (20.0 %)" in text
    assert "| Keel, GRPO | 0 | 6.00 s | 30 s |" in text
    assert "| TRL 1.16, GRPO | 0 | 6.00 s | 50 s |" in text
    assert "run gsm8k --trainer trl --seed 0 --minutes 1.0 --beside 0 --model FOLDER" in text
    assert (tmp_path / "results-gsm8k.png").stat().st_size > 10_000
    assert (tmp_path / "results-gsm8k-race.png").stat().st_size > 10_000
    finished(runs / "crowded", "keel", (0.1, 0.9), seed=1, beside=3)  # no part of the race
    results_page.table([runs], out)
    results_page.page([out], tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| Keel, GRPO | 1 | 1.0 | 3 | 10 |" in text
    assert "Time to accuracy: 15.0 %" in text
    finished(runs / "other", "trl", (0.1, 0.2), seed=1, settings="optim.learning_rate=1")
    results_page.table([runs], out)
    with pytest.raises(SystemExit, match="a race of different settings"):
        results_page.page([out], tmp_path / "results.md")
    finished(runs / "again", "keel", (0.1, 0.2))
    with pytest.raises(SystemExit, match="is a second"):
        results_page.table([runs], out)
