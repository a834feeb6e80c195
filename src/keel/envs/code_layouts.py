"""The file layouts of MBPP, HumanEval, APPS and LiveCodeBench: their columns, and their tests in one common form."""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.layouts import LoadedProblems
from keel.envs.options import SourceOptions
from keel.envs.programs import check_tests
from keel.envs.rewards.text import program_reward
from keel.envs.rows import DataRow, convert_rows, read_rows
from keel.envs.sandbox import SandboxLimits

INSTRUCTION = "Answer with the whole program in one ```python block."
LARGEST_TESTS = 1 << 28  # bytes of the tests of one problem, unpacked
Row = Mapping[str, Any]
Tests = list[dict[str, Any]]


@dataclass(frozen=True)
class CodeGrader:
    """Grade a completion's program by the problem's tests; `fenced` writes gold programs in a code block."""

    limits: SandboxLimits
    partial: float
    fenced: bool

    def gold(self, problem: Problem) -> str:
        if not problem.answer:
            raise KeelError(f"{problem.key}: it has no reference solution, so there is no gold answer")
        return f"```python\n{problem.answer}\n```" if self.fenced else str(problem.answer)

    def reward(self, problem: Problem, text: str) -> Reward:
        return program_reward(problem, text, self.limits, self.partial)


@dataclass(frozen=True)
class Layout:
    """One benchmark: the columns that identify it, and their contents."""

    name: str
    columns: tuple[str, ...]
    question: Callable[[Row], str]
    solution: Callable[[Row], Any]
    tests: Callable[[Row], Any]


def read_code(source: SourceOptions) -> LoadedProblems:
    """Every usable row as a problem: the question, the reference solution if there is one, and the hidden tests."""
    assert source.path is not None
    rows = read_rows(source.path, source.split)
    layout = next((each for each in LAYOUTS if set(each.columns) <= set(rows.columns)), None)
    if layout is None:
        known = "; ".join(f"{each.name} has {', '.join(each.columns)}" for each in LAYOUTS)
        raise KeelError(
            f"{rows.source} has the columns {', '.join(rows.columns)}, which match no known layout: {known}"
        )
    problems, notes = convert_rows(rows, partial(_problem, layout), source.on_broken)
    if not problems:
        raise KeelError(f"{rows.source} has no problem that can be read as {layout.name}")
    return LoadedProblems(rows.source, tuple(problems), (f"{rows.source}: {layout.name}'s layout", *notes))


def _problem(layout: Layout, row: DataRow) -> Problem:
    try:
        question, solution, tests = (read(row.values) for read in (layout.question, layout.solution, layout.tests))
        if not isinstance(question, str) or not question.strip():
            raise ValueError("the question is empty")
        info = {"tests": check_tests(tests)}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, zlib.error) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"as {layout.name}: {cause}") from error
    prompt = [{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}]
    return Problem(row.location, prompt, solution if isinstance(solution, str) else None, info)


def _json(value: Any) -> Any:
    """A column that contains JSON, as text or parsed."""
    return json.loads(value) if isinstance(value, str) and value.strip() else value


def _started(question: str, row: Row) -> str:
    """A question with the code that an answer must start with."""
    starter = row.get("starter_code")
    return f"{question}\n\nBegin with:\n```python\n{starter.rstrip()}\n```" if starter and starter.strip() else question


def _mbpp_question(row: Row) -> str:
    """The question with the first test, which shows the function's name; the others are hidden."""
    return f"{row.get('text') or row['prompt']}\nYour program must pass this test: {row['test_list'][0]}"


def _mbpp_tests(row: Row) -> Tests:
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return [{"code": code, "setup": setup} for code in row["test_list"]]


def _humaneval_question(row: Row) -> str:
    prompt = row["prompt"].rstrip()
    return f"Complete this function:\n```python\n{prompt}\n```" if prompt else ""


def _humaneval_tests(row: Row) -> Tests:
    """The test, with the prompt's helper functions; the tested function is the program's."""
    name = row["entry_point"]
    return [{"code": f"{row['test']}\ncheck({name})", "setup": row["prompt"], "remote": {name: name}}]


_AS_DATA = "def data(v): return [data(i) for i in v] if isinstance(v, (list, tuple)) else v"


def _apps_tests(row: Row) -> Tests:
    """Inputs and outputs of the program or of a function; a list of one output is also accepted as that output."""
    io = _json(row["input_output"])
    pairs, name = list(zip(io["inputs"], io["outputs"], strict=True)), io.get("fn_name")
    if not name:
        return [{"stdin": _text(given), "stdout": _text(expected)} for given, expected in pairs]
    path = _method(name, row)
    return [
        {
            "code": f"assert data(solve(*{given!r})) in {[expected, *expected] if _single(expected) else [expected]!r}",
            "setup": _AS_DATA,
            "remote": {"solve": path},
        }
        for given, expected in pairs
    ]


def _single(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _method(name: str | None, row: Row) -> str:
    if not name:
        raise ValueError("metadata has no func_name")
    return f"Solution.{name}" if "class Solution" in (row.get("starter_code") or "") else name


def _livecodebench_tests(row: Row) -> Tests:
    """Public and private cases: texts, or one line of JSON for each argument of a function."""
    name = (_json(row.get("metadata")) or {}).get("func_name")
    cases = [*_json(row["public_test_cases"]), *_private(row.get("private_test_cases"))]
    tests: Tests = []
    for case in cases:
        if case.get("testtype") == "functional":
            arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
            tests.append({"call": _method(name, row), "args": arguments, "returns": json.loads(case["output"])})
        else:
            tests.append({"stdin": case["input"], "stdout": case["output"]})
    return tests


def _private(value: Any) -> list[dict[str, Any]]:
    """The private cases, as JSON or packed: base64 of zlib of a pickle of their JSON text.

    The pickle is never loaded: the text is read from its opcodes.
    """
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return list(_json(value) or ())
    packed = zlib.decompressobj().decompress(base64.b64decode(value, validate=True), LARGEST_TESTS)
    text = next((argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)), "")
    return list(json.loads(text))


LAYOUTS = (
    Layout("MBPP", ("code", "test_list"), _mbpp_question, lambda row: row["code"], _mbpp_tests),
    Layout(
        "HumanEval",
        ("prompt", "entry_point", "test"),
        _humaneval_question,
        lambda row: row["prompt"] + row["canonical_solution"] if row.get("canonical_solution") else None,
        _humaneval_tests,
    ),
    Layout(
        "APPS",
        ("question", "input_output"),
        lambda row: _started(row["question"], row),
        lambda row: next(iter(_json(row.get("solutions")) or ()), None),
        _apps_tests,
    ),
    Layout(
        "LiveCodeBench",
        ("question_content", "public_test_cases"),
        lambda row: _started(row["question_content"], row),
        lambda row: None,
        _livecodebench_tests,
    ),
    Layout(
        "Keel",
        ("question", "tests"),
        lambda row: row["question"],
        lambda row: row.get("answer"),
        lambda row: row["tests"],
    ),
)
