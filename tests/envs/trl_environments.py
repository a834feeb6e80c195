"""Objects as they are handed to TRL's GRPOTrainer: environment_factory, reward functions, a rollout_func."""

from __future__ import annotations

import random
from typing import Any

from keel.envs.tool_calls import write_call
from keel.envs.tools import tool


class Digits:
    """Guess a digit, which the row names or which is drawn."""

    def reset(self, digit: int | None = None, **row: Any) -> str:
        self.digit = random.randrange(10) if digit is None else digit
        self.low, self.high, self.guesses = 0, 9, list[int]()
        return " Guess a digit."

    def guess(self, digit: int) -> str:
        """Say a digit.

        Args:
            digit: The digit that it may be.
        """
        self.guesses.append(digit)
        if not 0 <= digit <= 9:
            raise ValueError("no digit")
        if digit == self.digit:
            return "hit"
        if digit < self.digit:
            self.low = max(self.low, digit + 1)
        else:
            self.high = min(self.high, digit - 1)
        return "higher" if digit < self.digit else "lower"

    def get_reward(self) -> float:
        return float(self.digit in self.guesses)

    def _hidden(self) -> None: ...


class Coins:
    """Toss coins until one is heads. Its tool is a coroutine function, and so is its reward."""

    def reset(self, **row: Any) -> None:
        self.tossed = 0

    async def toss(self) -> str:
        """Toss the coin."""
        self.tossed += 1
        return "heads" if self.tossed == 2 else "tails"

    async def get_reward(self) -> float:
        return 1.0 if self.tossed == 2 else 0.0


class Unpaid:
    """An environment whose reward is a function's."""

    def reset(self, **row: Any) -> None:
        self.said = list[str]()

    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: The word.
        """
        self.said.append(word)
        return word


class Dice(Digits):
    """A tool that draws."""

    def roll(self) -> int:
        """Roll a die."""
        return random.randint(1, 6)


class Restless(Digits):
    def reset(self, **row: Any) -> str:
        return str(random.SystemRandom().random())


class Deaf(Digits):
    """Takes no columns."""

    def reset(self) -> str:  # type: ignore[override]
        return super().reset()


class Odd(Digits):
    def reset(self, **row: Any) -> Any:
        return [{"type": "image"}]


class Bare:
    def guess(self, digit: int) -> str:
        """Say a digit."""
        return ""


class Gone(Digits):
    """Its reward is asked of a server that is not there for some digits."""

    def get_reward(self) -> float:
        if self.digit % 3 == 0:
            raise ConnectionError("the server is gone")
        return float(len(self.guesses))


def both(prompts: Any, completions: Any, environments: Any, word: Any, **rest: Any) -> list[float]:
    """A reward function of TRL: one for each time that the row's word was said."""
    return [float(env.said.count(w)) for env, w in zip(environments, word, strict=True)]


def length(completions: Any, **rest: Any) -> list[float]:
    return [float(sum(m["role"] == "tool" for m in messages)) for messages in completions]


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    return {"prompt_ids": [], "completion_ids": [], "logprobs": []}


def needs(path: str) -> Digits:
    return Digits()


def needs_by_name(*, path: str, mode: str) -> Digits:
    return Digits()


NOTHING = 3
MIXED = {"digits": Digits, "coins": Coins}
GUESS = tool(Digits().guess)


def player(env: Digits, observation: str) -> str:
    """The middle of the range, in JSON."""
    if "hit" in observation:
        return "found"
    return write_call("guess", {"digit": (env.low + env.high) // 2}, "json", [GUESS])


def tag_player(env: Digits, observation: str) -> str:
    return "ok" if "hit" in observation else f"<guess>{(env.low + env.high) // 2}</guess>"
