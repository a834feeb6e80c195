"""`keel doctor --trl`: its texts, what it leaves unchecked, and that the trainer stays as it was."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from integrations.small_trl import small_model
from integrations.trl_subjects import (
    FAULTS,
    RATE,
    codes,
    lora_trainer,
    of_keel,
    trainer_of,
    with_a_frozen_adapter,
    with_another_reference,
)
from keel.base.errors import KeelError
from keel.cli import main
from keel.integrations import versions
from keel.integrations.trl.preflight import MEASURES, preflight
from keel.integrations.trl.preflight.trainer import check_trainer
from keel.integrations.versions import TRL
from keel.models.fingerprint import fingerprint


def test_causes_are_the_doctors_own_and_advice_is_spelled_as_trl_has_it(tmp_path):
    rows, dropout = (preflight(FAULTS[name][1](tmp_path)).findings[0] for name in ("scores of other rows", "dropout"))
    assert "the gap closes when the rows of scores are reordered" in rows.evidence
    assert "_get_per_token_logps_and_entropies returns scores in another order" in rows.cause
    assert dropout.options == (("disable_dropout=True", "lora_dropout=0"),)
    assert "set disable_dropout=True lora_dropout=0" in dropout.advice


def test_what_a_trainer_lacks_is_unchecked_with_its_reason(tmp_path):
    unchecked = preflight(trainer_of(tmp_path, beta=0.0)).unchecked
    assert any(line.startswith("reference/*, kl/at-start: β is 0") for line in unchecked)
    assert any(line.startswith("prompt/format: ") and "gold answers" in line for line in unchecked)


def test_a_probe_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    trainer, outcomes = trainer_of(tmp_path), []

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of one's own")

    monkeypatch.setattr(trainer, "create_optimizer", broken)
    diagnosis = preflight(trainer, on_probe=lambda outcome, seconds: outcomes.append(outcome.name))
    assert codes(diagnosis) == ["doctor/probe-failed"]
    assert outcomes == [measure.name for measure in MEASURES]


# -------------------------------------------------------------------------------------- the trainer stays as it was


def everything(trainer) -> dict[str, Any]:
    """All that training would go on from."""
    optimizer = trainer.optimizer
    reference = trainer.ref_model
    return {
        "weights": fingerprint(trainer.model),
        "reference": None if reference is None else fingerprint(reference),
        "gradients": [p.grad is None for p in trainer.model.parameters()],
        "trainable": [p.requires_grad for p in trainer.model.parameters()],
        "modes": [m.training for m in trainer.model.modules()],
        "optimizer": None if optimizer is None else json.dumps(optimizer.state_dict(), default=lambda x: x.tolist()),
        "state": json.dumps(vars(trainer.state), default=str, sort_keys=True),
        "metrics": json.dumps(trainer._metrics),
        "logs": repr(trainer._logs),
        "attributes": sorted(vars(trainer)),
        "plain": {name: value for name, value in vars(trainer).items() if isinstance(value, int | float | str | None)},
        "keel": getattr(trainer, "keel_state", None),
        "random": (random.random(), np.random.rand(), torch.rand(1).item()),  # noqa: NPY002
    }


def seeded() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)


def with_a_used_optimizer(out):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return trainer_of(out, model=model, keel={"optimizers": (optimizer, None)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [trainer_of, lora_trainer, of_keel, with_a_used_optimizer, with_a_frozen_adapter, with_another_reference]
)
def test_the_trainer_is_left_as_it_was(make, tmp_path):
    trainer = make(tmp_path)
    seeded()
    before = everything(trainer)
    seeded()
    preflight(trainer)
    assert everything(trainer) == before
    assert list(tmp_path.iterdir()) == []


def test_training_after_a_preflight_is_the_same_to_the_last_bit(tmp_path):
    plain, looked_at = trainer_of(tmp_path / "a", max_steps=2), trainer_of(tmp_path / "b", max_steps=2)
    preflight(looked_at)
    for trainer in (plain, looked_at):
        torch.manual_seed(0)
        trainer.train()
    assert fingerprint(plain.model) == fingerprint(looked_at.model)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (plain, looked_at)]
    assert losses[0] == losses[1]


# -------------------------------------------------------------------------------------------- as it is typed


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A module with functions that build trainers, or do not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"script_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "from trl import GRPOTrainer\n"
        "from integrations.small_trl import build, small_model\n"
        "def healthy():\n    print('building')\n    return build(GRPOTrainer, Path('out'), learning_rate=0.002)\n"
        "def frozen():\n"
        "    model = small_model()\n    model.requires_grad_(False)\n"
        "    return build(GRPOTrainer, Path('out'), model=model)\n"
        "def nothing():\n    return {'trainer': 1}\n"
        "def broken():\n    raise RuntimeError('no such model\\nat all')\n"
        "def few():\n    return build(GRPOTrainer, Path('out'), per_device_train_batch_size=128)\n"
        "number = 3\n"
    )
    return name


def test_a_healthy_trainer_in_three_lines(script, capsys):
    assert main(["doctor", "--trl", f"{script}:healthy"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"preflight of {script}:healthy: healthy"
    assert "tried and found sound: travel, collection, scoring, masks" in out
    assert "building" in err
    assert "building" not in out


def test_findings_as_text_data_and_page(script, tmp_path, capsys):
    page = tmp_path / "doctor.html"
    assert main(["doctor", "--trl", f"{script}:frozen", "--json", "--html", str(page)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["code"] == "optim/no-update"
    assert set(data) == {"findings", "hypotheses", "unchecked", "notes", "raised_thresholds"}
    assert {row["verdict"] for row in data["hypotheses"]} <= {"confirmed", "ruled out"}
    assert "none of the model" in page.read_text()
    assert main(["doctor", "--trl", f"{script}:frozen"]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("error optim/no-update")


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("nothing", "dict: return a trl.GRPOTrainer"),
        ("broken", "could not build its trainer: RuntimeError: no such model, in "),
        ("missing", "has no attribute 'missing'"),
        ("number", "is of type int"),
        ("few", "need 32 rows"),
    ],
)
def test_bad_builders_are_one_line(script, attribute, words, capsys):
    assert main(["doctor", "--trl", f"{script}:{attribute}"]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("keel: error: ")]
    assert len(lines) == 1
    assert words in lines[0]
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trl", "no_such_module:build"], "No module named 'no_such_module'"),
        (["--trl", "build_trainer"], "is not module:attr"),
        (["--trl", "m:f", "configs/default.yaml"], "leave configs/default.yaml out"),
        (["--trl", "m:f", "--quick"], "leave --quick out"),
        (["--trl", "m:f", "--write"], "leave --write out"),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, capsys):
    assert main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_another_version_of_trl_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: "1.17.0")
    with pytest.raises(KeelError, match=r"keel\.integrations\.trl .*TRL 1\.17\.0"):
        TRL.check_version()


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("is_fsdp_enabled", True, "FSDP"),
        ("_is_vlm", True, "vision-language"),
    ],
)
def test_what_was_not_tested_is_refused_by_name(attribute, value, words, tmp_path):
    trainer = trainer_of(tmp_path)
    setattr(trainer, attribute, value)
    with pytest.raises(KeelError, match=words):
        check_trainer(trainer)


def test_fp16_is_refused_by_name(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.args.mixed_precision = "fp16"
    with pytest.raises(KeelError, match="fp16"):
        check_trainer(trainer)
