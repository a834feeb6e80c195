"""The reward `code`: run the completion's program against the problem's tests, in the sandbox."""

from __future__ import annotations

from statistics import fmean

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.programs import NO_SYNTAX, check_tests, program_of, run_tests
from keel.envs.sandbox import SandboxLimits

LONGEST_DETAILS = 20_000  # characters


def code(
    problem: Problem,
    text: str,
    partial: float = 0.0,
    sandbox: str = "auto",
    timeout_s: float = 4.0,
    memory_mb: int = 256,
    disk_mb: int = 16,
    output_kb: int = 256,
    workers: int = 0,
) -> Reward:
    """1 if the program passes every test of the column `tests`; else `partial` × the fraction that it passes.

    The parts are `correct`, `passed` (the fraction), and one for each name of a test.
    """
    return judge(problem, text, SandboxLimits(sandbox, timeout_s, memory_mb, disk_mb, output_kb, workers), partial)


def judge(problem: Problem, text: str, limits: SandboxLimits, partial: float) -> Reward:
    """The reward of a completion's program."""
    try:
        tests = check_tests(problem.info.get("tests"))
    except (ValueError, TypeError) as error:
        raise KeelError(f"{problem.key}: {error}") from None
    program = program_of(text)
    if not program.strip():
        return Reward(0.0, {"correct": 0.0, "passed": 0.0}, parsed=False, details="no program")
    outcomes = run_tests(program, tests, limits)
    passed = fmean(outcome.passed for outcome in outcomes)
    correct = float(passed == 1.0)
    named = {outcome.name: [o.passed for o in outcomes if o.name == outcome.name] for outcome in outcomes}
    parts = {"correct": correct, "passed": passed, **{name: fmean(rows) for name, rows in named.items() if name}}
    parsed = any(outcome.kind not in NO_SYNTAX for outcome in outcomes)
    lines = list(map(str, outcomes))
    if not parsed and len(lines) > 1:
        lines[1:] = [f"✗ {len(lines) - 1} more with this result"]
    written = [] if program == text else ["```python", program.strip("\n"), "```"]
    shown = "\n".join([*written, *lines])
    shown = shown if len(shown) <= LONGEST_DETAILS else f"{shown[:LONGEST_DETAILS]}…"
    # A program's text must not contain control codes for the terminal, and must be valid in every encoding.
    readable = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in shown)
    return Reward(max(correct, partial * passed), parts, parsed, details=readable)
