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
UNFOLDED = 4  # number of turns and replies shown at either end of a long episode
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


@dataclass(frozen=True)
class RecordedTurn:
    """A turn of the policy, or a reply to it: speaker, tokens, and for a turn its caption and note."""

    speaker: str
    sampled: bool
    tokens: tuple[Token, ...]
    caption: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


def turns_of(record: Record) -> list[RecordedTurn]:
    """The turns and replies of a completion in order; empty if its tokens cannot be shown.

    Without recorded turns, each span of sampled tokens is a turn. Captions and notes are for completions with replies,
    and for one-turn episodes of multi-turn tasks.
    """
    tokens, described = tokens_of(record), iter(_described(record))
    parts = _cut(tokens, _described(record))
    if not parts:
        parts = [(sampled, tuple(part)) for sampled, part in groupby(tokens, key=lambda token: token.sampled)]
        described = iter(())
    several = len(parts) > 1 or "turns" in record
    turns: list[RecordedTurn] = []
    for sampled, part in parts:
        if sampled:
            recorded = next(described, {})
            count = 1 + sum(turn.sampled for turn in turns)
            caption = _caption(count, part, recorded.get("stop_reason")) if several else ""
            turns.append(RecordedTurn("policy", True, part, caption, str(recorded.get("note") or "")))
        else:
            caption = f"{_counted(len(part), 'token')}, not trained on"
            turns.append(RecordedTurn(_environment(record), False, part, caption))
    return turns


def _described(record: Record) -> list[Record]:
    return _mappings(record, "turns")


def _cut(tokens: Sequence[Token], described: Sequence[Record]) -> list[tuple[bool, tuple[Token, ...]]]:
    """The tokens split at the recorded lengths of turns and replies; empty if the lengths do not fit the tokens."""
    parts: list[tuple[bool, tuple[Token, ...]]] = []
    at = 0
    for turn in described:
        for sampled, length in ((True, turn.get("tokens")), (False, turn.get("reply"))):
            if not isinstance(length, int) or length < sampled:
                return []
            part, at = tuple(tokens[at : at + length]), at + length
            if part:
                parts.append((sampled, part))
    agree = all(token.sampled == sampled for sampled, part in parts for token in part)
    return parts if agree and at == len(tokens) else []


def _caption(number_of_turn: int, tokens: Sequence[Token], stop_reason: Any) -> str:
    known = [token.kl for token in tokens if token.kl is not None]
    parts = [f"turn {number_of_turn}", _counted(len(tokens), "token")]
    parts += [f"log-ratio {sum(known):+.3g} nats"] if known else []
    return " · ".join(parts + ([f"stopped: {stop_reason}"] if stop_reason else []))


Turns = Sequence[RecordedTurn]


def folded(turns: Turns) -> tuple[Turns, Turns, Turns]:
    """The beginning, the folded middle and the end of an episode; short ones have neither middle nor end."""
    if len(turns) <= 3 * UNFOLDED:
        return turns, (), ()
    end = next((at for at in range(len(turns) - UNFOLDED, len(turns)) if turns[at].sampled), len(turns))
    return turns[:UNFOLDED], turns[UNFOLDED:end], turns[end:]


def fold_title(turns: Sequence[RecordedTurn]) -> str:
    """The title of a folded part of an episode: its turns, tokens and log-ratio."""
    of_policy = sum(turn.sampled for turn in turns)
    known = [token.kl for turn in turns for token in turn.tokens if token.kl is not None]
    title = f"{_counted(of_policy, 'turn')} more, {_counted(sum(len(turn.tokens) for turn in turns), 'token')}"
    return title + (f", log-ratio {sum(known):+.3g} nats" if known else "")


def messages_of(record: Record) -> list[dict[str, Any]]:
    """The rendered prompt as a single message without a role, or the task's chat messages in older records."""
    if "prompt_tokens_cut" in record:
        return [{"role": "", "content": str(record.get("prompt", ""))}]
    messages = [item for item in as_list(record.get("messages")) if isinstance(item, dict)]
    text = record.get("prompt")
    plain = isinstance(text, str) and (not messages or [m.get("content") for m in messages] == [text])
    return [{"role": "", "content": text}] if plain else messages


def cut_note(record: Record) -> str:
    """The number of prompt tokens that were truncated on the left; empty if none."""
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
    if record.get("policy_term") is False:
        lines.append("not in the policy term")
    known = [token.kl for token in tokens_of(record) if token.kl is not None]
    if known:
        lines.append(f"log-ratio {sum(known):+.3g} nats over {len(known)} tokens (k1 sample)")
    return lines


def details_of(record: Record) -> str:
    """The details of the reward, such as the outcome of each test; may be empty."""
    details = record.get("details")
    return details if isinstance(details, str) else ""


def _episode(record: Record) -> list[str]:
    """Turns, tool calls and faulty answers of an episode, if they were counted."""
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
    """(name, count) of errors in calls or answers."""
    known = [(str(name), number(value)) for name, value in counts.items() if str(name).startswith(prefix)]
    skipped = ("tool/calls", "tool/errors")
    return [(n.removeprefix(prefix).replace("_", " "), value) for n, value in known if value and n not in skipped]


def _counted(count: float, thing: str) -> str:
    return f"{count:.0f} {thing}" if count == 1 else f"{count:.0f} {thing}s"


def _environment(record: Record) -> str:
    """The speaker of replies: tools if any were called, else the environment; `context` if only tokens are known."""
    counts = record.get("counts")
    called = isinstance(counts, dict) and number(counts.get("tool/calls"))
    return "tools" if called else "environment" if _described(record) else "context"


def brief(value: Any) -> str:
    """A number with three digits; a dash if it is missing."""
    known = number(value)
    return "–" if known is None else f"{known:.3g}"


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def readable(token: str, completion_text: str) -> str:
    """Replace byte-level and SentencePiece marks by spaces and line ends, unless the text itself contains them."""
    for mark, meaning in (("Ġ", " "), ("Ċ", "\n"), ("▁", " ")):
        if mark in token and mark not in completion_text:
            token = token.replace(mark, meaning)
    return token


def read_step(run: Path, step: int | None = None) -> tuple[int, list[Record]]:
    """(step, its records) of `step`, or of the last step with rollouts; only that part of the file is parsed."""
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
    """The records of a problem or group; `order` best or worst sorts them by reward, default: as recorded."""
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
