"""Gold answers under the policy. A trained model finds them more likely than random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.weights import row_logits
from keel.envs import Task

_GOLDS = 8  # number of problems


@dataclass(frozen=True)
class Gold:
    """The tokens of a problem's prompt and gold answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def golds(setup: KeelSubject) -> list[Gold]:
    """Prompts and first gold turns of the first problems, sampled once, as far as they fit into the model's context."""
    if "golds" not in setup.shared:
        task, encode = setup.run.task, setup.policy.tokenizer.encode
        problems = [] if task.prompts_only else setup.problems(_GOLDS)
        turns = [(gold_or_none(task, problem) or [""])[0] for problem in problems]
        pairs = [
            Gold(setup.prompt(problem), tuple(encode(turn, add_special_tokens=False)))
            for problem, turn in zip(problems, turns, strict=True)
        ]
        limit = setup.policy.context_length or 1 << 30
        setup.shared["golds"] = [g for g in pairs if g.prompt and g.answer and len(g.prompt) + len(g.answer) < limit]
    chosen: list[Gold] = setup.shared["golds"]
    return chosen


def gold_or_none(task: Task, problem: Problem) -> list[str] | None:
    """The gold turns; None if the problem has no answer or the task has no gold answers."""
    try:
        return task.gold_turns(problem) or None
    except (KeelError, NotImplementedError):
        return None


@dataclass(frozen=True)
class GoldReading:
    """Statistics of the policy on gold answers at temperature 1.

    The mean log-probability per token of each answer, the mean next-token distribution after the answers `[V]`, and the
    mean distribution `[V]` and mean entropy over prompts and answers.
    """

    logp: list[float]
    after: Tensor
    written: Tensor
    entropy: float


def read_golds(setup: KeelSubject) -> GoldReading:
    """Read the gold answers in one pass, whose result is cached."""
    if "gold reading" not in setup.shared:
        chosen, means, entropies, after, written = golds(setup), [], [], [], []
        for gold, logits in zip(
            chosen, row_logits(setup.policy, [(*g.prompt, *g.answer) for g in chosen]), strict=True
        ):
            logp = logits.log_softmax(-1)
            answer = torch.tensor(gold.answer, device=logp.device)[:, None]
            means.append(float(logp[len(gold.prompt) - 1 : -1].gather(-1, answer).mean()))
            entropies.append(-float((logp.exp() * logp).sum(-1).mean()))
            after.append(logp[-1].exp())
            written.append(logp.exp().mean(0))
        averages = torch.stack(after).mean(0), torch.stack(written).mean(0)
        setup.shared["gold reading"] = GoldReading(means, *averages, fmean(entropies))
    reading: GoldReading = setup.shared["gold reading"]
    return reading
