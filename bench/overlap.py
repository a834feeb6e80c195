"""Time of a step with and without sampling ahead (`rollout.max_staleness`), on two cores of one machine.

    python bench/overlap.py                       # three turns of both sides
    python bench/overlap.py --repeats 1 --steps 2 --tokens 8

A random Llama of 19M parameters, one thread for the update and one for the sampler, in one process. The sides take
turns, and every other round goes the other way; the first step of a turn fills the pipeline and is not counted.
`ratio` is the time of a step that samples ahead over that of one that does not, within the same turn; `bound` is what
that would be if neither disturbed the other: max(rollout, rest) / (rollout + rest) of the side that does not. Both are
medians over the turns. The load of the machine is shown: more than two busy cores leave nothing to gain. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.envs import Task
from keel.run.build import build_policy, build_run
from keel.trainer.sample import wait_for_sampler
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step
from random_model import save_random_llama
from step import take_turns

WORDS = tuple(f"number{i}" for i in range(100))


@dataclass(frozen=True)
class Parity(Task):
    """Prompts of random words; the reward is a bit of the answer's checksum, so that every group has a signal."""

    name: str = "parity"
    length: int = 16

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [self._problem(f"{seed}/{step}/{i}") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self._problem(f"held/{i}") for i in range(count)]

    def _problem(self, key: str) -> Problem:
        numbers = (zlib.crc32(f"{key}/{i}".encode()) % len(WORDS) for i in range(self.length))
        return Problem(key, " ".join(WORDS[number] for number in numbers), "")

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(zlib.crc32(turns[-1].encode()) & 1))


class Side:
    """One run, which stands still while it is not its turn."""

    def __init__(self, model: Path, staleness: int, given: argparse.Namespace) -> None:
        overrides = [f"rollout.max_staleness={staleness}", f"rollout.prompts_per_step={given.prompts}"]
        overrides += [f"rollout.num_generations={given.generations}", f"rollout.max_completion_length={given.tokens}"]
        settings = {"model": {"name": str(model), "device": "cpu"}, "kl": {"beta": 0.01}, "rewards": [{"name": "task"}]}
        config = load_config(settings, overrides)
        self.run: TrainingRun = build_run(config, build_policy(config), task=Parity()).run
        self.state = State(kl=self.run.controller.init())

    def turn(self, steps: int) -> dict[str, float]:
        """Medians of a step's seconds by phase."""
        lines: list[dict[str, float]] = []
        for _ in range(steps + 1):
            self.state, metrics, _ = train_step(self.run, self.state)
            lines.append(metrics)
        wait_for_sampler(self.run, self.state)
        names = [name for name in lines[0] if name.startswith("time/")]
        return {name: statistics.median(line[name] for line in lines[1:]) for name in names}


def summarise(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of both sides over their turns, of their ratio, and of the bound."""
    total, rollout = "time/total_s", "time/rollout_s"
    pairs = list(zip(turns["after"], turns["beside"], strict=True))
    bounds = [max(plain[rollout], plain[total] - plain[rollout]) / plain[total] for plain, _ in pairs]
    ratios = [ahead[total] / plain[total] for plain, ahead in pairs]
    sides = {
        side: {name: round(statistics.median(turn[name] for turn in taken), 4) for name in taken[0]}
        for side, taken in turns.items()
    }
    ratio, bound = round(statistics.median(ratios), 4), round(statistics.median(bounds), 4)
    return {**sides, "ratio": ratio, "ratio_min": min(ratios), "ratio_max": max(ratios), "bound": bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count, after one that does not")
    parser.add_argument("--staleness", type=int, default=1, help="rollout.max_staleness of the side that samples ahead")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="length of a completion")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(Path(folder), WORDS)
        sides = {"after": Side(Path(folder), 0, given), "beside": Side(Path(folder), given.staleness, given)}
        with closing(sides["beside"].run):

            def measure(side: str) -> dict[str, float]:
                taken = sides[side].turn(given.steps)
                shown = ", ".join(f"{name[5:-2]} {seconds:.2f}" for name, seconds in taken.items())
                print(f"{side:>7}  {shown} s; load {os.getloadavg()[0]:.1f}", flush=True)
                return taken

            figures = summarise(take_turns(list(sides), given.repeats, measure))
    spread = f"({figures['ratio_min']:.2f} to {figures['ratio_max']:.2f})"
    print(f"ahead / not ahead: {figures['ratio']:.2f} {spread} of the time of a step; bound {figures['bound']:.2f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
