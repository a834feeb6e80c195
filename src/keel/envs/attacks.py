"""Reward-hacking answers for `keel check-task`, built from the prompt, the format of gold answers, the gold answers of
other problems and tool calls. This module uses no model and calls no reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property, reduce
from typing import Any

from keel.base.types import Problem

Turns = tuple[str, ...]
# Variants that a policy cannot choose between without knowing the answer, such as lists with the correct answer at
# different positions. A way earns the minimum over its variants.
Way = tuple[Turns, ...]

EMPTY = "empty"  # name of the attack with an empty answer
FILLER = "answer"
REFUSAL = "I do not know."
REPEATS = 200
CALLS = 8  # turns of an episode that only calls tools
NUMBERS = tuple(map(str, range(101)))
NOT_NUMBERS = ("nan", "inf", "-inf")  # compare unequal to every finite number
NEIGHBOURS = 4  # wrong answers listed with the correct one
SEPARATORS = ("{} {}", "{}, {}", "{} or {}", "{}\n{}", "{} = {}")
AROUND = ("[{}]", "{{{}}}")  # brackets of a comma-separated list
NOTATIONS = ("\\boxed{{{}}} {}", "**{}** {}", "{} (or {})", "{}\n#### {}")
# For each family of attacks: what a policy learns if the attack is rewarded, and how to change the reward.
LESSONS: Mapping[str, str] = {
    "silence": "to stop at once: give no reward for an answer without content",
    "form": "to write the format without an answer: reward the format only with a correct answer, or reward it less",
    "prompt": "to copy the prompt: parse the answer from a fixed place, not from anywhere in the text",
    "guess": "to give one answer to every problem: balance the answers in the data, or pay less for correct guesses",
    "wrong": "to give any answer in the right format: reward wrong answers less",
    "list": "to list answers: grade exactly one answer, and count any other text in it as wrong",
    "endless": "to write up to the length limit: do not reward length, or penalise it",
    "program": "to manipulate the tests: run them outside the program's process and compare only data",
    "calls": "to call tools without answering: reward calls only with a correct answer, or reward them less",
}


@dataclass(frozen=True)
class Attack:
    """One kind of answer. It earns the maximum over its `ways`.

    `lucky`: it may be correct by chance. `is_gold`: for this problem it equals the gold answer.
    """

    name: str
    family: str
    ways: tuple[Way, ...]
    lucky: bool = False
    is_gold: bool = False


@dataclass(frozen=True)
class Form:
    """The common template of several texts: `pieces` with a slot between neighbours; `optional` slots may be empty."""

    pieces: tuple[str, ...] = ("", "")
    optional: frozenset[int] = frozenset()

    @property
    def slots(self) -> int:
        return len(self.pieces) - 1

    def fill(self, contents: str | Sequence[str]) -> str:
        """Fill the slots, or all slots that are not optional with the same text."""
        if isinstance(contents, str):
            several: Sequence[str] = ["" if slot in self.optional else contents for slot in range(self.slots)]
        else:
            several = contents
        return "".join(p for pair in zip(self.pieces, (*several, ""), strict=True) for p in pair)

    def contents(self, text: str) -> tuple[str, ...]:
        """The contents of the slots in a text of this form."""
        marks = [piece.strip() for piece in self.pieces]
        position = len(marks[0]) if text.startswith(marks[0]) else 0
        contents = []
        for mark in marks[1:-1]:
            end = text.find(mark, position)
            end = len(text) if end < 0 else end
            contents.append(text[position:end].strip())
            position = min(end + len(mark), len(text))
        last = text[position:].strip()
        return (*contents, last.removesuffix(marks[-1]).strip() if marks[-1] else last)


_NUMBER = r"\d+(?:\.\d+)?(?![\w.])"
_TOKEN = re.compile(rf"</?[\w-]+>|{_NUMBER}|\w+|[^\w\s]")
_MARK = re.compile(r"</?[\w-]+>|([^\w\s])\1\1+")


def form_of(texts: Iterable[str]) -> Form:
    """Infer the common tokens of all texts, without numbers. A single text gives the empty form."""
    distinct = list(dict.fromkeys(text.strip() for text in texts))
    if len(distinct) < 2:
        return Form()
    rows = [list(_TOKEN.finditer(text)) for text in distinct]
    shared = reduce(_shared, ([match.group() for match in row] for row in rows))
    common = [token for token in shared if not re.fullmatch(_NUMBER, token)]
    spots = [[-1, *_spots(common, row), len(row)] for row in rows]
    # numbers of tokens before each common token, over the texts
    gaps = [{at[i + 1] - at[i] - 1 for at in spots} for i in range(len(common) + 1)]
    pieces, optional, start = [], set(), 0
    for i, gap in enumerate(gaps):
        if gap != {0}:  # a slot; the piece before it gets the whitespace of the first text
            pieces.append(_piece(distinct[0], rows[0], spots[0][1 + start : 1 + i]))
            optional |= {len(pieces) - 1} if 0 in gap else set()
            start = i
    pieces.append(_piece(distinct[0], rows[0], spots[0][1 + start : 1 + len(common)]))
    return Form(tuple(pieces), frozenset(optional))


def _shared(first: list[str], second: list[str]) -> list[str]:
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return [token for block in blocks for token in first[block.a : block.a + block.size]]


def _spots(common: Sequence[str], row: Sequence[re.Match[str]]) -> list[int]:
    """The indices of the common tokens in a text."""
    spots: list[int] = []
    for token in common:
        spots.append(next(i for i in range(spots[-1] + 1 if spots else 0, len(row)) if row[i].group() == token))
    return spots


def _piece(text: str, row: Sequence[re.Match[str]], spots: Sequence[int]) -> str:
    """The text between these tokens, with the surrounding whitespace."""
    if not spots:
        return ""
    before, after = text[: row[spots[0]].start()], text[row[spots[-1]].end() :]
    return text[len(before.rstrip()) : len(text) - len(after.lstrip())]


@dataclass(frozen=True)
class GoldBatch:
    """Problems with the turns of their gold answers, which the attacks are built from."""

    problems: tuple[Problem, ...]
    golds: tuple[Turns, ...]

    def form(self, index: int) -> Form:
        """The form of a problem's last gold turn."""
        return self._forms[self._kinds[index]]

    @cached_property
    def _kinds(self) -> list[tuple[Any, frozenset[str]]]:
        """The kind of each answer: its task in a mixture, and its marks."""
        pairs = zip(self.problems, self.golds, strict=True)
        return [(problem.info.get("mixture"), _marks(gold[-1])) for problem, gold in pairs]

    @cached_property
    def _forms(self) -> dict[tuple[Any, frozenset[str]], Form]:
        pairs = list(zip(self._kinds, self.golds, strict=True))
        return {kind: form_of(gold[-1] for other, gold in pairs if other == kind) for kind in self._kinds}

    @cached_property
    def _call(self) -> Form | None:
        calls = [turn for gold in self.golds for turn in gold[:-1]]
        return form_of(calls) if calls else None

    def calls(self, index: int, argument: str) -> list[str]:
        """Tool calls with this argument: in the form of the gold turns, or else one for every tool in the prompt."""
        if self._call is not None:
            return [self._call.fill(argument)]
        return [_json_call(tool, argument) for tool in self.problems[index].tools]

    def neighbours(self, index: int) -> list[Turns]:
        """Different gold answers of the same form from other problems, starting with the next problem."""
        own, count = self.golds[index], len(self.golds)
        others = [(index + step) % count for step in range(1, count)]
        alike = [self.golds[i] for i in others if self._kinds[i] == self._kinds[index] and self.golds[i][-1] != own[-1]]
        return list(dict.fromkeys(alike))[:NEIGHBOURS]

    def accepted(self, index: int) -> set[str]:
        """The gold answer with and without its form, and the problem's text answers."""
        gold, answer = self.golds[index][-1], self.problems[index].answer
        answers = answer if isinstance(answer, list | tuple) else [answer]
        texts = [gold, self.form(index).contents(gold)[-1], *(text for text in answers if isinstance(text, str))]
        return {_bare(text) for text in texts} - {""}

    def is_copy_task(self, index: int) -> bool:
        """Whether the prompts differ only in the gold answer, so that copying the prompt solves the problem."""
        alike = [i for i, kind in enumerate(self._kinds) if kind == self._kinds[index]]
        around = {self._around(i) for i in alike}
        return len(alike) > 1 and len(around) == 1 and None not in around

    def _around(self, index: int) -> tuple[str, str] | None:
        """The prompt before and after the gold answer, or None if the prompt does not contain it."""
        answer = self.form(index).contents(self.golds[index][-1])[-1]
        before, _, behind = prompt_text(self.problems[index]).partition(answer) if answer else ("", "", "")
        return (before, behind) if answer and answer in prompt_text(self.problems[index]) else None

    def most_common_gold(self, index: int) -> Turns | None:
        """The most frequent gold answer of the other problems, or None if all differ."""
        others = Counter(gold for i, gold in enumerate(self.golds) if i != index)
        gold, count = others.most_common(1)[0] if others else ((), 0)
        return gold if count > 1 else None


def _marks(text: str) -> frozenset[str]:
    """Tags, and runs of a symbol such as ####."""
    return frozenset(match.group() for match in _MARK.finditer(text))


def _bare(text: str) -> str:
    """Lower case, without surrounding whitespace, `.` and `!`."""
    return text.strip(" \t\r\n.!").casefold()


def _json_call(tool: Mapping[str, object], argument: str) -> str:
    function = tool.get("function", tool)
    parameters = function.get("parameters", {}) if isinstance(function, Mapping) else {}
    names = parameters.get("properties", {}) if isinstance(parameters, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    body = json.dumps({"name": name, "arguments": dict.fromkeys(names, argument)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def prompt_text(problem: Problem) -> str:
    """The text of the prompt."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n".join(message["content"] for message in problem.prompt)


def attacks_on(batch: GoldBatch, index: int, wrong: Sequence[Turns]) -> list[Attack]:
    """Every attack on one problem. `wrong` are answers of other problems that are wrong here.

    Texts that give the gold answer are dropped, except in `lucky` attacks. Copies of the prompt are dropped if copying
    it is the task.
    """
    form, accepted = batch.form(index), batch.accepted(index)
    fair = []
    for attack in (*_plain(batch, index), *_lists(batch, index, wrong), *_calls(batch, index)):
        other = tuple(way for way in attack.ways if not _contains_answer(way, form, accepted))
        is_gold = len(other) < len(attack.ways)
        fair.append(replace(attack, is_gold=is_gold) if attack.lucky else replace(attack, ways=other))
    if wrong:
        endless = "\n".join([wrong[0][-1]] * REPEATS)
        fair.append(Attack("form of one value", "form", _repeated(form, wrong[0]), lucky=True))
        fair.append(Attack("another problem's answer", "wrong", ((wrong[0],),)))
        fair.append(Attack("another problem's answer, endless", "endless", (((*wrong[0][:-1], endless),),)))
    copying = batch.is_copy_task(index)
    return [attack for attack in fair if attack.ways and not (copying and attack.family == "prompt")]


def _repeated(form: Form, turns: Turns) -> tuple[Way, ...]:
    """Fill a form of several values with one repeated value: the first one of each slot, or of the first slot."""
    values = [content.split() for content in form.contents(turns[-1])]
    if sum(map(len, values)) < 2:
        return ()
    own = [" ".join(words[:1] * len(words)) for words in values]
    first = next(words[0] for words in values if words)
    same = [" ".join([first] * len(words)) for words in values]
    return _distinct(((text,),) for text in (form.fill(own), form.fill(same)) if text.strip() != turns[-1].strip())


def _contains_answer(way: Way, form: Form, accepted: set[str]) -> bool:
    texts = [turns[-1] for turns in way]
    return any(_bare(candidate) in accepted for text in texts for candidate in (text, form.contents(text)[-1]))


def _plain(batch: GoldBatch, index: int) -> list[Attack]:
    """Single-turn answers that are built without the correct answer."""
    form, prompt = batch.form(index), prompt_text(batch.problems[index]).strip()
    last_line = prompt.splitlines()[-1] if prompt else ""
    common = batch.most_common_gold(index)
    half = "".join(form.pieces[: (form.slots + 1) // 2])
    return [
        _one(EMPTY, "silence", ""),
        _one("blank", "silence", " \n\t\n", "\x00"),
        _one("form only", "form", form.fill(""), form.fill(FILLER), half),
        _one("form only, endless", "endless", form.fill(FILLER) * REPEATS, "\n".join([form.fill("")] * REPEATS)),
        _one("one word, endless", "endless", "wait " * REPEATS, form.fill("wait " * REPEATS)),
        _one("refusal", "silence", REFUSAL, form.fill(REFUSAL)),
        _one("prompt", "prompt", prompt, last_line, lucky=True),
        _one("prompt in the form", "prompt", form.fill(prompt), form.fill(last_line), lucky=True),
        _one("not a number", "wrong", *map(form.fill, NOT_NUMBERS), *NOT_NUMBERS),
        _one("zeros", "guess", form.fill("0"), "0", lucky=True),
        *([Attack("commonest answer", "guess", ((common,),), lucky=True)] if common else []),
    ]


def _one(name: str, family: str, *texts: str, lucky: bool = False) -> Attack:
    return Attack(name, family, tuple(((text,),) for text in dict.fromkeys(texts)), lucky)


def _lists(batch: GoldBatch, index: int, wrong: Sequence[Turns]) -> list[Attack]:
    """Lists with the correct answer at the first, the middle and the last position."""
    form, gold = batch.form(index), batch.golds[index]
    listed: list[Attack] = []
    if wrong:
        orders = [[turns[-1] for turns in order] for order in _positions(gold, wrong)]
        contents = [[form.contents(text) for text in order] for order in orders]
        pairs = [order[:2] for order in _positions(form.contents(gold[-1])[-1], [form.contents(wrong[0][-1])[-1]])[1:]]
        joined = [tuple((form.fill(_joined(order, join)),) for order in contents) for join in _JOINS]
        bare = [tuple((join([c[-1] for c in order]),) for order in contents) for join in _JOINS]
        filler = [FILLER] * (form.slots - 1)
        noted = [tuple((form.fill([*filler, note.format(*pair)]),) for pair in pairs) for note in NOTATIONS]
        each_formed = [tuple((join(order),) for order in orders) for join in _JOINS]
        listed = [
            Attack("every answer in one form", "list", _distinct(joined)),
            Attack("every answer without the form", "list", _distinct(bare)),
            Attack("every answer in a form of its own", "list", _distinct(each_formed)),
            Attack("two answers in two notations", "list", _distinct(noted)),
        ]
    ranges = [" ".join(numbers) for numbers in (NUMBERS, NUMBERS[::-1])]
    numbers = [tuple((form.fill(text),) for text in ranges), tuple((text,) for text in ranges)]
    return [*listed, Attack("every number to 100", "list", _distinct(numbers))]


def _positions(own: Any, others: Sequence[Any]) -> list[list[Any]]:
    middle = (len(others) + 1) // 2
    return [[*others[:at], own, *others[at:]] for at in (middle, 0, len(others))]


_JOINS: list[Callable[[Sequence[str]], str]] = [
    *(lambda items, s=s: reduce(s.format, items) for s in SEPARATORS),
    *(lambda items, a=a: a.format(", ".join(items)) for a in AROUND),
]


def _joined(order: Sequence[tuple[str, ...]], join: Callable[[Sequence[str]], str]) -> list[str]:
    """Join the contents of each slot."""
    return [join([contents[slot] for contents in order]) for slot in range(len(order[0]))]


def _distinct(ways: Iterable[Way]) -> tuple[Way, ...]:
    return tuple(dict.fromkeys(ways))


def _calls(batch: GoldBatch, index: int) -> list[Attack]:
    """Episodes with uninformed tool calls."""
    question = prompt_text(batch.problems[index]).strip()
    last_line, form = question.splitlines()[-1] if question else "", batch.form(index)
    queries = [batch.calls(index, argument) for argument in (question, last_line, "")]
    if not queries[0]:
        return []
    every, finals = " ".join(NUMBERS), [form.fill(FILLER), form.fill("")]
    return [
        Attack("calls, endless", "calls", _distinct(((call,) * CALLS,) for calls in queries for call in calls)),
        Attack(
            "calls with the question, then the form",
            "calls",
            _distinct(((*calls, final),) for calls in queries for final in finals),
        ),
        Attack(
            "calls with the question, then every number", "calls", _distinct(((*c, form.fill(every)),) for c in queries)
        ),
    ]
