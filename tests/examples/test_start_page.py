"""The first own training of docs/start.md, as the page has it: it learns, and the doctor finds nothing wrong."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.cli import main
from keel.run.warmstart import CACHE_SWITCH

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the section's script writes; the warm start is made once."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.delenv(CACHE_SWITCH)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for code in blocks("python"):
            exec(compile(code, str(PAGE), "exec"), {})
        yield folder


def blocks(language: str) -> list[str]:
    section = PAGE.read_text().partition("## Your own\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def command(name: str) -> list[str]:
    """The arguments of the section's `keel NAME …`."""
    lines = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
    [found] = [words[1:] for words in lines if words[:2] == ["keel", name]]
    return found


@pytest.mark.slow
def test_it_begins_to_learn(folder: Path) -> None:
    """Its warm start as a whole and a quarter of its steps, judged by more samples than the page takes."""
    assert main([*command("train"), "run.max_steps=40", "optim.warmup_steps=0", "eval.every=0", "eval.k=[1,8]"]) == 0
    accuracy = json.loads((folder / "runs" / "mine" / "summary.json").read_text())["accuracy"]
    assert 0.3 < accuracy["before"] < 0.8  # the warm start has learned, and has left something to learn
    assert accuracy["after"] > accuracy["before"] + 0.03


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong(folder: Path) -> None:
    assert main(["doctor", *command("train")[1:], "--quick", "run.name=fresh"]) == 0
