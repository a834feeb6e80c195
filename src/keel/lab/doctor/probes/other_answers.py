"""Gold answers that a model is sure against: all of them, or those that repeat what other rows are answered by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch

from keel.base.errors import KeelError
from keel.base.thresholds import Thresholds
from keel.base.types import Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.alignment import (
    FEWEST,
    MOST,
    MOST_ANSWERS,
    MOST_PROMPTS,
    POOL,
    against,
    association,
    distinct,
    likelihoods,
    normal_deviations,
    rows_by_number,
)
from keel.lab.doctor.probes.evidence import chance_below, level
from keel.lab.doctor.setup import ProbeSetup

REPEATED = 0.9  # share of the answers that are those of as many rows before
LEFT = 1 / 3  # of what the model knows of the first rows, all that it may know of the others
TRIED = 24  # rows that must repeat before all are compared


def other_answer_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Answers of data alone: those that a task computes may be out of a model's reach, and are right."""
    task = setup.run.task
    if setup.config.data.path is None or task.unanswered or task.several_turns or "another template" in setup.shared:
        return
    draw = partial(task.sample, POOL, seed=setup.config.run.seed)
    try:
        denied = [*_denied(setup, distinct(draw(step=0), MOST_PROMPTS), thresholds)]
        yield from denied or _repeated(setup, rows_by_number(draw), thresholds)
    except (KeelError, NotImplementedError):
        return


def _denied(setup: ProbeSetup, problems: Sequence[Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """Few different answers, of which the model chooses one by the prompt and is sure, and hardly ever the gold one.

    Whoever does not know the answer is unsure or, of three answers, right by chance as often as `answers_denied` says.
    """
    golds = [setup.run.task.gold(problem) for problem in problems]
    texts = sorted(set(golds))
    if not 1 < len(texts) <= MOST_ANSWERS or len(problems) < MOST:
        return
    likelihood = likelihoods(setup, problems, texts)
    if len(likelihood) < MOST:
        return
    own = torch.tensor([texts.index(gold) for gold in golds[: len(likelihood)]])
    _, mass, opinion = against(likelihood, own)
    if mass < thresholds["answers_mass"] or opinion < thresholds["answers_opinion"]:
        return
    top = likelihood.exp().max(-1)
    sure, right = float(top.values.mean()), (top.indices == own).double().tolist()
    chance = chance_below(right, thresholds["answers_denied"])
    if sure < thresholds["answers_sure"] or chance > level(thresholds):
        return
    wrong = next(i for i, value in enumerate(right) if not value)
    yield finding(
        "data/misaligned",
        f"after {len(own)} prompts the model chooses one of the {len(texts)} gold answers with {100 * sure:.0f} % on "
        f"average, and in {100 * fmean(right):.0f} % of them the gold one (chance {chance:.1g} at "
        f"{100 * thresholds['answers_denied']:.0f} %): {texts[int(top.indices[wrong])]!r} and not {golds[wrong]!r} "
        f"after {str(problems[wrong].prompt)[-60:]!r}",
        "the answers are those of another task, another column or other problems, or the model was taught another task "
        "than the data ask for",
        "read some rows, question beside answer; nothing, if the model is to unlearn what it answers now",
        severity="warning",
    )


def _repeated(setup: ProbeSetup, rows: Mapping[int, Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """Answers that begin anew after some rows while questions go on: the model knows the first, and not the others.

    Rows that ask the same again in other words may have the same answers in the same order: those it knows as well.
    """
    golds = {number: setup.run.task.gold(problem) for number, problem in rows.items()}
    period = repeats_after(golds, level(thresholds))
    if period is None:
        return
    numbers = sorted(rows)
    again = [n for n in numbers if n - period in rows]
    if sum(str(rows[n].prompt) == str(rows[n - period].prompt) for n in again) > len(again) / 2:
        return
    first = [n for n in numbers if n < numbers[0] + period]
    others = [n for n in numbers if n >= numbers[0] + period]
    known, unknown = (_own(setup, [rows[n] for n in part], [golds[n] for n in part]) for part in (first, others))
    if known is None or unknown is None:
        return
    apart = (known - unknown) / 2**0.5  # each has a deviation of 1
    if known <= normal_deviations(level(thresholds)) or apart <= normal_deviations(thresholds["false_alarms"]):
        return
    if unknown > LEFT * known:
        return
    yield finding(
        "data/misaligned",
        f"the answers begin anew after {period} rows, and the questions do not: the model finds those of the first "
        f"{period} likelier after their own prompts by {known:.1f} standard deviations of a random pairing, those of "
        f"the {len(others)} others by {unknown:.1f}",
        "answers were joined by an id that begins anew in each part of the data, or one part's were copied to all",
        "join questions and answers by an id that is unique in all of the data",
        severity="warning",
        share=len(others) / len(rows),
    )


def _own(setup: ProbeSetup, problems: Sequence[Problem], golds: Sequence[str]) -> float | None:
    """By how many standard deviations the model likes answers after their own prompts; None of too few."""
    step = max(1, len(problems) // MOST)
    likelihood = likelihoods(setup, problems[::step][:MOST], golds[::step][:MOST])
    return association(likelihood, range(len(likelihood))) if len(likelihood) >= FEWEST else None


def repeats_after(golds: Mapping[int, str], chance: float) -> int | None:
    """The least number of rows after which nearly all answers are the same again; None where luck may do that.

    By luck two answers are equal as often as any two of the data are (one-sided exact binomial test over all periods).
    """
    from scipy.special import bdtrc

    numbers, total = sorted(golds), len(golds)
    if total < 2 * FEWEST:
        return None
    rate = sum((count / total) ** 2 for count in Counter(golds.values()).values())
    periods = range(FEWEST, numbers[-1] - numbers[0] + 2 - FEWEST)
    for period in periods:
        for part in (numbers[:TRIED], numbers):
            same = [golds[n] == golds[n + period] for n in part if n + period in golds]
            if len(same) < FEWEST // 2 or fmean(same) < REPEATED:
                break
        else:
            if bdtrc(sum(same) - 1, len(same), rate) <= chance / len(periods):
                return period
    return None
