"""Rollout records as data, for the report and the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import json_object
from keel.doctor.runs import Record, number
from keel.loggers import rundir

K1_SAMPLE = "log-ratio to the reference (k1 sample, may be negative)"
_STEP = re.compile(rb'\{"step":\s*(\d+)[,}]')


@dataclass(frozen=True)
class Token:
    """One token after the prompt: its text, whether the policy sampled it, its log-ratio to the reference in nats."""

    text: str
    sampled: bool
    kl: float | None


def tokens_of(record: Record) -> list[Token]:
    """The tokens of a completion; empty if none were recorded or if tokens and KL differ in length.

    In records without `action`, tokens without KL count as not sampled if other tokens have a KL.
    """
    texts, kls, action = (as_list(record.get(name)) for name in ("tokens", "kl", "action"))
    if not texts or (kls and len(kls) != len(texts)):
        return []
    if len(action) != len(texts):
        action = [kl is not None for kl in kls] if kls else [True] * len(texts)
    kls = kls or [None] * len(texts)
    completion = str(record.get("completion", ""))
    return [
        Token(readable(str(text), completion), bool(sampled), number(kl) if sampled else None)
        for text, kl, sampled in zip(texts, kls, action, strict=True)
    ]


def turns_of(tokens: Sequence[Token]) -> list[tuple[bool, list[Token]]]:
    """(sampled by the policy, its tokens) of each turn in order."""
    return [(sampled, list(turn)) for sampled, turn in groupby(tokens, key=lambda token: token.sampled)]


def messages_of(record: Record) -> list[dict[str, Any]]:
    """The rendered prompt as a single message without a role, or the task's chat messages in older records."""
    if "prompt_tokens_cut" in record:
        return [{"role": "", "content": str(record.get("prompt", ""))}]
    messages = [item for item in as_list(record.get("messages")) if isinstance(item, dict)]
    text = record.get("prompt")
    plain = isinstance(text, str) and (not messages or [m.get("content") for m in messages] == [text])
    return [{"role": "", "content": text}] if plain else messages


def cut_note(record: Record) -> str:
    """How many prompt tokens were truncated on the left; empty if none."""
    cut = number(record.get("prompt_tokens_cut"))
    return f"{cut:.0f} tokens truncated on the left" if cut else ""


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message, tool calls included."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in _mappings(message, "tool_calls")]
    return "\n".join(filter(None, (text, *(f"→ {call}" for call in calls))))


def _mappings(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [item for item in as_list(message.get(name)) if isinstance(item, dict)]


def colour_scale(records: Sequence[Record]) -> float:
    """The KL of the full colour: the 99th percentile of the shown tokens, at least 0.05 nats."""
    values = sorted(abs(v) for record in records for v in map(number, as_list(record.get("kl"))) if v is not None)
    return max(0.05, values[int(0.99 * (len(values) - 1))]) if values else 0.05


def facts(record: Record) -> list[str]:
    """The facts about a completion: reward, parts, advantage, stop reason, log-ratio."""
    lines = [f"reward {brief(record.get('reward'))}"]
    parts = record.get("parts")
    if isinstance(parts, dict) and parts:
        lines[0] += f" ({', '.join(f'{name} {brief(value)}' for name, value in parts.items())})"
    advantage = number(record.get("advantage"))
    if advantage is not None:
        lines.append(f"advantage {advantage:+.2f}")
    lines += _episode(record)
    if record.get("stop_reason"):
        lines.append(f"stopped: {record['stop_reason']}")
    known = [token.kl for token in tokens_of(record) if token.kl is not None]
    if known:
        lines.append(f"log-ratio {sum(known):+.3g} nats over {len(known)} tokens (k1 sample)")
    return lines


def details_of(record: Record) -> str:
    """The details of the reward, such as the outcome of each test; may be empty."""
    details = record.get("details")
    return details if isinstance(details, str) else ""


def _episode(record: Record) -> list[str]:
    """Turns, tool calls and faulty answers of an episode, where counted."""
    counts = record.get("counts")
    if not isinstance(counts, dict):
        return []
    turns, calls = number(counts.get("turn/count")), number(counts.get("tool/calls"))
    lines = [] if turns is None else [_counted(turns, "turn")]
    if calls is not None:
        errors = [f"{value:.0f} {name}" for name, value in _errors(counts, "tool/")]
        lines.append(_counted(calls, "tool call") + (f" ({', '.join(errors)})" if errors else ""))
    bad_answers = _errors(counts, "answer/")
    lines += [f"answer: {name}" + (f" ({value:.0f})" if value > 1 else "") for name, value in bad_answers]
    return lines


def _errors(counts: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    """(name, count) of what went wrong in calls or answers."""
    known = [(str(name), number(value)) for name, value in counts.items() if str(name).startswith(prefix)]
    skipped = ("tool/calls", "tool/errors")
    return [(n.removeprefix(prefix).replace("_", " "), value) for n, value in known if value and n not in skipped]


def _counted(count: float, thing: str) -> str:
    return f"{count:.0f} {thing}" if count == 1 else f"{count:.0f} {thing}s"


def speaker(record: Record, sampled: bool) -> str:
    """The speaker of a turn: the policy, its tools, or the environment."""
    counts = record.get("counts")
    called = isinstance(counts, dict) and number(counts.get("tool/calls"))
    return "policy" if sampled else "tools" if called else "context"


def brief(value: Any) -> str:
    """A number in three digits, a dash where there is none."""
    known = number(value)
    return "–" if known is None else f"{known:.3g}"


def as_list(value: Any) -> list[Any]:
    """A list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def readable(token: str, completion_text: str) -> str:
    """Byte-level and SentencePiece marks as the space or line end they stand for, unless the text itself has them."""
    for mark, meaning in (("Ġ", " "), ("Ċ", "\n"), ("▁", " ")):
        if mark in token and mark not in completion_text:
            token = token.replace(mark, meaning)
    return token


def read_step(run: Path, step: int | None = None) -> tuple[int, list[Record]]:
    """(step, its records) of `step`, or of the last step that has rollouts, however large the file is."""
    path = run / rundir.ROLLOUTS
    if not run.is_dir():
        raise KeelError(f"no run directory at {run}; a run is a folder such as runs/default")
    if not path.is_file():
        raise KeelError(f"{run} has no {rundir.ROLLOUTS}: wait for the first step, or set log.rollouts_every above 0")
    steps: dict[int, list[int]] = {}
    for offset, line_step in _line_offsets(path):
        steps.setdefault(line_step, []).append(offset)
    if not steps:
        raise KeelError(f"{path} has no complete line yet: wait for the first step")
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise KeelError(
            f"step {chosen} of {run} has no rollouts: the nearest steps with rollouts are {_nearest(steps, chosen)}"
        )
    with path.open("rb") as file:
        return chosen, [_read_at(file, offset) for offset in steps[chosen]]


def choose(
    records: Sequence[Record],
    *,
    problem: str | None = None,
    group: int | None = None,
    order: str | None = None,
    limit: int | None = None,
) -> list[Record]:
    """The records of a problem or group; `order` best or worst sorts them by reward, else they stay as written."""
    chosen = list(records)
    if problem is not None:
        keys = list(dict.fromkeys(str(record.get("problem")) for record in records))
        chosen = [record for record in chosen if str(record.get("problem")) == problem]
        if not chosen:
            raise KeelError(f"no problem {problem!r} was recorded at this step: there are {', '.join(keys[:8])}")
    if group is not None:
        numbers = sorted({int(value) for r in chosen if (value := number(r.get("group"))) is not None})
        chosen = [record for record in chosen if record.get("group") == group]
        if not chosen:
            raise KeelError(f"no group {group} was recorded at this step: there are {', '.join(map(str, numbers))}")
    if order is not None:
        sign = -1.0 if order == "best" else 1.0
        chosen.sort(key=lambda record: sign * (number(record.get("reward")) or 0.0))
    return chosen if limit is None else chosen[:limit]


def _line_offsets(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, step) of every complete line; only the step is parsed."""
    with path.open("rb") as file:
        offset = 0
        for line in file:
            begin, offset = offset, offset + len(line)
            match = _STEP.match(line)
            if match and line.endswith(b"}\n"):
                yield begin, int(match.group(1))
            elif not match and (step := number(_object(line).get("step"))) is not None:
                yield begin, int(step)


def _read_at(file: Any, offset: int) -> Record:
    file.seek(offset)
    return _object(file.readline())


def _object(line: bytes) -> Record:
    record = json_object(line)
    return {} if isinstance(record, str) else record


def _nearest(steps: Mapping[int, Any], target: int) -> str:
    below = max((step for step in steps if step < target), default=None)
    above = min((step for step in steps if step > target), default=None)
    return " and ".join(str(step) for step in (below, above) if step is not None)
