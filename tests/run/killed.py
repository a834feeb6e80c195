"""A task that kills a rank with -9 at its third step, once; `run.killed:task` in configurations."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from keel.base.types import Problem
from keel.base.watchdog import process_rank
from trainer.small import Letters


@dataclass(frozen=True)
class Killed(Letters):
    rank: int = 0
    flag: str = ""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if step == 2 and process_rank() == self.rank and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(count, seed=seed, step=step)


def task(rank: int, flag: str) -> Killed:
    return Killed(rank=rank, flag=flag)
