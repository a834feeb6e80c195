"""Gold answers as the policy sees them: what a trained model finds likelier than anything that is made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import rendered
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import row_logits
from keel.envs import Task

_GOLDS = 8  # problems


@dataclass(frozen=True)
class Gold:
    """A problem's prompt and its gold answer, as tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def golds(setup: KeelSubject) -> list[Gold]:
    """Those of the first problems, drawn once."""
    if "golds" not in setup.shared:
        setup.shared["golds"] = drawn_golds(setup, _GOLDS)
    chosen: list[Gold] = setup.shared["golds"]
    return chosen


def drawn_golds(setup: KeelSubject, count: int) -> list[Gold]:
    """Prompts and first gold turns of problems whose answer is not empty and fits into the model's context."""
    task, tokenizer = setup.run.task, setup.policy.tokenizer
    problems = [] if task.prompts_only else task.sample(count, seed=setup.config.run.seed, step=0)
    limit = setup.policy.context_length or 1 << 30
    pairs = [
        Gold(prompt, tuple(tokenizer.encode((gold_or_none(task, problem) or [""])[0], add_special_tokens=False)))
        for problem, prompt in zip(problems, rendered(setup, problems), strict=True)
    ]
    return [g for g in pairs if g.prompt and g.answer and len(g.prompt) + len(g.answer) + 2 <= limit]


def gold_or_none(task: Task, problem: Problem) -> list[str] | None:
    """The gold turns; None of a problem without an answer, as in part of a mixture, or of a task that writes none."""
    try:
        return task.gold_turns(problem) or None
    except (KeelError, NotImplementedError):
        return None


@dataclass(frozen=True)
class GoldReading:
    """The policy on gold answers at temperature 1.

    Mean log-probability a token of each; after each the next token's probabilities, as a mean `[V]`; over prompts and
    answers the mean probabilities `[V]` and the mean entropy.
    """

    logp: list[float]
    after: Tensor
    written: Tensor
    entropy: float


def read_golds(setup: KeelSubject) -> GoldReading:
    """One pass over them, made once."""
    if "gold reading" not in setup.shared:
        chosen, means, entropies, after, written = golds(setup), [], [], [], []
        for gold, logits in zip(
            chosen, row_logits(setup.policy, [(*g.prompt, *g.answer) for g in chosen]), strict=True
        ):
            logp = logits.log_softmax(-1)
            means.append(float(_of_answer(gold, logp).mean()))
            entropies.append(-float((logp.exp() * logp).sum(-1).mean()))
            after.append(logp[-1].exp())
            written.append(logp.exp().mean(0))
        averages = torch.stack(after).mean(0), torch.stack(written).mean(0)
        setup.shared["gold reading"] = GoldReading(means, *averages, fmean(entropies))
    reading: GoldReading = setup.shared["gold reading"]
    return reading


def answer_logp(setup: KeelSubject, chosen: Sequence[Gold]) -> list[float]:
    """Mean log-probability a token of each of these answers, with the weights as they are now."""
    return [float(logp.mean()) for logp in answer_tokens(setup, chosen)]


def answer_tokens(setup: KeelSubject, chosen: Sequence[Gold]) -> list[Tensor]:
    """The log-probabilities of the tokens of each of these answers; after padding, where nothing stands before them."""
    begun = [gold if gold.prompt else Gold((setup.policy.pad_id,), gold.answer) for gold in chosen]
    rows = row_logits(setup.policy, [(*gold.prompt, *gold.answer) for gold in begun])
    return [_of_answer(gold, logits.log_softmax(-1)) for gold, logits in zip(begun, rows, strict=True)]


def _of_answer(gold: Gold, logp: Tensor) -> Tensor:
    answer = torch.tensor(gold.answer, device=logp.device)[:, None]
    return logp[len(gold.prompt) - 1 : -1].gather(-1, answer).squeeze(-1)


def bos_gain(setup: KeelSubject, bos: int) -> tuple[list[float], float]:
    """By how many nats a token each gold answer is likelier where its prompt begins with BOS, and what it has then.

    The second is a mean of −log p: a model to which the answers mean nothing is confused by any token.
    """
    chosen = golds(setup)
    if not chosen:
        return [], 0.0
    with_bos = answer_logp(setup, [Gold((bos, *gold.prompt), gold.answer) for gold in chosen])
    return [after - before for before, after in zip(read_golds(setup).logp, with_bos, strict=True)], -fmean(with_bos)


def blind_surprise(setup: KeelSubject, thresholds: Thresholds) -> float:
    """Nats a token over which an answer is one that the model cannot know."""
    return thresholds["bos_surprise"] * math.log(setup.vocabulary)
