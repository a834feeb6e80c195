"""`keel check-task` as a user meets it, and a fault planted for each thing that it proves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.envs.rewards import http

# Sound tasks with one thing broken in each: `module:attr` as a user writes it.
FAULTS = """
import itertools
from keel.envs import TaskWrapper
from keel.envs.arithmetic import arithmetic
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
def unsound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unsound.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("unsound", None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["check-task", *words, "--samples", "8", "--json"])
    return status, json.loads(capsys.readouterr().out)


def detail(report: dict[str, Any], name: str) -> str:
    return str(next(check["detail"] for check in report["checks"] if check["name"] == name))


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["ok"]]


@pytest.mark.usefixtures("unsound")
@pytest.mark.parametrize(
    ("name", "first", "detail"),
    [
        ("too_few", "problems as asked", "must return 8 problems"),
        ("forgets", "deterministic", "the same problems for the same seed"),
        ("same_keys", "distinct keys", "the same key"),
        ("leaks", "held out", "a held-out problem is in the training data"),
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
    status, report = run(capsys, f"unsound:{name}")
    assert (status, report["ok"]) == (1, False)
    assert failed(report)[0] == first
    assert detail in next(check["detail"] for check in report["checks"] if not check["ok"])


@pytest.mark.usefixtures("unsound")
@pytest.mark.parametrize(
    ("name", "check"), [("foreign_prompt", "prompts round-trip"), ("foreign_gold", "answers round-trip")]
)
def test_what_the_tokenizer_of_the_model_cannot_write_is_a_fault(
    name: str, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(capsys, f"unsound:{name}", "--model", "tiny")
    assert (status, failed(report)) == (1, [check])
    status, report = run(capsys, f"unsound:{name}")  # tiny is a stand-in here: counted, not refused
    assert status == 0
    assert "does not know" in next(c["detail"] for c in report["checks"] if c["name"] == check)


@pytest.mark.usefixtures("unsound")
def test_configured_rewards_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "task: {name: 'unsound:sound'}\nrewards: [{name: exact}, {name: 'unsound:pays_more'}]\n"
    )
    status, report = run(capsys, "mine.yaml")
    assert (status, failed(report)) == (1, ["configured rewards"])
    assert "an empty answer" in detail(report, "configured rewards")
    status, report = run(capsys, "mine.yaml", "rewards=[{name: exact}, {name: length, weight: 0.1, scale: 50}]")
    assert (status, failed(report)) == (0, [])
    gold = report["examples"][0]["gold"]
    assert gold["parts"] == {"exact": 1.0, "length": -len(gold["text"]) / 50}
    assert gold["total"] == pytest.approx(1.0 - 0.1 * len(gold["text"]) / 50)
    status, report = run(capsys, "unsound:sound", "rewards=[{name: 'unsound:breaks'}]")
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


@pytest.mark.usefixtures("unsound")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["arithmetics"], "did you mean 'arithmetic'"),
        (["arithmetic", "skil=sort"], "did you mean 'skill'"),
        (["arithmetic", "countdown"], "one NAME, but 'countdown'"),
        (["arithmetic", "data.path=x.jsonl"], "generates its problems"),
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


# A user's own tasks, each with a reward that pays for something else than solving it.
LEAKS = """
from keel.base.types import Problem, Reward
from keel.envs import Episode, Task

COLOURS = ["red", "green", "blue", "black", "white", "pink", "brown", "grey", "gold", "teal", "amber", "ivory"]

class Colours(Task):
    name = "colours"
    def __init__(self, pay): self.pay = pay
    def problem(self, i): return Problem(f"c{i}", f"Colour number {i}, in <answer> tags?", COLOURS[i % 12] + str(i))
    def sample(self, count, *, seed, step): return [self.problem(count * step + i) for i in range(count)]
    def held_out(self, count, *, seed=0): return [self.problem(9000 + i) for i in range(count)]
    def gold(self, problem): return f"<answer>{problem.answer}</answer>"
    def reward(self, problem, turns):
        right = turns[-1].strip() == self.gold(problem)
        return Reward(1.0 if right else self.pay(problem, turns[-1]), {"correct": float(right)})

def odd(problem, text):
    if text.count("<answer>") > 1: raise LookupError("two tags")
    return 0.0

class Chat(Colours):
    reward = Task.reward
    def start(self, problem): return Talk(self, problem)
    def gold_turns(self, problem): return [f"ask: {problem.key}", self.gold(problem)]

class Talk(Episode):
    def __init__(self, task, problem): self.task, self.problem, self.turns = task, problem, []
    def step(self, text):
        self.turns.append(text)
        return "go on" if text.startswith("ask") else None
    def reward(self):
        right = self.turns[-1] == self.task.gold(self.problem)
        return Reward(max(float(right), 0.2 * (len(self.turns) - 1)), {"correct": float(right)})

def sound(): return Colours(lambda problem, text: 0.0)
def pays_form(): return Colours(lambda problem, text: 0.4 * (text.count("<answer>") == 1 and "</answer>" in text))
def pays_containing(): return Colours(lambda problem, text: float(problem.answer in text))
def pays_long(): return Colours(lambda problem, text: min(1.0, len(text) / 900))
def pays_prompt(): return Colours(lambda problem, text: 0.5 * (problem.prompt in text))
def raises(): return Colours(odd)
def pays_calls(): return Chat(None)
"""


@pytest.fixture
def leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("leaks", None)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in report["attacks"] if row["verdict"] != "fine"}


@pytest.mark.usefixtures("leaks")
def test_attacks_on_a_sound_task_of_ones_own_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, "leaks:sound")
    assert (status, failed(report), verdicts(report), report["warnings"]) == (0, [], {}, [])
    assert {row["mean"] for row in report["attacks"]} == {0.0}


@pytest.mark.usefixtures("leaks")
@pytest.mark.parametrize(
    ("name", "attack", "share", "lesson"),
    [
        ("pays_containing", "every answer in one form", 1.0, "to list answers"),
        ("pays_long", "form only, endless", 1.0, "length limit"),
        ("pays_calls", "calls, endless", 1.4, "to call tools without answering"),
    ],
)
def test_an_attack_that_is_as_good_as_the_gold_answer_fails(
    name: str, attack: str, share: float, lesson: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(capsys, f"leaks:{name}")
    assert (status, failed(report)) == (1, ["attacks earn less"])
    assert verdicts(report)[attack] == "hole"
    row = next(row for row in report["attacks"] if row["name"] == attack)
    assert (row["mean"], row["highest"]) == pytest.approx((share, share))
    assert f"{attack!r} earns {share:.2f}" in detail(report, "attacks earn less")
    assert lesson in detail(report, "attacks earn less")


@pytest.mark.usefixtures("leaks")
def test_a_judge_elsewhere_is_asked_few_times_and_that_is_said_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(url: str, body: dict[str, str], **options: Any) -> dict[str, float]:
        asked.append(body["completion"])
        return {"score": float(body["completion"].count("<answer>"))}

    monkeypatch.setattr(http, "ask", ask)
    monkeypatch.setattr(http, "probe", lambda **options: None)
    entry = "rewards=[{name: task}, {name: http, url: 'http://127.0.0.1:1/judge', weight: 0.1}]"
    main(["check-task", "leaks:sound", entry, "--json"])
    assert " 60 requests to http\n" in capsys.readouterr().err
    assert 40 < len(asked) <= 60
    main(["check-task", "leaks:sound", "--json"])
    assert "asked" not in capsys.readouterr().err


@pytest.mark.usefixtures("leaks")
def test_a_reward_that_raises_on_odd_answers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, "leaks:raises")
    assert (status, failed(report)) == (1, ["attacks are judged"])
    assert "'form only, endless' is not graded" in detail(report, "attacks are judged")
    assert "two tags" in detail(report, "attacks are judged")
    assert verdicts(report)["every answer in a form of its own"] == "raises"
