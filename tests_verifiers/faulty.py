"""Tasksets and environments with a fault each, chosen by the parameter `fault`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class FaultyConfig(vf.TasksetConfig):
    fault: str = ""


class FaultyTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    fault = ""

    @vf.reward
    async def paid(self, trace: vf.Trace) -> float:
        if self.fault == "reward" and self.data.prompt.endswith("1"):
            raise ValueError("no such answer")
        return float(len(trace.last_reply) % 3)


class Faulty(vf.Taskset[FaultyTask, FaultyConfig]):
    @property
    def bounded(self) -> bool:
        return self.config.fault != "endless"

    def load(self) -> Iterator[FaultyTask]:
        if self.config.fault == "load":
            raise OSError("the data are gone")
        for number in itertools.count() if self.config.fault == "endless" else range(30):
            prompt = (
                None if self.config.fault == "prompt" else "the same" if self.config.fault == "same" else f"n {number}"
            )
            task = FaultyTask(vf.TaskData(prompt=prompt), self.config.task)
            task.fault = self.config.fault
            yield task


class EnvironmentConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Environment(vf.Env[EnvironmentConfig]):
    async def run(self, task: Any, agents: vf.Agents) -> None:
        fault = self.taskset.config.fault
        if fault == "hang" and task.data.prompt.endswith("1"):
            await asyncio.sleep(600)
        await agents.agent.run(task)
        if fault in ("two", "judged"):
            agents.second.trainable = fault == "two"
            await agents.second.run(task)


__all__ = ["Environment", "Faulty"]
