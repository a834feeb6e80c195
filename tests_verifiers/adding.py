"""A taskset with a tool, which a server of the toolset's own runs."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Sums(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Sums(vf.ToolsetConfig())]

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "the sum is 12")


class Adding(vf.Taskset[AddingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[AddingTask]:
        for number in range(6):
            yield AddingTask(vf.TaskData(prompt=f"5 + 7, time {number}"), self.config.task)


__all__ = ["Adding"]

if __name__ == "__main__":
    Sums.run()
