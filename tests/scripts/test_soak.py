"""scripts/soak_resume.py: the runs that `make soak` kills."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from keel.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kills", [1, 2, 4, 13, 20])
def test_what_make_soak_kills_can_be_configured_however_few_the_kills(kills, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import soak_resume

    printed = subprocess.run(
        ["make", "--no-print-directory", "-n", "soak", f"KILLS={kills}", "BIN=bin"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    recipe = [line for line in printed.splitlines() if "soak_resume.py" in line]
    said = subprocess.run(
        ["bash", "-c", "\n".join(recipe).replace("bin/python", "echo")], capture_output=True, text=True, check=True
    ).stdout
    dealt = []
    for line in said.splitlines():
        options = soak_resume.parser().parse_args(shlex.split(line)[1:])
        words = soak_resume.command(tmp_path, "alone", options, resume=False)
        assert words[0] == sys.executable
        settings = words[words.index("configs/default.yaml") + 1 :]
        config = load_config(ROOT / "configs/default.yaml", settings)
        assert config.run.max_steps == options.steps
        assert config.optim.warmup_steps < options.steps
        assert config.checkpoint.every + 1 < options.steps  # the first kill falls after a checkpoint
        dealt.append(options.kills)
    assert len(dealt) == 4
    assert dealt[0] == kills
    assert min(dealt) >= 1
