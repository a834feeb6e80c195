"""Turns of the engine: all sampled tokens are trained, and the end token is the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from keel.base.types import Completion, Group
from keel.doctor.draws import draws, tail_masses, uniform_p_value
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds


def end_findings(setup: KeelSubject, thresholds: Thresholds) -> list[Finding]:
    """One answer of the engine must be one turn. Replies of the environment come between turns, never inside.

    An engine that runs tools itself has text in its turns that is not an action and that the policy would not write.
    """
    groups = _turns(setup)
    findings = [*_ends(setup, groups)] or [*_left_out(setup, groups, thresholds)]
    setup.shared["chosen actions"] = bool(findings)
    setup.shared["left out of turns"] = sum(not a for g in groups for turn in g.completions for a in turn.action)
    return findings


def _turns(setup: KeelSubject) -> Sequence[Group]:
    """The batch's turns as the engine returned them, each after its context."""
    if setup.config.rollout.max_turns == 1:
        return setup.sampled
    problems = {group.problem.key: group.problem for group in setup.groups}
    chosen = [turn for turn in setup.turns if turn.request.key in problems]
    return [Group(problems[t.request.key], t.request.tokens, (t.completion,)) for t in chosen]


def _ends(setup: KeelSubject, groups: Sequence[Group]) -> Iterator[Finding]:
    ends = set(setup.policy.eos_ids)
    turns = [turn for group in groups for turn in group.completions if turn.tokens]
    ended = [turn for turn in turns if turn.stop_reason == "eos"]
    past = [] if setup.sampling.ignore_eos else [turn for turn in turns if ends & set(turn.tokens[:-1])]
    bare = [turn for turn in ended if turn.tokens[-1] not in ends and turn not in past]
    untrained = [turn for turn in ended if turn.tokens[-1] in ends and not turn.action[-1]]
    if past:
        tail = sum(_after_the_end(turn, ends) for turn in past)
        yield finding(
            "mask/end",
            f"{len(past)} of {len(turns)} completions go on after an end token; {tail} of their tokens are trained",
            "the engine does not stop at the model's end token, or pads with it: the reward judges the text before it "
            "and the tail is trained for it",
            "cut completions after their first end token (Completion.tokens holds that one and nothing after it)",
        )
    elif bare:
        yield finding(
            "mask/end",
            f"{len(bare)} of {len(ended)} completions with stop_reason eos do not end with an end token "
            f"({', '.join(map(str, sorted(ends)))})",
            "the engine strips the end token, so that ending is never trained and completions drift longer",
            "keep the end token in Completion.tokens, with its log-probability and action True",
        )
    elif untrained:
        yield finding(
            "mask/end",
            f"the end token of {len(untrained)} of {len(ended)} completions is not an action",
            "the end token is left out of the loss, so that ending is never trained and completions drift longer",
            "set Completion.action to True on the end token: the policy has sampled it",
        )


def _after_the_end(turn: Completion, ends: set[int]) -> int:
    first = next(i for i, token in enumerate(turn.tokens) if token in ends)
    return sum(turn.action[first + 1 :])


def _left_out(setup: KeelSubject, groups: Sequence[Group], thresholds: Thresholds) -> Iterator[Finding]:
    """Tokens of a turn that are not marked as actions although the policy is likely to have drawn them."""
    missing = sum(not action for group in groups for turn in group.completions for action in turn.action)
    if not missing:
        return
    total = sum(len(turn.tokens) for group in groups for turn in group.completions)
    turned = [
        replace(group, completions=tuple(_reversed(turn) for turn in group.completions), rewards=()) for group in groups
    ]
    chance = uniform_p_value(tail_masses(draws(setup, turned), setup.sampling))
    if chance < thresholds["sampler_explained"]:
        return
    yield finding(
        "mask/not-actions",
        f"{missing} of {total} tokens of single turns are no actions, and they are what the policy draws (chance "
        f"{chance:.2g}): the environment has said nothing there",
        "the engine leaves tokens out that the policy sampled: they are not trained",
        "set Completion.action to True on every token that the engine sampled",
    )


def _reversed(turn: Completion) -> Completion:
    """The turn with the action mask inverted."""
    return replace(turn, action=tuple(not action for action in turn.action))
