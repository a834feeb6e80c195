"""Do the gold answers belong to their problems? The model's own likelihood of each answer after each prompt tells."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.thresholds import Thresholds
from keel.base.types import Completion, Group, Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import leave_undecided, level, more_groups
from keel.lab.doctor.setup import ProbeSetup
from keel.run.build import build_renderer

MOST, FIRST, FEWEST = 32, 12, 10  # problems: at most, to begin with, at least
MOST_PROMPTS, MOST_ANSWERS = 96, 16  # where there are few answers
POOL = 256  # problems that are drawn at once
SECONDS = 4.0
DRAWING_S = 1.0  # for the numbers of all rows
FARTHEST = 3  # rows that answers may have been shifted by, and ends of the data that may be missing
RUN = 24  # neighbouring rows, and as many at the places that they would be moved to
OWN = "their own"

Partners = Sequence[int | None]  # of each prompt, the number of the answer that would be its own


@dataclass(frozen=True)
class Fit:
    """The answers that the model finds likely, by standard deviations of a random pairing, beside their own."""

    which: str
    deviations: float
    own: float
    prompts: int


def alignment_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Answers that the model finds likely after the prompt of another row, and not after their own.

    A model without skill finds no answer likelier after any prompt, and then nothing is said. Held-out problems are
    looked at where it knows the answers of those that are trained on.
    """
    task, seed = setup.run.task, setup.config.run.seed
    if task.unanswered or task.several_turns:
        return
    draw = partial(task.sample, POOL, seed=seed)
    try:
        trained = _fit(setup, draw, thresholds)
        if trained is None:
            yield from _unrelated(setup, _distinct(draw(step=0), MOST_PROMPTS), thresholds)
        elif trained.which != OWN:
            yield _moved(trained, "data/misaligned", "")
        else:
            held_out = _fit(setup, lambda step: [] if step else task.held_out(POOL), thresholds)
            if held_out is not None and held_out.which != OWN:
                yield _moved(held_out, "eval/train-gap", "held-out ")
    except (KeelError, NotImplementedError):
        return


def _fit(setup: ProbeSetup, draw: Callable[..., Sequence[Problem]], thresholds: Thresholds) -> Fit | None:
    """The arrangement of the answers that fits their prompts, as they come in a batch or by rows of the data."""
    problems = _distinct(draw(step=0))
    few = _likelihoods(setup, problems[:FIRST], _golds(setup, problems[:FIRST]))
    if len(few) >= FEWEST and (own := association(few, range(len(few)))) > _deviations(0.01):
        return Fit(OWN, own, own, len(few))
    in_batch = _best(setup, problems, lambda count: shifts(range(count), "in a batch"), thresholds)
    if in_batch is not None:
        return in_batch
    rows = _rows(draw)
    if len(rows) < FEWEST:
        return None
    chosen = far_rows(rows)
    return _best(
        setup,
        [rows[number] for number in chosen],
        lambda count: rearranged(chosen[:count], min(rows), max(rows)),
        thresholds,
    )


def _best(
    setup: ProbeSetup,
    problems: Sequence[Problem],
    arrangements: Callable[[int], Mapping[str, Partners]],
    thresholds: Thresholds,
) -> Fit | None:
    """The arrangement that fits best, where it is no chance over both sides and both orders."""
    likelihood = _likelihoods(setup, problems, _golds(setup, problems))
    count = len(likelihood)
    if count < FEWEST:
        return None
    own = association(likelihood, range(count))
    if own > _deviations(0.05):
        return Fit(OWN, own, own, count)
    scores = {which: association(likelihood, partners) for which, partners in arrangements(count).items()}
    which = max(scores, key=scores.__getitem__)
    by_chance = scores[which] <= _deviations(level(thresholds) / (4 * len(scores)))
    return None if by_chance else Fit(which, scores[which], own, count)


def _golds(setup: ProbeSetup, problems: Sequence[Problem]) -> list[str]:
    return [setup.run.task.gold(problem) for problem in problems]


# ------------------------------------------------------------------------ where an answer may have gone


def shifts(numbers: Sequence[int], where: str) -> dict[str, Partners]:
    """Answers of some rows before or after, by the numbers of the rows that are there."""
    index = {number: i for i, number in enumerate(numbers)}
    return {
        f"the one {abs(by)} {'after' if by > 0 else 'before'} theirs {where}": [index.get(n + by) for n in numbers]
        for by in range(-FARTHEST, FARTHEST + 1)
        if by
    }


def rearranged(numbers: Sequence[int], first: int, last: int) -> dict[str, Partners]:
    """The same, and the opposite order of the rows from `first` to `last`, and their halves exchanged."""
    index = {number: i for i, number in enumerate(numbers)}
    total = last - first + 1
    moved = shifts(numbers, "in the data")
    for by in range(-FARTHEST, FARTHEST + 1):
        off = f", {abs(by)} off" if by else ""
        half = total // 2 + by
        moved[f"the one of the opposite order of the data{off}"] = [index.get(first + last + by - n) for n in numbers]
        moved[f"the one half of the data away{off}"] = [index.get(first + (n - first + half) % total) for n in numbers]
    return moved


def far_rows(rows: Collection[int]) -> list[int]:
    """Neighbouring rows, each with its counterparts in the opposite order and in the other half of the data."""
    first, last = min(rows), max(rows)
    total = last - first + 1
    if len(rows) <= 3 * RUN:
        return sorted(rows)
    start = first + total // 8
    trios = ((n, first + last - n, n + total // 2) for n in range(start, start + RUN))
    return list(dict.fromkeys(n for trio in trios for n in trio if n in rows))


def _rows(draw: Callable[..., Sequence[Problem]]) -> dict[int, Problem]:
    """All problems of one source by the number that their keys end with, as many as the time allows."""
    sources: dict[str, dict[int, Problem]] = {}
    began, step, fresh = time.monotonic(), 0, True
    while fresh and time.monotonic() - began < DRAWING_S:
        fresh = False
        for problem in draw(step=step):
            match = re.fullmatch(r"(.*?)(\d+)", problem.key.partition("#")[0])
            if match is not None and int(match.group(2)) not in sources.setdefault(match.group(1), {}):
                sources[match.group(1)][int(match.group(2))] = problem
                fresh = True
        step += 1
    return max(sources.values(), key=len, default={})


# ------------------------------------------------------------------------ in no order


def _unrelated(setup: ProbeSetup, problems: Sequence[Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """Few different answers, of which the model chooses by the prompt, and gold ones that its choice speaks against.

    A model that cannot tell finds all of them alike after every prompt: `opinion` is 0 then. What it writes is among
    them: gold answers may all be of another kind than its own, such as a place or a letter for a number.
    """
    golds = [setup.run.task.gold(problem) for problem in problems]
    if not 2 < len(set(golds)) <= MOST_ANSWERS or len(problems) < MOST:
        return
    groups = more_groups(setup, "data/misaligned", lambda groups: len(groups) < FEWEST)
    read = (c.text for g in groups for c, reward in zip(g.completions, g.rewards, strict=True) if reward.parsed)
    texts = sorted({*golds, *filter(None, read)})
    if not 2 < len(texts) <= MOST_ANSWERS:
        return
    likelihood = _likelihoods(setup, problems, texts)
    own = torch.tensor([texts.index(gold) for gold in golds[: len(likelihood)]])
    if len(likelihood) < MOST:
        return
    support, mass, opinion = against(likelihood, own)
    if not (mass >= thresholds["answers_mass"] and opinion >= thresholds["answers_opinion"]):  # no number is neither
        return
    deviations = float(support.mean() / (support.std() / len(support) ** 0.5).clamp_min(1e-12))
    if -deviations < _deviations(level(thresholds)):
        return
    yield finding(
        "data/misaligned",
        f"after {len(own)} prompts the model chooses among {len(texts)} answers ({100 * mass:.0f} % of what "
        f"it would write) and tells prompts apart ({opinion:.2g} nats), but gold answers are {-support.mean():.2g} "
        f"nats less likely after their own prompts than after others ({-deviations:.1f} standard errors)",
        "the answers belong to other problems, in no order (shuffled, sorted, joined by another key), or the model was "
        "taught another task than the data ask for, or they are the problems that it fails",
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


def _moved(fit: Fit, code: str, side: str) -> Finding:
    return finding(
        code,
        f"after {fit.prompts} {side}prompts the model finds as gold answer {fit.which} likelier than others by "
        f"{fit.deviations:.1f} standard deviations of a random pairing, their own by {fit.own:.1f}",
        f"{side}answers and problems are shifted against each other: each problem is graded by another one's answer",
        f"check that prompt and answer of {side}problems are taken from the same row (sorting, filtering or joining "
        "one column alone)",
        severity="error",
    )


def _distinct(pool: Sequence[Problem], most: int = MOST) -> list[Problem]:
    """Problems as they come in a batch, each once."""
    first: dict[str, Problem] = {}
    for problem in pool:
        first.setdefault(str(problem.prompt), problem)
    return list(first.values())[:most]


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
                leave_undecided(setup, "data/misaligned", f"{FEWEST} answers after {FEWEST} prompts take too long")
                return torch.zeros(0, 0)
    return torch.stack([row[:count] for row in rows[:count]])


def association(likelihood: Tensor, partners: Partners) -> float:
    """By how many standard deviations of a random pairing answers rank higher after the prompts they are paired with.

    What an answer has after all prompts is taken out first, then answers are ranked after each prompt: one likelihood
    that dwarfs the others counts no more than the first rank. Of m pairs of n the variance of a random pairing is
    Σ r² m/n² (1 + (m − 1)/(n − 1)²), with r the ranks less their means.
    """
    n, pairs = len(likelihood), [(i, j) for i, j in enumerate(partners) if j is not None]
    if len(pairs) < min(n, FEWEST):
        return 0.0
    values = (likelihood - likelihood.mean(0)).cpu()
    lower, higher = values[:, None] < values[:, :, None], values[:, None] > values[:, :, None]
    ranks = (lower.double().sum(-1) - higher.double().sum(-1) + n + 1) / 2  # ties share their mean rank
    centred = ranks - ranks.mean(0) - ranks.mean(1, keepdim=True) + ranks.mean()
    paired = sum(float(centred[pair]) for pair in pairs)
    m = len(pairs)
    variance = float(centred.square().sum()) * m / n**2 * (1 + (m - 1) / (n - 1) ** 2)
    return paired / variance**0.5 if variance > 0 else 0.0


def _deviations(chance: float) -> float:
    """Standard deviations that a normal variable exceeds with this chance."""
    from scipy.special import ndtri

    return float(-ndtri(chance))
