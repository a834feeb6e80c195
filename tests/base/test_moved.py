"""Names of 0.1: in configurations they mean what they meant, in imports they are refused with the new one."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import keel
from keel.base.errors import KeelError
from keel.base.imports import import_object
from keel.base.moved import MOVED, current, current_names
from keel.config import load_config
from keel.envs import build_task
from keel.run.resume import check_same_run
from keel.run.train import train
from trainer.small import BASE


def test_every_name_leads_to_a_module_that_is_there():
    for old, new in MOVED.items():
        assert importlib.import_module(new).__name__ == new, old
    for old in Path(__file__).with_name("modules_of_0_1.txt").read_text().split():
        assert importlib.util.find_spec(current(old)) is not None, old


def test_code_that_tries_an_old_name_first_may_try_another():
    with pytest.raises(ImportError, match=r"keel\.tasks is now keel\.envs"):
        importlib.import_module("keel.tasks")
    with pytest.raises(ImportError, match=r"keel\.tasks is now keel\.envs"):
        importlib.util.find_spec("keel.tasks")
    with pytest.raises(ImportError, match=r"keel\.losses\.LossSpec is now"):
        from keel.losses import LossSpec  # noqa: F401
    for module in ("keel.losses", "keel.losses.policy", "keel.kl", "keel.loggers"):
        assert not hasattr(importlib.import_module(module), "LossSpec")


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_import_is_refused_with_the_new_name(name):
    line = f"{name} is now {MOVED[name]}: change the import in {__file__}, line "
    with pytest.raises(KeelError, match=re.escape(line) if MOVED.get(name.rpartition(".")[0]) is None else "is now"):
        importlib.import_module(name)


def test_a_plug_in_learns_in_one_line_which_of_its_lines_to_change(tmp_path, monkeypatch):
    (tmp_path / "plugin_of_01.py").write_text("import keel\n\nfrom keel.train.step import train_step\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = r"^keel\.train\.step is now keel\.trainer\.step: change the import in .*plugin_of_01\.py, line 3$"
    with pytest.raises(KeelError, match=message):
        importlib.import_module("plugin_of_01")
    assert callable(keel.train)


def test_a_room_asked_of_the_package():
    with pytest.raises(AttributeError, match=r"^keel\.tasks is now keel\.envs$"):
        keel.tasks  # noqa: B018
    with pytest.raises(KeelError, match=r"keel\.types is now keel\.base\.types"):
        from keel import types  # noqa: F401


def test_a_folder_that_an_upgrade_left_behind_is_no_package(tmp_path):
    code = (
        f"import keel; keel.__path__.append({str(tmp_path)!r})\n"
        "try:\n    import keel.train\nexcept Exception as error:\n    print(error)"
    )
    (tmp_path / "train" / "__pycache__").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "keel.train is now keel.trainer" in done.stdout, done.stderr


def test_the_longest_name_decides():
    assert current("keel.studies.plan") == "keel.lab.plan.plan"
    assert current("keel.studies.planned") == "keel.lab.studies.planned"
    assert current("keel.kl.facts") == "keel.kl.facts"
    assert current("keel_of_mine.tasks") == "keel_of_mine.tasks"


def test_names_in_data():
    data = {
        "task": {"name": "keel.tasks.countdown:countdown"},
        "rewards": [{"name": "keel.tasks:x"}],
        "n": 3,
        "p": "a:b",
    }
    assert current_names(data) == {
        "task": {"name": "keel.envs.countdown:countdown"},
        "rewards": [{"name": "keel.envs:x"}],
        "n": 3,
        "p": "a:b",
    }


def test_a_configuration_of_01_loads():
    old, new = (
        load_config(BASE, ["kl.allow_biased=true", f"kl.estimator={room}.reversed_k3:reversed_k3"])
        for room in ("keel.studies", "keel.lab.studies")
    )
    assert old == new
    assert (
        load_config({"task": {"name": "keel.tasks.arithmetic:arithmetic"}}).task.name
        == "keel.envs.arithmetic:arithmetic"
    )


def test_each_importer_knows_them():
    from keel.envs.rewards import build_reward
    from keel.loggers.build import user_logger
    from keel.loggers.options import LoggerOptions
    from keel.verify.formula import load_callable

    assert build_task("keel.tasks.arithmetic:arithmetic") == build_task("arithmetic")
    assert import_object("keel.train.sft:sft", "part").__module__ == "keel.trainer.sft"
    assert build_reward("keel.tasks.rewards.text:exact", build_task("arithmetic")).name
    assert load_callable("keel.verify.values:reversed_k3")
    with pytest.raises(KeelError, match="derive it from"):
        user_logger(LoggerOptions(name="keel.types:Problem", key="a", prompt="b", answer="c"))


def test_a_run_of_01_goes_on(tmp_path):
    """The names in its config.yaml are old ones, those of the settings it is resumed with may be either."""
    old = ["kl.allow_biased=true", "kl.estimator=keel.studies.reversed_k3:reversed_k3", f"run.dir={tmp_path}"]
    run = train(BASE, overrides=[*old, "run.max_steps=1"]).directory
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["kl"]["estimator"] == "keel.lab.studies.reversed_k3:reversed_k3"
    settings["kl"]["estimator"] = "keel.studies.reversed_k3:reversed_k3"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    check_same_run(run, load_config(BASE, [*old, "run.max_steps=2"]))
    assert train(BASE, overrides=[*old, "run.max_steps=2"], resume=True).steps == 2


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [
        ("keel.losses", "LossSpec", "keel.losses.LossOptions"),
        ("keel.losses", "KLSpec", "keel.kl.KLOptions"),
        ("keel.losses", "MismatchSpec", "keel.losses.MismatchOptions"),
        ("keel.losses", "summed_kl", "keel.losses.vocabulary_kl"),
        ("keel.kl", "Controller", "keel.kl.BetaController"),
        ("keel.kl.controllers", "Steered", "keel.kl.controllers.RuleController"),
        ("keel.kl", "shape_rewards", "keel.kl.reward_penalty"),
        ("keel.kl", "shape_advantages", "keel.kl.advantage_penalty"),
        ("keel.loggers", "Quiet", "keel.loggers.Logger"),
        ("keel.loggers", "Fanout", "keel.loggers.MultiLogger"),
        ("keel.loggers.base", "Quiet", "keel.loggers.Logger"),
        ("keel.losses.policy", "LossSpec", "keel.losses.LossOptions"),
        ("keel.models", "LoraSettings", "keel.models.LoraOptions"),
        ("keel.config", "controller_params", "keel.kl.controller_of"),
        ("keel.lab.doctor", "found", "keel.lab.doctor.finding"),
    ],
)
def test_a_renamed_part_is_refused_in_one_line(module, name, now):
    with pytest.raises(KeelError, match=rf"^{module}\.{name} is now {now}: see docs/upgrading\.md$"):
        exec(f"from {module} import {name}")
    owner, _, renamed = now.rpartition(".")
    assert hasattr(importlib.import_module(owner), renamed)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {module} import nothing")


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [
        ("keel.config", "loss_spec", "config.loss itself"),
        ("keel.config", "kl_spec", "config.kl itself"),
        ("keel.config", "mismatch_spec", "config.loss.mismatch itself"),
        ("keel.kl", "EffectiveCoefficientWarning", "a sentence of keel.config.checks.advice"),
    ],
)
def test_what_has_no_name_any_more_says_where_it_went(module, name, now):
    with pytest.raises(KeelError, match=rf"^{module}\.{name} is now {now}: see docs/upgrading\.md$"):
        getattr(importlib.import_module(module), name)


def test_the_page_on_upgrading_names_where_modules_went():
    page = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text(encoding="utf-8")
    section = page.partition("## Imports")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    names = [[re.findall(r"`(keel[\w.]*\w)", cell.partition("(")[0]) for cell in row] for row in rows]
    pairs = [pair for old, new in names for pair in zip(old, new, strict=True)]
    assert {"keel.types", "keel.tasks", "keel.train.resume"} <= {old for old, _ in pairs}
    assert [(old, current(old)) for old, _ in pairs] == pairs
