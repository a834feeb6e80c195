"""Do the gold answers belong to their problems? The model's own likelihood of each answer after each prompt tells."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.evidence import level
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.answers import FEWEST, deviations_of, gold_texts, likelihoods
from keel.doctor.probes.choices import MOST_PROMPTS, unrelated_findings
from keel.doctor.thresholds import Thresholds

MOST, FIRST = 32, 12  # problems: at most, and to begin with
POOL = 256  # problems that are drawn at once
DRAWING_S = 1.0  # for the numbers of all rows
FARTHEST = 3  # rows that answers may have been shifted by, and ends of the data that may be missing
RUN = 24  # neighbouring rows, and as many at the places that they would be moved to
OWN = "their own"

Partners = Sequence[int | None]  # of each prompt, the number of the answer that would be its own


@dataclass(frozen=True)
class AlignmentFit:
    """The answers that the model finds likely, by standard deviations of a random pairing, beside their own."""

    which: str
    deviations: float
    own: float
    prompts: int


def alignment_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Answers that the model finds likely after the prompt of another row, and not after their own.

    A model without skill finds no answer likelier after any prompt, and then nothing is said. Held-out problems are
    looked at where it knows the answers of those that are trained on.
    """
    task, seed = setup.run.task, setup.config.run.seed
    if task.prompts_only or task.multi_turn:
        return
    draw = partial(task.sample, POOL, seed=seed)
    try:
        trained = _fit(setup, draw, thresholds)
        if trained is not None and trained.which != OWN:
            yield _moved(trained, "data/misaligned", "")
            return
        against_them = list(unrelated_findings(setup, _distinct(draw(step=0), MOST_PROMPTS), thresholds))
        yield from against_them
        if trained is not None and not against_them:
            held_out = _fit(setup, lambda step: [] if step else task.held_out(POOL), thresholds)
            if held_out is not None and held_out.which != OWN:
                yield _moved(held_out, "eval/train-gap", "held-out ")
    except (KeelError, NotImplementedError):
        return


def _fit(setup: KeelSubject, draw: Callable[..., Sequence[Problem]], thresholds: Thresholds) -> AlignmentFit | None:
    """The arrangement of the answers that fits their prompts, as they come in a batch or by rows of the data."""
    problems = _distinct(draw(step=0))
    few = likelihoods(setup, problems[:FIRST], gold_texts(setup, problems[:FIRST]))
    if len(few) >= FEWEST and (own := association(few, range(len(few)))) > deviations_of(0.01):
        return AlignmentFit(OWN, own, own, len(few))
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
    setup: KeelSubject,
    problems: Sequence[Problem],
    arrangements: Callable[[int], Mapping[str, Partners]],
    thresholds: Thresholds,
) -> AlignmentFit | None:
    """The arrangement that fits best, where it is no chance over both sides and both orders."""
    likelihood = likelihoods(setup, problems, gold_texts(setup, problems))
    count = len(likelihood)
    if count < FEWEST:
        return None
    own = association(likelihood, range(count))
    if own > deviations_of(0.05):
        return AlignmentFit(OWN, own, own, count)
    scores = {which: association(likelihood, partners) for which, partners in arrangements(count).items()}
    which = max(scores, key=scores.__getitem__)
    by_chance = scores[which] <= deviations_of(level(thresholds) / (4 * len(scores)))
    return None if by_chance else AlignmentFit(which, scores[which], own, count)


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


def _moved(fit: AlignmentFit, code: str, side: str) -> Finding:
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
