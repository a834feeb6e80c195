"""Programs a minute through the sandbox: forked from the warm process, beside a fresh bubblewrap and Python for each.

python bench/sandbox.py --seconds 20
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keel.envs.bubblewrap import confined, python_command
from keel.envs.sandbox import ENVIRONMENT, SandboxLimits, sandbox

PROGRAM = "numbers = list(map(int, input().split()))\nprint(sum(numbers), sorted(numbers)[-1])\n"
STDIN, STDOUT = "3 1 4 1 5 9 2 6\n", "31 9\n"
FUNCTION = "def f(x):\n    return sum(x)\n"


def warm_program(limits: SandboxLimits) -> None:
    """A whole program: a process, an input, an output."""
    with sandbox(limits).program() as program:
        answer = program.ask({"exec": PROGRAM, "stdin": STDIN}, time.monotonic() + limits.timeout_s)
    assert answer.output == STDOUT, answer


def warm_calls(limits: SandboxLimits) -> None:
    """A function that six tests call, in one process."""
    until = time.monotonic() + limits.timeout_s
    with sandbox(limits).program() as program:
        assert program.ask({"exec": FUNCTION}, until).ok
        for _ in range(6):
            answer = program.ask({"call": "f", "args": [[1, 2, 3]], "kwargs": {"dict": []}}, until)
            assert answer.message["value"] == 6


def fresh() -> None:
    """A new bubblewrap with a new Python in it."""
    pipe = subprocess.PIPE
    with confined(python_command(PROGRAM), stdin=pipe, stdout=pipe, env=ENVIRONMENT) as process:
        output, _ = process.communicate(STDIN.encode())
    assert output.decode() == STDOUT, output


def rate(one: Callable[[], None], seconds: float, workers: int) -> float:
    """Programs a minute, `workers` at a time."""
    one()
    until, count = time.monotonic() + seconds, 0
    begun = time.monotonic()
    with ThreadPoolExecutor(workers) as threads:

        def work() -> int:
            done = 0
            while time.monotonic() < until:
                one()
                done += 1
            return done

        count = sum(future.result() for future in [threads.submit(work) for _ in range(workers)])
    return 60 * count / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=0, help="programs at a time; 0: one a core")
    options = parser.parse_args()
    limits = SandboxLimits(workers=options.workers)
    print(f"{limits.at_once} at a time, programs a minute")
    for name, one in (
        ("warm, a program with an input", lambda: warm_program(limits)),
        ("warm, a function and six calls", lambda: warm_calls(limits)),
        ("fresh, a program with an input", fresh),
    ):
        print(f"{name:32} {rate(one, options.seconds, limits.at_once):10,.0f}", flush=True)


if __name__ == "__main__":
    main()
