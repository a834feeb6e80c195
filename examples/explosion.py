"""Two rewards for the same task: one with a cliff, which blows a run up, and one in steps, which does not.

Used by explosion.yaml and explosion_cured.yaml beside this file; the story is in docs/cases.md.
"""

from __future__ import annotations

from keel.base.types import Problem, Reward


def cliff(problem: Problem, text: str) -> Reward:
    """−1 for what is no number, +1 for the answer, a grain of credit for a number: the reward of the source run."""
    given = text.strip()
    if not given.isdecimal():
        return Reward(-1.0, {"correct": 0.0}, parsed=False)
    correct = float(given == str(problem.answer))
    return Reward(max(correct, 0.01), {"correct": correct})


def steps(problem: Problem, text: str) -> Reward:
    """0 for what is no number, 0.2 for a number, up to 0.4 more for right digits in place, 1 for the answer."""
    given, answer = text.strip(), str(problem.answer)
    if not given.isdecimal():
        return Reward(0.0, {"correct": 0.0}, parsed=False)
    if given == answer:
        return Reward(1.0, {"correct": 1.0})
    placed = sum(a == b for a, b in zip(given, answer, strict=False)) / max(len(given), len(answer))
    return Reward(0.2 + 0.4 * placed, {"correct": 0.0})
