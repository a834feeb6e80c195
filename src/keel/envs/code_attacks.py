"""Programs that try to pass tests without solving the problem, which `keel check-task` runs on tasks with programs."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence

from keel.base.types import Problem
from keel.envs.attacks import Attack, prompt_text

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
# Replace what an in-process judge relies on, and write its messages to every file descriptor.
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
    """Attacks on a problem with tests, made from its prompt and from the names that every gold program defines."""
    tests: Sequence[dict[str, object]] = problem.info["tests"]
    names = list(dict.fromkeys(name for test in tests for name in _names(test)))
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


def _names(test: dict[str, object]) -> list[str]:
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
