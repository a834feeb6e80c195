"""Players, opponents and short views for some environments of other packages, for small models.

A player gets the package's environment and the last observation, and returns the next turn. `bisect` and `nim` use only
what a model can infer from its observations; `final_answer` gives the correct answer, as a demonstration of its format.
"""

from __future__ import annotations

import random
import re
from functools import reduce
from operator import xor
from typing import Any


def bisect(env: Any, observation: str) -> str:
    """Guess the middle of the remaining range (gem's GuessTheNumber)."""
    low, high = env.min_number, env.max_number
    for guess in env.previous_guesses:
        if guess < env.game_number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return f"\\boxed{{{(low + high) // 2}}}"


def hint(text: str) -> str:
    """The range or the last hint of gem's GuessTheNumber, as one word."""
    found = re.search(r"between (\d+) and (\d+)|(higher|lower) than", text)
    if found is None:
        return text
    return found[3] or f"{found[1]}-{found[2]}"


def final_answer(env: Any, observation: str) -> str:
    """The correct answer of the environment, in the format of skyrl-gym's gsm8k environments."""
    return f"#### {env.ground_truth}"


def again(text: str) -> str:
    """The message of skyrl-gym's gsm8k environment between turns, as one word."""
    return "again" if text.startswith(("Please provide", "Now provide")) else text


def nim(env: Any, observation: str) -> str:
    """A winning move if there is one, else one object of the largest pile (textarena's Nim)."""
    piles = env.state.game_state["piles"]
    total = reduce(xor, piles)
    for index, pile in enumerate(piles):
        if pile ^ total < pile:
            return f"[{index} {pile - (pile ^ total)}]"
    return f"[{piles.index(max(piles))} 1]"


def random_nim(env: Any, observation: str) -> str:
    """A random legal move (textarena's Nim)."""
    piles = env.state.game_state["piles"]
    index = random.choice([index for index, pile in enumerate(piles) if pile])
    return f"[{index} {random.randint(1, piles[index])}]"


def piles(text: str) -> str:
    """The piles on the last board in textarena's Nim."""
    boards = re.findall(r"pile (\d+): (\d+)", text)
    last = dict(boards)  # later boards overwrite earlier ones
    return " ".join(last.values()) if last else text
