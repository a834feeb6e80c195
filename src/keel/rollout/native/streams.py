"""Run small kernels on a second stream, in parallel with those of the current one, also within a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Launch the kernels of this context on a second stream. The yielded function makes the current stream wait.

    Call it before anything reads the results. A device has one second stream, so all callers must use one stream.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    stream, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(stream)
    with torch.cuda.stream(second):
        yield lambda: stream.wait_stream(second)


@lru_cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
