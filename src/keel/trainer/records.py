"""Records of rollouts (texts, tokens, rewards, advantages, the KL of every token), and the KL of the final policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from keel.base.metrics import values
from keel.base.types import Batch, Group, Problem
from keel.envs import Task
from keel.kl.measure import metric_of
from keel.losses import advantages
from keel.models.sharding import local_tensor
from keel.trainer.batch import StepBatch, each_anchor, pack_step, score_policy, score_reference
from keel.trainer.checkpoint import rng_state, set_rng_state
from keel.trainer.measure import measure_policy, token_kl
from keel.trainer.memory import StepMemory
from keel.trainer.sample import sample_groups
from keel.trainer.state import Anchor, State, TrainingRun, step_seed

logger = logging.getLogger("keel")


def rollout_records(batch: StepBatch, tokenizer: Any, *, groups: int, tracked: bool = False) -> list[dict[str, Any]]:
    """Records of the first `groups` groups, one per completion.

    `prompt` is the model's input with system message, template and special tokens, without the `prompt_tokens_cut`
    tokens that left truncation removed. `messages` are the messages of the task's problem.

    `tokens`, `action` and `kl` have one entry per token: its text; whether the policy sampled it (false for tool output
    and later user turns); and log π − log p, or null if not measured. `policy_term` is false if only the KL penalty
    trains the completion. `turns` describe the turns of an episode in order; see `Completion`.
    """
    shown, kl, shaped = batch.groups[:groups], token_kl(batch), shaped_advantages(batch.rows)
    rows = sum(len(group.completions) for group in shown)
    mask = batch.rows.action_mask if batch.rows.policy_mask is None else batch.rows.policy_mask
    trained = mask[:rows].any(-1).tolist()
    kl, shaped = (None if x is None else x[:rows].cpu() for x in (kl, shaped))
    records, row = [], 0
    for number, group in enumerate(shown):
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            length = len(completion.tokens)
            per_token = None if kl is None else [round(value, 5) for value in kl[row, :length].tolist()]
            records.append(
                {
                    "problem": group.problem.key,
                    "group": number,
                    "tracked": tracked,
                    "prompt": tokenizer.decode(list(group.prompt_tokens)),
                    "prompt_tokens_cut": int(group.problem.info.get("prompt_tokens_cut", 0)),
                    "messages": _messages(group.problem),
                    "completion": completion.text,
                    "tokens": token_texts(tokenizer, completion.tokens),
                    "action": list(completion.action),
                    "kl": per_token,
                    "reward": reward.total,
                    "parts": dict(reward.parts),
                    **({"details": reward.details} if reward.details else {}),
                    "advantage": None if shaped is None else float(shaped[row]),
                    "stop_reason": completion.stop_reason,
                    **({} if trained[row] else {"policy_term": False}),
                    **({"counts": dict(completion.counts)} if completion.counts else {}),
                    **({"turns": list(completion.turns)} if completion.turns else {}),
                    **({} if (version := completion.policy_version) is None else {"policy_version": version}),
                }
            )
            row += 1
    return records


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Each token's text in the context of the token before it.

    If a token is decoded alone, word-level and SentencePiece tokenizers drop its leading space.
    """
    alone = {token: tokenizer.decode([token]) for token in set(tokens)}
    texts = [alone[token] for token in tokens[:1]]
    for before, token in pairwise(tokens):
        both = tokenizer.decode([before, token])
        texts.append(both[len(alone[before]) :] if both.startswith(alone[before]) else alone[token])
    return texts


def tracked_records(run: TrainingRun, problems: Sequence[Problem], *, step: int) -> list[dict[str, Any]]:
    """Records of fixed held-out problems, sampled with fixed noise, to compare the start and the end of a run."""
    groups = run.collect(problems, attempt=0, step=-1)
    batch = pack_step([_first(group, 2) for group in groups], run)
    with torch.no_grad():
        if run.reference is not None:
            batch = score_reference(batch, run)
        batch = score_policy(batch, run)
    rows = batch.rows
    assert rows.rewards is not None
    assert rows.group is not None
    batch = batch.with_rows(advantages=advantages(rows.rewards, rows.group, scale="none"))
    records = rollout_records(batch, run.policy.tokenizer, groups=len(groups), tracked=True)
    drawn = (_picture(run.task, groups[r["group"]].problem, r["completion"]) for r in records)
    return [r if picture is None else {**r, "picture": picture} for r, picture in zip(records, drawn, strict=True)]


def _picture(task: Task, problem: Problem, text: str) -> str | None:
    """The task's picture of an answer, or None. An error is logged and not raised."""
    try:
        return task.picture(problem, text)
    except Exception as error:
        logger.warning("no picture of %s: %s", problem.key, error)
        return None


def _first(group: Group, count: int) -> Group:
    return replace(group, completions=group.completions[:count], rewards=group.rewards[:count])


def shaped_advantages(rows: Batch) -> torch.Tensor | None:
    """Advantages `[B]`, including the part of a KL penalty in the reward."""
    if rows.advantages is None or rows.kl_advantages is None:
        return rows.advantages
    return rows.advantages + rows.kl_advantages


def _messages(problem: Problem) -> list[dict[str, str]]:
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return [dict(message) for message in problem.prompt]


def measure_final(run: TrainingRun, state: State) -> dict[str, float]:
    """Measure the current policy's KL on the rollouts of the next step.

    `state` and the random states are unchanged, so a run that is extended later samples the same rollouts. Without a
    reference, the weights are only checked for NaN and infinity.
    """
    finite = bool(torch.stack([local_tensor(p).isfinite().all() for p in run.optimizer.parameters]).all())
    if run.world.any(not finite):
        return {"logp/policy_mean": math.nan}
    if all(anchor.reference is None for anchor in run.anchors):
        return {}
    before, memory = rng_state(), StepMemory(run, state.step)
    try:
        torch.manual_seed(step_seed(run.seed, state))
        with memory("rollout"):
            groups = sample_groups(run, run.collect, state.attempt, state.step, state.curriculum).groups
        with memory("score"):
            batch = each_anchor(pack_step(groups, run), run, lambda view, anchor: _scored(view, run, anchor))
            measured = values(measure_policy(score_policy(batch, run), run))
    finally:
        set_rng_state(before)
    prefixes = (*(metric_of("kl/policy_ref/", anchor.name) for anchor in run.anchors), "logp/policy_mean")
    return {name: value for name, value in measured.items() if name.startswith(prefixes)}


def _scored(view: StepBatch, run: TrainingRun, anchor: Anchor) -> StepBatch:
    return view if anchor.reference is None else score_reference(view, run, anchor)
