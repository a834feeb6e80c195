"""A taskset whose program rewrites its history, so that an episode ends with two contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import verifiers.v1 as vf


class RewritingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return sum(len(message.content or "") for message in trace.assistant_messages) / 10


class Rewriting(vf.Taskset[RewritingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[RewritingTask]:
        for number in range(20):
            yield RewritingTask(vf.TaskData(prompt=f"number {number}"), self.config.task)


class Summaries(vf.Harness[vf.HarnessConfig]):
    """Two turns; then the first is replaced by a summary, and a third follows."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        async with aiohttp.ClientSession() as client:

            async def ask(messages: list[dict[str, str]]) -> dict[str, str]:
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                async with client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
                    message: dict[str, str] = (await answer.json())["choices"][0]["message"]
                    return message

            opening = [{"role": "user", "content": data.prompt}]
            first = await ask(opening)
            await ask([*opening, first, {"role": "user", "content": "more"}])
            await ask([*opening, first, {"role": "user", "content": "in short"}])
        return vf.ProgramResult(0, "", "")


__all__ = ["Rewriting", "Summaries"]
