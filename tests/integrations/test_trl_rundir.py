"""A run directory out of a TRL run: Keel's commands read it as one of Keel's own."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from trl import GRPOTrainer

from integrations.small_trl import WORDS, build, keel_trainer, lines, lora, small_model
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.doctor.runs import read_run
from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
from keel.kl import KLOptions
from keel.run.resume import check_same_run

KL = KLOptions(beta=0.1, controller={"name": "step", "target": 0.01})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mine"
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    build(KeelGRPOTrainer, out, beta=0.0, keel={"kl": KL}, **saves).train()
    return out


@pytest.fixture
def command(capsys):
    """A command as `keel` runs it: (exit status, what it printed)."""

    def run(*arguments):
        capsys.readouterr()
        status = main(list(map(str, arguments)))
        return status, capsys.readouterr().out

    return run


def test_the_files(run):
    record = read_run(run)
    assert record.missing == ("eval.jsonl does not exist",)
    assert [line["step"] for line in record.metrics] == [1, 2, 3, 4]
    line = record.metrics[-1]
    for name in ("reward/mean", "loss/kl", "kl/policy_ref/k3/se", "entropy/mean", "length/mean", "grad/norm"):
        assert isinstance(line[name], float), name
    assert record.summary["steps"] == 4
    assert record.summary["kl"]["k3"]["se"] > 0
    assert (run / "report.html").stat().st_size > 10_000
    (weights,) = [event for event in record.events if event["kind"] == "weights"]
    assert weights["before"] != weights["after"]


def test_the_configuration_is_one_of_keels(run):
    config = load_config(run / "config.yaml")
    assert config.kl == KL
    assert config.loss.loss_type == "dapo"
    assert config.rollout.num_generations == 4
    assert config.rollout.prompts_per_step == 2
    assert config.optim.learning_rate == 0.02
    assert config.run.max_steps == 4


def test_rollouts_have_rewards_and_a_kl_for_each_token(run):
    rollouts = lines(run, "rollouts.jsonl")
    first, last = ([row for row in rollouts if row["step"] == step] for step in (1, 4))
    assert len(first) == len(last) == 8
    assert {row["group"] for row in last} == {0, 1}
    for row in last:
        ids = [WORDS.index(token.strip()) for token in row["tokens"]]
        assert row["reward"] == pytest.approx(sum(token % 2 == 0 for token in ids) / len(ids), abs=1e-6)
        assert len(row["kl"]) == len(row["tokens"]) == len(row["action"])
    assert all(value == 0 for row in first for value in row["kl"])
    assert any(value != 0 for row in last for value in row["kl"])
    group = [row["advantage"] for row in last if row["group"] == 0]
    assert sum(group) == pytest.approx(0, abs=1e-4)


def test_links_lead_to_checkpoints_that_are_there(run):
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-4"]
    assert (run / "checkpoints" / "step-4" / "config.json").is_file()


def test_doctor_report_show_and_kl(run, tmp_path, command):
    status, out = command("doctor", run)
    assert status in (0, 1)
    assert "output/truncated" in out  # at 5 tokens most of them are
    status, out = command("report", run, "--out", tmp_path / "page.html")
    assert status == 0
    status, out = command("show", run, "--json")
    assert status == 0
    assert len(json.loads(out)) == 8
    status, out = command("kl", run, "--num-prompts", 4, "--samples", 2, "--max-tokens", 3, "--json")
    assert status == 0, out


def test_the_callback_on_a_plain_trainer(tmp_path):
    trainer = build(GRPOTrainer, tmp_path, keel={"callbacks": [KeelRunCallback(report=False)]})
    trainer.train()
    record = read_run(tmp_path)
    logged = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert [line["kl/policy_ref/k3/mean"] for line in record.metrics] == logged
    assert {line["kl/beta"] for line in record.metrics} == {0.2}
    assert record.config["kl"]["gradient"] == "rho"
    assert record.summary["kl"]["k3"]["mean"] == logged[-1]


def test_curves_that_look_fine_while_nothing_is_trained(tmp_path):
    """An optimizer of other weights: rewards wander, losses are logged, and no weight changes."""
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    keel = {"callbacks": [KeelRunCallback(report=False)], "optimizers": (optimizer, None)}
    build(GRPOTrainer, tmp_path, keel=keel).train()
    codes = [finding["code"] for finding in json.loads((tmp_path / "findings.json").read_text())]
    assert "optim/no-update" in codes


def test_a_lora_run_names_its_base_and_adapter(tmp_path, command):
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    keel_trainer(tmp_path, KL, more={"peft_config": lora()}, learning_rate=1.0, **saves).train()
    config = load_config(tmp_path / "config.yaml")
    assert config.model.lora.r == 2
    status, out = command("kl", tmp_path, "--num-prompts", 4, "--samples", 2, "--max-tokens", 3, "--json")
    assert status == 0, out


def test_a_run_is_not_overwritten(run):
    with pytest.raises(KeelError, match="already holds a run"):
        build(KeelGRPOTrainer, run, beta=0.0, keel={"kl": KL}).train()


def test_a_run_that_is_replaced_leaves_no_checkpoint(tmp_path):
    """Resumed from, or gone back to, they would be another run's."""
    keel_trainer(tmp_path, KL, save_strategy="steps", save_steps=1, max_steps=2).train()
    (tmp_path / "checkpoint-7").mkdir()  # not of that run
    keel_trainer(tmp_path, KL, if_exists="replace", max_steps=1).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-7"]


def test_keel_does_not_go_on_with_it(run):
    with pytest.raises(KeelError, match=r"is a run of TRL 1\.16"):
        check_same_run(run, load_config(run / "config.yaml"))


def test_what_may_surprise_is_said(tmp_path):
    keel_trainer(tmp_path, KLOptions(beta=0.1, gradient="plain"), loss_type="luspo", max_steps=1).train()
    notes = [event["message"] for event in read_run(tmp_path).events if event["kind"] == "note"]
    assert any("luspo" in note for note in notes)
    assert any("expected gradient is" in note for note in notes)


class Hub:
    """Takes a folder as the hub's client does, whose own filter says which files go."""

    def __init__(self):
        self.pushed = set()

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, folder_path, ignore_patterns=None, **_):
        files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        self.pushed |= set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        return SimpleNamespace(done=lambda: True)


def test_what_is_pushed_to_the_hub_holds_no_rollouts(tmp_path, monkeypatch):
    """transformers pushes at a checkpoint and at the end, by its own patterns."""
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "hub_model_id": "somebody/it"}
    trainer = keel_trainer(tmp_path, push_to_hub=True, **changes)
    trainer.train()
    trainer.push_to_hub()
    assert (tmp_path / "_keel" / "rollouts.jsonl").is_file()
    assert (tmp_path / "_keel" / "checkpoints" / "step-1").is_dir()
    assert "model.safetensors" in hub.pushed
    assert [name for name in hub.pushed if "keel" in name or "rollouts" in name] == []


def test_the_example(tmp_path, monkeypatch, capsys):
    out = tmp_path / "example"
    monkeypatch.setattr(sys, "argv", ["trl_keel.py", "--steps", "2", "--out", str(out)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_keel.py"), run_name="__main__")
    assert "nats per token, steered to 0.2" in capsys.readouterr().out
    assert len(read_run(out).metrics) == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--target", "-1"], "trl_keel.py: error: kl.budget.max"),
        (["--target", "nan"], "trl_keel.py: error: kl."),
        (["--steps", "0"], "trl_keel.py: error: --steps 0: use 1 or more"),
    ],
)
def test_bad_input_to_the_example_is_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.setattr(sys, "argv", ["trl_keel.py", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_keel.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert not (tmp_path / "out").exists()
