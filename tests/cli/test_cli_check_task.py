"""`keel check-task` as a user meets it, and a fault planted for each thing that it proves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main

# Sound tasks with one thing broken in each: `module:attr` as a user writes it.
FAULTS = """
import itertools
from keel.envs import TaskWrapper, arithmetic
from keel.base.types import Problem, Reward

class Broken(TaskWrapper):
    name = "broken"
    inner = arithmetic(high=30)
    def __init__(self, **methods): vars(self).update(methods)

good = arithmetic(high=30)
draws = itertools.count()

def sound(): return Broken()
def too_few(): return Broken(sample=lambda count, seed, step: good.sample(1, seed=seed, step=step))
def forgets(): return Broken(sample=lambda count, seed, step: good.sample(count, seed=next(draws), step=step))
def same_keys(): return Broken(sample=lambda count, seed, step: good.sample(1, seed=0, step=0) * count)
def leaks(): return Broken(held_out=lambda count, seed=0: good.sample(count, seed=0, step=1))
def nan(): return Broken(reward=lambda problem, turns: Reward(float("nan") if turns[-1] == "no" else 0.0))
def nothing(): return Broken(reward=lambda problem, turns: None)
def moody(): return Broken(reward=lambda problem, turns: Reward(float(next(draws))))
def bad_gold(): return Broken(gold=lambda problem: "0")
def pays_silence(): return Broken(reward=lambda problem, turns: Reward(1.0))
def pays_length(): return Broken(reward=lambda problem, turns: Reward(float(len(turns[-1]))))
def pays_anything(): return Broken(reward=lambda problem, turns: Reward(float(bool(turns[-1]))))
def raises(): return Broken(reward=lambda problem, turns: 1 / 0)

def _foreign(problem): return Problem(problem.key, "\\u4e09" + problem.prompt, problem.answer)
def foreign_prompt():
    return Broken(
        sample=lambda count, seed, step: [_foreign(p) for p in good.sample(count, seed=seed, step=step)],
        held_out=lambda count, seed=0: [_foreign(p) for p in good.held_out(count, seed=seed)],
    )
def foreign_gold():
    return Broken(
        gold=lambda problem: "\\u4e09" + problem.answer,
        reward=lambda problem, turns: Reward(float(turns[-1] == "\\u4e09" + problem.answer)),
    )
def pays_more(problem, text): return 5.0 if text == "" else 1.0
def breaks(problem, text): raise RuntimeError("out of order")
"""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("faults", None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["check-task", *words, "--samples", "8", "--json"])
    return status, json.loads(capsys.readouterr().out)


def detail(report: dict[str, Any], name: str) -> str:
    return str(next(check["detail"] for check in report["checks"] if check["name"] == name))


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["ok"]]


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("name", "first", "detail"),
    [
        ("too_few", "problems as asked", "must return 8 problems"),
        ("forgets", "deterministic", "the same problems for the same seed"),
        ("same_keys", "distinct keys", "the same key"),
        ("leaks", "held out", "turns up in training"),
        ("nan", "finite rewards", "nan"),
        ("nothing", "finite rewards", "is a return missing"),
        ("moody", "finite rewards", "changes from call to call"),
        ("raises", "finite rewards", "raised ZeroDivisionError"),
        ("bad_gold", "gold is correct", "is not judged correct"),
        ("pays_silence", "empty earns less", "earns as much as the gold one"),
        ("pays_length", "gold earns most", "earns more than the gold one"),
        ("pays_anything", "wrong earns less", "always earns the full reward"),
    ],
)
def test_each_fault_is_caught_by_name(name: str, first: str, detail: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, f"faults:{name}")
    assert (status, report["ok"]) == (1, False)
    assert failed(report)[0] == first
    assert detail in next(check["detail"] for check in report["checks"] if not check["ok"])


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("name", "check"), [("foreign_prompt", "prompts round-trip"), ("foreign_gold", "answers round-trip")]
)
def test_what_the_tokenizer_of_the_model_cannot_write_is_a_fault(
    name: str, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(capsys, f"faults:{name}", "--model", "tiny")
    assert (status, failed(report)) == (1, [check])
    status, report = run(capsys, f"faults:{name}")  # tiny is a stand-in here: counted, not refused
    assert status == 0
    assert "does not know" in next(c["detail"] for c in report["checks"] if c["name"] == check)


@pytest.mark.usefixtures("faults")
def test_configured_rewards_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("task: {name: 'faults:sound'}\nrewards: [{name: exact}, {name: 'faults:pays_more'}]\n")
    status, report = run(capsys, "mine.yaml")
    assert (status, failed(report)) == (1, ["configured rewards"])
    assert "an empty answer" in detail(report, "configured rewards")
    status, report = run(capsys, "mine.yaml", "rewards=[{name: exact}, {name: length, weight: 0.1, scale: 50}]")
    assert (status, failed(report)) == (0, [])
    gold = report["examples"][0]["gold"]
    assert gold["parts"] == {"exact": 1.0, "length": -len(gold["text"]) / 50}
    assert gold["total"] == pytest.approx(1.0 - 0.1 * len(gold["text"]) / 50)
    status, report = run(capsys, "faults:sound", "rewards=[{name: 'faults:breaks'}]")
    assert (status, failed(report)) == (1, ["configured rewards"])
    assert "out of order" in detail(report, "configured rewards")


@pytest.mark.parametrize(
    "words",
    [
        ["arithmetic", "skill=sort", "digits=6"],
        ["arithmetic", "style=words", "--format", "answer_tag"],
        ["countdown", "numbers=3"],
        ["reasoning_gym", "dataset=chain_sum", "max_terms=3", "min_terms=2"],
        ["mixture", "tasks=[{name: arithmetic, skill: add}, {name: countdown}]"],
    ],
    ids=" ".join,
)
def test_our_own_tasks_are_proven(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, *words)
    assert (status, failed(report)) == (0, [])
    assert len(report["checks"]) == 13
    # The library pays an answer that contains the right one by their lengths: two answers at once earn about a third.
    pays = ["two answers in two notations"] if words[0] == "reasoning_gym" else []
    assert [row["name"] for row in report["attacks"] if row["verdict"] != "fine"] == pays
    assert len(report["warnings"]) == len(pays)
    assert len(report["examples"]) == 3
    for example in report["examples"]:
        assert example["gold"]["parts"]["correct"] == 1.0
        assert example["wrong"]["total"] < example["gold"]["total"]


def test_a_file_of_ones_own_by_data_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(100)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    status, report = run(capsys, "dataset", "data.path=mine.jsonl")
    assert (status, failed(report)) == (0, [])


def test_the_page_shows_marks_and_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["check-task", "arithmetic", "--samples", "4"]) == 0
    page = capsys.readouterr().out
    assert page.count("✓") == 13
    assert all(f"example {number}" in page for number in (1, 2, 3))
    assert "all 13 checks hold" in page
    assert "earns 1 (correct 1)" in page


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["arithmetics"], "did you mean 'arithmetic'"),
        (["arithmetic", "skil=sort"], "did you mean 'skill'"),
        (["arithmetic", "countdown"], "'countdown' is another"),
        (["arithmetic", "data.path=x.jsonl"], "makes its own problems"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["nowhere:task"], "nowhere:task"),
        (["reasoning_gym", "dataset=chain_sums"], "did you mean 'chain_sum'"),
        (["arithmetic", "--model", "./no/such/folder"], "no/such/folder"),
        (["arithmetic", "rewards=[{name: http, url: 'http://127.0.0.1:1/judge'}]"], "http://127.0.0.1:1/judge is down"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-task", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len([line for line in error.splitlines() if "error" in line]) == 1
    assert "Traceback" not in error


def test_a_reward_that_takes_every_answer_is_found_where_it_was_not_planted(capsys: pytest.CaptureFixture[str]) -> None:
    """This dataset's scoring compares the truth of texts, and "False" is as true as "True"."""
    status, report = run(capsys, "reasoning_gym", "dataset=game_of_life_halting")
    assert (status, failed(report)) == (1, ["wrong earns less", "attacks earn less"])
