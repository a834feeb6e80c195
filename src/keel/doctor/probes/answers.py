"""The model's likelihood of answers after prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from keel.base.types import Completion, Group, Problem
from keel.doctor.keel_subject import KeelSubject
from keel.run.build import build_renderer

FEWEST = 10  # problems
SECONDS = 4.0


def gold_texts(setup: KeelSubject, problems: Sequence[Problem]) -> list[str]:
    return [setup.run.task.gold(problem) for problem in problems]


def likelihoods(setup: KeelSubject, problems: Sequence[Problem], golds: Sequence[str]) -> Tensor:
    """`[n, answers]`: the log-probability of each after each prompt, of as many problems as the time allows.

    Where there is an answer a prompt, fewer prompts leave fewer answers.
    """
    tokenizer = setup.policy.tokenizer
    renderer = build_renderer(setup.config, tokenizer)
    answers = [tuple(tokenizer(gold, add_special_tokens=False)["input_ids"]) for gold in golds]
    if len(problems) < FEWEST or not all(answers):
        return torch.zeros(0, 0)
    context = setup.policy.context_length or math.inf
    rows: list[Tensor] = []
    count, began = len(problems), time.monotonic()
    for problem in problems:
        if len(rows) >= count:
            break
        prompt = renderer.prompt(problem)
        if len(prompt) + max(map(len, answers)) > context:
            return torch.zeros(0, 0)
        distinct = list(dict.fromkeys(answers[:count]))
        completions = tuple(
            Completion(a, (True,) * len(a), (0.0,) * len(a), (0.0,) * len(a), "", "eos") for a in distinct
        )
        scored: dict[tuple[int, ...], float] = {}
        for i, logits in setup.each_logits([Group(problem, prompt, completions)]):
            tokens = torch.tensor(distinct[i], device=logits.device)[:, None]
            scored[distinct[i]] = float(logits.log_softmax(-1).gather(-1, tokens).sum())
        rows.append(torch.tensor([scored[answer] for answer in answers[:count]], dtype=torch.float64))
        each = (time.monotonic() - began) / len(rows)  # a row: fewer rows are shorter ones too
        if each * count > SECONDS:
            count = min(count, int(math.sqrt(SECONDS / each * count)))
            if count < FEWEST:
                setup.budget.undecided["data/misaligned"] = f"{FEWEST} answers after {FEWEST} prompts take too long"
                return torch.zeros(0, 0)
    return torch.stack([row[:count] for row in rows[:count]])


def deviations_of(chance: float) -> float:
    """Standard deviations that a normal variable exceeds with this chance."""
    from scipy.special import ndtri

    return float(-ndtri(chance))
