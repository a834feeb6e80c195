"""Rows that load and whose oracle earns the maximum, and rows that do not."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from keel import cli
from keel.recipes.multihop.__main__ import app, play_oracle

from .rows import row, three_hops, written

main = partial(cli.main, app=app)


def test_every_row_is_played_in_every_form(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row(), three_hops(), row(id="two", question="Again?", answer="[Bo]"))
    played = play_oracle(path)
    assert [(one.tool_format, one.answer_style) for one in played] == [
        ("json", "tags"),
        ("json", "complete"),
        ("tags", "tags"),
        ("tags", "complete"),
    ]
    # no paragraph says who leads the town, nor anything of [Bo]
    assert [(one.rows, one.complete, one.demonstrations, one.short) for one in played] == [(3, 3, 1, ())] * 4


def test_a_row_whose_support_is_cut_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = row(id="long", question="Long?")
    long["paragraphs"][1]["paragraph_text"] = "x" * 300
    path = written(tmp_path / "a.jsonl", row(), long)
    assert main([path, "max_characters=200"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 rows load"
    # both recalls are 1/2, since what is not shown is not cited: (1 + 0.9 + 0.5 + 0.4 + 0.3 + 0.1) / 4
    lacking = "(long earns 0.8 of 1: retrieval_recall, citation_recall)"
    named = f"1 of 2 oracle episodes earn the maximum, 1 retrieve all support, 1 retrieve the answer {lacking}"
    assert lines[1:] == [
        f"{form}: {named}" for form in ("json, tags", "json, complete", "tags, tags", "tags, complete")
    ]


def test_a_broken_row_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path / "a.jsonl", row(), row(paragraphs=[]))]) == 2
    assert "a.jsonl:2: column 'paragraphs' is empty" in capsys.readouterr().err
    assert main([]) == 2
    assert main([written(tmp_path / "b.jsonl", row()), "top_n"]) == 2


def test_it_is_a_command(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row(), three_hops())
    command = [sys.executable, "-m", "keel.recipes.multihop", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == [
        "2 rows load",
        "json, tags: 2 of 2 oracle episodes earn the maximum, 2 retrieve all support, 1 retrieve the answer",
    ]
