"""Problems by their rendered tokens: other ones at every step, and none of those that are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from keel.base.thresholds import Thresholds
from keel.base.types import Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.rendering import rendered
from keel.lab.doctor.setup import ProbeSetup

_DRAWN = 1024  # training problems that are looked at
_HELD_OUT = 64


def training_steps(setup: ProbeSetup) -> list[list[tuple[Problem, tuple[int, ...]]]]:
    """Problems and prompts of as many steps as it takes to see a thousand problems, three at least."""
    if "steps" not in setup.shared:
        count, seed = setup.config.rollout.prompts_per_step, setup.config.run.seed
        steps = [
            setup.run.task.sample(count, seed=seed, step=step) for step in range(max(3, min(128, _DRAWN // count)))
        ]
        setup.shared["steps"] = [list(zip(step, rendered(setup, step), strict=True)) for step in steps]
    chosen: list[list[tuple[Problem, tuple[int, ...]]]] = setup.shared["steps"]
    return chosen


def repeat_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """A single prompt, the same ones at every step, fewer than a run can learn from, or a step of copies."""
    steps = [[_content(setup, problem, prompt) for problem, prompt in step] for step in training_steps(setup)]
    counts = Counter(prompt for step in steps for prompt in step)
    asked, per_step = counts.total(), setup.config.rollout.prompts_per_step
    shown = setup.policy.tokenizer.decode(list(steps[0][0][0]))[-80:]
    total = (setup.config.run.max_steps or 0) * per_step
    same = len({frozenset(step) for step in steps}) == 1
    often = total > thresholds["problem_repeats"] * len(counts)
    if len(counts) == 1 or (often and (same or len(counts) < thresholds["distinct_problems"])):
        each = ", the same at every step" if same and len(counts) > 1 else ""
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


def _content(setup: ProbeSetup, problem: Problem, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """What tells problems apart, whatever their keys: the prompt.

    Episodes of several turns may all begin alike: there the answer and what else a problem holds count too.
    """
    several = setup.config.rollout.max_turns > 1 and setup.run.task.several_turns
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


def eval_leak(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Prompts that are held out are not trained on, whatever their keys; the odd duplicate of a data set is no leak."""
    trained = {_content(setup, problem, prompt) for step in training_steps(setup) for problem, prompt in step}
    held_out = setup.run.task.held_out(_HELD_OUT)
    contents = [_content(setup, *pair) for pair in zip(held_out, rendered(setup, held_out), strict=True)]
    shared = [problem for problem, content in zip(held_out, contents, strict=True) if content in trained]
    if len(shared) <= thresholds["eval_leaked"] * len(held_out):
        return
    asked = sum(map(len, training_steps(setup)))
    yield finding(
        "eval/leak",
        f"{len(shared)} of {len(held_out)} held-out problems turn up in the first {asked} training problems, such as "
        f"{shared[0].key!r}",
        "task.sample returns problems that task.held_out keeps for evaluation",
        "keep the two apart, as keel.envs.Task asks",
        share=len(trained.intersection(contents)) / len(trained),
    )
