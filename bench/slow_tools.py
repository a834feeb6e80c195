"""Time of a whole step with tools that take a second, with and without `rollout.overlap_tools`.

    python bench/slow_tools.py                     # 8 prompts × 8 episodes × 4 turns of 32 tokens, a tool of 1 s
    python bench/slow_tools.py --tool-seconds 0.2 --steps 2

A random Llama of 19M parameters on the CPU. Every turn is answered by a tool that waits, for all episodes at once if
they ask at once. `without` has a tool that takes no time, `overlapped` and `waiting` one that takes `--tool-seconds`:
the former samples half of the unfinished episodes while the others wait for their tools, the latter samples, waits,
and samples again. Sides take turns, and the first step of a turn is not counted. `ratio` is the time of an overlapped
step over one without the tool, the median of the turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.envs import Episode, Task
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import train_step
from random_model import save_random_llama
from step import take_turns

WORDS = tuple(f"number{i}" for i in range(100))


class Slow(Episode):
    """An episode whose tool takes some seconds; it ends after so many turns."""

    at_once = 1024

    def __init__(self, key: str, turns: int, seconds: float, words: int) -> None:
        self.key, self.left, self.seconds, self.words = key, turns, seconds, words
        self.last = ""

    async def step(self, text: str) -> str | None:
        self.left, self.last = self.left - 1, text
        if not self.left:
            return None
        await asyncio.sleep(self.seconds)
        return " ".join(WORDS[zlib.crc32(f"{self.key}/{self.left}/{i}".encode()) % 100] for i in range(self.words))

    def reward(self) -> float:
        return float(zlib.crc32(self.last.encode()) % 2)


@dataclass(frozen=True)
class Asking(Task):
    """Prompts of random words; a turn is answered by a slow tool."""

    turns: int
    seconds: float
    words: int
    name: str = "asking"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [self._problem(f"{seed}/{step}/{i}") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self._problem(f"held/{i}") for i in range(count)]

    def _problem(self, key: str) -> Problem:
        return Problem(key, " ".join(WORDS[zlib.crc32(f"{key}/{i}".encode()) % 100] for i in range(self.words)), "")

    def start(self, problem: Problem) -> Slow:
        return Slow(problem.key, self.turns, self.seconds, self.words)

    def gold(self, problem: Problem) -> str:
        return WORDS[0]

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Task.reward(self, problem, turns)


def seconds_of_a_step(model: str, seconds: float, overlap: bool, given: argparse.Namespace) -> float:
    """The median of the steps after the first."""
    options = [
        f"model.name={model}",
        "model.device=cpu",
        f"rollout.prompts_per_step={given.prompts}",
        f"rollout.num_generations={given.generations}",
        f"rollout.max_turns={given.turns}",
        f"rollout.max_turn_length={given.tokens}",
        f"rollout.max_completion_length={given.turns * (given.tokens + 2 * given.words + 8)}",
        f"rollout.overlap_tools={str(overlap).lower()}",
        "data.chat_template=none",
        "optim.learning_rate=1e-6",
    ]
    config = load_config({}, options)
    run = build_run(config, build_policy(config), task=Asking(given.turns, seconds, given.words)).run
    times = []
    with closing(run):
        state = State(kl=run.controller.init())
        for _ in range(given.steps + 1):
            state, metrics, _ = train_step(run, state)
            times.append(metrics["time/total_s"])
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each side")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn that count, after one that does not")
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a turn")
    parser.add_argument("--words", type=int, default=32, help="tokens of a prompt and of a tool's answer")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sides = {"without": (0.0, False), "overlapped": (given.tool_seconds, True), "waiting": (given.tool_seconds, False)}
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(Path(folder), WORDS)

        def measure(side: str) -> float:
            taken = seconds_of_a_step(folder, *sides[side], given)
            print(f"{side:>10}  {taken:.2f} s a step; load {os.getloadavg()[0]:.1f}", flush=True)
            return taken

        turns = take_turns(list(sides), given.repeats, measure)
    ratios = {
        side: [with_tool / without for with_tool, without in zip(turns[side], turns["without"], strict=True)]
        for side in ("overlapped", "waiting")
    }
    figures = {f"{side}_s": round(statistics.median(taken), 3) for side, taken in turns.items()}
    figures |= {f"{side}_ratio": round(statistics.median(ratio), 3) for side, ratio in ratios.items()}
    print(f"overlapped / without the tool: {figures['overlapped_ratio']:.2f}; waiting: {figures['waiting_ratio']:.2f}")
    print(json.dumps(figures | vars(given)))


if __name__ == "__main__":
    main()
