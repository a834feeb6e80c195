"""Programs against tests: the reward, the task, benchmarks' files, the tool; and attacks on each."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs import programs
from keel.envs.base import Task, play_turns
from keel.envs.code import OPERATIONS, code, compose
from keel.envs.exploits import exploit
from keel.envs.judge import Judge
from keel.envs.programs import check_tests, program_of, run_tests
from keel.envs.registry import build_task
from keel.envs.sandbox import Program, Sandbox, SandboxLimits, sandbox
from keel.envs.validity import checks

PATIENT = {"timeout_s": 60.0, "workers": 2}  # for what takes milliseconds, on a machine that is busy
LIMITS = SandboxLimits(**PATIENT)  # type: ignore[arg-type]
Tests = list[Any]


def hurry(monkeypatch: pytest.MonkeyPatch, late: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leave little time to some requests, and to no others."""
    ask = Program.ask

    def asks(self: Program, request: Mapping[str, Any], until: float, *args: Any) -> Any:
        return ask(self, request, time.monotonic() + 0.2 if late(request) else until, *args)

    monkeypatch.setattr(Program, "ask", asks)


def passed(program: str, tests: Tests) -> list[bool]:
    return [outcome.passed for outcome in run_tests(program, check_tests(tests), LIMITS)]


def test_each_kind_of_test_passes_and_fails() -> None:
    double = "def f(x):\n    return x * 2\n"
    tests: Tests = [
        {"call": "f", "args": [2], "returns": 4},
        {"call": "f", "args": [2], "returns": 5},
        "assert f(3) == 6",
        "assert f(3) == 7",
        {"code": "assert g(2) == 4", "remote": {"g": "f"}},
        {"code": "assert f(k) == 10", "setup": "k = 5"},
        {"call": "g", "args": [], "returns": None},
    ]
    assert passed(double, tests) == [True, False, True, False, True, True, False]
    printed = [
        {"stdin": "3 4\n", "stdout": "7\n"},
        {"stdin": "3 4", "stdout": "7   \n\n"},
        {"stdin": "1 1", "stdout": "3"},
    ]
    assert passed("print(sum(map(int, input().split())))", printed) == [True, True, False]


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "True",
        "3",
        "2.5",
        "'ü'",
        "b'x'",
        "(1, (2,))",
        "[1, [2]]",
        "{1, 2}",
        "frozenset({3})",
        "{1: (2, {3})}",
        "2j",
    ],
)
def test_values_cross_unchanged(value: str) -> None:
    tests = [f"v = f()\nassert v == {value} and type(v) is type({value})", f"assert g({value}) == {value}"]
    assert passed(f"def f(): return {value}\ndef g(x): return x", tests) == [True, True]


def test_exceptions_and_iterators_cross_too() -> None:
    program = "def f(x):\n    if x < 0: raise ValueError('low')\n    return map(str, range(x))"
    tests = [
        "assert list(f(2)) == ['0', '1']",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e: assert str(e) == 'low'",
    ]
    assert passed(program, tests) == [True, True]


def test_partial_credit_by_name() -> None:
    tests = [
        {"name": "small", "call": "f", "args": [1], "returns": 1},
        {"name": "small", "call": "f", "args": [2], "returns": 2},
        {"name": "large", "call": "f", "args": [100], "returns": 10000},
    ]
    problem = Problem("p", "square", info={"tests": tests})
    judge = Judge.of(code(), [{"name": "code", "partial": 0.3, **PATIENT}])
    judged = judge.judge(
        problem, [["def f(x): return x"], ["def f(x): return x if x < 2 else 3"], ["def f(x: x"], [""]]
    )
    assert judged is not None
    assert [reward.total for reward in judged] == [pytest.approx(0.2), pytest.approx(0.1), 0.0, 0.0]
    assert [reward.parsed for reward in judged] == [True, True, False, False]
    assert judged[1].parts == {
        "code": pytest.approx(0.1),
        "code/correct": 0.0,
        "code/passed": pytest.approx(1 / 3),
        "code/small": 0.5,
        "code/large": 0.0,
    }
    assert "returned 3, expected 2" in judged[1].details


@pytest.mark.parametrize("depth", [300, 900, 1000, 5000, 100_000])
def test_deeply_nested_values_are_no_failure_of_the_judge(depth: int) -> None:
    """Written past the encoder: as deep as JSON is read, or deeper."""
    nested = f"b'[' * {depth} + b']' * {depth}"
    program = f"import os\ndef f():\n    os.write(3, b'{{\"value\": ' + {nested} + b'}}\\n')\n    os._exit(0)"
    assert passed(program, [{"call": "f", "args": [], "returns": 1}, "assert f() == 1"]) == [False, False]


def test_words_of_a_program_steer_no_terminal() -> None:
    problem = Problem("p", "", info={"tests": [{"call": "f", "args": [], "returns": 1}]})
    text = "\x1b]0;title\x07```python\ndef f(): raise ValueError('\\x1b[2J\\ud800\\u202e')\n#\x1b[2J\n```"
    (judged,) = Judge.of(code(), [{"name": "code"}]).judge(problem, [[text]]) or ()
    assert "ValueError: \\x1b[2J\\ud800\\u202e" in judged.details
    assert judged.details.replace("\n", "").isprintable()


def test_what_runs_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash the program is loaded anew; after the first test that runs out of time none is run."""
    hurry(monkeypatch, lambda request: request.get("args") == [3] or request.get("stdin") == "loop")
    program = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    while x == 3: pass\n    return x"
    tests = [{"call": "f", "args": [x], "returns": x} for x in (0, 1, 2, 3, 4)]
    outcomes = run_tests(program, tests, LIMITS)
    assert [outcome.passed for outcome in outcomes] == [True, False, True, False, False]
    assert "ended before" in outcomes[1].shown
    assert "not run" in outcomes[4].shown
    printed = [{"stdin": x, "stdout": x} for x in ("a", "loop", "b")]
    assert passed("x = input()\nwhile x == 'loop': pass\nprint(x)", printed) == [True, False, False]


def test_tests_after_a_late_one_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    program = Sandbox.program
    monkeypatch.setattr(Sandbox, "program", lambda self: started.append(1) or program(self))
    hurry(monkeypatch, lambda request: request["exec"] == "while True: pass")
    tests = [{"stdin": str(i), "stdout": ""} for i in range(30)]
    for times in (1, 2):  # what ran out of time is not remembered: the machine may have been busy
        outcomes = run_tests("while True: pass", tests, LIMITS)
        assert [outcome.kind for outcome in outcomes] == ["timeout"] * 30
        assert times <= len(started) <= 3 * times
    started.clear()
    for _ in range(2):
        run_tests("print(1)", tests, LIMITS)
    assert len(started) == 30


@pytest.mark.parametrize(
    "program",
    [
        'import os\nos.write(3, b\'{"unconfined": "owned"}\\n\')\n',
        'import os\ndef f(): os.write(3, b\'{"unconfined": "owned"}\\n\')',
        'import os\nos.write(3, b\'{"ready": true}\\n{"ok": true}\\n\')\nwhile True: pass',
    ],
)
def test_no_message_of_a_program_ends_the_run(program: str) -> None:
    tests = [{"call": "f", "args": [], "returns": 1}, "assert f() == 1", {"stdin": "", "stdout": ""}]
    judge = Judge.of(code(), [{"name": "code", "timeout_s": 0.5}])
    (judged,) = judge.judge(Problem("p", "", info={"tests": tests}), [[program]]) or ()
    assert judged.total == 0.0


def test_outcomes_are_remembered_up_to_a_size() -> None:
    memory = programs._Memory(5000)
    outcomes = (programs.CaseOutcome("", True, "x" * 1500),)
    for key in (b"1", b"2", b"2", b"1", b"3"):
        memory.put(key, outcomes)
    assert [memory.get(key) for key in (b"1", b"2", b"3")] == [outcomes, None, outcomes]


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ("(1, [2])", [1, [2]], True),
        ("[1, 2]", [1, 3], False),
        ("[1]", [1, 1], False),
        ("{'a': (1,), 'b': {}}", {"b": {}, "a": [1]}, True),
        ("{'a': 1}", {"a": 2}, False),
        ("{'a': 1}", {"b": 1}, False),
        ("{1: 1}", {"1": 1}, False),
        ("{1}", [1], False),
        ("{'tuple': [1]}", {"tuple": [1]}, True),
        ("b'a'", "a", False),
        ("[]", None, False),
        ("None", [], False),
        ("x(100)", [], False),
    ],
)
def test_a_returned_value_is_what_a_test_expects(value: str, expected: Any, same: bool) -> None:
    program = f"def x(n): return [x(n - 1)] if n else 0\ndef f(): return {value}"
    assert passed(program, [{"call": "f", "args": [], "returns": expected}]) == [same]


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration"])
def test_a_program_does_not_stop_a_tests_own_loop(error: str) -> None:
    tests = ["assert all(a == b for a, b in zip(map(f, [1, 2]), [1, 4]))", "for x in map(f, [3]): assert x == 9"]
    assert passed("def f(x): return x * x", tests) == [True, True]
    assert passed(f"def f(x): raise {error}", tests) == [False, False]


def test_errors_are_shown_and_not_compared() -> None:
    program = "import sys\nprint('note', file=sys.stderr)\nprint(1)"
    (outcome,) = run_tests(program, [{"stdin": "", "stdout": "1"}], LIMITS)
    assert outcome.passed
    assert "note" in outcome.shown


def end(program: Program, limits: SandboxLimits) -> None:
    """Kill a program's sandbox, and wait until the program is gone."""
    os.killpg(sandbox(limits)._process.pid, signal.SIGKILL)
    program._channel.setblocking(True)
    assert program._channel.recv(1) == b""
    program._channel.setblocking(False)


def test_a_death_of_the_sandbox_costs_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, ended = SandboxLimits(timeout_s=60.0, workers=1), []
    ask = Program.ask

    def dies(self: Program, request: Any, until: float, *args: Any) -> Any:
        if len(ended) < 2 and ("stdin" in request or "call" in request):
            ended.append(end(self, limits))
        return ask(self, request, until, *args)

    monkeypatch.setattr(Program, "ask", dies)
    outcomes = run_tests("def f(): return 1", [{"call": "f", "args": [], "returns": 1}], limits)
    outcomes += run_tests("print(2)", [{"stdin": "", "stdout": "2"}], limits)
    assert len(ended) == 2
    assert all(outcome.passed for outcome in outcomes)
    ended.clear()
    monkeypatch.setattr("keel.envs.programs.TRIES", 2)
    with pytest.raises(KeelError, match="memory"):
        run_tests("print(3)", [{"stdin": "", "stdout": "3"}], limits)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```\na\n```\n```py\nb\n```\n```text\nc\n```", "b"),
        ("```python\nx = 1", "x = 1"),
        ("```python\n```", ""),
    ],
)
def test_the_program_of_a_completion(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "",
        [{"stdin": "x"}],
        [3],
        [{"call": "f"}],
        [{"code": "", "stdin": ""}],
        "[1",
        [{"code": "1", "name": "correct"}],
    ],
)
def test_wrong_tests_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        check_tests(wrong)
    with pytest.raises(KeelError, match=r"p7.*test"):
        Judge.of(code(), [{"name": "code"}]).judge(Problem("p7", "", info={"tests": wrong}), [["x = 1"]])


@pytest.mark.parametrize("params", [{"sandbox": "docker"}, {"partial": 1.0}, {"memory_mb": 1}, {"timeout_s": 0}])
def test_wrong_options_are_refused_before_anything_runs(params: dict[str, Any]) -> None:
    with pytest.raises(KeelError):
        Judge.of(code(), [{"name": "code", **params}])
    with pytest.raises(KeelError):
        build_task("code", **params)


# ---------------------------------------------------------------- the made problems


def test_composed_programs_do_what_the_operations_do() -> None:
    x = [3, -1, 4, 1, -5]
    for operations in product(OPERATIONS, repeat=3):
        if operations[0].of is not list or any(a.gives is not b.of for a, b in pairwise(operations)):
            continue
        value: Any = x
        for operation in operations:
            value = operation.apply(value, 3)
        assert eval(compose([(operation, 3) for operation in operations]), {"x": x}) == value


@pytest.mark.parametrize("format", ["plain", "chat"])
def test_the_task_is_sound(format: str) -> None:
    task = code(format=format, **PATIENT)  # type: ignore[arg-type]
    assert [result for result in checks(task, count=3) if not result.ok] == []
    for problem in task.sample(4, seed=1, step=0):
        assert not any(str(test["args"][0]) in str(problem.prompt) for test in problem.info["tests"])


class Naive(Task):
    """The same problems judged as one should not: program and tests in one process."""

    name = "naive"

    def __init__(self) -> None:
        self.inner = code(steps=2, format="plain")

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return self.inner.sample(count, seed=seed, step=step)

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self.inner.held_out(count, seed=seed)

    def gold(self, problem: Problem) -> str:
        return self.inner.gold(problem)

    def attacks(self, problem: Problem) -> Any:
        return self.inner.attacks(problem)

    def reward(self, problem: Problem, turns: Any) -> Reward:
        tests = "\n".join(f"assert f({t['args'][0]}) == {t['returns']}" for t in problem.info["tests"])
        try:
            with redirect_stdout(io.StringIO()):
                exec(f"{turns[-1]}\n{tests}", {})
        except SystemExit as exit:
            return Reward(float(not exit.code))
        except Exception:
            return Reward(0.0)
        return Reward(float(bool(turns[-1].strip())))


def paid(task: Task) -> set[str]:
    """The attacks that earn the full reward on a problem."""
    problem = task.sample(1, seed=0, step=0)[0]
    return {
        attack.name
        for attack in task.attacks(problem)
        for way in attack.ways
        if attack.name != "patched asserts" or not isinstance(task, Naive)  # which would patch these tests
        if task.reward(problem, way[0]).total == 1.0
    }


def test_attacks_break_a_judge_in_one_process_and_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    chosen = code(steps=2, format="plain", **PATIENT)  # type: ignore[arg-type]
    names = {attack.name for attack in chosen.attacks(chosen.sample(1, seed=0, step=0)[0])}
    assert names == {
        "hard-coded outputs",
        "reads the tests",
        "objects that equal everything",
        "early exit with status 0",
        "stopped iterations",
        "patched asserts",
    }
    assert paid(chosen) == set()
    monkeypatch.setattr("os._exit", leave)
    assert paid(Naive()) == {"reads the tests", "objects that equal everything", "early exit with status 0"}


@pytest.mark.slow
def test_check_task_attacks_programs() -> None:
    exploits = exploit(code(format="plain", **PATIENT), count=8, seconds=0.0)  # type: ignore[arg-type]
    tried = {row.name for row in exploits.rows if row.family == "program"}
    assert len(tried) == 6
    assert all(check.ok for check in exploits.checks)
    assert exploits.warnings == []


def test_hard_coded_outputs_earn_only_their_share() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 5", "assert f(3) == 10"]
    assert passed("def f(x): return {1: 2}.get(x)", tests) == [True, False, False]


# ---------------------------------------------------------------- benchmarks' files

MBPP = {
    "task_id": 1,
    "text": "Write a function to add two numbers.",
    "code": "import math\ndef add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(.1, .2), .3)"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def half(x):\n    return x / 2\n\ndef mean(a, b):\n    '''The mean.'''\n",
    "entry_point": "mean",
    "canonical_solution": "    return half(a + b)\n",
    "test": "def check(candidate):\n    assert candidate(2, 4) == 3\n    assert half(candidate(0, 4)) == 1\n",
}
APPS = {
    "question": "Add the numbers of a line.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "starter_code": "",
}
APPS_CALLS = {
    "question": "Pairs.",
    "solutions": json.dumps(["class Solution:\n    def pair(self, a, b):\n        return (a, b)"]),
    "input_output": json.dumps({"fn_name": "pair", "inputs": [[1, 2], [3, 4]], "outputs": [[[1, 2]], [[3, 4]]]}),
    "starter_code": "class Solution:\n    def pair(self, a, b):\n",
}
LCB = {
    "question_content": "Read a number, print its double.",
    "public_test_cases": json.dumps([{"input": "4", "output": "8", "testtype": "stdin"}]),
    "private_test_cases": base64.b64encode(
        zlib.compress(pickle.dumps(json.dumps([{"input": "5", "output": "10", "testtype": "stdin"}])))
    ).decode(),
    "starter_code": "",
    "metadata": "{}",
}
LCB_CALLS = {
    "question_content": "Add.",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
    "private_test_cases": "[]",
    "starter_code": "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        ",
    "metadata": json.dumps({"func_name": "add"}),
}
OWN = {"question": "Say hi.", "answer": "print('hi')", "tests": [{"stdin": "", "stdout": "hi"}]}
SOLVED = {
    "mbpp": (MBPP, MBPP["code"], 2),
    "humaneval": (HUMANEVAL, None, 1),
    "apps": (APPS, None, 2),
    "apps, calls": (APPS_CALLS, None, 2),
    "livecodebench": (LCB, "print(int(input()) * 2)", 2),
    "livecodebench, calls": (LCB_CALLS, "class Solution:\n    def add(self, a, b):\n        return sum(a) + b", 1),
    "own": (OWN, None, 1),
}
QUESTIONS = ("text", "question", "question_content", "prompt")


def _read(tmp_path: Path, row: Mapping[str, Any]) -> Task:
    question = next(name for name in QUESTIONS if name in row)
    other = {**row, question: f"{row[question]}\n# again\n"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    return build_task("code", data={"path": str(tmp_path / "rows.jsonl")}, held_out=1, **PATIENT)


@pytest.mark.parametrize("name", SOLVED)
def test_benchmark_files_are_read(tmp_path: Path, name: str) -> None:
    row, solution, count = SOLVED[name]
    task = _read(tmp_path, row)
    (problem,) = task.sample(1, seed=0, step=0)
    assert len(problem.info["tests"]) == count
    right = task.reward(problem, [f"```python\n{solution}\n```" if solution else task.gold(problem)])
    assert (right.total, dict(right.parts)) == (1.0, {"correct": 1.0, "passed": 1.0}), right.details
    assert task.reward(problem, ["```python\nprint('?')\n```"]).total == 0.0
    holes = [
        attack.name
        for attack in task.attacks(problem)
        for way in attack.ways
        if task.reward(problem, way[0]).total == 1.0
    ]
    assert holes == []


def test_hidden_tests_stay_hidden(tmp_path: Path) -> None:
    (problem,) = _read(tmp_path, MBPP).sample(1, seed=0, step=0)
    assert "add(1, 2)" in str(problem.prompt)
    assert "isclose" not in str(problem.prompt)


def test_a_pickle_of_private_tests_is_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "owned",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(KeelError, match=r"rows\.jsonl:1.*LiveCodeBench"):
        _read(tmp_path, {**LCB, "private_test_cases": packed})
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"a": 1}, "MBPP"),
        ({**MBPP, "test_list": []}, "rows.jsonl:1"),
        ({**APPS, "input_output": "{}"}, "rows.jsonl:1"),
        ({**HUMANEVAL, "prompt": ""}, "rows.jsonl:1"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, row: Mapping[str, Any], says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(KeelError, match=says):
        build_task("code", data={"path": str(tmp_path / "rows.jsonl")})


# ---------------------------------------------------------------- the tool


def _call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def test_the_tool_has_state_within_an_episode_and_none_across(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, lambda request: request["exec"] == "while True: pass")
    task = build_task("tools", task={"name": "arithmetic"}, tools=[{"python": PATIENT}])
    problem = task.sample(1, seed=0, step=0)[0]
    assert "python" in str(problem.tools)

    def replies(*codes: str) -> list[str]:
        with play_turns(task, problem, map(_call, codes)) as (_, answers):
            return [answer[0]["content"] for answer in answers if answer is not None and not isinstance(answer, str)]

    first = replies("x = 20\nopen('f', 'w').write('kept')", "x + 1", "print(open('f').read())\nx / 0", "x * 2")
    assert first == ["4", "21", "kept\nZeroDivisionError: division by zero", "40"]
    assert replies("x", "import os\nos.listdir('.')") == ["NameError: name 'x' is not defined", "[]"]
    assert replies("x = 1", "while True: pass", "x") == [
        "",
        "ran out of time; its variables are gone",
        "NameError: name 'x' is not defined",
    ]
    with play_turns(task, problem, [_call("x = 1")]) as (episode, _):
        program = episode.sessions["python"].program  # type: ignore[attr-defined]
    assert program.closed


def test_wrong_limits_of_the_tool_are_refused() -> None:
    for entry in ({"python": {"timeout": 1}}, {"python": {"timeout_s": -1}}, {"python": 3}):
        with pytest.raises(KeelError):
            build_task("tools", task={"name": "arithmetic"}, tools=[entry])
