"""Check that gold answers belong to their problems, by the model's likelihood of each answer after each prompt."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.doctor.evidence import level
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.run.build import build_renderer

FEWEST, MOST, FIRST = 10, 32, 12  # number of problems: least, most, and at first
POOL = 256  # problems that are sampled at once
DRAWING_S, SECONDS = 1.0, 4.0  # time limits in seconds for sampling row numbers and for likelihoods
FARTHEST = 3  # largest shift of rows that is tested
LONGER = 4  # a text longer than this multiple of the longest gold answer is not a candidate
LEAST_PROMPTS, MOST_PROMPTS, MOST_ANSWERS = 32, 96, 16  # for few distinct answers
OWN = "their own"

Partners = Sequence[int | None]  # for each prompt, the index of the answer that is paired with it


@dataclass(frozen=True)
class AlignmentFit:
    """The best arrangement of answers: its association, and that of the given arrangement, in standard deviations."""

    which: str
    deviations: float
    own: float
    prompts: int


def alignment_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Answers that fit the prompt of another row, and not their own prompt.

    A model that cannot solve the task prefers no arrangement, and nothing is reported. Held-out problems are tested if
    the training answers fit their own prompts.
    """
    task, seed = setup.run.task, setup.config.run.seed
    if task.prompts_only or task.multi_turn:
        return
    draw = partial(task.sample, POOL, seed=seed)
    try:
        trained = _fit(setup, draw)
        if trained is not None and trained.which != OWN:
            yield _moved(trained, "data/misaligned", "")
            return
        against_them = list(unrelated_findings(setup, _distinct(draw(step=0), MOST_PROMPTS)))
        yield from against_them
        if trained is not None and not against_them:
            held_out = _fit(setup, lambda step: [] if step else task.held_out(POOL))
            if held_out is not None and held_out.which != OWN:
                yield _moved(held_out, "eval/train-gap", "held-out ")
    except (KeelError, NotImplementedError):
        return


def _fit(setup: KeelSubject, draw: Callable[..., Sequence[Problem]]) -> AlignmentFit | None:
    """The arrangement of answers that fits the prompts best, in batch order or by row number."""
    problems = _distinct(draw(step=0))
    few = likelihoods(setup, problems[:FIRST], gold_texts(setup, problems[:FIRST]))
    if len(few) >= FEWEST and (own := association(few, range(len(few)))) > deviations_of(0.01):
        return AlignmentFit(OWN, own, own, len(few))
    in_batch = _best(setup, problems, lambda count: shifts(range(count), "in the batch"))
    if in_batch is not None:
        return in_batch
    rows = _rows(draw)
    numbers = sorted(rows)[max(0, (len(rows) - MOST) // 2) :][:MOST]  # the first rows may precede the shift
    chosen = [rows[number] for number in numbers]
    return _best(setup, chosen, lambda count: shifts(numbers[:count], "in the data"))


def _best(
    setup: KeelSubject,
    problems: Sequence[Problem],
    arrangements: Callable[[int], Mapping[str, Partners]],
) -> AlignmentFit | None:
    """The best arrangement if it is significant (corrected for shifts, orders, training and held-out problems)."""
    likelihood = likelihoods(setup, problems, gold_texts(setup, problems))
    count = len(likelihood)
    if count < FEWEST:
        return None
    own = association(likelihood, range(count))
    if own > deviations_of(0.05):
        return AlignmentFit(OWN, own, own, count)
    scores = {which: association(likelihood, partners) for which, partners in arrangements(count).items()}
    which = max(scores, key=scores.__getitem__)
    by_chance = scores[which] <= deviations_of(level(setup.thresholds) / (4 * len(scores)))
    return None if by_chance else AlignmentFit(which, scores[which], own, count)


# ------------------------------------------------------------------------ shifted answers


def shifts(numbers: Sequence[int], where: str) -> dict[str, Partners]:
    """The pairings for each shift, by row number; missing rows have no partner."""
    index = {number: i for i, number in enumerate(numbers)}
    return {
        f"{abs(by)} {'after' if by > 0 else 'before'} their own {where}": [index.get(n + by) for n in numbers]
        for by in range(-FARTHEST, FARTHEST + 1)
        if by
    }


def _rows(draw: Callable[..., Sequence[Problem]]) -> dict[int, Problem]:
    """Problems of one source by the row number in their key, as many as the time limit allows."""
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
        f"for {fit.prompts} {side}prompts, the gold answer {fit.which} is more likely than in a random pairing by "
        f"{fit.deviations:.1f} standard deviations, and their own gold answer by {fit.own:.1f}",
        f"{side}answers and problems are shifted against each other: each problem is graded with the answer of "
        "another problem",
        f"check that prompt and answer of {side}problems are taken from the same row (sorting, filtering or joining "
        "only one column shifts it)",
        severity="error",
    )


def _distinct(pool: Sequence[Problem], most: int = MOST) -> list[Problem]:
    """The first `most` distinct problems in batch order."""
    first: dict[str, Problem] = {}
    for problem in pool:
        first.setdefault(str(problem.prompt), problem)
    return list(first.values())[:most]


def association(likelihood: Tensor, partners: Partners) -> float:
    """The rank correlation between prompts and their paired answers, in standard deviations of a random pairing.

    The mean of each answer over all prompts is subtracted, and then the answers are ranked for each prompt. An extreme
    likelihood therefore counts as one rank. For m pairs of n the variance of a random pairing is Σ r² m/n² (1 + (m −
    1)/(n − 1)²), with the centred ranks r.
    """
    n, pairs = len(likelihood), [(i, j) for i, j in enumerate(partners) if j is not None]
    if len(pairs) < min(n, FEWEST):
        return 0.0
    values = (likelihood - likelihood.mean(0)).cpu()
    lower, higher = values[:, None] < values[:, :, None], values[:, None] > values[:, :, None]
    ranks = (lower.double().sum(-1) - higher.double().sum(-1) + n + 1) / 2  # ties get their mean rank
    centred = ranks - ranks.mean(0) - ranks.mean(1, keepdim=True) + ranks.mean()
    paired = sum(float(centred[pair]) for pair in pairs)
    m = len(pairs)
    variance = float(centred.square().sum()) * m / n**2 * (1 + (m - 1) / (n - 1) ** 2)
    return paired / variance**0.5 if variance > 0 else 0.0


# ------------------------------------------------------------------------ few distinct answers


@dataclass(frozen=True)
class SettingChoice:
    """The model's choice among a few answers: log-probabilities `[n, answers]`, and the gold answer's index `[n]`."""

    likelihood: Tensor
    own: Tensor

    @property
    def mass(self) -> float:
        """The mean total probability of these answers."""
        return float(self.likelihood.exp().sum(-1).clamp_max(1).mean())

    @property
    def chosen(self) -> Tensor:
        return self.likelihood.log_softmax(-1)

    @property
    def beyond_usual(self) -> Tensor:
        """The log-ratio of each answer's probability to its mean over all prompts, in nats `[n, answers]`."""
        return self.chosen - (self.chosen.logsumexp(0) - math.log(len(self.chosen)))

    @property
    def opinion(self) -> float:
        """The mutual information between prompt and chosen answer: the mean KL from each choice to the mean choice."""
        return float((self.chosen.exp() * self.beyond_usual).sum(-1).mean())

    @property
    def support(self) -> Tensor:
        """The log-ratio of each gold answer's probability to its mean over all prompts, in nats `[n]`."""
        return self.beyond_usual.gather(-1, self.own[:, None]).squeeze(-1)


def unrelated_findings(setup: KeelSubject, problems: Sequence[Problem]) -> Iterator[Finding]:
    """With few distinct answers: gold answers that are less likely after their own prompts than after others."""
    golds = gold_texts(setup, problems)
    longest = LONGER * max(map(len, golds), default=0)
    pairs = (pair for group in setup.groups for pair in zip(group.completions, group.rewards, strict=True))
    # the model may answer in another form than the gold answers, such as with letters instead of names
    written = [c.text for c, reward in pairs if reward.parsed and 0 < len(c.text) <= longest]
    texts = list(dict.fromkeys([*golds, *written]))[:MOST_ANSWERS]
    if not 1 < len(set(golds)) <= MOST_ANSWERS or len(texts) < 3 or len(problems) < LEAST_PROMPTS:
        return
    likelihood = likelihoods(setup, problems, texts)
    if len(likelihood) < LEAST_PROMPTS:
        return
    choice = SettingChoice(likelihood, torch.tensor([texts.index(gold) for gold in golds[: len(likelihood)]]))
    # skip a model that writes other texts or ignores the prompt, and NaN
    if not (choice.mass >= setup.thresholds["answers_mass"] and choice.opinion >= setup.thresholds["answers_opinion"]):
        return
    support = choice.support
    deviations = float(support.mean() / (support.std() / len(support) ** 0.5).clamp_min(1e-12))
    if -deviations < deviations_of(level(setup.thresholds, looks=2)):
        return
    yield finding(
        "data/misaligned",
        f"after {len(likelihood)} prompts, {len(texts)} answers have {100 * choice.mass:.0f} % of the model's "
        f"probability, and its choice depends on the prompt ({choice.opinion:.2g} nats), but gold answers are "
        f"{-support.mean():.2g} nats less likely after their own prompts than after others ({-deviations:.1f} "
        "standard errors)",
        "the answers belong to other problems (shuffled, sorted, or joined by a wrong key), or many answers are "
        "wrong, or the model was trained on another task, or these are problems that the model fails",
        "read some rows with question and answer; check that both are taken from the same row",
        severity="warning",
    )


# ------------------------------------------------------------------------ likelihoods


def gold_texts(setup: KeelSubject, problems: Sequence[Problem]) -> list[str]:
    return [setup.run.task.gold(problem) for problem in problems]


def likelihoods(setup: KeelSubject, problems: Sequence[Problem], golds: Sequence[str]) -> Tensor:
    """`[n, answers]`: the log-probability of each answer after each prompt, for as many problems as the time allows.

    With one answer per prompt, fewer prompts also mean fewer answers.
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
        each = (time.monotonic() - began) / len(rows)  # seconds per row; shorter batches also have fewer columns
        if each * count > SECONDS:
            count = min(count, int(math.sqrt(SECONDS / each * count)))
            if count < FEWEST:
                setup.budget.undecided["data/misaligned"] = (
                    f"scoring {FEWEST} answers after {FEWEST} prompts takes too long"
                )
                return torch.zeros(0, 0)
    return torch.stack([row[:count] for row in rows[:count]])


def deviations_of(chance: float) -> float:
    """The number of standard deviations that a normal variable exceeds with this probability."""
    from scipy.special import ndtri

    return float(-ndtri(chance))
