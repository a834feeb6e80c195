"""Checks of problems that need no model: answers in prompts, repeated prompts, held-out prompts in training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from keel.base.errors import KeelError, first_line
from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.model import gold_or_none
from keel.doctor.rendering import messages_of, rendered
from keel.doctor.thresholds import Thresholds

# ------------------------------------------------------------------------ answers in prompts

_CUES = re.compile(r"answer|solution|result|gold|label|target|correct|expected|truth|hint|####|boxed|key\b", re.I)
# These words may also introduce a text to copy from. They count only right before an answer, as a warning.
_VAGUE_CUES = re.compile(r"\b(?:final|response|output)\W*(?:(?:is|was)\b\W*)?$", re.I)
_SLOT = 24  # number of characters before an answer that are searched for an announcing word
_TAIL = 6  # number of characters right before the answer that all problems must share
_HOLE = "\0"

Slots = Callable[[str, str], set[str]]  # (answer, text) → contexts in which the answer occurs


@dataclass(frozen=True)
class _Shared:
    """The context in which most texts contain their own answer: its count, the rate for other answers, an example."""

    slot: str
    own: int
    rate: float
    chance: float
    text: str


def leak_findings(setup: KeelSubject, prompts: Sequence[tuple[Problem, str]], of: str = "prompts") -> Iterator[Finding]:
    """Find answers in prompts, right after words that announce them. Operands and choices follow no such words.

    A slot is the text right before an answer. It must announce an answer, and other problems' answers must be
    significantly rarer in it (one-sided exact binomial test).
    """
    pairs = _pairs(setup, prompts)
    for cues in (_CUES, _VAGUE_CUES):
        if (shared := _shared(pairs, partial(_before, cues=cues), _before, setup.thresholds)) is None:
            continue
        found = finding(
            "prompt/answer-leak",
            f"{shared.own} of {len(pairs)} {of} contain their own answer right after {shared.slot!r} (other problems' "
            f"answers: {100 * shared.rate:.0f} %; p-value {shared.chance:.1g}), such as {shared.text[-80:]!r}",
            "the prompt is built from a row that contains the answer, so copying it earns the reward",
            "leave the answer out of the prompt (task.sample, or the columns that the prompt is built from)",
        )
        unsure = f"{found.advice}; no change is needed if the task is to find or copy it"
        yield found if cues is _CUES else replace(found, severity="warning", advice=unsure)
        return


def system_leaks(setup: KeelSubject, problems: Sequence[Problem]) -> Iterator[Finding]:
    """System messages that are equal for all problems except for each one's own answer.

    Passages to read differ in more than the answer. User messages are excluded, since they may contain the task itself.
    """
    roles = ("system", "developer")
    texts = ["\n".join(m["content"] for m in messages_of(p) if m["role"] in roles).strip() for p in problems]
    pairs = _pairs(setup, [*zip(problems, texts, strict=True)])
    shared = _shared(pairs, _holed, _holed, setup.thresholds)
    if shared is None or len({text for answer, text in pairs if shared.slot in _holed(answer, text)}) < 2:
        return  # one equal text for all, which lists the possible answers
    bare = not shared.slot.strip(f"{_HOLE} .") or _CUES.search(shared.slot)
    yield finding(
        "prompt/answer-leak",
        f"{shared.own} of {len(pairs)} system messages are {shared.slot.replace(_HOLE, '…')[:80]!r} with their "
        f"problem's own answer in it (other problems' answers: {100 * shared.rate:.0f} %; p-value {shared.chance:.1g})",
        "the system message is built from the column of the answers, so copying it earns the reward",
        "give the column of system messages in data.columns, or leave it out"
        + ("" if bare else "; no change is needed if the task is to repeat it"),
        severity=None if bare else "warning",
    )


def _pairs(setup: KeelSubject, prompts: Sequence[tuple[Problem, str]]) -> list[tuple[str, str]]:
    """Answers with the texts of their prompts; empty without answers, or with one answer for all."""
    if setup.run.task.prompts_only:
        return []
    pairs = [(answer, text) for problem, text in prompts if (answer := answer_of(setup, problem))]
    return pairs if len({answer for answer, _ in pairs}) > 1 else []


def answer_of(setup: KeelSubject, problem: Problem) -> str:
    """The problem's answer if it is a plain value, else the gold text; empty if there is none."""
    if isinstance(problem.answer, str | int | float) and str(problem.answer).strip():
        return str(problem.answer).strip()
    return (gold_or_none(setup.run.task, problem) or [""])[-1].strip()


def _shared(pairs: Sequence[tuple[str, str]], slots: Slots, of_others: Slots, thresholds: Thresholds) -> _Shared | None:
    from scipy.special import bdtrc

    counts = Counter(slot for answer, text in pairs for slot in slots(answer, text))
    if not counts:
        return None
    slot, own = counts.most_common(1)[0]
    others = [slot in of_others(other, text) for answer, text in pairs for other, _ in pairs if other != answer]
    rate = (sum(others) + 1) / (len(others) + 2)
    chance = float(bdtrc(own - 1, len(pairs), rate))
    if own < thresholds["leak_share"] * len(pairs) or chance > thresholds["travel_chance"]:
        return None
    shown = next(text for answer, text in pairs if slot in slots(answer, text))
    return _Shared(slot, own, rate, chance, shown)


def _word(answer: str) -> str:
    """A pattern for the answer as a separate word."""
    return rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\w)"


def _before(answer: str, text: str, cues: re.Pattern[str] = re.compile("")) -> set[str]:
    """The last characters before each occurrence of the answer that follows an announcing word."""
    earlier = (text[max(0, place.start() - _SLOT) : place.start()] for place in re.finditer(_word(answer), text))
    return {before[-_TAIL:] for before in earlier if cues.search(before)}


def _holed(answer: str, text: str) -> set[str]:
    """The text with the answer replaced by a placeholder."""
    return {re.sub(_word(answer), _HOLE, text)} - {text}


# ------------------------------------------------------------------------ repeated prompts

_DRAWN = 1024  # number of training problems that are examined
_HELD_OUT = 64
_STAYING = 0.5  # share of steps with the same prompts as the step before
_COPIED = 0.25  # share of problems that are copies within their step; a few cost little
_FEWEST = 4  # prompts with contradicting answers; fewer are single errors in the data


def training_steps(setup: KeelSubject) -> list[list[tuple[Problem, tuple[int, ...]]]]:
    """Problems and prompts of the first steps: about a thousand problems in 3 to 128 steps."""
    if "steps" not in setup.shared:
        count, seed = setup.config.rollout.prompts_per_step, setup.config.run.seed
        steps = [
            setup.run.task.sample(count, seed=seed, step=step) for step in range(max(3, min(128, _DRAWN // count)))
        ]
        setup.shared["steps"] = [list(zip(step, rendered(setup, step), strict=True)) for step in steps]
    chosen: list[list[tuple[Problem, tuple[int, ...]]]] = setup.shared["steps"]
    return chosen


def repeat_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Find a single prompt, equal prompts at every step, too few prompts for the run, or copies within steps."""
    steps = [[_content(setup, problem, prompt) for problem, prompt in step] for step in training_steps(setup)]
    counts = Counter(prompt for step in steps for prompt in step)
    asked, per_step = counts.total(), setup.config.rollout.prompts_per_step
    shown = setup.policy.tokenizer.decode(list(steps[0][0][0]))[-80:]
    total = (setup.config.run.max_steps or 0) * per_step
    sets = [frozenset(step) for step in steps]
    same, stay = len(set(sets)) == 1, fmean(a == b for a, b in pairwise(sets))
    often = total > setup.thresholds["problem_repeats"] * len(counts)
    staying = stay > _STAYING and len(counts) > 1.5 * max(map(len, sets)) and len(steps) > 3
    if len(counts) == 1 or staying or (often and (same or len(counts) < setup.thresholds["distinct_problems"])):
        each = (
            ", the same at every step" if same and len(counts) > 1 else ", the same for many steps in a row" * staying
        )
        yield finding(
            "task/repeats",
            f"{asked} problems of {len(steps)} steps have {len(counts)} different prompts{each} ({per_step} per "
            f"step), such as {shown!r}",
            "task.sample ignores its step, or the task has few distinct problems, whatever their keys are",
            "sample problems by seed and step, as keel.envs.Task requires, or add problems to the task",
            share=1.0,
        )
        return
    copies = sum(len(step) - len(set(step)) for step in steps)
    if copies > _COPIED * asked and _chance_of_copies(steps) < setup.thresholds["travel_chance"]:
        yield finding(
            "task/repeats",
            f"{copies} of {asked} problems are copies of another problem of the same step, far more than neighbouring "
            f"steps share, such as {shown!r}",
            "task.sample returns a problem several times: each copy leaves one prompt fewer for the update of the step",
            "sample the problems of a step without repetition; for more completions per problem, use "
            "rollout.num_generations",
            share=1.0,
        )


def _chance_of_copies(steps: Sequence[Sequence[Hashable]]) -> float:
    """The p-value of the number of equal pairs within steps, at the rate between neighbouring steps (binomial)."""
    from scipy.special import bdtrc

    counters = [Counter(step) for step in steps]
    pairs = sum(len(step) * (len(step) - 1) // 2 for step in steps)
    equal = sum(n * (n - 1) // 2 for counter in counters for n in counter.values())
    between = sum(a[prompt] * b[prompt] for a, b in pairwise(counters) for prompt in a)
    rate = (between + 1) / (sum(len(a) * len(b) for a, b in pairwise(steps)) + 2)
    return float(bdtrc(equal - 1, pairs, rate))


def contradiction_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Equal prompts with different gold answers, where one row pays its own answer more than the other's.

    The share is taken among prompts that occur more than once.
    """
    task, judge = setup.run.task, setup.built.judge
    if task.prompts_only or judge.remote or task.multi_turn:
        return
    met: dict[tuple[int, ...], dict[str, Problem]] = {}
    times: Counter[tuple[int, ...]] = Counter()
    for problem, prompt in (pair for step in training_steps(setup) for pair in step):
        gold = gold_or_none(task, problem)
        if gold:
            met.setdefault(prompt, {}).setdefault(gold[-1], problem)
            times[prompt] += 1
    repeated = [prompt for prompt in met if times[prompt] > 1]
    doubtful = [prompt for prompt in repeated if len(met[prompt]) > 1]
    if len(doubtful) < _FEWEST or len(doubtful) <= setup.thresholds["gold_contradicts"] * len(repeated):
        return
    apart = [rows for prompt in doubtful[:_FEWEST] if _apart(setup, rows := met[prompt])]
    judge.drain()
    if len(apart) < _FEWEST:
        return
    shown = setup.policy.tokenizer.decode(list(doubtful[0]))[-60:]
    yield finding(
        "data/misaligned",
        f"{len(doubtful)} of {len(repeated)} repeated prompts have different gold answers (such as "
        f"{' and '.join(map(repr, [*met[doubtful[0]]][:3]))} for the prompt that ends with {shown!r}), and on one of "
        "these rows the other row's answer earns less than the row's own",
        "rows with the same question contradict each other: answers were joined by a wrong key, or only one column "
        "was copied",
        "read the rows of one such question, and keep those with correct answers",
        share=len(doubtful) / len(repeated),
    )


def _apart(setup: KeelSubject, rows: Mapping[str, Problem]) -> bool:
    """Whether the first row pays its own answer more than that of the second."""
    (own, problem), (other, _) = [*rows.items()][:2]
    rewards = setup.built.judge.judge(problem, [[own], [other]])
    return rewards is not None and rewards[0].total > rewards[1].total


def _content(setup: KeelSubject, problem: Problem, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The identity of a problem, independent of its key: its prompt.

    Episodes of several turns may start with equal prompts, so that the answer and `info` count as well.
    """
    several = setup.config.rollout.max_turns > 1 and setup.run.task.multi_turn
    return prompt, repr((problem.answer, dict(problem.info))) if several else ""


def held_out_problems(setup: KeelSubject, count: int) -> Sequence[Problem]:
    """The task's held-out problems; empty if the task raises, which leaves the check undecided."""
    try:
        return setup.run.task.held_out(count)
    except KeelError as error:
        setup.budget.undecided["eval/leak"] = first_line(error)
        return ()


def eval_leak(setup: KeelSubject) -> Iterator[Finding]:
    """Held-out prompts must not be trained on, under any key. A small share of duplicates is accepted."""
    held_out = held_out_problems(setup, _HELD_OUT)
    trained = [*dict.fromkeys(_contents(setup, [pair for step in training_steps(setup) for pair in step]))]
    evaluated = _contents(setup, [*zip(held_out, rendered(setup, held_out), strict=True)])
    shared = [problem for problem, copies in zip(held_out, _among(evaluated, trained), strict=True) if copies]
    if not held_out or len(shared) <= setup.thresholds["eval_leaked"] * len(held_out):
        return
    asked = sum(map(len, training_steps(setup)))
    yield finding(
        "eval/leak",
        f"{len(shared)} of {len(held_out)} held-out problems occur in the first {asked} training problems, such as "
        f"{shared[0].key!r}",
        "task.sample returns problems that task.held_out keeps for evaluation",
        "keep the two separate, as keel.envs.Task requires",
        share=fmean(_among(trained, evaluated)),
    )


def _contents(setup: KeelSubject, pairs: Sequence[tuple[Problem, tuple[int, ...]]]) -> list[tuple[Hashable, Hashable]]:
    """The identity of each problem, once by tokens and once by normalized text."""
    contents = ((problem, _content(setup, problem, prompt)) for problem, prompt in pairs)
    return [(content, _text(problem, content)) for problem, content in contents]


def _among(rows: Sequence[tuple[Hashable, Hashable]], others: Sequence[tuple[Hashable, Hashable]]) -> list[bool]:
    """Whether each row occurs in `others`, by tokens or by text."""
    tokens, texts = ({row[i] for row in others} for i in (0, 1))
    return [content in tokens or text in texts for content, text in rows]


def _text(problem: Problem, content: tuple[tuple[int, ...], str]) -> tuple[str, str]:
    """The text of a problem without case, extra spaces and final punctuation, so that close copies are equal."""
    asked = "\n".join(message["content"] for message in messages_of(problem))
    return " ".join(asked.split()).casefold().rstrip(" .:?!"), content[1]
