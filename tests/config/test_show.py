"""What a part declares by an options class: shown with its sentences, and a default written out is the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Options, PositiveFloat, PositiveInt
from keel.config import Config, load_config
from keel.config.text import show_config
from keel.envs import Task
from keel.envs.registry import build_task
from keel.kl import BetaController, build_controller
from keel.losses import LossInputs, PolicyTerm
from keel.rollout import EngineWrapper
from keel.run.resume import check_same_run

HERE = __name__


class Own(Options):
    width: PositiveInt = Field(default=3, description="Cells a side.")
    gain: PositiveFloat = 0.5


def task(options: Own) -> Task:
    return build_task("arithmetic")


def controller(beta: float, options: Own) -> BetaController:
    return build_controller("fixed", beta)


def reference(loaded: Any, options: Own) -> Any: ...


def loss(inputs: LossInputs, options: Own) -> PolicyTerm: ...


class Engine(EngineWrapper):
    def __init__(self, model: Any, tokenizer: Any, options: Own) -> None: ...


def config(**own: Any) -> Config:
    return load_config(
        {
            "task": {"name": f"{HERE}:task", **own},
            "kl": {"controller": {"name": f"{HERE}:controller", **own}},
            "reference": {"kind": f"{HERE}:reference", **own},
            "rollout": {"engine": {"name": f"{HERE}:Engine", **own}},
            "loss": {"loss_type": f"{HERE}:loss", **own},
        }
    )


def test_every_part_shows_its_parameters() -> None:
    lines = [" ".join(line.split()) for line in show_config(config(gain=2.0)).splitlines()]
    assert lines.count("width: 3 # Cells a side.") == 5
    own = [line for line in lines if line.startswith("gain: 2.0 #")]
    parts = ("task", "engine", "controller", "reference", "loss")
    assert own == [f"gain: 2.0 # A parameter of this {part}." for part in parts]
    assert load_config(yaml.safe_load(show_config(config(gain=2.0)))).kl.controller.params == {"width": 3, "gain": 2.0}


def test_a_default_that_is_written_out_is_the_same_run(tmp_path: Path) -> None:
    for begun, resumed in (({}, {"width": 3}), ({"width": 3}, {}), ({"gain": 2.0}, {"gain": 2.0, "width": 3})):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(**begun).to_dict()))
        check_same_run(tmp_path, config(**resumed))
        with pytest.raises(KeelError, match=r"width was 3 in .* and is 4 now"):
            check_same_run(tmp_path, config(**{**resumed, "width": 4}))
