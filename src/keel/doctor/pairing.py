"""Do gold answers belong to their problems? The model's own likelihood of each answer after each prompt tells."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.run.build import build_renderer

FEWEST, MOST, FIRST = 10, 32, 12  # problems: at least, at most, and to begin with
POOL = 256  # problems that are drawn at once
DRAWING_S, SECONDS = 1.0, 4.0  # for the numbers of all rows, and for likelihoods
FARTHEST = 3  # rows that answers may have been shifted by, and ends of the data that may be missing
RUN = 24  # neighbouring rows, and as many at the places that they would be moved to
LEAST_PROMPTS, MOST_PROMPTS, MOST_ANSWERS = 32, 96, 16  # where there are few different answers
LONGER = 4  # times as long as a gold answer: a text beyond that is no answer of its kind
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


# ------------------------------------------------------------------------ few different answers


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
    if -deviations < deviations_of(level(thresholds, looks=2)):
        return
    yield finding(
        "data/misaligned",
        f"after {count} prompts the model chooses among {answers} answers ({100 * choice.mass:.0f} % of what it would "
        f"write) and tells prompts apart ({choice.opinion:.2g} nats), but gold answers are {-support.mean():.2g} nats "
        f"less likely after their own prompts than after others ({-deviations:.1f} standard errors)",
        "the answers belong to other problems, in no order (shuffled, sorted, joined by another key), or many are "
        "wrong, or the model was taught another task than the data ask for, or they are the problems that it fails",
        "read some rows, question beside answer; check that both are taken from the same row",
        severity="warning",
    )


# ------------------------------------------------------------------------ likelihoods


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
