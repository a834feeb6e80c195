"""Players, opponents and short views for some environments of other packages, so that small models can learn them.

A player is given the package's environment and the last observation, and returns the next turn. Those here use nothing
that a model could not infer from its observations.
"""

from __future__ import annotations

import random
import re
from functools import reduce
from operator import xor
from typing import Any


def bisect(env: Any, observation: str) -> str:
    """Guess the middle of what the hints leave (gem's GuessTheNumber)."""
    low, high = env.min_number, env.max_number
    for guess in env.previous_guesses:
        if guess < env.game_number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return f"\\boxed{{{(low + high) // 2}}}"


def hint(text: str) -> str:
    """The range or the last hint of gem's GuessTheNumber in a word."""
    found = re.search(r"between (\d+) and (\d+)|(higher|lower) than", text)
    if found is None:
        return text
    return found[3] or f"{found[1]}-{found[2]}"


def final_answer(env: Any, observation: str) -> str:
    """The answer in the form that skyrl-gym's gsm8k environments read."""
    return f"#### {env.ground_truth}"


def again(text: str) -> str:
    """What skyrl-gym's gsm8k environment says between turns in a word."""
    return "again" if text.startswith(("Please provide", "Now provide")) else text


def nim(env: Any, observation: str) -> str:
    """A winning move of Nim where there is one, else one object of the largest pile (textarena's Nim)."""
    piles = env.state.game_state["piles"]
    total = reduce(xor, piles)
    for index, pile in enumerate(piles):
        if pile ^ total < pile:
            return f"[{index} {pile - (pile ^ total)}]"
    return f"[{piles.index(max(piles))} 1]"


def random_nim(env: Any, observation: str) -> str:
    """Any move of Nim (textarena's Nim)."""
    piles = env.state.game_state["piles"]
    index = random.choice([index for index, pile in enumerate(piles) if pile])
    return f"[{index} {random.randint(1, piles[index])}]"


def piles(text: str) -> str:
    """The piles as the last board of textarena's Nim shows them."""
    boards = re.findall(r"pile (\d+): (\d+)", text)
    last = dict(boards)  # of several boards the last
    return " ".join(last.values()) if last else text
