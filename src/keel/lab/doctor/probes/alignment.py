"""Do the gold answers belong to their problems? The model's own likelihood of each answer after each prompt tells."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.thresholds import Thresholds
from keel.base.types import Completion, Group, Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import leave_undecided, level
from keel.lab.doctor.setup import ProbeSetup
from keel.run.build import build_renderer

MOST, FIRST, FEWEST = 32, 12, 10  # problems: at most, to begin with, at least
MOST_PROMPTS, MOST_ANSWERS = 96, 16  # where there are few answers
POOL = 256  # that are drawn to find neighbouring rows
SECONDS = 4.0
FARTHEST = 3  # rows that answers may have been shifted by


def alignment_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Answers that the model finds likely after the prompt of another row, and not after their own.

    A model without skill finds no answer likelier after any prompt, and then nothing is said.
    """
    task = setup.run.task
    if task.unanswered or task.several_turns:
        return
    pool = task.sample(POOL, seed=setup.config.run.seed, step=0)
    for where, problems in (("in a batch", _distinct(pool)), ("in the data", _neighbours(pool))):
        try:
            answers = [task.gold(problem) for problem in problems]
            few = _likelihoods(setup, problems[:FIRST], answers[:FIRST])
            if len(few) >= FEWEST and association(few, 0) > _deviations(0.01):
                return
            likelihood = _likelihoods(setup, problems, answers)
        except (KeelError, NotImplementedError):
            return
        if len(likelihood) < FEWEST:
            continue
        scores = {shift: association(likelihood, shift) for shift in range(-FARTHEST, FARTHEST + 1)}
        best = max(scores, key=scores.__getitem__)
        if scores[0] > _deviations(0.05):
            return  # the model knows its problems' answers
        if scores[best] > _deviations(level(thresholds) / (2 * len(scores))):
            yield _shifted(best, scores, len(likelihood), where)
            return
    yield from _unrelated(setup, _distinct(pool, MOST_PROMPTS), thresholds)


def _unrelated(setup: ProbeSetup, problems: Sequence[Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """Few different answers, of which the model chooses by the prompt, and gold ones that its choice speaks against.

    A model that cannot tell finds all of them alike after every prompt: `opinion` is 0 then.
    """
    golds = [setup.run.task.gold(problem) for problem in problems]
    texts = sorted(set(golds))
    if not 2 < len(texts) <= MOST_ANSWERS or len(problems) < MOST:
        return
    likelihood = _likelihoods(setup, problems, texts)
    own = torch.tensor([texts.index(gold) for gold in golds[: len(likelihood)]])
    if len(likelihood) < MOST:
        return
    support, mass, opinion = against(likelihood, own)
    if mass < thresholds["answers_mass"] or opinion < thresholds["answers_opinion"]:
        return
    deviations = float(support.mean() / (support.std() / len(support) ** 0.5).clamp_min(1e-12))
    if -deviations < _deviations(level(thresholds)):
        return
    yield finding(
        "data/misaligned",
        f"after {len(own)} prompts the model chooses among the {len(texts)} gold answers ({100 * mass:.0f} % of what "
        f"it would write) and tells prompts apart ({opinion:.2g} nats), but gold answers are {-support.mean():.2g} "
        f"nats less likely after their own prompts than after others ({-deviations:.1f} standard errors)",
        "the answers belong to other problems, in no order (shuffled, sorted, joined by another key), or the model was "
        "taught another task than the data ask for",
        "read some rows, question beside answer; check that both are taken from the same row",
        severity="warning",
    )


def against(likelihood: Tensor, own: Tensor) -> tuple[Tensor, float, float]:
    """What the model says of each gold answer beyond what it says of it after all prompts, in nats `[n]`.

    `likelihood` is `[n, answers]`, `own` the column of each row's gold one. With it the share of the model's text that
    these answers are, and how much it tells prompts apart: the mean KL from its choice to its mean choice.
    """
    mass = likelihood.exp().sum(-1)
    chosen = likelihood.log_softmax(-1)
    usual = chosen.exp().mean(0).log()
    opinion = (chosen.exp() * (chosen - usual)).sum(-1)
    rows = torch.arange(len(own))
    return (chosen - usual)[rows, own], float(mass.clamp_max(1).mean()), float(opinion.mean())


def _shifted(best: int, scores: Mapping[int, float], count: int, where: str) -> Finding:
    return finding(
        "data/misaligned",
        f"after {count} prompts the model finds the gold answer {abs(best)} "
        f"{'after' if best > 0 else 'before'} theirs {where} likelier than others by {scores[best]:.1f} standard "
        f"deviations of a random pairing, their own by {scores[0]:.1f}",
        "answers and problems are shifted against each other: each problem is graded by another one's answer",
        "check that prompt and answer are taken from the same row (sorting, filtering or joining one column alone)",
    )


def _distinct(pool: Sequence[Problem], most: int = MOST) -> list[Problem]:
    """Problems as they come in a batch, each once."""
    first: dict[str, Problem] = {}
    for problem in pool:
        first.setdefault(str(problem.prompt), problem)
    return list(first.values())[:most]


def _neighbours(pool: Sequence[Problem]) -> list[Problem]:
    """Problems of neighbouring rows, by the number that their keys end with."""
    numbered: dict[tuple[str, int], Problem] = {}
    for problem in pool:
        match = re.fullmatch(r"(.*?)(\d+)", problem.key.partition("#")[0])
        if match is not None:
            numbered.setdefault((match.group(1), int(match.group(2))), problem)
    longest: list[tuple[str, int]] = []
    run: list[tuple[str, int]] = []
    for name, number in sorted(numbered):
        run = [*run, (name, number)] if (name, number - 1) in numbered and run else [(name, number)]
        longest = run if len(run) > len(longest) else longest
    return [numbered[key] for key in longest[:MOST]]


def _likelihoods(setup: ProbeSetup, problems: Sequence[Problem], golds: Sequence[str]) -> Tensor:
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
        completions = tuple(
            Completion(a, (True,) * len(a), (0.0,) * len(a), (0.0,) * len(a), "", "eos") for a in answers[:count]
        )
        group = Group(problem, prompt, completions)
        scored = torch.zeros(len(completions), dtype=torch.float64)
        for i, logits in setup.each_logits([group]):
            tokens = torch.tensor(answers[i], device=logits.device)[:, None]
            scored[i] = float(logits.log_softmax(-1).gather(-1, tokens).sum())
        rows.append(scored)
        each = (time.monotonic() - began) / len(rows)  # a row: fewer rows are shorter ones too
        if each * count > SECONDS:
            count = min(count, int(math.sqrt(SECONDS / each * count)))
            if count < FEWEST:
                leave_undecided(setup, "data/misaligned", f"{FEWEST} answers after {FEWEST} prompts take too long")
                return torch.zeros(0, 0)
    return torch.stack([row[:count] for row in rows[:count]])


def association(likelihood: Tensor, shift: int) -> float:
    """By how many standard deviations of a random pairing answers rank higher after the prompt `shift` rows before.

    What an answer has after all prompts is taken out first, then answers are ranked after each prompt: one likelihood
    that dwarfs the others counts no more than the first rank. The variance of a random pairing is Σ m² / (n − 1).
    """
    n = len(likelihood)
    values = (likelihood - likelihood.mean(0)).cpu()
    lower, higher = values[:, None] < values[:, :, None], values[:, None] > values[:, :, None]
    ranks = (lower.double().sum(-1) - higher.double().sum(-1) + n + 1) / 2  # ties share their mean rank
    centred = ranks - ranks.mean(0) - ranks.mean(1, keepdim=True) + ranks.mean()
    paired = torch.cat([centred.diagonal(shift), centred.diagonal(shift - n if shift > 0 else shift + n)])
    deviation = float(centred.square().sum() / (n - 1)) ** 0.5
    return float(paired.sum()) / deviation if deviation > 0 else 0.0


def _deviations(chance: float) -> float:
    """Standard deviations that a normal variable exceeds with this chance."""
    from scipy.special import ndtri

    return float(-ndtri(chance))
