"""The reward `math`: mathematical equality, by math-verify."""

from __future__ import annotations

import re

from keel.base.types import Problem, Reward
from keel.envs.answers import last_tag
from keel.envs.maths import math_equal

_TAG = re.compile(r"</?[A-Za-z_]\w*>")


def math(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last expression of the text (or of its last `<tag>`) equals the answer: ½, 0.5 and \\frac{1}{2} do."""
    within = last_tag(text, tag) if tag else _TAG.sub("\n", text)
    equal = None if within is None else math_equal(str(problem.answer), within)
    return Reward(float(bool(equal)), {}, parsed=equal is not None)
