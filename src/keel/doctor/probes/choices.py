"""Few different answers: what the model chooses among them after each prompt, beside the gold one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.types import Group, Problem
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.answers import FEWEST, deviations_of, gold_texts, likelihoods
from keel.doctor.thresholds import Thresholds

LEAST_PROMPTS, MOST_PROMPTS, MOST_ANSWERS = 32, 96, 16
LONGER = 4  # times as long as a gold answer: a text beyond that is no answer of its kind


@dataclass(frozen=True)
class SettingChoice:
    """What the model chooses among few answers after each prompt: log-probabilities `[n, answers]`, gold columns `[n]`.

    What it writes is among them: gold answers may all be of another kind than its own, such as a place or a letter.
    """

    likelihood: Tensor
    own: Tensor

    @property
    def mass(self) -> float:
        """The share of the model's text that these answers are."""
        return float(self.likelihood.exp().sum(-1).clamp_max(1).mean())

    @property
    def chosen(self) -> Tensor:
        return self.likelihood.log_softmax(-1)

    @property
    def beyond_usual(self) -> Tensor:
        """By how many nats each answer is likelier after this prompt than after all of them `[n, answers]`."""
        return self.chosen - (self.chosen.logsumexp(0) - math.log(len(self.chosen)))

    @property
    def opinion(self) -> float:
        """How much it tells prompts apart: the mean KL from its choice to its mean choice; 0 where it cannot tell."""
        return float((self.chosen.exp() * self.beyond_usual).sum(-1).mean())

    @property
    def support(self) -> Tensor:
        """What it says of each gold answer beyond what it says of it after all prompts, in nats `[n]`."""
        return self.beyond_usual.gather(-1, self.own[:, None]).squeeze(-1)

    @property
    def first(self) -> tuple[Tensor, Tensor]:
        """The probability of its first choice, and whether that is the gold answer, `[n]` each."""
        sure, which = self.chosen.exp().max(-1)
        return sure, which == self.own

    def ranks_of_missed(self) -> Tensor:
        """Of gold answers that are not its first choice, the share of the other answers that it finds less likely."""
        values, first = self.beyond_usual, self.chosen.argmax(-1)
        gold = values.gather(-1, self.own[:, None])
        below = (values < gold).double() + 0.5 * (values == gold).double()
        others = torch.ones_like(below).scatter(-1, self.own[:, None], 0).scatter(-1, first[:, None], 0)
        return ((below * others).sum(-1) / others.sum(-1))[first != self.own]

    def foresight(self) -> float:
        """The chance that it is surer of a choice that is gold than of one that is not; 0.5 where it cannot know."""
        sure, right = self.first
        pairs = sure[right][:, None] - sure[~right][None]
        return float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()) if pairs.numel() else math.nan


def _choice(setup: KeelSubject, problems: Sequence[Problem], thresholds: Thresholds) -> SettingChoice | None:
    """None where there are more answers than few, or the model writes something else, or cannot tell prompts apart."""
    golds = gold_texts(setup, problems)
    if not 1 < len(set(golds)) <= MOST_ANSWERS or len(problems) < LEAST_PROMPTS:
        return None
    choice = _between(setup, problems, golds, setup.groups, thresholds)
    if choice is not None and choice.mass < thresholds["answers_mass"]:  # it may write more than the batch shows
        groups = more_groups(setup, "data/misaligned", lambda groups: len(groups) < FEWEST)
        choice = _between(setup, problems, golds, groups, thresholds)
    if choice is None or not choice.mass >= thresholds["answers_mass"]:  # no number is not
        return None
    return choice if choice.opinion >= thresholds["answers_opinion"] else None


def _between(
    setup: KeelSubject,
    problems: Sequence[Problem],
    golds: Sequence[str],
    groups: Sequence[Group],
    thresholds: Thresholds,
) -> SettingChoice | None:
    """Gold answers and what the model has written of their length; None where that is something else."""
    longest = LONGER * max(map(len, golds))
    written = [
        completion.text
        for group in groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
        if reward.parsed and completion.text
    ]
    read = Counter(text for text in written if len(text) <= longest)
    texts = list(dict.fromkeys([*golds, *(text for text, _ in read.most_common())]))[:MOST_ANSWERS]
    if not written or len(texts) < 3 or sum(read[text] for text in texts) < thresholds["answers_mass"] * len(written):
        return None
    likelihood = likelihoods(setup, problems, texts)
    if len(likelihood) < LEAST_PROMPTS:
        return None
    return SettingChoice(likelihood, torch.tensor([texts.index(gold) for gold in golds[: len(likelihood)]]))


def unrelated_findings(setup: KeelSubject, problems: Sequence[Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """Few different answers, of which the model chooses by the prompt, and gold ones that its choice speaks against."""
    choice = _choice(setup, problems, thresholds)
    if choice is None:
        return
    count, answers = choice.likelihood.shape
    support = choice.support
    deviations = float(support.mean() / (support.std() / count**0.5).clamp_min(1e-12))
    chance = level(thresholds, looks=2)
    evidence = f"after {count} prompts the model chooses among {answers} answers ({100 * choice.mass:.0f} % of what "
    evidence += f"it would write) and tells prompts apart ({choice.opinion:.2g} nats), but "
    if -deviations >= deviations_of(chance):
        evidence += f"gold answers are {-support.mean():.2g} nats less likely after their own prompts than after "
        evidence += f"others ({-deviations:.1f} standard errors)"
    elif surely_other(choice, thresholds):
        sure, right = choice.first
        evidence += (
            f"of its first choices, of which it is {100 * sure.mean():.0f} % sure, {100 * right.double().mean():.0f} % "
        )
        evidence += "are gold, it is no surer of those, and where they are not, gold answers are to it like any other"
    else:
        return
    yield finding(
        "data/misaligned",
        evidence,
        "the answers belong to other problems, in no order (shuffled, sorted, joined by another key), or many are "
        "wrong, or the model was taught another task than the data ask for, or they are the problems that it fails",
        "read some rows, question beside answer; check that both are taken from the same row",
        severity="warning",
    )


def surely_other(choice: SettingChoice, thresholds: Thresholds) -> bool:
    """Whether the gold answers that a model misses are ones that it cannot know, of all it seems to be sure of.

    One that has learned a task as well as it agrees with the gold answers is surer where it is right, and its second
    thought is better than chance where it is wrong, however sure it is. Answers of which a part are others' agree with
    it as often as they are right, whatever it thinks.
    """
    from scipy.special import bdtr

    sure, right = choice.first
    ranks, limit = choice.ranks_of_missed(), thresholds["false_alarms"]
    by_chance = bdtr(int(right.sum()), len(right), float(sure.mean()))
    if min(len(ranks), int(right.sum())) < FEWEST or by_chance >= limit:
        return False
    expected = missed_rank(float(right.double().mean()), choice.likelihood.shape[-1])
    below = (expected - ranks.mean()) / (ranks.std() / len(ranks) ** 0.5).clamp_min(1e-12)
    return bool(below > deviations_of(limit) and choice.foresight() < thresholds["answers_foreseen"])


def missed_rank(accuracy: float, answers: int) -> float:
    """The mean of `ranks_of_missed` of a model with this accuracy, whose evidence for each answer has normal noise.

    The gold one has d more of it: P(first) = ∫ φ(x − d) Φ(x)^(n−1) dx, by bisection, whatever it makes of it.
    """
    x = torch.linspace(-8.0, 12.0, 2001, dtype=torch.float64)
    lower = torch.special.ndtr(x)

    def density(d: float) -> Tensor:
        values = torch.exp(-((x - d) ** 2) / 2)
        return values / values.sum()

    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        first = float((density(middle) * lower ** (answers - 1)).sum())
        low, high = (middle, high) if first < accuracy else (low, middle)
    weights, others = density(low), answers - 1
    missed = float((weights * (1 - lower**others)).sum())
    return float((weights * others * (lower - lower**others)).sum()) / (others - 1) / max(missed, 1e-12)
