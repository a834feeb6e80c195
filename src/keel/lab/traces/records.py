"""The record of a completion: tokens, action mask, log-probabilities under sampler and policy, and messages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import parse_json

# Field names of other trainers. The first one in a line is used. Masks are combined, because TRL has one for padding
# and one for tools.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompts"),
    "completion_ids": ("completion_ids", "response_ids", "completion_token_ids", "responses"),
    "token_ids": ("token_ids", "input_ids", "tokens"),
    "action": ("action", "completion_mask", "env_mask", "tool_mask", "response_mask", "loss_mask", "sampled_mask"),
    "sample_logp": ("sample_logp", "sampling_per_token_logps", "rollout_log_probs", "logprobs"),
    "logp": ("logp", "old_per_token_logps", "old_log_probs"),
    "messages": ("messages",),
    "step": ("step",),
}


@dataclass(frozen=True)
class Trace:
    """One completion with its prompt.

    `action` is true where the policy sampled the token of `completion_ids`. `sample_logp` and `logp` are the
    log-probabilities of the completion's tokens under sampler and policy, at the sampling temperature; NaN if unknown.
    `messages` are the whole conversation, including the completion's turns.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    action: tuple[bool, ...]
    sample_logp: tuple[float, ...] | None = None
    logp: tuple[float, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    step: int | None = None

    def turns(self) -> Iterator[tuple[int, int]]:
        """Start and end of each span of sampled tokens in the completion."""
        start = None
        for index, sampled in enumerate((*self.action, False)):
            if sampled and start is None:
                start = index
            elif not sampled and start is not None:
                yield start, index
                start = None


def read_traces(path: Path | str) -> list[Trace]:
    """The traces in a file of JSON lines; an invalid line is refused."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"{path} cannot be read: {error}") from None
    traces = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                traces.append(trace_of(parse_json(line)))
            except ValueError as error:
                raise KeelError(f"{path}, line {number}: {error}") from None
    if not traces:
        raise KeelError(f"{path} has no completions: write one per line, with completion_ids and prompt_ids")
    return traces


def trace_of(row: Any) -> Trace:
    """A trace from a mapping with the names of TRL, verl or Keel; a ValueError names what is missing."""
    if not isinstance(row, Mapping):
        raise ValueError("this is not a record: give an object with completion_ids and prompt_ids")
    found = {name: next((row[key] for key in keys if key in row), None) for name, keys in NAMES.items()}
    completion, prompt = found["completion_ids"], found["prompt_ids"]
    masks = [row[key] for key in NAMES["action"] if row.get(key) is not None]
    if len({len(mask) for mask in masks}) > 1:
        raise ValueError("the masks have different lengths: give one entry for each token")
    action = [all(entries) for entries in zip(*masks, strict=True)] if masks else None
    if completion is None and found["token_ids"] is not None and action is not None:
        both = _integers(found["token_ids"], "token_ids")
        if len(action) != len(both):
            raise ValueError(f"token_ids has {len(both)} entries and the mask {len(action)}: give one for each token")
        first = next((index for index, sampled in enumerate(action) if sampled), len(both))
        prompt, completion, action = both[:first], both[first:], action[first:]
        for name in ("sample_logp", "logp"):
            if (values := found[name]) is not None and len(values) == len(both):
                found[name] = values[first:]
    if completion is None:
        known = ", ".join(sorted(map(str, row))[:8])
        raise ValueError(f"there are no token ids, only {known}: completion_ids and prompt_ids must be recorded")
    completion = _integers(completion, "completion_ids")
    sampled = [True] * len(completion) if action is None else action
    numbers = {name: _numbers(found[name]) for name in ("sample_logp", "logp")}
    for name, values in (("the mask", sampled), *numbers.items()):
        if values is not None and len(values) != len(completion):
            raise ValueError(
                f"{name} has {len(values)} entries and completion_ids {len(completion)}: give one for each token"
            )
    messages = found["messages"]
    return Trace(
        prompt_ids=_integers(prompt or (), "prompt_ids"),
        completion_ids=completion,
        action=tuple(sampled),
        messages=None if messages is None else tuple(messages),
        step=None if found["step"] is None else int(found["step"]),
        **numbers,
    )


def write_traces(path: Path | str, traces: Iterable[Trace]) -> None:
    """Append traces to a file of JSON lines."""
    with Path(path).open("a") as file:
        for trace in traces:
            row = {name: value for name, value in asdict(trace).items() if value is not None}
            for name in ("sample_logp", "logp"):
                if name in row:
                    row[name] = [x if math.isfinite(x) else None for x in row[name]]
            file.write(json.dumps(row, default=str) + "\n")


def _integers(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(type(x) is int for x in values):
        raise ValueError(f"{name} is not a list of token ids")
    return tuple(values)


def _numbers(values: Any) -> tuple[float, ...] | None:
    """Log-probabilities as floats: NaN for null; some samplers give a list with one number per token."""
    if values is None:
        return None
    flat = (x[0] if isinstance(x, list) and x else x for x in values)
    return tuple(math.nan if x is None else float(x) for x in flat)
