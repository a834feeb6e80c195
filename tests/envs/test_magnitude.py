"""Giant formulas are refused before sympy reads them: bounds against true values, and a child process with limits."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest

from keel.envs.magnitude import _Reader, is_giant

GIANT = [
    "(9999!)!",
    "$(9999!+1)!$",
    "$|9999!+1|!$",
    r"$\left(9999!\right)!$",
    "$9!!!$",
    "$99999!$",
    "$(99^4)!$",
    "$(99*99*99*99*99)!$",
    "$9^{9*9*9*9*9*9*9*9*9}$",
    "9^(9*9*9*9*9*9*9*9*9)",
    "$9^{9+9^9}$",
    "9**9**9**9**9",
    "so **9**99999999",
    "9 **99999999",
    "$2^{10^{10}}$",
    "$10^{99999}$",
    "$(9^{9999}+1)^{9999}$",
    r"$2^{\frac{9^9}{1}}$",
    r"$2^{1/0.00001}$",
    r"$\binom{999999999}{444444444}$",
    r"${999999999 \choose 444444444}$",
    r"$\Gamma(999999999)$",
    r"$\exp(\exp(\exp(99)))$",
    r"$\prod_{k=1}^{9999} k^{9999}$",
    r"$\lfloor 9^{9+9^9} \rfloor$",
    r"$99\,999\,999!$",
    "$(x+y+z)^{9999}$",
    "9" + "^9" * 3000,
    "$" + "(" * 3000 + "9!$",
]
USUAL = [
    "the answer is **18000**",
    "**18000** dollars, so **5**",
    "1. **Answer:** 18000!",
    "x^{2023/2024}",
    "$2^{2^3}$",
    "$(x^2)^3$",
    "$9999!$",
    "$2^{9999}$",
    r"$\binom{100}{50}$",
    r"$\frac{1}{\sqrt{2\pi\sigma^2}} e^{-\frac{(x-\mu)^2}{2\sigma^2}+1}$",
    r"$1.5 \times 10^{30} - 10^{-9}$",
    r"$\sum_{k=1}^{100} k^2$",
    r"$\int_0^{\infty} e^{-x^2} dx$",
    "$(x-1)^{2020}$",
    "$3^{1.23456}$",
    r"$7^{2018} \mod 10$",
    r"90^\circ 20000",
    "1,000,000^2",
]


def formula(rng: random.Random, depth: int) -> tuple[str, str]:
    """A random formula as text, and as Python."""
    kind = rng.choice("n!^cf+-*/") if depth else "n"
    if kind == "n":
        number = str(rng.choice([0, 1, 2, 3, 7, 12, 40]))
        return number, f"Fraction({number})"
    text, code = formula(rng, depth - 1)
    if kind == "!":
        return f"({text})!", f"factorial({code})"
    other, more = formula(rng, depth - 1)
    if kind == "^":
        return f"({text})^{{{other}}}", f"power({code}, {more})"
    if kind == "c":
        return rf"\binom{{{text}}}{{{other}}}", f"binomial({code}, {more})"
    if kind == "f":
        return rf"\frac{{{text}}}{{{other}}}", f"({code}) / ({more})"
    return f"({text}){kind}({other})", f"({code}) {kind} ({more})"


def whole(number: Fraction, largest: int) -> int:
    if number.denominator != 1 or abs(number) > largest:
        raise ValueError
    return int(number)


NAMES = {
    "Fraction": Fraction,
    "factorial": lambda n: Fraction(math.factorial(whole(n, 200))),
    "power": lambda base, n: base ** whole(n, 200),
    "binomial": lambda n, k: Fraction(math.comb(whole(n, 1000), whole(k, 1000))),
}


def test_the_bound_is_never_below_the_value() -> None:
    rng, tested = random.Random(0), 0
    while tested < 1000:
        text, code = formula(rng, 3)
        try:
            value = eval(code, NAMES)
        except (ValueError, ZeroDivisionError):
            continue
        if is_giant(f"${text}$"):
            continue
        tested += 1
        size = _Reader(text, exclamations=False).group(0)
        assert math.log10(max(1, abs(value.numerator))) <= size.up + 1e-6, (text, size)
        assert math.log10(value.denominator) <= size.down + 1e-6, (text, size)


@pytest.mark.parametrize("text", USUAL)
def test_usual_formulas_are_parsed(text: str) -> None:
    assert not is_giant(text, exclamations="$" not in text)


def test_giant_answers_return_in_a_child_with_limits() -> None:
    code = """
import json, resource, sys, threading
from keel.envs.answers import math_equal

def compare():
    print(json.dumps([math_equal("7", text) for text in ["$7$", *json.loads(sys.argv[1])]]))

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
thread = threading.Thread(target=compare)  # math-verify has no time limit of its own outside the main thread
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(GIANT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, *[None] * len(GIANT)]
