"""What tools return: the batch's first calls made again, each alone and after those of others.

A call has one result: its own, all of it, the same for the same call, another for another one. Each row of the tables
is a property that this implies, without a guess at what the tool should say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from keel.base.types import Group, Problem
from keel.doctor.evidence import more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.leaks import answer_of, leak_findings
from keel.doctor.rendering import words
from keel.doctor.replayed import FEWEST, MOST, Replayed, Wrong, asked_of, replayed
from keel.doctor.replies import (
    TAG,
    answers_again,
    contents,
    first_turn,
    is_useless,
    played_again,
    squeezed,
    stands_in,
)
from keel.doctor.thresholds import Thresholds
from keel.envs.toolbox import ToolEpisode

ALL = 0.99  # of the calls
GOLDS = 2  # gold turns that are played
PROBLEMS = 16  # on which a tool says the same: two outcomes are alike on so many once in 30,000 times
LEAST_CUT, LEFT = 2.0, 64  # a result is lost where so many times as much is cut off as is left, and so few characters
ALIKE = 0.1  # by which two results of one call are more alike than those of two calls, at least
SHOWN = 60  # characters

_CUT = re.compile(r"\n\[cut: (\d+) characters more\]")
_BYTES = re.compile(r"\s*b(['\"]).*\1\s*", re.DOTALL)
# Words that something was done, or a verdict: many calls may earn the same one.
_DONE = re.compile(
    r"ok|okay|done|success\w*|true|false|yes|no|(?:in)?valid|(?:in)?correct|right|wrong|saved|stored|written|executed|"
    r"completed?|accepted|received|sent|added|updated|deleted|removed|finished|passed|failed|status|results?|"
    r"code|exit|0|files?|notes?|memory|the|is|was|has|been"
)

Rows = Sequence[Replayed]


@dataclass(frozen=True)
class Property:
    """`breaks` gives the calls that break it, and those that were looked at; more than `most` of these break it."""

    breaks: Callable[[KeelSubject, Rows], tuple[Rows, Rows]]
    broken: Wrong
    most: float = MOST

    def judge(self, setup: KeelSubject, rows: Rows) -> Wrong | None:
        wrong, of = self.breaks(setup, rows)
        if len(wrong) < FEWEST or len(wrong) <= self.most * len(of):
            return None
        heard = dict.fromkeys((wrong[0].shown, wrong[0].first, wrong[0].again))
        shown = " / ".join(repr(text.strip()[-SHOWN:]) for text in heard if text is not None)
        return self.broken._replace(evidence=f"{len(wrong)} of {len(of)} calls {self.broken.evidence}: {shown}")


def call_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """The first property that does not hold; nothing where no call of the batch was answered."""
    rows, ends = replayed(setup)
    if len(ends) < FEWEST:
        return
    tests: tuple[Callable[[], Wrong | None], ...] = (
        lambda: _ended_by_others(ends),
        *(partial(row.judge, setup, rows) for row in PROPERTIES),
        lambda: _whatever_is_asked(setup, rows),
    )
    wrong = next((broken for test in tests if (broken := test()) is not None), None)
    if wrong is not None:
        yield finding(
            "tool/failing",
            wrong.evidence,
            wrong.cause,
            "let every call return its own result, whole, to the episode that made it (Episode.step, the tool's "
            "function), and let the template write messages of the role tool" + wrong.unless,
            wrong.in_failures if wrong.in_failures is not None and _failing(setup, thresholds) else wrong.severity,
        )
    yield from _told(setup, rows, thresholds)


def _failing(setup: KeelSubject, thresholds: Thresholds) -> bool:
    parsed = fmean(reward.parsed for group in setup.groups for reward in group.rewards)
    cut = fmean(completion.stop_reason == "length" for group in setup.groups for completion in group.completions)
    return parsed < thresholds["parse_rate_warning"] or cut > thresholds["truncated_completions_error"]


def _ended_by_others(ends: Sequence[tuple[bool, bool]]) -> Wrong | None:
    """One and the same turn that ends an episode and not the next: an environment that draws lots does so by half."""
    odd = sum(first != again for first, again in ends)
    if odd < FEWEST or odd <= MOST * len(ends):
        return None
    return Wrong(
        f"{odd} of {len(ends)} first turns, said twice in new episodes of their problem, end one and not the other",
        "episodes share what each should have for itself, such as a count of turns",
    )


# ------------------------------------------------------------------------ a call and its result


def _lost(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Of a tool that says the same each time: what dice showed another time is no other episode's."""
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
    """Results that change from one call to the next equal one as much as between calls that differ."""
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


def _by_others(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Calls that return the same twice in a row, something else after other episodes' calls, and the same once more.

    The last is after the call that came before at first: a clock that went on or a server's limit brings nothing back.
    """
    if not all(row.first == row.again for row in rows):
        return [], rows
    moved, played, last = list[Replayed](), list[Replayed](), rows[-PROBLEMS // 2 - 2 :]
    for before, row, after in [*zip(last, last[1:], last[2:], strict=False)][::-1]:  # each after another than before
        with suppress(Exception):
            reply = contents(answers_again(setup, row.problem, row.text))
            if len({r.problem.key for r in (row, before, after)}) < 3 or is_useless(reply):
                continue
            played.append(row)
            if reply != row.again:
                answers_again(setup, before.problem, before.text)
                back = contents(answers_again(setup, row.problem, row.text)) == row.again
                moved += [replace(row, first=reply)] if back else []
    return moved, played


def _unreadable(setup: KeelSubject, rows: Rows) -> tuple[Rows, Rows]:
    """Results of which the tokenizer keeps no word, that are bytes written out, or of which next to nothing is left."""
    encode, decode = setup.policy.tokenizer.encode, setup.policy.tokenizer.decode

    def lost(row: Replayed) -> bool:
        bare = TAG.sub(" ", row.again)
        said, kept = words(bare), words(str(decode(encode(bare, add_special_tokens=False), skip_special_tokens=True)))
        parts = _CUT.split(bare)  # text, characters that were cut, text, …
        left, gone = sum(len(squeezed(part)) for part in parts[::2]), sum(map(int, parts[1::2]))
        without_tokens = bool(said) and not set(said) & set(kept) and "".join(said) not in "".join(kept)
        return without_tokens or _BYTES.fullmatch(bare) is not None or (left <= LEFT and gone > LEAST_CUT * left)

    return [row for row in rows if lost(row)], rows


def _where(breaks: Callable[[Replayed], bool]) -> Callable[[KeelSubject, Rows], tuple[Rows, Rows]]:
    return lambda setup, rows: ([row for row in rows if breaks(row)], rows)


def _holds(longer: str, shorter: str) -> bool:
    """Whether all words of a text stand in a longer one, in their order and right behind each other."""
    part, whole = (f" {' '.join(words(TAG.sub(' ', text)))} " for text in (shorter, longer))
    return bool(part.strip()) and part != whole and part in whole


def _piles_up(row: Replayed) -> bool:
    """Whether a result holds the one before it and more, or ends with what both end with, twice."""
    one, two = (words(TAG.sub(" ", text)) for text in (row.first, row.again))
    sizes = range(1, min(len(one), len(two) // 2) + 1)
    alike = [size for size in sizes if one[-size:] == two[-size:] == two[-2 * size : -size]]
    return _holds(row.again, row.first) or any(one[-2 * size : -size] != one[-size:] for size in alike)


def _bare(text: str) -> str:
    return squeezed(TAG.sub("", text))


def _is_echo(row: Replayed) -> bool:
    """Whether a reply is the turn itself, or all its call gives, and nothing more; a tool to think with does that."""
    said = {_bare(row.text)}
    if isinstance(row.asked, tuple):
        values = [value for _, arguments in row.asked for value in (json.loads(arguments) or {}).values()]
        said.add(squeezed("".join(map(str, values))))
    return _bare(row.again) in said - {""}


_SHARED = "episodes share what each should have for itself"
PROPERTIES: tuple[Property, ...] = (
    Property(
        _late,
        Wrong(
            "return what the call before them should have returned",
            "the tool, or a cache of it, hands out the result of the call before",
        ),
    ),
    Property(
        _lost,
        Wrong(
            "return something else alone than what the model reads next",
            f"{_SHARED} (a session, a quota, a result), or the chat template or the task drops what a tool returns",
        ),
    ),
    Property(
        _where(lambda row: bool(row.first.strip()) and row.first != row.again and _piles_up(row)),
        Wrong(
            "return what they did before and more when made again in a new episode",
            "the tool keeps what other episodes asked for, and every result holds theirs",
        ),
    ),
    Property(
        _where(lambda row: row.shown is None and is_useless(row.again)),
        Wrong(
            "return an error or nothing, too long to be shown",
            "the tool returns something that has no text of its own, or fails, whatever it is asked",
        ),
        ALL,
    ),
    Property(
        _unreadable,
        Wrong(
            "have results that cannot be read",
            "max_characters of the tool leaves next to nothing, it returns bytes and not a text, or characters that "
            "the tokenizer has no tokens for",
        ),
    ),
    Property(
        _where(lambda row: "assistant" in row.roles),
        Wrong(
            "are answered in the role assistant, as if the model had said it",
            "the environment writes its reply into the model's own turn",
        ),
    ),
    Property(
        _unrelated,
        Wrong(
            "return something else when made again, as unlike as results of different calls",
            "what the tool returns has nothing to do with what it is asked: it is random, or of other calls",
            "warning",
            "; if randomness is meant, as of dice or a clock, nothing",
        ),
    ),
    Property(
        _where(_is_echo),
        Wrong(
            "are repeated to who made them, and nothing else is said",
            "the tool returns its own arguments, or the environment hands the model's text back to it",
            "warning",
            "; if the environment is meant to repeat what it is told, nothing",
            "error",
        ),
        ALL,
    ),
    Property(
        _by_others,
        Wrong(
            "return something else after calls of other episodes, and the same again after those of before",
            f"{_SHARED}: what another one asked decides what this one is told",
        ),
    ),
)


# ------------------------------------------------------------------------ whatever is asked


def _whatever_is_asked(setup: KeelSubject, rows: Rows) -> Wrong | None:
    """One and the same result for different calls of many problems, and no mere word that something was done.

    Calls that are all wrong may earn one reply, so that gold ones must have it as well; where no gold turn is a call of
    a tool, it is a warning.
    """
    results = [row for row in rows if not is_useless(row.again)]  # a call may be the model's own mistake
    said = {row.again for row in results if row.is_result}
    if len(said) != 1 or len({row.asked for row in results}) < FEWEST or len(results) <= MOST * len(rows):
        return None
    (result,) = said
    result_words = words(TAG.sub(" ", result))
    if all(map(_DONE.fullmatch, result_words)) and not (result_words and all(map(str.isdecimal, result_words))):
        return None
    golds = _to_gold_turns(setup, rows)
    if golds - {result} or not (golds or rows[0].of_tool):
        return None
    known = {row.problem.key: (row.asked, row.again) for row in results}  # by problem, a call and what it returns

    def heard(groups: Sequence[Group]) -> set[str]:
        for group in groups:
            if group.problem.key not in known and len(known) < PROBLEMS:
                text = first_turn(group.completions[0], setup.policy.tokenizer, setup.sampling.stop)
                known[group.problem.key] = text, ""
                with suppress(Exception), played_again(setup, group.problem, [text]) as (episode, (reply, *_)):
                    known[group.problem.key] = asked_of(episode, text), contents(reply)
        return {reply for _, reply in known.values() if reply and not is_useless(reply)}

    more_groups(setup, "tool/failing", lambda groups: heard(groups) == {result} and len(known) < PROBLEMS)
    asked = [call for call, reply in known.values() if reply == result]
    if heard(()) != {result} or len(asked) <= MOST * PROBLEMS or len(set(asked)) < FEWEST:
        return None
    return Wrong(
        f"{len(set(asked))} different calls in {len(asked)} problems have one and the same result: "
        f"{result.strip()[:SHOWN]!r}",
        "the tool returns the same whatever it is asked: a default, a page for everybody, or what a cache holds",
        "error" if golds else "warning",
        "" if golds else "; if all of these calls deserve it, as wrong answers do, nothing",
        "error",
    )


def _to_gold_turns(setup: KeelSubject, rows: Rows) -> set[str]:
    """What gold first turns are answered that are not all that the model says; "" for the end of an episode."""
    task, heard = setup.run.task, list[str]()
    for problem in {row.problem.key: row.problem for row in rows}.values():
        with suppress(Exception):  # as above; a task may have no gold turns
            gold = task.gold_turns(problem)[0]
            said = [squeezed(row.text) for row in rows if row.problem.key == problem.key]
            if len(heard) >= GOLDS or all(squeezed(gold) in text for text in said):
                continue
            with played_again(setup, problem, [gold]) as (episode, (reply, *_)):
                calls = not isinstance(episode, ToolEpisode) or bool(asked_of(episode, gold))
                heard += [contents(reply)] if calls else []
    return set(heard)


def _told(setup: KeelSubject, rows: Rows, thresholds: Thresholds) -> Iterator[Finding]:
    """Replies that hold the answer of the problem, whatever is asked: also to the call of another one."""
    task, pairs = setup.run.task, list[tuple[Problem, str]]()
    if task.prompts_only or not rows or not all(_holds(row.again, answer_of(setup, row.problem)) for row in rows):
        return
    problems = {row.problem.key: row.problem for row in rows}
    problems |= {p.key: p for p in task.sample(PROBLEMS, seed=setup.config.run.seed, step=1)}
    for number, problem in enumerate(problems.values()):
        turns = [row.text for row in rows if row.problem.key != problem.key]
        with suppress(Exception):  # as above
            reply = answers_again(setup, problem, turns[number % len(turns)])
            pairs += [] if reply is None else [(problem, contents(reply))]
    for leak in leak_findings(setup, pairs, thresholds, of="replies to another problem's turn"):
        yield replace(
            leak,
            cause="the environment gives the answer away, whatever it is asked, so that copying earns the reward",
            advice="let replies depend on what the model asked for, and hold what it could find, not problem.answer",
        )


__all__ = ["call_findings"]
