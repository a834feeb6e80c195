"""Whose results tools return: the batch's first calls made again alone, made directly, and said to other episodes.

A call has one result: its own, all of it, the same for the same call, another for another one, and none that was asked
for by somebody else. Each property is an experiment without a guess at what the tool should say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from keel.base.types import Group, Problem
from keel.doctor.evidence import more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.helpful import unhelpful
from keel.doctor.probes.independence import by_others, echoed, of_its_episode, unreadable
from keel.doctor.probes.leaks import answer_of, leak_findings
from keel.doctor.probes.replayed import FEWEST, MOST, Replayed, Wrong, asked_of, replayed
from keel.doctor.probes.replies import (
    TAG,
    answers_again,
    contents,
    first_turn,
    is_useless,
    played_again,
    squeezed,
    stands_in,
)
from keel.doctor.rendering import words
from keel.doctor.thresholds import Thresholds
from keel.envs.calls import HungCalls, call_sync
from keel.envs.tool_calls import parse_calls
from keel.envs.toolbox import ToolEpisode

DIRECT = 4  # episodes whose tools are called directly, too
GOLDS = 2  # gold turns that are played
PROBLEMS = 16  # on which a tool says the same: two outcomes are alike on so many once in 30,000 times
LEAST_CUT, LEFT = 2.0, 64  # a result is lost where so many times as much is cut off as is left, and so few characters
ALIKE = 0.1  # by which two results of one call are more alike than those of two calls, at least

_CUT = re.compile(r"\n\[cut: (\d+) characters more\]")
# Words that something was done, or a verdict: many calls may earn the same one.
_DONE = re.compile(
    r"ok|okay|done|success\w*|true|false|yes|no|(?:in)?valid|(?:in)?correct|right|wrong|saved|stored|written|wrote|executed|"
    r"completed?|accepted|received|noted|sent|added|updated|deleted|removed|finished|passed|failed|status|results?|output|"
    r"code|exit|0|none|null|files?|notes?|memory|the|is|was|has|been"
)

# A page for everybody who asks for anything, in an environment that calls nothing a result.
_PAGE = re.compile(
    r"\b(?:(?:sign|log) ?in|login|session (?:has )?(?:expired|timed out)|captcha|enable (?:javascript|cookies)|"
    r"(?:accept|uses) cookies|maintenance|try again later|subscribe to|api key|verify (?:that )?you are|"
    r"checking your browser|access token|quota|redirecting|moved (?:permanently|temporarily)|it works!|"
    r"press (?:enter|any key)|allow this \w+)(?!\w)|[\[(]y(?:es)?/no?[\])]",
    re.IGNORECASE,
)


def result_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """The first property that does not hold; nothing where no call of the batch was answered."""
    rows, ends = replayed(setup)
    if len(ends) < FEWEST:
        return
    wrong = (
        _ended_by_others(ends)
        or broke(rows)
        or _late(rows)
        or of_another_episode(rows)
        or _dropped(setup, rows)
        or _piled_up(rows)
        or _of_no_room(rows)
        or not_the_tools(setup, rows)
        or _cut(rows)
        or _in_the_models_name(rows)
        or unreadable(setup, rows)
        or _unrelated(rows)
        or _whatever_is_asked(setup, rows)
        or echoed(rows)
        or by_others(setup, rows)
        or of_its_episode(setup, rows)
        or unhelpful(setup, rows, thresholds)
    )
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


def broke(rows: Sequence[Replayed]) -> Wrong | None:
    """Calls that were answered in the batch, and fail whenever they are made after it."""
    answered = [row for row in rows if row.shown is not None and squeezed(row.again) not in squeezed(row.shown)]
    failed = [row for row in answered if is_useless(row.first) and is_useless(row.again)]
    broken = [row for row in failed if not is_useless(row.shown or "")]
    if len(broken) < FEWEST or len(broken) <= MOST * len(rows):
        return None
    return Wrong(
        f"{len(broken)} of {len(answered)} calls that were answered once fail when they are made again, in new "
        f"episodes: {broken[0].again.strip()[:80]!r}",
        "episodes share what each should have for itself and one of them closes or uses up: a session, a file, a quota",
    )


def _late(rows: Sequence[Replayed]) -> Wrong | None:
    late = [(row, after) for row, after in pairwise(rows) if row.again != after.again]
    stale = sum(after.first == row.again and after.first != after.again for row, after in late)
    if len(late) < FEWEST or stale <= MOST * len(late):
        return None
    return Wrong(
        f"{stale} of {len(late)} calls return what the call before them should have returned",
        "the tool, or a cache of it, hands out the result of the call before",
    )


def _steady(rows: Sequence[Replayed]) -> list[tuple[Replayed, str]]:
    """Calls that return the same each time, with what the model was shown."""
    return [(row, row.shown) for row in rows if row.shown is not None and row.first == row.again and row.again.strip()]


def of_another_episode(rows: Sequence[Replayed]) -> Wrong | None:
    """Of a tool that says the same each time: what dice showed another time, or another problem, is no other's."""
    steady, shown_at_all = _steady(rows), sum(row.shown is not None and bool(row.again.strip()) for row in rows)
    lost = [(row, shown) for row, shown in steady if squeezed(row.again) not in squeezed(shown)]
    swapped = sum(
        any(other.problem.key != row.problem.key and squeezed(other.again) in squeezed(shown) for other, _ in steady)
        for row, shown in lost
    )
    if len(steady) <= MOST * shown_at_all or len(lost) < FEWEST:
        return None
    if 2 * len(lost) <= len(steady) or 2 * swapped <= len(lost):
        return None
    return Wrong(
        f"{swapped} of {len(steady)} calls return another episode's result, and their own where they are alone",
        "episodes share what each should have for itself: a result of one is handed to another",
    )


def _dropped(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    steady = _steady(rows)
    dropped = [(row, shown) for row, shown in steady if not stands_in(row.again, shown, setup.policy.tokenizer)]
    if len(dropped) < FEWEST or len(dropped) < len(steady) or any(is_useless(row.again) for row, _ in steady):
        return None
    row, shown = dropped[0]
    return Wrong(
        f"none of {len(steady)} results stands in what the model reads next: {row.again.strip()[:60]!r} "
        f"became {shown[-60:]!r}",
        "the chat template or the task drops or cuts what a tool returns",
    )


def _piled_up(rows: Sequence[Replayed]) -> Wrong | None:
    """A result that holds the one before it and more, where the same call is made twice in new episodes."""
    changed = [row for row in rows if row.first.strip() and row.first != row.again]
    grown = [row for row in changed if _holds(row.again, row.first) or _ends_with_both(row.again, row.first)]
    if len(grown) < FEWEST or len(grown) <= MOST * len(rows):
        return None
    return Wrong(
        f"{len(grown)} of {len(rows)} calls, made again in a new episode, return what they did before and more: "
        f"{grown[-1].again.strip()[-80:]!r}",
        "the tool keeps what other episodes asked for, and every result holds theirs",
    )


def _holds(longer: str, shorter: str) -> bool:
    """Whether all words of a text stand in a longer one, in their order and right behind each other."""
    part, whole = (words(TAG.sub(" ", text)) for text in (shorter, longer))
    return 0 < len(part) < len(whole) and any(
        whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1)
    )


def _ends_with_both(later: str, earlier: str) -> bool:
    """Whether what two texts end with alike stands at the end of the later one twice: one result behind the other."""
    one, two = (words(TAG.sub(" ", text)) for text in (earlier, later))
    sizes = range(1, min(len(one), len(two) // 2) + 1)
    alike = [size for size in sizes if one[-size:] == two[-size:] == two[-2 * size : -size]]
    return any(one[-2 * size : -size] != one[-size:] for size in alike)


def not_the_tools(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    """Replies without what the tools return where they are called with the arguments that stand in the text.

    An episode may shape results on purpose: a warning, unless every such reply is the result of another call.
    """
    pairs = list[tuple[str, str]]()
    for row in (row for row in rows if row.of_tool and row.first == row.again):
        if len(pairs) >= DIRECT:
            break
        with suppress(Exception):  # a user's tool may raise anything, which is an error that the reply tells
            once, twice = (directly(setup, row.problem, row.text) for _ in range(2))
            pairs += [(row.again, "\n".join(once))] if once == twice and any(map(str.strip, once)) else []
    tokenizer = setup.policy.tokenizer
    others = [(reply, own) for reply, own in pairs if not stands_in(own, reply, tokenizer)]
    if len(others) < FEWEST or len(others) < MOST * len(pairs):
        return None
    returned = {squeezed(own) for _, own in pairs}
    swapped = all(squeezed(TAG.sub("", reply)) in returned for reply, _ in others)
    return Wrong(
        f"{len(others)} of {len(pairs)} replies are not what the tools return for the calls that the model wrote: "
        f"{others[0][0].strip()[:60]!r} in place of {others[0][1].strip()[:60]!r}",
        "the environment hands out the results of other calls"
        if swapped
        else "the environment calls tools with other arguments than the text has, not at all, or changes what they "
        "return",
        "error" if swapped else "warning",
        "" if swapped else "; if the episode shapes results on purpose, nothing",
    )


def directly(setup: KeelSubject, problem: Problem, text: str) -> list[str]:
    """What the tools that an episode offers return for the calls of a turn, called without the episode."""
    with played_again(setup, problem) as (episode, _):
        if not isinstance(episode, ToolEpisode):
            return []
        results = []
        for tool_call in parse_calls(text, episode.toolbox.format, tuple(episode.offered.values())):
            tool = episode.offered[tool_call.name]
            function = partial(tool.function, **tool.arguments(tool_call.arguments or {}))
            value = call_sync(function, timeout_s=tool.timeout_s, hung=HungCalls())
            results.append(("" if value is None else str(value))[: tool.max_characters])
        return results


def _of_no_room(rows: Sequence[Replayed]) -> Wrong | None:
    """Replies that are too long to be shown, and from which nothing would be learned if they were."""
    useless = [row for row in rows if row.shown is None and is_useless(row.again)]
    if len(useless) < FEWEST or len(useless) < len(rows):
        return None
    return Wrong(
        f"what the environment answers to all of {len(rows)} calls is an error or nothing, and too long to be shown: "
        f"{useless[0].again.strip()[:80]!r}",
        "the tool returns something that has no text of its own, or fails, whatever it is asked",
    )


def _cut(rows: Sequence[Replayed]) -> Wrong | None:
    lost = []
    for row in rows:
        parts = _CUT.split(row.again)  # text, characters that were cut, text, …
        left, gone = sum(len(squeezed(TAG.sub("", part))) for part in parts[::2]), sum(map(int, parts[1::2]))
        lost += [row] if left <= LEFT and gone > LEAST_CUT * left else []
    if len(lost) < FEWEST or len(lost) <= MOST * len(rows):
        return None
    return Wrong(
        f"{len(lost)} of {len(rows)} results are cut to a few characters: {lost[0].again.strip()[:80]!r}",
        "max_characters of the tool leaves next to nothing of what it returns",
    )


def _in_the_models_name(rows: Sequence[Replayed]) -> Wrong | None:
    spoken = [row for row in rows if "assistant" in row.roles]
    if len(spoken) < FEWEST or len(spoken) <= MOST * len(rows):
        return None
    return Wrong(
        f"{len(spoken)} of {len(rows)} replies of the environment have the role assistant, as if the model had said "
        f"{spoken[0].again.strip()[:60]!r}",
        "the environment writes its reply into the model's own turn",
    )


def _unrelated(rows: Sequence[Replayed]) -> Wrong | None:
    """Results that change from one call to the next equal one as much as between calls that differ."""
    results = [row for row in rows if row.is_result and not is_useless(row.again)]
    pairs = [(a, b) for a in results for b in results if a.asked != b.asked and a.problem.key != b.problem.key]
    moved = sum(row.first != row.again for row in results)
    if len(results) < 2 * FEWEST or not pairs or moved <= MOST * len(results):
        return None
    same = fmean(_likeness(row.first, row.again) for row in results)
    if same > fmean(_likeness(a.first, b.again) for a, b in pairs) + ALIKE:
        return None
    row = next(row for row in results if row.first != row.again)
    return Wrong(
        f"{moved} of {len(results)} calls return something else when they are made again, as unlike as results of "
        f"different calls: {row.first.strip()[-40:]!r}, then {row.again.strip()[-40:]!r}",
        "what the tool returns has nothing to do with what it is asked: it is random, or of other calls",
        "warning",
        "; if randomness is meant, as of dice or a clock, nothing",
    )


def _likeness(one: str, other: str) -> float:
    a, b = set(words(one)), set(words(other))
    return len(a & b) / max(1, len(a | b))


def _whatever_is_asked(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    """One and the same result for different calls of many problems, and no mere word that something was done.

    Calls that are all wrong may earn one reply, so that gold ones must have it as well; where no gold turn is a call of
    a tool, it is a warning.
    """
    results = [row for row in rows if not is_useless(row.again)]  # a call may be the model's own mistake
    said = {row.again for row in results if row.is_result or _PAGE.search(row.again)}
    if len(said) != 1 or len({row.asked for row in results}) < FEWEST or len(results) <= MOST * len(rows):
        return None
    (result,) = said
    result_words = words(TAG.sub(" ", result))
    is_number = bool(result_words) and all(map(str.isdecimal, result_words))
    if all(map(_DONE.fullmatch, result_words)) and not is_number:
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
        f"{result.strip()[:80]!r}",
        "the tool returns the same whatever it is asked: a default, a page for everybody, or what a cache holds",
        "error" if golds else "warning",
        "" if golds else "; if all of these calls deserve it, as wrong answers do, nothing",
        "error",
    )


def _to_gold_turns(setup: KeelSubject, rows: Sequence[Replayed]) -> set[str]:
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


def _told(setup: KeelSubject, rows: Sequence[Replayed], thresholds: Thresholds) -> Iterator[Finding]:
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
