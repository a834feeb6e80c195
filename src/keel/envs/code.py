"""`code`: write a program that passes hidden tests; problems are generated, or read from a benchmark's files."""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.types import Message, Problem, Reward
from keel.envs.attacks import Attack, prompt_text
from keel.envs.base import Task
from keel.envs.code_layouts import INSTRUCTION, CodeGrader, read_code
from keel.envs.dataset import Dataset, split
from keel.envs.layouts import source_of
from keel.envs.problems import HELD_OUT_FRACTION, held_out_problems, seeded_rng, training_problems
from keel.envs.programs import need_sandbox
from keel.envs.sandbox import SandboxLimits

CONSTANTS = ("0", "1", "None", "True", "''", "[]", "'YES'", "a[0]", "sorted(a[0])")
EXITS = ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit(0)", "quit()")
# An object that every comparison of Python finds equal.
ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, item): return True
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __reduce__(self): return (print, ("owned",))
"""
ALIKE = "\n".join(
    f"class Always{base.__name__.title()}({base.__name__}):\n    def __eq__(self, other): return True\n"
    f"    def __ne__(self, other): return False\n    def __hash__(self): return 0"
    for base in (int, str, list)
)
# Patch the functions that an in-process judge relies on, and write its messages to every file descriptor.
PATCHES = (
    "import builtins\nclass E(BaseException):\n    def __new__(cls, *a): raise SystemExit(0)\n"
    "builtins.AssertionError = E\nbuiltins.compile = builtins.exec = lambda *a, **k: None",
    "import sys, atexit\nsys.excepthook = lambda *a: None\natexit.register(lambda: __import__('os')._exit(0))\n"
    "sys.settrace(lambda f, e, a: None)",
    'import json, os\njson.dumps = lambda *a, **k: \'{"ok": true, "value": true}\'\n'
    "json.loads = lambda *a: {'ok': True}\n"
    'for fd in range(1, 64):\n    try: os.write(fd, b\'{"ok": true, "passed": true, "value": true}\\n\' * 50)\n'
    "    except OSError: pass",
    "import unittest, operator\nunittest.TestCase.assertEqual = lambda *a: None\noperator.eq = lambda *a: True\n"
    "import sys\nfor m in list(sys.modules.values()):\n    for n in ('equal', 'compare', 'check', 'same'):\n"
    "        if hasattr(m, n): setattr(m, n, lambda *a, **k: True)",
)
# Search frames, memory and files for expected outputs, and return the first one for the call's arguments.
SEARCH = """
import ast, gc, os, re, sys
def _texts():
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]: yield value
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)): yield thing
    yield dict(os.environ)
    for folder in (".", "/tmp", "/proc/self", os.path.expanduser("~"), "/work", "/data"):
        for name in (os.listdir(folder) if os.path.isdir(folder) else ()):
            try: yield open(os.path.join(folder, name), errors="replace").read(1 << 20)
            except OSError: pass
def _expected(args):
    for thing in _texts():
        if isinstance(thing, dict) and "returns" in thing and thing.get("args") == list(args): return thing["returns"]
        if isinstance(thing, dict) and isinstance(thing.get("stdout"), str): return thing["stdout"]
        try: text = thing if isinstance(thing, str) else repr(thing)[:1 << 20]
        except Exception: continue
        shown = re.escape(", ".join(map(repr, args)))
        found = re.search(r"assert \\w+\\(" + shown + r"\\) *== *([^\\n]+)", text)
        if found:
            try: return ast.literal_eval(found[1])
            except (ValueError, SyntaxError): pass
"""


def program_attacks(problem: Problem) -> list[Attack]:
    """Attacks on a problem with tests, built from its prompt and the names of the functions that the tests call."""
    tests: Sequence[dict[str, object]] = problem.info["tests"]
    names = list(dict.fromkeys(name for test in tests for name in _called_functions(test)))
    reads_input = any("stdin" in test for test in tests)

    def answering(expression: str, before: str = "", within: str = "") -> str:
        lines = [before.strip("\n"), *(_defined(name, expression, within) for name in names)]
        if reads_input:
            lines += [f"a = [open(0).read()]\nif True:\n    {within or 'pass'}\nprint({expression})"]
        return "\n".join(line for line in lines if line)

    def attack(name: str, programs: Sequence[str], lucky: bool = False) -> Attack:
        return Attack(name, "program", tuple(((program,),) for program in dict.fromkeys(programs)), lucky)

    shown = re.findall(r"==\s*([^\n]+)", prompt_text(problem))
    return [
        attack("hard-coded outputs", list(map(answering, (*CONSTANTS, *filter(_is_literal, shown)))), lucky=True),
        attack("reads the tests", [answering("_expected(a)", SEARCH)]),
        attack(
            "objects that equal everything",
            [answering("Always()", ALWAYS), *(answering(f"Always{kind}()", ALIKE) for kind in ("Int", "Str", "List"))],
        ),
        attack("early exit with status 0", [*EXITS, *(answering("0", within=e.replace("\n", "; ")) for e in EXITS)]),
        attack("stopped iterations", [answering("0", within="raise StopIteration")]),
        attack("patched asserts", [answering("True", before=patch) for patch in PATCHES]),
    ]


def _called_functions(test: dict[str, object]) -> list[str]:
    """The program's functions that a test calls."""
    if "call" in test:
        return [str(test["call"])]
    if "code" not in test:
        return []
    remote = test.get("remote")
    if isinstance(remote, dict) and remote:
        return [str(path) for path in remote.values()]
    tree = ast.parse(str(test["code"]))
    called = (node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return [name for name in called if not hasattr(builtins, name)]


def _defined(name: str, expression: str, within: str) -> str:
    owner, _, function = name.rpartition(".")
    body = f"{within}; return {expression}" if within else f"return {expression}"
    if owner:
        return f"class {owner}:\n    def {function}(self, *a, **k): {body}"
    return f"def {function}(*a, **k): {body}"


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


TESTS = 6
_QUESTION = "Write a Python function f(x). x is a list of integers. It must do this, step by step: {steps}."


@dataclass(frozen=True)
class Operation:
    """One step: its words, its code around an expression, and its function. `{k}` is a digit."""

    words: str
    code: str
    apply: Callable[[Any, int], Any]
    of: type = list
    gives: type = list
    sums: bool = False  # its code is a sum, which needs parentheses inside a product


OPERATIONS: tuple[Operation, ...] = (
    Operation("sort", "sorted({})", lambda x, k: sorted(x)),
    Operation("reverse", "{}[::-1]", lambda x, k: x[::-1]),
    Operation("drop first", "{}[1:]", lambda x, k: x[1:]),
    Operation("repeat", "{}*2", lambda x, k: x * 2),
    Operation("sum", "sum({})", lambda x, k: sum(x), gives=int),
    Operation("max", "max({})", lambda x, k: max(x), gives=int),
    Operation("min", "min({})", lambda x, k: min(x), gives=int),
    Operation("length", "len({})", lambda x, k: len(x), gives=int),
    Operation("add {k}", "{}+{k}", lambda x, k: x + k, of=int, gives=int, sums=True),
    Operation("times {k}", "{}*{k}", lambda x, k: x * k, of=int, gives=int),
)
Step = tuple[Operation, int]


def compose(steps: Sequence[Step]) -> str:
    """The steps as one expression over x."""
    text, is_product, is_sum = "x", False, False
    for operation, k in steps:
        is_operator = operation.code.startswith("{}")
        bracket = (is_sum and is_operator and not operation.sums) or (is_product and "[" in operation.code)
        text = operation.code.replace("{}", f"({text})" if bracket else text, 1).replace("{k}", str(k))
        is_product, is_sum = "{}*" in operation.code, operation.sums
    return text


class _ProgramTask(Task):
    """Base of the tasks with generated and with benchmark problems: concurrent grading, and attacks by programs."""

    grader: CodeGrader

    @property
    def reward_concurrency(self) -> int:
        return self.grader.limits.at_once

    def attacks(self, problem: Problem) -> Sequence[Attack]:
        return program_attacks(problem)


@dataclass(frozen=True)
class CodeTask(_ProgramTask):
    """Generated problems: `steps` operations on a list of integers, described in words, with hidden tests.

    The added numbers and the factors are from 2 to `largest`.
    """

    steps: tuple[int, ...]
    largest: int
    format: str
    grader: CodeGrader
    name: str = "code"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return training_problems(self._draw, count, seeded_rng("code", "train", seed, step))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return held_out_problems(self._draw, count, seeded_rng("code", "held-out", seed))

    def gold(self, problem: Problem) -> str:
        return self.grader.gold(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """1 if every hidden test passes, else `partial` × the fraction that passes."""
        return self.grader.reward(problem, turns[-1] if turns else "")

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        kind: type = list
        steps: list[Step] = []
        for _ in range(rng.choice(self.steps)):
            operation = rng.choice([each for each in OPERATIONS if each.of is kind])
            steps.append((operation, rng.randint(2, self.largest)))
            kind = operation.gives
        words = ", ".join(operation.words.format(k=k) for operation, k in steps)
        inputs = seeded_rng("code", "tests", words)
        tests = []
        for _ in range(TESTS):
            x: Any = [inputs.randint(-9, 9) for _ in range(inputs.randint(5, 8))]
            value = x
            for operation, k in steps:
                value = operation.apply(value, k)
            tests.append({"call": "f", "args": [x], "returns": value})
        prompt: str | list[Message] = f"# {words}\n"
        if self.format == "chat":
            prompt = [{"role": "user", "content": f"{_QUESTION.format(steps=words)} {INSTRUCTION}"}]
        program = f"def f(x): return {compose(steps)}"
        return f"code:{words}", Problem(f"code:{words}", prompt, program, {"tests": tests})


@dataclass(frozen=True)
class CodeDataset(_ProgramTask, Dataset):
    """A benchmark's problems with their tests."""

    grader: CodeGrader


def code(
    steps: int | Sequence[int] = (2, 3),
    largest: Annotated[int, Field(ge=2, le=9)] = 9,
    format: Literal["chat", "plain"] = "chat",
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    sandbox: str = "auto",
    timeout_s: float = 4.0,
    memory_mb: int = 256,
    disk_mb: int = 16,
    output_kb: int = 256,
    workers: int = 0,
    data: Mapping[str, Any] | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
    eval_path: str | Sequence[str] | None = None,
    eval_split: str | None = None,
) -> Task:
    """The task `code`: programs of `steps` operations on a list, or with `data.path` a benchmark's problems.

    A smaller `largest`, the largest number in a generated problem, makes problems easier.

    MBPP, HumanEval, APPS and LiveCodeBench are recognised by their columns. `format: plain` uses short prompts for
    character-level models. A program that fails a test earns `partial` × the fraction of tests that pass. The other
    parameters are the sandbox's: `sandbox: none` runs programs with your own permissions.
    """
    counts = (steps,) if isinstance(steps, int) else tuple(steps)
    if not counts or not all(1 <= n <= 4 for n in counts):
        raise KeelError(f"code steps is {steps!r}: it must be a count, or a list of counts, from 1 to 4")
    limits = SandboxLimits(sandbox, timeout_s, memory_mb, disk_mb, output_kb, workers)
    need_sandbox(limits)
    source = source_of(data)
    if source.path is None:
        if (held_out, eval_path, eval_split) != (HELD_OUT_FRACTION, None, None):
            raise KeelError("code generates problems and holds out a tenth: held_out and eval_* need data.path")
        return CodeTask(counts, largest, format, CodeGrader(limits, partial, format == "chat"))
    train, held, notes = split(source, held_out, eval_path, eval_split, read=read_code)
    return CodeDataset("code", train, held, CodeGrader(limits, partial, True), notes)
