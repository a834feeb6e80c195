"""Problems by their rendered tokens: other ones at every step, and none of those that are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from keel.base.errors import KeelError, first_line
from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.rendering import messages_of, rendered
from keel.doctor.thresholds import Thresholds

_DRAWN = 1024  # training problems that are looked at
_HELD_OUT = 64
_STAYING = 0.5  # share of steps that ask what the one before has asked
_FEWEST = 4  # prompts whose answers contradict each other: fewer are mistakes of the data


def training_steps(setup: KeelSubject) -> list[list[tuple[Problem, tuple[int, ...]]]]:
    """Problems and prompts of as many steps as it takes to see a thousand problems, three at least."""
    if "steps" not in setup.shared:
        count, seed = setup.config.rollout.prompts_per_step, setup.config.run.seed
        steps = [
            setup.run.task.sample(count, seed=seed, step=step) for step in range(max(3, min(128, _DRAWN // count)))
        ]
        setup.shared["steps"] = [list(zip(step, rendered(setup, step), strict=True)) for step in steps]
    chosen: list[list[tuple[Problem, tuple[int, ...]]]] = setup.shared["steps"]
    return chosen


def repeat_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """A single prompt, the same ones at every step, fewer than a run can learn from, or a step of copies."""
    steps = [[_content(setup, problem, prompt) for problem, prompt in step] for step in training_steps(setup)]
    counts = Counter(prompt for step in steps for prompt in step)
    asked, per_step = counts.total(), setup.config.rollout.prompts_per_step
    shown = setup.policy.tokenizer.decode(list(steps[0][0][0]))[-80:]
    total = (setup.config.run.max_steps or 0) * per_step
    sets = [frozenset(step) for step in steps]
    same, stay = len(set(sets)) == 1, fmean(a == b for a, b in pairwise(sets))
    often = total > thresholds["problem_repeats"] * len(counts)
    staying = stay > _STAYING and len(counts) > 1.5 * max(map(len, sets)) and len(steps) > 3
    if len(counts) == 1 or staying or (often and (same or len(counts) < thresholds["distinct_problems"])):
        each = ", the same at every step" if same and len(counts) > 1 else ", the same for steps on end" * staying
        yield finding(
            "task/repeats",
            f"{asked} problems of {len(steps)} steps are {len(counts)} different prompts{each} ({per_step} a step), "
            f"such as {shown!r}",
            "task.sample ignores its step, or the task has few problems, under whatever keys",
            "draw problems by seed and step, as keel.envs.Task asks, or give the task more of them",
            share=1.0,
        )
        return
    copies = sum(len(step) - len(set(step)) for step in steps)
    if copies > thresholds["step_copies"] * asked and _copies_in_steps(steps) < thresholds["travel_chance"]:
        yield finding(
            "task/repeats",
            f"{copies} of {asked} problems are copies of another one of their own step, under other keys, far more "
            f"than neighbouring steps share; such as {shown!r}",
            "task.sample returns one problem several times: each copy is one prompt less in the step's update",
            "draw the problems of a step without repetition; rollout.num_generations samples one more often",
            share=1.0,
        )


def contradiction_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """One and the same prompt with different gold answers, of which one row pays its own and not the other's.

    Of the prompts that are met twice: how many are asked with an answer that their other row does not take.
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
    if len(doubtful) < _FEWEST or len(doubtful) <= thresholds["gold_contradicts"] * len(repeated):
        return
    apart = [rows for prompt in doubtful[:_FEWEST] if _apart(setup, rows := met[prompt])]
    judge.drain()
    if len(apart) < _FEWEST:
        return
    shown = setup.policy.tokenizer.decode(list(doubtful[0]))[-60:]
    yield finding(
        "data/misaligned",
        f"{len(doubtful)} of {len(repeated)} prompts that are drawn more than once have different gold answers, such "
        f"as {' and '.join(map(repr, [*met[doubtful[0]]][:3]))} after {shown!r}, and one row's answer earns less in "
        "the other",
        "rows that ask the same contradict each other: answers were joined by another key, or copies were made of one "
        "column alone",
        "read the rows of one such question; keep those whose answer is right",
        share=len(doubtful) / len(repeated),
    )


def _apart(setup: KeelSubject, rows: Mapping[str, Problem]) -> bool:
    """Whether the first row pays its own answer more than that of the second."""
    (own, problem), (other, _) = [*rows.items()][:2]
    rewards = setup.built.judge.judge(problem, [[own], [other]])
    return rewards is not None and rewards[0].total > rewards[1].total


def _content(setup: KeelSubject, problem: Problem, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """What tells problems apart, whatever their keys: the prompt.

    Episodes of several turns may all begin alike: there the answer and what else a problem holds count too.
    """
    several = setup.config.rollout.max_turns > 1 and setup.run.task.multi_turn
    return prompt, repr((problem.answer, dict(problem.info))) if several else ""


def _copies_in_steps(steps: Sequence[Sequence[Hashable]]) -> float:
    """The chance of as many equal pairs within steps, at the rate of pairs of neighbouring steps (exact binomial).

    Neighbours, since a curriculum draws from other problems later.
    """
    from scipy.special import bdtrc

    counters = [Counter(step) for step in steps]
    pairs = sum(len(step) * (len(step) - 1) // 2 for step in steps)
    equal = sum(n * (n - 1) // 2 for counter in counters for n in counter.values())
    pairs_between = sum(len(a) * len(b) for a, b in pairwise(steps))
    equal_between = sum(a[prompt] * b[prompt] for a, b in pairwise(counters) for prompt in a)
    rate = (equal_between + 1) / (pairs_between + 2)
    return float(bdtrc(equal - 1, pairs, rate)) if equal else 1.0


def held_out_problems(setup: KeelSubject, count: int) -> Sequence[Problem]:
    """Those of the task; none where it has none to give, which its own problems may explain."""
    try:
        return setup.run.task.held_out(count)
    except KeelError as error:
        setup.budget.undecided["eval/leak"] = first_line(error)
        return ()


def eval_leak(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Prompts that are held out are not trained on, whatever their keys; the odd duplicate of a data set is no leak."""
    held_out = held_out_problems(setup, _HELD_OUT)
    trained = [*dict.fromkeys(_contents(setup, [pair for step in training_steps(setup) for pair in step]))]
    kept = _contents(setup, [*zip(held_out, rendered(setup, held_out), strict=True)])
    shared = [problem for problem, copies in zip(held_out, _among(kept, trained), strict=True) if copies]
    if not held_out or len(shared) <= thresholds["eval_leaked"] * len(held_out):
        return
    asked = sum(map(len, training_steps(setup)))
    yield finding(
        "eval/leak",
        f"{len(shared)} of {len(held_out)} held-out problems turn up in the first {asked} training problems, such as "
        f"{shared[0].key!r}",
        "task.sample returns problems that task.held_out keeps for evaluation",
        "keep the two apart, as keel.envs.Task asks",
        share=fmean(_among(trained, kept)),
    )


def _contents(setup: KeelSubject, pairs: Sequence[tuple[Problem, tuple[int, ...]]]) -> list[tuple[Hashable, Hashable]]:
    """Of each problem what tells it apart, by its tokens and by its text."""
    contents = ((problem, _content(setup, problem, prompt)) for problem, prompt in pairs)
    return [(content, _text(problem, content)) for problem, content in contents]


def _among(rows: Sequence[tuple[Hashable, Hashable]], others: Sequence[tuple[Hashable, Hashable]]) -> list[bool]:
    """Whether each of them is one of the others too, by its tokens or by its text."""
    tokens, texts = ({row[i] for row in others} for i in (0, 1))
    return [content in tokens or text in texts for content, text in rows]


def _text(problem: Problem, content: tuple[tuple[int, ...], str]) -> tuple[str, str]:
    """What a problem asks, whatever its spaces, its case and the sign at its end: a copy is one in those, too."""
    asked = "\n".join(message["content"] for message in messages_of(problem))
    return " ".join(asked.split()).casefold().rstrip(" .:?!"), content[1]
