"""Run a program against its tests, and decide what counts as passed.

The program's process never decides whether a test passes. Its output is compared here. Return values of its functions
are sent as data and compared here, or in the test's process, which runs nothing of the program.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from keel.base.errors import KeelError
from keel.envs.sandbox import (
    FAULTS,
    LONGEST_ERROR,
    TRIES,
    Lost,
    Program,
    ProgramAnswer,
    Sandbox,
    SandboxLimits,
    sandbox,
)
from keel.envs.sandbox_worker import encode

_LANGUAGE = re.compile(r"[ \t]*(\w*)")
_SHOWN = 200  # characters of an output or a value
NO_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_DEEPEST = 100  # maximum nesting of a compared value
_REMEMBERED = 32 * 2**20  # bytes of cached outcomes
_PARTS = ("correct", "passed")  # names of reward parts, which a test must not have
FORMS = "a text of asserts, {stdin, stdout}, {call, args, returns} or {code}"
_KEYS = ({"stdin", "stdout"}, {"call", "args", "returns"}, {"code"})


@dataclass(frozen=True)
class CaseOutcome:
    """The outcome of one test: its name, whether it passed, and a line of explanation. `kind` is the error's type."""

    name: str
    passed: bool
    shown: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {f'{self.name}: ' if self.name else ''}{self.shown}"


def program_of(text: str) -> str:
    """The last fenced block of a completion marked as Python, else the last fenced block, else the whole text."""
    blocks = _blocks(text)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return str((python or [code for _, code in blocks] or [text])[-1])


def _blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each fenced block; the last one may be unclosed."""
    blocks, language, lines = list[tuple[str, str]](), None, list[str]()
    for line in text.split("\n"):
        before, fence, after = line.partition("```")
        if language is None:
            if fence and "```" not in after:
                language, lines = _LANGUAGE.match(after)[1], []  # type: ignore[index]  # it matches every text
        elif fence:
            blocks.append((language, "\n".join([*lines, before] if before.strip() else lines)))
            language = None
        else:
            lines.append(line)
    return blocks if language is None else [*blocks, (language, "\n".join(lines))]


def check_tests(value: Any) -> list[dict[str, Any]]:
    """The tests of a data row, each as an object; a ValueError if they are invalid."""
    tests = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            tests = json.loads(value)
        except ValueError as error:
            raise ValueError(f"the tests are not JSON: {error}") from None
    tests = [tests] if isinstance(tests, str | Mapping) else tests
    if not isinstance(tests, Sequence) or not any(tests):
        raise ValueError(f"there are no tests: give a list of tests, each {FORMS}")
    checked = []
    for number, test in enumerate(tests, start=1):
        entry = {"code": test} if isinstance(test, str) else dict(test) if isinstance(test, Mapping) else {}
        calls = entry.get("call") is not None  # parquet stores absent keys as null
        entry = {key: item for key, item in entry.items() if item is not None or (calls and key == "returns")}
        optional = {"name", "setup", "remote"} if "code" in entry else {"name"}
        if entry.keys() - optional not in _KEYS:
            raise ValueError(f"test {number} is {str(test)[:80]!r}: give {FORMS}, and optionally a name")
        if entry.get("name") in _PARTS:
            raise ValueError(
                f"test {number} is named {entry['name']}, which is a part of every reward: give another name"
            )
        checked.append(entry)
    return checked


def run_tests(program: str, tests: Sequence[Mapping[str, Any]], limits: SandboxLimits) -> tuple[CaseOutcome, ...]:
    """The outcome of every test, cached by program, tests and limits unless a test ran out of time.

    After a test that ran out of time, the remaining tests are not run and count as failed.
    """
    text = json.dumps(tests, sort_keys=True)
    key = hashlib.sha256(json.dumps([program, text, repr(limits)]).encode()).digest()
    outcomes = _memory.get(key)
    if outcomes is None:
        outcomes = _run(program, json.loads(text), limits)
        if all(outcome.kind != "timeout" for outcome in outcomes):
            _memory.put(key, outcomes)
    return outcomes


class _Memory:
    """A least-recently-used cache of outcomes, limited by their size."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._kept: OrderedDict[bytes, tuple[CaseOutcome, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[CaseOutcome, ...] | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, outcomes: tuple[CaseOutcome, ...]) -> None:
        with self._lock:
            self.size += _size(outcomes) - _size(self._kept.get(key, ()))
            self._kept[key] = outcomes
            self._kept.move_to_end(key)
            while self.size > self.most:
                self.size -= _size(self._kept.popitem(last=False)[1])


def _size(outcomes: tuple[CaseOutcome, ...]) -> int:
    """The approximate bytes of outcomes: their texts and objects."""
    return sum(500 + len(o.name) + len(o.shown) + len(o.kind) for o in outcomes)


_memory = _Memory(_REMEMBERED)
Result = TypeVar("Result")
Late = set[int]  # indices of tests that ran out of time, shared by the threads of one program


def _run(program: str, tests: Sequence[Mapping[str, Any]], limits: SandboxLimits) -> tuple[CaseOutcome, ...]:
    box, late = sandbox(limits), Late()
    numbered = list(enumerate(tests))
    together = [(i, test) for i, test in numbered if "stdin" not in test]
    jobs: list[Callable[[], list[tuple[int, CaseOutcome]]]] = [partial(_functions, box, program, together, late)]
    jobs += [partial(_printed, box, program, i, test, late) for i, test in numbered if "stdin" in test]
    work = [box.threads.submit(_again, job) for job in jobs[0 if together else 1 :]]
    outcomes = dict(pair for done in work for pair in done.result())
    return tuple(_not_run(test) if _is_over(i, late) else outcomes[i] for i, test in numbered)


def _again(job: Callable[[], Result]) -> Result:
    """A job's result; the job is repeated if the sandbox ended during it."""
    for _ in range(TRIES):
        try:
            return job()
        except Lost:
            continue
    raise KeelError(f"the sandbox ended {TRIES} times while it ran the same program: free memory, or lower workers")


def _is_over(number: int, late: Late) -> bool:
    return any(other < number for other in list(late))


def _not_run(test: Mapping[str, Any]) -> CaseOutcome:
    return CaseOutcome(_name(test), False, f"{_short_name(test)}: not run", "timeout")


def _name(test: Mapping[str, Any]) -> str:
    return str(test.get("name", ""))


def _short_name(test: Mapping[str, Any]) -> str:
    """A short description of a test."""
    if "stdin" in test:
        return f"input {_short(test['stdin'])}"
    if "call" in test:
        return _cut(f"{test['call']}({', '.join(map(repr, test['args']))})")
    return _cut("; ".join(line.strip() for line in str(test["code"]).splitlines() if line.strip()).replace(":; ", ": "))


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _printed(
    box: Sandbox, program: str, number: int, test: Mapping[str, Any], late: Late
) -> list[tuple[int, CaseOutcome]]:
    """Run the program on an input; its output is compared by line, without trailing spaces."""
    if _is_over(number, late):
        return [(number, _not_run(test))]
    with box.program() as process:
        request = {"exec": program, "stdin": test["stdin"]}
        answer = process.ask(request, time.monotonic() + box.limits.timeout_s)
    if answer.fault == "timeout":
        late.add(number)
    right = answer.ok and _lines(answer.output) == _lines(test["stdout"])
    what = f"printed {_short(answer.output)}" + (f", {answer.error}" if answer.error else "")
    what += f", errors {_short(answer.errors)}" if answer.errors else ""
    expected = "" if right else f", expected {_short(test['stdout'])}"
    return [(number, CaseOutcome(_name(test), right, f"{_short_name(test)}: {what}{expected}", answer.kind))]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class _Solver:
    """The program's process, which is restarted after a fault."""

    def __init__(self, box: Sandbox, program: str) -> None:
        self.box, self.program = box, program
        self.process: Program | None = None
        self.output, self.fault = "", ""

    def ready(self, until: float) -> ProgramAnswer | None:
        """Load the program if needed; returns an answer only if that failed."""
        self.output, self.fault = "", ""
        if self.process is not None and not self.process.closed:
            return None
        self.process = self.box.program()
        loaded = self.process.ask({"exec": self.program}, until)
        self.output = loaded.output + loaded.errors
        if loaded.ok:
            return None
        self.close()
        return loaded

    def call(self, request: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Run a call that a test's process requests; returns only the fields that it reads."""
        if self.process is None or self.process.closed:
            return {"error": "the program has ended", "kind": "RuntimeError"}
        call = {key: request[key] for key in ("call", "args", "kwargs")}
        answer = self.process.ask(call, until)
        self.output = (self.output + answer.output + answer.errors)[: self.box.limits.output_kb * 1024]
        if answer.fault is not None:
            self.fault = answer.fault
            return {"error": FAULTS[answer.fault], "kind": "RuntimeError"}
        if "value" in answer.message:
            return {"value": answer.message["value"]}
        return {"error": str(answer.message.get("error", ""))[:LONGEST_ERROR], "kind": answer.kind}

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def _functions(
    box: Sandbox, program: str, tests: Sequence[tuple[int, Mapping[str, Any]]], late: Late
) -> list[tuple[int, CaseOutcome]]:
    """Tests that call the program's functions: the program has one process, tests that are code have another."""
    solver, outcomes = _Solver(box, program), list[tuple[int, CaseOutcome]]()
    try:
        for number, test in tests:
            outcome = _not_run(test) if _is_over(number, late) else _function(box, solver, test)
            outcomes.append((number, outcome))
            if outcome.kind == "timeout":
                late.add(number)
    finally:
        solver.close()
    return outcomes


def _function(box: Sandbox, solver: _Solver, test: Mapping[str, Any]) -> CaseOutcome:
    until = time.monotonic() + box.limits.timeout_s
    failed = solver.ready(until)
    if failed is not None:
        return _outcome(test, False, failed.error, solver.output, failed.kind)
    return _called(solver, test, until) if "call" in test else _asserted(box, solver, test, until)


def _called(solver: _Solver, test: Mapping[str, Any], until: float) -> CaseOutcome:
    """Whether `call` with `args` returns `returns`, compared as JSON values; a tuple is a list."""
    reply = solver.call({"call": test["call"], "args": encode(test["args"]), "kwargs": {"dict": []}}, until)
    if "value" not in reply:
        return _outcome(test, False, str(reply["error"]), solver.output, solver.fault or str(reply["kind"]))
    try:
        right = _same(reply["value"], encode(test["returns"]))
        returned = _short(_plain(reply["value"]))
    except (RecursionError, ValueError, TypeError, AttributeError):
        right, returned = False, "no plain data"
    expected = "" if right else f", expected {_short(test['returns'])}"
    return _outcome(test, right, f"returned {returned}{expected}", solver.output)


def _asserted(box: Sandbox, solver: _Solver, test: Mapping[str, Any], until: float) -> CaseOutcome:
    """Run a test's code in its own process; it passes if it ends without an error."""
    request = {"exec": test["code"], "setup": test.get("setup", ""), "remote": test.get("remote", {})}
    with box.program() as tester:
        answer = tester.ask(request, until, partial(solver.call, until=until))
    right = answer.message.get("ok") is True and not solver.fault
    why = "holds" if right else FAULTS.get(solver.fault) or answer.error or "ended early"
    return _outcome(test, right, why, solver.output, solver.fault or answer.kind)


def _outcome(test: Mapping[str, Any], right: bool, why: str, output: str, kind: str = "") -> CaseOutcome:
    printed = f", printed {_short(output)}" if output else ""
    return CaseOutcome(_name(test), right, f"{_short_name(test)}: {why}{printed}", kind)


def _same(value: Any, expected: Any, depth: int = 0) -> bool:
    """Whether encoded data equal a test's JSON value, in which tuples and iterators are lists."""
    if depth > _DEEPEST:
        return False
    if isinstance(value, dict) and value.keys() <= {"tuple", "iter"}:
        ((_, value),) = value.items()
    if isinstance(value, list) and isinstance(expected, list):
        pairs = zip(value, expected, strict=True)
        return len(value) == len(expected) and all(_same(a, b, depth + 1) for a, b in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        ((kind, items),) = value.items()
        if kind != "dict" or len(items) != len(expected["dict"]):
            return False
        found = {key: item for key, item in items if isinstance(key, str)}
        return all(key in found and _same(found[key], item, depth + 1) for key, item in expected["dict"])
    return not isinstance(value, list | dict) and bool(value == expected)


def _plain(value: Any) -> Any:
    """Encoded data as text, without hashing or comparing anything."""
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return inner if kind == "dict" else _plain(inner)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def need_sandbox(limits: SandboxLimits) -> None:
    """Raise a KeelError if these limits cannot be enforced, before a model is loaded."""

    def tried() -> ProgramAnswer:
        with sandbox(limits).program() as program:
            return program.ask({"exec": "print(6 * 7)"}, time.monotonic() + 30.0)

    answer = _again(tried)
    if answer.output != "42\n":
        raise KeelError(f"the sandbox does not run programs: {answer.error or answer.output[:80]!r}")
