"""A taskset of verifiers: name the largest of three digits, with a second try for half the reward.

pip install 'keel-rl[verifiers]'
cd examples && keel train verifiers_largest.yaml
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Digits(vf.TaskData):
    answer: str


class LargestTask(vf.Task[Digits, vf.State, vf.TaskConfig]):
    def right(self, reply: str) -> bool:
        return reply.strip() == self.data.answer

    @vf.reward
    async def tries(self, trace: vf.Trace) -> float:
        """1 for the first reply, 1/2 for the second."""
        right = [self.right(message.content or "") for message in trace.assistant_messages]
        return 1 / (1 + right.index(True)) if True in right else 0.0


class Largest(vf.Taskset[LargestTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LargestTask]:
        for digits in itertools.product("0123456789", repeat=3):
            yield LargestTask(Digits(prompt=f"max {' '.join(digits)}", answer=max(digits)), self.config.task)


class SecondTryConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class SecondTry(vf.Env[SecondTryConfig]):
    """Answers a wrong reply, once."""

    async def run(self, task: Any, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated and not task.right(segment.last_reply):
                await interaction.turn("again")


def player(task: LargestTask, observation: str) -> str:
    """The turn of the warm start and of keel check-task."""
    return task.data.answer


__all__ = ["Largest", "SecondTry"]
