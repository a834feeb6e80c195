"""Check tool results: repeat the batch's first calls in two new episodes each, after calls of other episodes.

A call should return its own, complete result: the same for an equal call, another for a different call. Each row of the
tables tests one consequence, without assuming what the tool should return.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from keel.base.types import Group, Problem
from keel.doctor.evidence import more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.problems import answer_of, leak_findings
from keel.doctor.rendering import words
from keel.doctor.replies import (
    FEWEST,
    MOST,
    TAG,
    Replayed,
    Wrong,
    answers_again,
    asked_of,
    contents,
    first_turn,
    is_useless,
    played_again,
    replayed,
    squeezed,
    stands_in,
)
from keel.envs.toolbox import ToolEpisode

ALL = 0.99  # least share of the calls, for properties that must hold for almost all
GOLDS = 2  # number of gold first turns that are replayed
PROBLEMS = 16  # number of problems; two random outcomes agree on all of them once in 30,000 times
ALIKE = 0.1  # two results of one call must be more similar than those of different calls by this much
SHOWN = 60  # characters that are shown

# Confirmations and verdicts, which many different calls may return.
_DONE = re.compile(
    r"ok|okay|done|success\w*|true|false|yes|no|(?:in)?valid|(?:in)?correct|right|wrong|saved|stored|written|executed|"
    r"completed?|accepted|received|sent|added|updated|deleted|removed|finished|passed|failed|status|results?|"
    r"code|exit|0|files?|notes?|memory|the|is|was|has|been"
)

Rows = Sequence[Replayed]


@dataclass(frozen=True)
class Property:
    """`breaks` returns the violating calls and all calls examined. More than the share `most` must violate it."""

    breaks: Callable[[KeelSubject, Rows], tuple[Rows, Rows]]
    broken: Wrong
    most: float = MOST

    def judge(self, setup: KeelSubject, rows: Rows) -> Wrong | None:
        wrong, of = self.breaks(setup, rows)
        if len(wrong) < FEWEST or len(wrong) <= self.most * len(of):
            return None
        texts = dict.fromkeys((wrong[0].shown, wrong[0].first, wrong[0].again))
        shown = " / ".join(repr(text.strip()[-SHOWN:]) for text in texts if text is not None)
        return self.broken._replace(evidence=f"{len(wrong)} of {len(of)} calls {self.broken.evidence}: {shown}")


def call_findings(setup: KeelSubject) -> Iterator[Finding]:
    """The first property that is violated, and leaked answers; nothing if no call of the batch was answered."""
    rows = replayed(setup)
    wrong = next((broken for row in PROPERTIES if (broken := row.judge(setup, rows))), None)
    wrong = wrong or _whatever_is_asked(setup, rows)
    if wrong is not None:
        yield finding(
            "tool/failing",
            wrong.evidence,
            wrong.cause,
            "return the complete result of each call to its own episode (Episode.step, the tool's function), and let "
            "the chat template write messages of the role tool" + wrong.unless,
            wrong.in_failures if wrong.in_failures is not None and _failing(setup) else wrong.severity,
        )
    yield from _leaks(setup, rows)


def _failing(setup: KeelSubject) -> bool:
    parsed = fmean(reward.parsed for group in setup.groups for reward in group.rewards)
    cut = fmean(completion.stop_reason == "length" for group in setup.groups for completion in group.completions)
    return parsed < setup.thresholds["parse_rate_warning"] or cut > setup.thresholds["truncated_completions_error"]


# ------------------------------------------------------------------------ properties of a call's result


def _lost(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Results that are not in the model's context in full. Only tools with repeatable results are checked."""
    shown = [row for row in rows if row.shown is not None and row.again.strip()]
    steady = [row for row in shown if row.is_steady]
    if len(steady) <= MOST * len(shown):
        return [], rows
    return [row for row in steady if not stands_in(row.again, row.shown or "", setup.policy.tokenizer)], steady


def _late(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    pairs = [(row, after) for row, after in pairwise(rows) if row.again != after.again]
    stale = [after for row, after in pairs if after.first == row.again and after.first != after.again]
    return stale, [after for _, after in pairs]


def _unrelated(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Results of repeated calls that are no more similar than results of different calls."""
    results = [row for row in rows if row.is_result and not is_useless(row.again)]
    pairs = [(a, b) for a in results for b in results if a.asked != b.asked and a.problem.key != b.problem.key]
    if len(results) < 2 * FEWEST or not pairs:
        return [], rows
    same = fmean(_likeness(row.first, row.again) for row in results)
    if same > fmean(_likeness(a.first, b.again) for a, b in pairs) + ALIKE:
        return [], rows
    return [row for row in results if row.first != row.again], results


def _likeness(one: str, other: str) -> float:
    a, b = set(words(one)), set(words(other))
    return len(a & b) / max(1, len(a | b))


def _unreadable(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Results in which the tokenizer keeps no word."""
    encode, decode = setup.policy.tokenizer.encode, setup.policy.tokenizer.decode

    def lost(row: Replayed) -> bool:
        bare = TAG.sub(" ", row.again)
        own, kept = words(bare), words(str(decode(encode(bare, add_special_tokens=False), skip_special_tokens=True)))
        return bool(own) and not set(own) & set(kept) and "".join(own) not in "".join(kept)

    return [row for row in rows if lost(row)], rows


def _where(breaks: Callable[[Replayed], bool]) -> Callable[[KeelSubject, Rows], tuple[Rows, Rows]]:
    return lambda setup, rows: ([row for row in rows if breaks(row)], rows)


def _holds(longer: str, shorter: str) -> bool:
    """Whether a longer text contains all words of a text, in order and without gaps."""
    part, whole = (f" {' '.join(words(TAG.sub(' ', text)))} " for text in (shorter, longer))
    return bool(part.strip()) and part != whole and part in whole


def _bare(text: str) -> str:
    return squeezed(TAG.sub("", text))


def _is_echo(row: Replayed) -> bool:
    """Whether a reply only repeats the turn or the arguments of its call, as a "think" tool does."""
    echoes = {_bare(row.text)}
    if isinstance(row.asked, tuple):
        values = [value for _, arguments in row.asked for value in (json.loads(arguments) or {}).values()]
        echoes.add(squeezed("".join(map(str, values))))
    return _bare(row.again) in echoes - {""}


_SHARED = "episodes share state that each should have for itself"
PROPERTIES: tuple[Property, ...] = (
    Property(
        _late,
        Wrong(
            "return the result of the previous call",
            "the tool or its cache returns the result of the previous call",
        ),
    ),
    Property(
        _lost,
        Wrong(
            "return another result in a new episode than the one in the model's context",
            f"{_SHARED} (a session, a quota, a result), or the chat template or the task drops tool results",
        ),
    ),
    Property(
        _where(lambda row: bool(row.first.strip()) and _holds(row.again, row.first)),
        Wrong(
            "return their earlier result and more text when repeated in a new episode",
            "the tool keeps the requests of other episodes, and every result contains them",
        ),
    ),
    Property(
        _where(lambda row: row.shown is None and is_useless(row.again)),
        Wrong(
            "return an error or no information, in a reply too long for the context",
            "the tool fails at every call, or returns an object without a text form",
        ),
        ALL,
    ),
    Property(
        _unreadable,
        Wrong(
            "have results that the tokenizer cannot encode",
            "the tool returns characters that the tokenizer has no tokens for",
        ),
    ),
    Property(
        _unrelated,
        Wrong(
            "return another result when repeated, as different as results of different calls",
            "the result does not depend on the call: it is random, or belongs to other calls",
            "warning",
            "; no change is needed if randomness is intended, as for dice or a clock",
        ),
    ),
    Property(
        _where(_is_echo),
        Wrong(
            "get only their own text back",
            "the tool returns its arguments, or the environment returns the model's text",
            "warning",
            "; no change is needed if the environment should echo",
            "error",
        ),
        ALL,
    ),
)


# ------------------------------------------------------------------------ equal results for different calls


def _whatever_is_asked(setup: KeelSubject, rows: Rows) -> Wrong | None:
    """The same result for different calls in many problems, unless it is a mere confirmation.

    If all calls of the model are wrong, one reply to all of them is correct. Calls in gold turns must therefore get
    this reply too. If no gold turn calls a tool, the finding is a warning.
    """
    # a useless reply may be due to a mistake in the model's call
    results = [row for row in rows if not is_useless(row.again)]
    seen = {row.again for row in results if row.is_result}
    if len(seen) != 1 or len({row.asked for row in results}) < FEWEST or len(results) <= MOST * len(rows):
        return None
    (result,) = seen
    result_words = words(TAG.sub(" ", result))
    if all(map(_DONE.fullmatch, result_words)) and not (result_words and all(map(str.isdecimal, result_words))):
        return None
    golds = _to_gold_turns(setup, rows)
    if golds - {result} or not (golds or rows[0].of_tool):
        return None
    known = {row.problem.key: (row.asked, row.again) for row in results}  # by problem: a call and its result

    def returned(groups: Sequence[Group]) -> set[str]:
        for group in groups:
            if group.problem.key not in known and len(known) < PROBLEMS:
                text = first_turn(group.completions[0], setup.policy.tokenizer, setup.sampling.stop)
                known[group.problem.key] = text, ""
                with suppress(Exception), played_again(setup, group.problem, [text]) as (episode, (reply, *_)):
                    known[group.problem.key] = asked_of(episode, text), contents(reply)
        return {reply for _, reply in known.values() if reply and not is_useless(reply)}

    more_groups(setup, "tool/failing", lambda groups: returned(groups) == {result} and len(known) < PROBLEMS)
    asked = [call for call, reply in known.values() if reply == result]
    if returned(()) != {result} or len(asked) <= MOST * PROBLEMS or len(set(asked)) < FEWEST:
        return None
    return Wrong(
        f"{len(set(asked))} different calls in {len(asked)} problems have the same result: {result.strip()[:SHOWN]!r}",
        "the tool returns the same text for every call: a default, a general page, or a cached result",
        "error" if golds else "warning",
        "" if golds else "; no change is needed if this result is correct for all of these calls, as for wrong answers",
        "error",
    )


def _to_gold_turns(setup: KeelSubject, rows: Rows) -> set[str]:
    """The replies to gold first turns that differ from the model's turns; "" where the episode ends."""
    task, replies_to_gold = setup.run.task, list[str]()
    for problem in {row.problem.key: row.problem for row in rows}.values():
        with suppress(Exception):  # user code may raise anything, and a task may have no gold turns
            gold = task.gold_turns(problem)[0]
            made = [squeezed(row.text) for row in rows if row.problem.key == problem.key]
            if len(replies_to_gold) >= GOLDS or all(squeezed(gold) in text for text in made):
                continue
            with played_again(setup, problem, [gold]) as (episode, (reply, *_)):
                calls = not isinstance(episode, ToolEpisode) or bool(asked_of(episode, gold))
                replies_to_gold += [contents(reply)] if calls else []
    return set(replies_to_gold)


def _leaks(setup: KeelSubject, rows: Rows) -> Iterator[Finding]:
    """Replies that contain the problem's answer even if the call is that of another problem."""
    task, pairs = setup.run.task, list[tuple[Problem, str]]()
    if task.prompts_only or not rows or not all(_holds(row.again, answer_of(setup, row.problem)) for row in rows):
        return
    problems = {row.problem.key: row.problem for row in rows}
    problems |= {p.key: p for p in task.sample(PROBLEMS, seed=setup.config.run.seed, step=1)}
    for number, problem in enumerate(problems.values()):
        turns = [row.text for row in rows if row.problem.key != problem.key]
        with suppress(Exception):  # user code may raise anything
            reply = answers_again(setup, problem, turns[number % len(turns)])
            pairs += [] if reply is None else [(problem, contents(reply))]
    for leak in leak_findings(setup, pairs, of="replies to another problem's turn"):
        yield replace(
            leak,
            cause="the environment returns the answer for any call, so copying it earns the reward",
            advice="let replies depend on the model's call, and do not put problem.answer into them",
        )


__all__ = ["call_findings"]
