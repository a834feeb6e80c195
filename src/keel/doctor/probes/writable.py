"""Gold answers under the rollout's own limits: one that a stop text or a limit cuts cannot be written by any policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keel.doctor.advice import either
from keel.doctor.evidence import SAME, chance_above, level
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.judged_golds import JudgedGold, totals_of
from keel.doctor.thresholds import Thresholds

LEAST = 4  # gold answers below which nothing is said


@dataclass(frozen=True)
class Cut:
    """What is left of a problem's gold turns, and what that earns."""

    row: JudgedGold
    left: tuple[str, ...]
    reward: float
    at_stop: bool  # else at a limit of tokens


def unwritable_findings(setup: KeelSubject, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Gold answers that earn, are cut by stop texts or limits of tokens, and earn less then: beyond the odd row.

    Nothing is said where a completion earns as much on one of their problems: answers can be said in fewer words. It is
    a warning where the batch cannot tell.
    """
    paid = [row for row in judged if row.gold > row.top + SAME]
    if len(paid) < LEAST:
        return
    cuts = [cut for row in paid if (cut := _cut(setup, row)) is not None]
    earned = [_earned_otherwise(setup, cut) for cut in cuts]
    flags = [1.0] * len(cuts) + [0.0] * (len(paid) - len(cuts))
    if any(earned) or chance_above(flags, thresholds["gold_unpaid"]) > level(thresholds):
        return
    told = False in earned  # else none of these problems was tried
    first, most = cuts[0], max(_tokens(setup, cut.row.turns) for cut in cuts)
    rollout = setup.config.rollout
    limits = f"max_completion_length={rollout.max_completion_length}"
    limits += "" if rollout.max_turn_length is None else f", max_turn_length={rollout.max_turn_length}"
    roomier: dict[str, object] = {"rollout.max_completion_length": max(2 * most, rollout.max_completion_length)}
    roomier |= {} if rollout.max_turn_length is None else {"rollout.max_turn_length": None}
    yield finding(
        "output/truncated",
        f"{len(cuts)} of {len(paid)} gold answers cannot be written whole: of {first.row.turns[-1][-60:]!r} "
        f"{first.left[-1][-60:]!r} is left, which earns {first.reward:.3g} in place of {first.row.gold:.3g}",
        f"one of rollout.stop={list(rollout.stop)} stands in what is to be written, and ends it there"
        if first.at_stop
        else f"the answers are longer than rollout allows ({limits}): no policy can write them",
        propose("{}, or stop texts that come after an answer", {"rollout.stop": []})
        if first.at_stop
        else either(propose("set {}", roomier), "shorter answers"),
        severity="error" if told and len(cuts) > thresholds["truncated_completions"] * len(paid) else "warning",
        share=len(cuts) / len(paid),
    )


def _tokens(setup: KeelSubject, turns: Sequence[str]) -> int:
    return sum(len(setup.policy.tokenizer.encode(text, add_special_tokens=False)) for text in turns)


def _cut(setup: KeelSubject, row: JudgedGold) -> Cut | None:
    """None where nothing is cut, where it earns as much, or where that cannot be asked."""
    left, at_stop = kept(setup, row.turns)
    if left == row.turns:
        return None
    (reward,) = totals_of(setup, row.problem, [left])
    return Cut(row, left, reward, at_stop) if math.isfinite(reward) and reward < row.gold - SAME else None


def kept(setup: KeelSubject, turns: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """These turns as the rollout would end them, and whether a stop text did; an episode ends where its tokens do.

    Where a limit ends the last of them it is the limit that is named, whatever a stop text left of earlier ones.
    """
    rollout, tokenizer = setup.config.rollout, setup.policy.tokenizer
    left: list[str] = []
    room, stopped = rollout.max_completion_length, False
    for text in turns:
        starts = [text.find(stop) for stop in rollout.stop if stop in text]
        stopped = stopped or bool(starts)
        ended = text[: min(starts)] if starts else text
        tokens = tokenizer.encode(ended, add_special_tokens=False)
        limit = min(room, rollout.max_turn_length or room)
        if len(tokens) > limit:
            return (*left, str(tokenizer.decode(tokens[:limit], skip_special_tokens=True))), False
        left.append(ended)
        room -= len(tokens)
    return tuple(left), stopped


def _earned_otherwise(setup: KeelSubject, cut: Cut) -> bool | None:
    """Whether a completion of the batch earns as much on that problem; None where that is not known."""
    rewards = [r.total for group in setup.groups if group.problem.key == cut.row.problem.key for r in group.rewards]
    if not rewards or setup.config.reward.aggregate != "sum":
        return None
    return any(total >= cut.row.gold - SAME for total in rewards)
