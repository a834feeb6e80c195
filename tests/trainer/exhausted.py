"""Parts that run out of memory through the public extension points, each when `at` says so and once a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keel.base.types import Completion
from keel.models.scorer import ScoreRows
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from trainer.small import small_model

at: dict[str, int] = {}  # what raises, and after how many calls of its own


def exhaust(part: str) -> None:
    """Raise as CUDA's allocator does when a part's calls are used up."""
    if part not in at:
        return
    at[part] -= 1
    if at[part] < 0:
        del at[part]
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.03 GiB "
            "is free. See documentation for Memory Management"
        )


class ExhaustedEngine(NativeEngine):
    """The native engine on weights of its own, so that there is something to sync."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, copy=True)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        exhaust("evaluation" if requests[0].key.startswith("held") else "rollout")
        return super().generate(requests, sampling, seed=seed, attempt=attempt, step=step)

    def sync(self, policy: Any, version: int | None = None) -> None:
        exhaust("sync")
        super().sync(policy, version)


def scorer(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The plain scores; the policy's pass and the reference's run out apart."""
    exhaust("update" if torch.is_grad_enabled() else "score")
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask).logits[:, :-1] / temperature
    return rows.completion(logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None])[..., 0])


def exhausted_model(seed: int = 0) -> tuple[Any, Any]:
    """The small model, whose body runs out of memory while it learns."""
    model, tokenizer = small_model(seed)
    model.model.register_forward_pre_hook(lambda *_: exhaust("supervised") if torch.is_grad_enabled() else None)
    return model, tokenizer
