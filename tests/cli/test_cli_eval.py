"""keel eval as a user types it: against the run's own evaluation, and against a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.api import supervise, train
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.run.model_ref import model_folder, resolve_model, saved_steps
from trainer.small import BASE

OTHERS = [{"name": "arithmetic", "skill": "copy", "digits": 2}, {"name": "arithmetic", "skill": "max", "high": 9}]
SETTINGS = [
    "run.max_steps=2",
    "run.seed=3",
    "checkpoint.every=1",
    "warmstart.steps=2",
    "warmstart.batch_size=4",
    f"eval.tasks={json.dumps(OTHERS)}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    return train(load_config(BASE, [*SETTINGS, f"run.dir={folder}"])).directory


def evaluated(capsys: Any, *arguments: object) -> dict[str, Any]:
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines_of(run: Path, step: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "step"} for line in lines if line["step"] == step]


def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(run: Path, capsys: Any) -> None:
    assert evaluated(capsys, run)["tasks"] == lines_of(run, 2)
    assert evaluated(capsys, f"{run}@2")["tasks"] == lines_of(run, 2)
    assert evaluated(capsys, run, "--checkpoint", "start")["tasks"] == lines_of(run, 0)
    assert evaluated(capsys, f"{run}@warmstart")["tasks"] == lines_of(run, 0)
    assert evaluated(capsys, run / "checkpoints" / "step-2")["tasks"] == lines_of(run, 2)


def test_what_keel_sft_leaves_is_evaluated_too(tmp_path: Path, capsys: Any) -> None:
    run = supervise(load_config(BASE, [*SETTINGS, f"run.dir={tmp_path}"])).directory
    data = evaluated(capsys, run, "--baseline", f"{run}@start")
    for record in data["tasks"]:
        record.pop("difference")
    assert [record.pop("baseline") for record in data["tasks"]] == lines_of(run, 0)
    assert data["tasks"] == lines_of(run, 2)
    with pytest.raises(KeelError, match="no best checkpoint"):
        resolve_model(f"{run}@best")


def test_an_adapters_checkpoint_is_its_base_with_the_adapter(tmp_path: Path, capsys: Any) -> None:
    settings = ["run.max_steps=1", "model.lora.r=2", "optim.learning_rate=0.3", f"run.dir={tmp_path}"]
    run = train(load_config(BASE, settings)).directory
    assert evaluated(capsys, run)["tasks"] == lines_of(run, 1)
    assert evaluated(capsys, f"{run}@start")["tasks"] == lines_of(run, 0)
    assert lines_of(run, 0) != lines_of(run, 1)


def test_an_adapter_by_itself_names_its_base_or_is_told(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    model_ref = resolve_model(str(tmp_path))
    assert (model_ref.config.model.name, model_ref.config.model.lora.adapter) == ("owner/base", str(tmp_path))
    assert not model_ref.has_tasks
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(KeelError, match=r"add model\.name=BASE"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), ["model.name=tiny"]).config.model.name == "tiny"


def test_the_baseline_is_the_other_end_of_the_run(run: Path, capsys: Any) -> None:
    data = evaluated(capsys, run, "--baseline", f"{run}@start")
    assert [record.pop("baseline") for record in data["tasks"]] == lines_of(run, 0)
    for record in data["tasks"]:
        difference = record.pop("difference")
        before = next(line for line in lines_of(run, 0) if line["task"] == record["task"])
        assert difference["pass@1"] == pytest.approx(record["pass@1"] - before["pass@1"])
        low, high = difference["ci95"]
        assert -1 <= low <= difference["pass@1"] <= high <= 1
        assert "Bonett" in difference["method"]
    assert data["tasks"] == lines_of(run, 2)
    assert data["baseline"] == f"{run}@start"


def test_a_model_against_itself_does_not_differ(run: Path, capsys: Any) -> None:
    model = run / "checkpoints" / "step-2"
    options = ("--task", "arithmetic:skill=copy,digits=2", "--samples", 4, "--k", "1,3", "--max-tokens", 4)
    data = evaluated(capsys, model, *options, "--baseline", model)
    [record] = data["tasks"]
    assert record["difference"]["pass@1"] == 0
    assert record["difference"]["ci95"][0] == -record["difference"]["ci95"][1]
    assert (record["n"], record["samples"], list(record["pass@k"])) == (4, 3, ["1", "3"])
    assert data["max_completion_length"] == 4


def test_noise_temperature_and_what_is_given_by_name(run: Path, capsys: Any) -> None:
    shared = ("--task", "arithmetic:skill=add,low=0,high=9", "--samples", 3, "rollout.max_completion_length=4")
    first = evaluated(capsys, "tiny", *shared, "--seed", 1)
    assert evaluated(capsys, "tiny", *shared)["tasks"] == first["tasks"]  # run.seed + 1
    greedy = evaluated(capsys, "tiny", *shared, "--temperature", 0)
    assert (greedy["temperature"], greedy["tasks"][0]["greedy"], greedy["tasks"][0]["samples"]) == (0, True, 1)
    same = evaluated(capsys, "tiny", "task.name=arithmetic", "task.high=9", "task.low=0", *shared[2:])
    assert same["tasks"][0]["length_mean"] == first["tasks"][0]["length_mean"]


def test_figures_of_a_tasks_own(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """`extra_metrics` reaches the data and the table."""
    (tmp_path / "task_with_figures.py").write_text(
        "from trainer.small import Letters\n"
        "class Counting(Letters):\n"
        "    def extra_metrics(self, groups):\n"
        "        return {'groups': len(groups), 'longest': max(len(c.text) for g in groups for c in g.completions)}\n"
        "class Wrong(Letters):\n"
        "    def extra_metrics(self, groups):\n"
        "        return {'share': float('nan')}\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["eval", "trainer.small:small_model", "--samples", "3", "--k", "1", "--max-tokens", "5", "--task"]
    assert main([*options, "task_with_figures:Counting", "--json"]) == 0
    extra = json.loads(capsys.readouterr().out)["tasks"][0]["extra"]
    assert extra["groups"] == 3
    assert 0 < extra["longest"] <= 5
    assert main([*options, "task_with_figures:Counting"]) == 0
    assert "longest" in capsys.readouterr().out
    assert main([*options, "task_with_figures:Wrong"]) == 2
    assert "share=nan" in capsys.readouterr().err


def test_the_best_checkpoint_and_those_that_are_not_there(run: Path, tmp_path: Path) -> None:
    assert [path.name for path in saved_steps(run)] == ["step-0", "step-1", "step-2"]
    best = json.loads((run / "checkpoints/step-2/trainer/state.json").read_text())["state"]["best"]["step"]
    assert resolve_model(f"{run}@best").weights == run / "checkpoints" / f"step-{best}"
    with pytest.raises(KeelError, match="no checkpoint of step 7"):
        resolve_model(str(run), checkpoint="7")
    with pytest.raises(KeelError, match="warmstart"):
        resolve_model(f"{run}@begin")
    with pytest.raises(KeelError) as error:
        model_folder(f"{run}@begin")
    assert "warmstart" not in str(error.value)  # a warm start has no folder to export
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text("run: {name: empty}\n")
    with pytest.raises(KeelError, match="no complete checkpoint yet"):
        resolve_model(str(empty))
    with pytest.raises(KeelError, match="has no warm start"):
        resolve_model(f"{empty}@warmstart")
    assert resolve_model(f"{empty}@start").weights is None


def test_a_configuration_brings_model_and_tasks(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**BASE, "run": {"name": "x", "seed": 3}}))
    [record] = evaluated(capsys, path, "--samples", 2)["tasks"]
    assert (record["task"], record["split"], record["n"]) == ("letters", "trained", 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny"], "--task arithmetic"),
        (["tiny", "--task", "arithmetik"], "did you mean 'arithmetic'"),
        (["tiny", "--task", "arithmetic:skil=add"], "did you mean 'skill'"),
        (["tiny", "--task", "arithmetic", "task.skill=sort"], "give one of them"),
        (["tiny", "--task", "arithmetic", "data.path=x.csv"], "data.path=x.csv is given, but arithmetic generates"),
        (["tiny", "--task", "chess_puzzles:path=5"], "path is 5"),
        (["tiny", "--task", "arithmetic", "--k", "0"], "eval.k"),
        (["tiny", "--task", "arithmetic", "--samples", "0"], "eval.samples"),
        (["tiny", "--task", "arithmetic", "--checkpoint", "best"], "needs the folder of a run"),
        (["tiny", "--task", "arithmetic", "--plot", "x.jpeg"], "end its name in .png"),
        (["tiny", "--task", "arithmetic", "--plot", "no/where/x.png"], "folder no/where does not exist"),
        (["tiny", "--task", "arithmetic", "--out", "no/where/x.json"], "folder no/where does not exist"),
        (["tiny", "tiny"], "takes one model"),
        (["tiny", "--task", "arithmetic", "--nope", "1"], "unknown option nope"),
        (["./nowhere", "--task", "arithmetic"], "no model folder"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], says: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
