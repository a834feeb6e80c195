"""Completions of a TRL batch in the format of Keel's files: rollouts, and batches whose update was skipped."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from keel.integrations.trl.window import Pass
from keel.trainer.records import token_texts

GROUPS = 2  # groups per update in rollouts.jsonl


def rollout_records(passes: Sequence[Pass], tokenizer: Any, eos_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Records of the first groups that these passes have scored, one per completion.

    Groups are numbered over all batches of the update. There are several batches if TRL generates more often than it
    updates.
    """
    records = []
    before = _groups_before(passes)
    for part in passes:
        generated = part.generated
        for index, row in enumerate(part.inputs["keel_row"].tolist()):
            tokens, group = _tokens(part, index), before[id(generated)] + row // generated.group_size
            if group >= GROUPS or row >= len(generated.prompts) or not tokens:
                continue
            prompt = generated.prompts[row]
            records.append(
                {
                    "problem": problem_key(prompt),
                    "group": group,
                    "tracked": False,
                    "prompt": tokenizer.decode(_prompt_tokens(part, index)),
                    "prompt_tokens_cut": 0,
                    "messages": messages_of(prompt),
                    "completion": tokenizer.decode(tokens, skip_special_tokens=True),
                    "tokens": token_texts(tokenizer, tokens),
                    "action": part.batch.action_mask[index, : len(tokens)].tolist(),
                    "kl": _token_kl(part, index, len(tokens)),
                    "reward": generated.total(row),
                    "parts": {name: values[row] for name, values in generated.rewards.items()},
                    "advantage": float(generated.advantages[row]),
                    "stop_reason": "eos" if tokens[-1] in eos_ids else "length",
                }
            )
    return sorted(records, key=lambda record: record["group"])


def _groups_before(passes: Sequence[Pass]) -> dict[int, int]:
    """The number of groups in the update before each of its batches, by the batch's identity."""
    before, count = dict[int, int](), 0
    for part in passes:
        if id(part.generated) not in before:
            before[id(part.generated)] = count
            count += math.ceil(part.generated.rows / part.generated.group_size)
    return before


def skipped_record(passes: Sequence[Pass], tokenizer: Any) -> list[dict[str, Any]]:
    """Every completion of an update, with the numbers that its loss was computed from."""
    return [
        {
            "prompt_tokens": _prompt_tokens(part, index),
            "tokens": (tokens := _tokens(part, index)),
            "action": part.batch.action_mask[index, : len(tokens)].tolist(),
            "text": tokenizer.decode(tokens),
            "advantage": _row(part.batch.advantages, index, len(tokens)),
            "sample_logp": _row(part.inputs.get("sampling_per_token_logps"), index, len(tokens)),
            "old_logp": _row(part.batch.old_logp, index, len(tokens)),
            "logp": _row(part.scores.logp, index, len(tokens)),
            "ref_logp": _row(part.batch.ref_logp, index, len(tokens)),
        }
        for part in passes
        for index in range(len(part.batch.action_mask))
    ]


def problem_key(prompt: Any) -> str:
    """A key for a prompt. Equal prompts have equal keys."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:12]


def messages_of(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": str(m.get("role", "user")), "content": _text(m.get("content"))} for m in prompt]


def _text(content: Any) -> str:
    """The text of a message, without pictures."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    return "" if content is None else str(content)


def _prompt_tokens(part: Pass, index: int) -> list[int]:
    tokens: list[int] = part.inputs["prompt_ids"][index][part.inputs["prompt_mask"][index].bool()].tolist()
    return tokens


def _tokens(part: Pass, index: int) -> list[int]:
    """All tokens after the prompt, without padding; empty if TRL has masked a truncated completion."""
    tokens: list[int] = part.inputs["completion_ids"][index][part.inputs["completion_mask"][index].bool()].tolist()
    return tokens


def _token_kl(part: Pass, index: int, length: int) -> list[float] | None:
    if part.batch.ref_logp is None:
        return None
    values = (part.scores.logp - part.batch.ref_logp).where(part.batch.action_mask, 0.0)
    return [round(value, 5) for value in values[index, :length].tolist()]


def _row(values: Tensor | None, index: int, length: int) -> Any:
    if values is None:
        return None
    return values[index].tolist() if values.dim() == 1 else values[index, :length].tolist()
