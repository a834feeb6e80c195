"""Gold answers as the policy sees them: what a trained model finds likelier than anything that is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.types import Problem
from keel.lab.doctor.probes.rendering import rendered
from keel.lab.doctor.setup import ProbeSetup
from keel.models.head import evaluating

_GOLDS = 8  # problems


@dataclass(frozen=True)
class Gold:
    """A problem's prompt and its gold answer, as tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def golds(setup: ProbeSetup, count: int = _GOLDS) -> list[Gold]:
    """Prompts and first gold turns of problems whose answer is not empty and fits into the model's context."""
    if "golds" not in setup.shared:
        task, tokenizer = setup.run.task, setup.policy.tokenizer
        problems = [] if task.unanswered else task.sample(count, seed=setup.config.run.seed, step=0)
        limit = setup.policy.context_length or 1 << 30
        pairs = [
            Gold(prompt, tuple(tokenizer.encode(_first_turn(setup, problem), add_special_tokens=False)))
            for problem, prompt in zip(problems, rendered(setup, problems), strict=True)
        ]
        setup.shared["golds"] = [g for g in pairs if g.answer and len(g.prompt) + len(g.answer) + 2 <= limit]
    chosen: list[Gold] = setup.shared["golds"]
    return chosen


def _first_turn(setup: ProbeSetup, problem: Problem) -> str:
    return next(iter(setup.run.task.gold_turns(problem)), "")


def row_logits(setup: ProbeSetup, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The model's own logits `[t, V]` of each row of tokens, fp32; rows are padded on the right, which nobody sees."""
    width = max(map(len, rows))
    padded = [[*row, *(setup.policy.pad_id,) * (width - len(row))] for row in rows]
    ids = torch.tensor(padded, device=setup.policy.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=ids.device)
    with evaluating(setup.policy.model):
        logits = setup.policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [logits[i, : len(row)].float() for i, row in enumerate(rows)]


def answer_logp(
    setup: ProbeSetup, chosen: Sequence[Gold], changed: Callable[[Gold], Gold] = lambda gold: gold
) -> list[float]:
    """Mean log-probability a token of each gold answer at temperature 1, after its prompt or a changed one."""
    pairs = [changed(gold) for gold in chosen]
    means = []
    for gold, logits in zip(pairs, row_logits(setup, [(*g.prompt, *g.answer) for g in pairs]), strict=True):
        logp = logits[len(gold.prompt) - 1 : -1].log_softmax(-1)
        answer = torch.tensor(gold.answer, device=logp.device)[:, None]
        means.append(float(logp.gather(-1, answer).mean()))
    return means


def bos_gain(setup: ProbeSetup, bos: int) -> list[float]:
    """By how many nats a token each gold answer is likelier where its prompt begins with BOS."""
    chosen = golds(setup)
    if not chosen:
        return []
    plain = answer_logp(setup, chosen)
    with_bos = answer_logp(setup, chosen, lambda gold: Gold((bos, *gold.prompt), gold.answer))
    return [after - before for before, after in zip(plain, with_bos, strict=True)]
