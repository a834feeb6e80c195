"""Compare rewards of gold answers with those of wrong ones, and find the format that earns more. No model is used."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean

from keel.base.errors import KeelError
from keel.base.types import Problem, RewardFailure
from keel.doctor.evidence import SAME, chance_above, level
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import OutOfPlays, answers, played_again
from keel.doctor.thresholds import Thresholds
from keel.envs import Task
from keel.envs.answers import last_number, last_tag
from keel.envs.attacks import GoldBatch, Turns

# problems whose gold answers are judged: in general, with episodes, with a remote judge
MOST, MOST_EPISODES, MOST_REMOTE = 64, 16, 2
FEWEST = 4
COMPARED = 6  # problems on which wrong answers are judged too: an empty one and WRONG others
WRONG = 2
SECONDS = 2.0  # seconds after which no further problem is judged or attacked


@dataclass(frozen=True)
class JudgedGold:
    """The rewards of a problem's gold turns, of an empty answer, and of other problems' gold answers."""

    problem: Problem
    turns: Turns
    gold: float
    empty: float
    others: tuple[float, ...]

    @property
    def bottom(self) -> float:
        return min(self.empty, *self.others) if self.others else self.empty

    @property
    def is_least(self) -> bool:
        """Whether most wrong answers earn more than the gold one."""
        return sum(total > self.gold + SAME for total in self.others) > len(self.others) / 2

    @property
    def top(self) -> float:
        return max(self.empty, *self.others) if self.others else self.empty


def judged_golds(setup: KeelSubject) -> list[JudgedGold]:
    """Judge the gold answers of many problems; for the first ones also wrong answers of the same format.

    Later gold answers are compared with these wrong answers first, and with their own only if they earn no more.
    Judging stops after three times as many problems if all gold answers earn, or none does. Reward parts are summed,
    whatever `reward.aggregate` says, since rewards normalised within a group cannot be compared with those of other
    texts.

    Empty if there are no gold answers, if rewards failed or are shuffled, or if gold turns are not usable for SFT or do
    not end their episode.
    """
    task = setup.run.task
    if task.prompts_only or setup.config.reward.shuffle is not None or setup.failures:
        return []
    try:
        batch = _batch(setup, task)
    except (KeelError, NotImplementedError):
        return []
    rows: list[JudgedGold] = []
    judgements, began = setup.judgements_left, time.monotonic()
    compared = min(COMPARED, setup.budget.judgements // 20)
    for index, (problem, turns) in enumerate(zip(batch.problems, batch.golds, strict=True)):
        settled = len({_earns(row) for row in rows}) == 1
        if (index >= FEWEST and time.monotonic() - began > SECONDS) or (index >= 3 * compared and settled):
            break
        wrong: list[Turns] = [("",), *batch.neighbours(index)[:WRONG]]
        totals, failures = _judged(setup, problem, [turns] if index >= compared and rows else [turns, *wrong])
        setup.shared.setdefault("failed golds", []).extend(
            failure for failure in failures if failure.sample == 0 and failure.kind == "invalid"
        )
        if len(totals) == 1 and totals[0] > max(row.top for row in rows[:compared]):
            totals += [max(row.empty for row in rows[:compared])]
        elif len(totals) == 1:
            totals += totals_of(setup, problem, wrong)
        if all(map(math.isfinite, totals)):
            rows.append(JudgedGold(problem, turns, totals[0], totals[1], tuple(totals[2:])))
    setup.shared["seconds a judgement"] = (time.monotonic() - began) / max(judgements - setup.judgements_left, 1)
    return rows


def _earns(row: JudgedGold) -> bool:
    """Whether a gold answer earns the highest reward on its problem, and not all answers earn it."""
    rounding = SAME * max(abs(row.gold), abs(row.top))
    return row.gold >= row.top - rounding and row.gold > row.bottom + rounding


def totals_of(setup: KeelSubject, problem: Problem, episodes: Sequence[Turns]) -> list[float]:
    """The total reward of each episode; −∞ if it failed or if the budget of a remote judge is used up."""
    return _judged(setup, problem, episodes)[0]


def _judged(setup: KeelSubject, problem: Problem, episodes: Sequence[Turns]) -> tuple[list[float], list[RewardFailure]]:
    judge = copy(setup.built.judge)
    judge.options = judge.options.model_copy(update={"aggregate": "sum"})
    asked = episodes[: setup.judgements_left] if judge.remote else episodes
    rewards = (judge.judge(problem, asked) or ()) if asked else ()
    failures = [*judge.drain()]
    failed = {failure.sample for failure in failures}
    totals = [-math.inf if i in failed else reward.total for i, reward in enumerate(rewards)]
    return totals + [-math.inf] * (len(episodes) - len(totals)), failures


def _batch(setup: KeelSubject, task: Task) -> GoldBatch:
    """Problems with gold turns: the batch's, then further ones with distinct prompts."""
    most = MOST_REMOTE if setup.built.judge.remote else MOST_EPISODES if task.multi_turn else MOST
    problems = {str(group.problem.prompt): group.problem for group in setup.groups[:most]}
    seed = setup.config.run.seed
    for problem in () if len(problems) >= most else task.sample(most, seed=seed, step=1):
        problems.setdefault(str(problem.prompt), problem)
    shown = [(p, tuple(task.gold_turns(p))) for p in [*problems.values()][:most] if task.usable_for_sft(p)]
    if task.multi_turn:
        shown = [(problem, turns) for problem, turns in shown if _ends(task, problem, turns)]
    return GoldBatch(tuple(problem for problem, _ in shown), tuple(turns for _, turns in shown))


def _ends(task: Task, problem: Problem, turns: Turns) -> bool:
    """Whether these gold turns end the episode. Otherwise they are only part of an answer."""
    return None in answers(task, problem, turns)


def reward_scale(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float:
    """The range of all observed rewards, as the scale of differences; without gold answers, the largest magnitude."""
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    if not judged or setup.config.reward.aggregate != "sum":
        return max(map(abs, totals))
    totals += [total for row in judged for total in (row.gold, row.empty, *row.others)]
    return max(totals) - min(totals)


def solved_at(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float | None:
    """The least reward of a right answer; None if most gold answers earn too little, or rewards are not summed."""
    paid = [row.gold for row in judged if row.gold > row.bottom + SAME]
    return min(paid) if 2 * len(paid) > len(judged) and setup.config.reward.aggregate == "sum" else None


# ------------------------------------------------------------------------ gold answers that earn too little

EXPLAINED = 8  # problems on which explanations are tested; the first two select one
CHOOSING = 2
TRIFLE = 0.01  # rewards that differ by a smaller share of their scale count as almost equal
FORMS = {  # formats that a reward may expect around an answer
    "{}": "as it is",
    "\\boxed{{{}}}": "\\boxed{…}",
    "<answer>{}</answer>": "<answer>…</answer>",
    "<think></think><answer>{}</answer>": "<think>…</think><answer>…</answer>",
    "<think>\n\n</think>\n<answer>\n{}\n</answer>": "<think>…</think> and <answer>…</answer> on lines of their own",
    "#### {}": "#### …",
    "The answer is {}": "The answer is …",
    "Answer: {}": "Answer: …",
    "**{}**": "**…**",
    "{}.": "a full stop after it",
    '{{"answer": "{}"}}': '{"answer": "…"}',
}


def unpaid_golds(judged: Sequence[JudgedGold], thresholds: Thresholds) -> list[JudgedGold]:
    """Gold answers that earn nothing or less than wrong ones; [] if chance explains how few they are."""
    if not judged:
        return []
    lacking = _lacking(judged, *_margins(judged, thresholds))
    return [] if _by_chance(judged, lacking, thresholds) and len(lacking) < len(judged) else lacking


def _margins(judged: Sequence[JudgedGold], thresholds: Thresholds) -> tuple[float, float]:
    """The least difference of rewards that counts, and the largest one that is rounding."""
    totals = [total for row in judged for total in (row.gold, row.empty, *row.others)]
    rounding = SAME * max(map(abs, totals))
    return max(thresholds["reward_spread"] * (max(totals) - min(totals)), rounding, SAME), rounding


def _by_chance(judged: Sequence[JudgedGold], lacking: Sequence[JudgedGold], thresholds: Thresholds) -> bool:
    unpaid = [float(row in lacking) for row in judged]
    return chance_above(unpaid, thresholds["gold_unpaid"]) > level(thresholds)


def gold_findings(setup: KeelSubject, judged: Sequence[JudgedGold], lacking: Sequence[JudgedGold]) -> Iterator[Finding]:
    """The finding for the gold answers of `unpaid_golds`."""
    totals = [total for row in judged for total in (row.gold, row.empty, *row.others)]
    scale, (margin, rounding) = max(map(abs, totals)), _margins(judged, setup.thresholds)
    if over := _over_before(setup, lacking):
        yield _unheard(over, judged)
        return
    if min(totals) > 0 and max(totals) - min(totals) <= rounding:
        return  # reported as groups without spread
    form = _form(setup, lacking[:EXPLAINED], margin)
    if form is None and (paid := _whatever_is_said(lacking, totals, rounding)):
        yield _textless(judged, paid)
        return
    found = _explained(setup, judged, lacking, margin, _by_chance(judged, lacking, setup.thresholds), form)
    trifles = rounding < max(totals) - min(totals) <= TRIFLE * scale
    # such small differences matter only if advantages amplify them, which is a finding too
    yield replace(found, severity="warning") if trifles and found.severity == "error" else found


def _over_before(setup: KeelSubject, lacking: Sequence[JudgedGold]) -> list[JudgedGold]:
    """Episodes that end before their last gold turn, if most do. The reward then has no answer to judge."""
    task, over = setup.run.task, list[JudgedGold]()
    if not task.multi_turn:
        return over
    for row in lacking[:EXPLAINED]:
        with suppress(OutOfPlays), played_again(setup, row.problem, row.turns) as (_, replies):
            over += [row] if len(replies) < len(row.turns) else []
    return over if 2 * len(over) > len(lacking[:EXPLAINED]) else []


def _unheard(over: Sequence[JudgedGold], judged: Sequence[JudgedGold]) -> Finding:
    return finding(
        "answer/unusable",
        f"of {len(judged)} judged episodes of gold answers, {len(over)} earn nothing and end before the last of their "
        f"{len(over[0].turns)} turns",
        "the environment ends episodes before an answer can be given: a simulated user stops, a budget of turns or "
        "time is too small, or a call is taken for the end",
        "let Episode.step return None only after the answer",
        severity="error",
    )


def _lacking(judged: Sequence[JudgedGold], margin: float, rounding: float) -> list[JudgedGold]:
    """Gold answers that earn no more than the lowest reward, or less than a wrong one by more than `margin`.

    If wrong answers earn more on most problems, any difference counts, because such a reward may have tiny differences.
    """
    outranked = sum(row.gold < row.top - rounding for row in judged)
    least = rounding if 2 * outranked > len(judged) else margin
    return [row for row in judged if row.gold <= row.bottom + rounding or row.gold < row.top - least]


def _whatever_is_said(lacking: Sequence[JudgedGold], totals: Sequence[float], rounding: float) -> list[JudgedGold]:
    """Problems on which all texts earn the same nonzero reward; [] unless most of `lacking` are such problems."""
    paid = [row for row in lacking if row.top - row.bottom <= rounding and abs(row.gold - row.top) <= rounding]
    some = max(totals) - min(totals) > rounding and max((row.gold for row in paid), default=0.0) > 0
    return paid if some and 2 * len(paid) > len(lacking) else []


def _textless(judged: Sequence[JudgedGold], paid: Sequence[JudgedGold]) -> Finding:
    low, high = min(row.gold for row in paid), max(row.gold for row in paid)
    return finding(
        "reward/exploit",
        f"on {len(paid)} of {len(judged)} problems gold, wrong and empty answers earn the same reward ({low:.3g} to "
        f"{high:.3g}), such as problem {paid[0].problem.key!r} with the gold answer "
        f"{paid[0].turns[-1].strip()[-40:]!r}",
        "the reward pays although it cannot judge (perhaps it cannot parse the gold answer), or it judges a part of "
        "the problem, such as the prompt",
        "let the reward judge the completion's text, and pay nothing if it cannot parse the gold answer",
        severity="error" if len(paid) > len(judged) / 2 else None,
    )


def _explained(
    setup: KeelSubject,
    judged: Sequence[JudgedGold],
    lacking: Sequence[JudgedGold],
    margin: float,
    by_chance: bool,
    form: tuple[str, str, int] | None,
) -> Finding:
    """The finding, with an explanation if there is one: another format, a part of the answer, or a reversed sign."""
    average = f"gold answers earn {fmean(row.gold for row in lacking):.3g} on average"
    size = f"{len(lacking)} of {len(judged)} gold answers earn no more than wrong or empty ones: {average}"
    completions = [reward.total for group in setup.groups for reward in group.rewards]
    summed = setup.config.reward.aggregate == "sum"
    bare = max(max(row.gold, row.top) for row in lacking)
    earning = summed and max(completions) > bare + margin  # no answer without the format earns as much
    written = f"; the model's completions earn {fmean(completions):.3g}"
    if form is not None:
        content, name, count = form
        asked = earning or _asked_for(setup, name)
        what = f"{content} {'' if name == FORMS['{}'] else f'in the form {name} '}earns a reward on {count}"
        return finding(
            "reward/gold",
            f"{size}{written}; {what} of {len(lacking[:EXPLAINED])}"
            + ("; the prompts request this format, or completions have it" if asked else ""),
            "the reward compares a value, but the gold answer contains more than the value"
            if name == FORMS["{}"]
            else f"the reward expects a format that gold answers do not have: {name}",
            "let task.gold return the format that the reward expects, and request it in the prompt "
            "(data.system_prompt, or the task's prompt)",
            severity="note" if asked else "warning" if by_chance or len(lacking) < len(judged) / 2 else "error",
        )
    return finding(
        "reward/gold",
        size + written,
        "the sign of the reward is reversed, or the reward is a distance: correct answers earn least"
        if fmean(row.is_least for row in lacking) > 0.9
        else "the reward does not accept the gold answers: it compares with something else, such as another problem's "
        "answer, or pays for something else",
        "check the reward with task.gold(problem), which must earn the most; keel check-task shows the reward of each "
        "part",
        severity="warning" if by_chance or len(lacking) < len(judged) / 2 else "error",
    )


def _asked_for(setup: KeelSubject, name: str) -> bool:
    """Whether the prompts show the format that the reward reads, so that gold answers in the data need not have it."""
    form = next(form for form, called in FORMS.items() if called == name)
    marks = [mark for mark in re.split(r"\s+|\{+\}+|[{}$]", form) if len(mark) > 2]
    decode = setup.policy.tokenizer.decode
    prompts = [decode(list(group.prompt_tokens)) for group in setup.groups]
    return bool(marks) and all(mark in prompt for prompt in prompts for mark in marks)


def _form(setup: KeelSubject, lacking: Sequence[JudgedGold], margin: float) -> tuple[str, str, int] | None:
    """A part of the gold answer and a format that earn on most of these problems, and more than with wrong answers."""
    pairs: list[tuple[str, str]] = []
    for row in lacking[:CHOOSING]:
        first = row is lacking[0]
        names = [(content, form) for content in _contents(row) for form in FORMS] if first else pairs
        texts = [_filled(row, content, form) for content, form in names]
        earning = [
            pair for pair, earned in zip(names, _earned(setup, row, texts), strict=True) if earned > row.top + margin
        ]
        pairs = earning if first else earning or pairs
    for content, form in pairs:
        rights = [_earned(setup, row, [_filled(row, content, form)])[0] for row in lacking]
        wrongs = [
            _earned(setup, row, [_filled(other, content, form)])[0]
            for row, other in zip(lacking, [*lacking[1:], lacking[0]], strict=True)
        ]
        count = sum(right > row.top + margin for row, right in zip(lacking, rights, strict=True))
        better = sum(right > wrong + margin for right, wrong in zip(rights, wrongs, strict=True))
        if 2 * count > len(lacking) and (better or len({row.turns for row in lacking}) < 2):
            return content, FORMS[form], count
    return None


def _contents(row: JudgedGold) -> dict[str, str]:
    """The parts of a gold answer that a reward may compare: all of it, its number, tag or box, problem.answer."""
    gold, answer = row.turns[-1].strip(), row.problem.answer
    answers = answer if isinstance(answer, list | tuple) else [answer]
    behind = re.split(r"####|[Aa]nswer(?: is|:)", gold)[-1].strip(" .\n*")
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", gold)
    candidates = {
        "the gold answer": gold,
        "the gold answer's last number": last_number(gold) or "",
        "the text after its mark": behind,
        "the text in its tag": (last_tag(gold) or "").strip(),
        "the text in its box": boxed[-1] if boxed else "",
        "its last line": gold.splitlines()[-1].strip() if gold else "",
        "problem.answer": str(answers[0]) if answers and answers[0] is not None else "",
        "the gold answer in lower case": gold.lower(),
        "the gold answer in upper case": gold.upper(),
        "the gold answer in title case": gold.title(),
    }
    distinct: dict[str, str] = {}
    for name, text in candidates.items():
        if text and text not in distinct.values():
            distinct[name] = text
    return distinct


def _filled(row: JudgedGold, content: str, form: str) -> str:
    contents = _contents(row)
    return form.format(contents.get(content, contents["the gold answer"]) if contents else "")


def _earned(setup: KeelSubject, row: JudgedGold, texts: Sequence[str]) -> list[float]:
    """The rewards of these last turns after the gold answer's earlier turns."""
    return totals_of(setup, row.problem, [(*row.turns[:-1], text) for text in texts])
