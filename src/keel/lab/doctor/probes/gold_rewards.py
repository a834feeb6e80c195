"""Gold answers, judged without a model: do they earn what a right answer should, and if not, what would?"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean

from keel.base.errors import KeelError
from keel.base.thresholds import Thresholds
from keel.base.types import Problem
from keel.envs import Task
from keel.envs.answers import last_number, last_tag
from keel.envs.attacks import LESSONS, Attack, Batch, Turns
from keel.envs.exploits import Payoff, payoffs
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import LOOKS, SAME, chance_above, leave_undecided, level
from keel.lab.doctor.probes.replies import answers
from keel.lab.doctor.setup import ProbeSetup

MOST, MOST_EPISODES, MOST_REMOTE = 64, 16, 2  # problems whose gold answers are judged
FEWEST = 4
COMPARED = 6  # problems on which wrong answers are judged too, each with so many of them beside an empty one
WRONG = 2
SECONDS = 2.0  # after which no further problem is judged, nor attacked
EXPLAINED = 8  # problems on which explanations are tried; the first of them choose
CHOOSING = 2
ATTACKS, FEW_ATTACKS = 70, 20  # judgements that the attacks on a problem take, about; where few may be asked for
MOST_ATTACKED = 16  # problems a look; luck is ruled out on as many
HOPELESS = 3  # problems on which no other row's answer earns
TRIFLE = 0.01  # of a reward's size, within which texts earn the same for all that is said of them
ROWS = 32  # other problems' gold answers that are tried in place of a problem's own
FORMS = {  # what a reward may want around an answer
    "{}": "as it is",
    "\\boxed{{{}}}": "\\boxed{…}",
    "$\\boxed{{{}}}$": "$\\boxed{…}$",
    "<answer>{}</answer>": "<answer>…</answer>",
    "<answer> {} </answer>": "<answer> … </answer>",
    "<think></think><answer>{}</answer>": "<think>…</think><answer>…</answer>",
    "<think>\n\n</think>\n<answer>\n{}\n</answer>": "<think>…</think> and <answer>…</answer> on lines of their own",
    "<think>\n\n</think>\n\n{}": "<think>…</think> before it",
    "#### {}": "#### …",
    "The answer is {}": "The answer is …",
    "The answer is {}.": "The answer is ….",
    "The final answer is {}": "The final answer is …",
    "Answer: {}": "Answer: …",
    "Final answer: {}": "Final answer: …",
    "**{}**": "**…**",
    "`{}`": "`…`",
    "({})": "(…)",
    "{}.": "a full stop after it",
    " {}": "a space before it",
    "{}\n": "a new line after it",
    '{{"answer": "{}"}}': '{"answer": "…"}',
}


@dataclass(frozen=True)
class JudgedGold:
    """What a problem's gold turns earn, what an empty answer does, and what other problems' gold answers do there."""

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
        """Whether most wrong answers earn more."""
        return sum(total > self.gold + SAME for total in self.others) > len(self.others) / 2

    @property
    def top(self) -> float:
        return max(self.empty, *self.others) if self.others else self.empty


def judged_golds(setup: ProbeSetup) -> list[JudgedGold]:
    """The gold answers of many problems under the configured rewards, the first beside wrong ones of the same form.

    The others are compared with what those earn, and only where they are no better with wrong ones of their own. It
    ends after three times as many where all of them earn, or none does. Parts are summed, whatever `reward.aggregate`
    says: what is normalised within a group cannot be compared with what another text would earn.

    None where there are no gold answers, where rewards are dealt out at random, or where the gold turns are not fit to
    be shown or do not end their episode.
    """
    task = setup.run.task
    if task.unanswered or setup.config.reward.shuffle is not None or setup.failures:
        return []
    try:
        batch = _batch(setup, task)
    except (KeelError, NotImplementedError):
        return []
    rows: list[JudgedGold] = []
    judgements, began = setup.judgements_left, time.monotonic()
    compared = min(COMPARED, setup.judgements // 20)
    for index, (problem, turns) in enumerate(zip(batch.problems, batch.golds, strict=True)):
        settled = len({_earns(row) for row in rows}) == 1
        if (index >= FEWEST and time.monotonic() - began > SECONDS) or (index >= 3 * compared and settled):
            break
        wrong: list[Turns] = [("",), *batch.neighbours(index)[:WRONG]]
        totals = totals_of(setup, problem, [turns] if index >= compared and rows else [turns, *wrong])
        if len(totals) == 1 and totals[0] > max(row.top for row in rows[:compared]):
            totals += [max(row.empty for row in rows[:compared])]
        elif len(totals) == 1:
            totals += totals_of(setup, problem, wrong)
        if all(map(math.isfinite, totals)):
            rows.append(JudgedGold(problem, turns, totals[0], totals[1], tuple(totals[2:])))
    setup.shared["seconds a judgement"] = (time.monotonic() - began) / max(judgements - setup.judgements_left, 1)
    return rows


def _earns(row: JudgedGold) -> bool:
    """Whether a gold answer earns no less than any other that was judged there, and more than some."""
    rounding = SAME * max(abs(row.gold), abs(row.top))
    return row.gold >= row.top - rounding and row.gold > row.bottom + rounding


def totals_of(setup: ProbeSetup, problem: Problem, episodes: Sequence[Turns]) -> list[float]:
    """The sum of the rewards of each; −∞ where it failed, or where a judge elsewhere may not be asked any more."""
    judge = copy(setup.built.judge)
    judge.options = judge.options.model_copy(update={"aggregate": "sum"})
    asked = episodes[: setup.judgements_left] if judge.remote else episodes
    rewards = (judge.judge(problem, asked) or ()) if asked else ()
    failed = {failure.sample for failure in judge.drain()}
    totals = [-math.inf if i in failed else reward.total for i, reward in enumerate(rewards)]
    return totals + [-math.inf] * (len(episodes) - len(totals))


def _batch(setup: ProbeSetup, task: Task) -> Batch:
    """Problems with their gold turns: those of the batch, then others, each prompt once."""
    most = MOST_REMOTE if setup.built.judge.remote else MOST_EPISODES if task.several_turns else MOST
    problems = {str(group.problem.prompt): group.problem for group in setup.groups[:most]}
    seed = setup.config.run.seed
    for problem in () if len(problems) >= most else task.sample(most, seed=seed, step=1):
        problems.setdefault(str(problem.prompt), problem)
    shown = [(p, tuple(task.gold_turns(p))) for p in [*problems.values()][:most] if task.demonstrates(p)]
    if task.several_turns:
        shown = [(problem, turns) for problem, turns in shown if _ends(task, problem, turns)]
    return Batch(tuple(problem for problem, _ in shown), tuple(turns for _, turns in shown))


def _ends(task: Task, problem: Problem, turns: Turns) -> bool:
    """Whether an episode is over after these turns: gold turns of one that is not are only a part of an answer."""
    return None in answers(task, problem, turns)


def reward_scale(setup: ProbeSetup, judged: Sequence[JudgedGold]) -> float:
    """The range of the rewards that were seen, what a difference is measured by; without gold answers, the largest."""
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    if not judged or setup.config.reward.aggregate != "sum":
        return max(map(abs, totals))
    totals += [total for row in judged for total in (row.gold, row.empty, *row.others)]
    return max(totals) - min(totals)


def solved_at(setup: ProbeSetup, judged: Sequence[JudgedGold]) -> float | None:
    """What a right answer earns, where gold answers earn more than wrong ones do, in a group as well."""
    paid = [row.gold for row in judged if row.gold > row.bottom + SAME]
    return min(paid) if 2 * len(paid) > len(judged) and setup.config.reward.aggregate == "sum" else None


def gold_findings(setup: ProbeSetup, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Gold answers that earn nothing or less than wrong ones; else, answers that say nothing and earn as much."""
    if not judged:
        return
    totals = [total for row in judged for total in (row.gold, row.empty, *row.others)]
    scale = max(map(abs, totals))
    margin = max(thresholds["reward_spread"] * (max(totals) - min(totals)), SAME * scale, SAME)
    lacking = _lacking(judged, margin, SAME * scale)
    unpaid = [float(row in lacking) for row in judged]
    by_chance = chance_above(unpaid, thresholds["gold_unpaid"]) > level(thresholds)
    if not lacking or (by_chance and fmean(unpaid) < 1):
        yield from (
            [*_one_for_all(setup, judged, thresholds)]
            or [*_exploits(setup, judged, thresholds)]
            or _any_answer(judged, thresholds)
        )
        return
    if _pays_for_anything(judged, scale):
        return  # a reward that never differs: what the groups show
    form = _form(setup, lacking[:EXPLAINED], margin)
    if form is None and _ignores_the_text(setup, judged, scale):
        yield _textless(judged)
        return
    if form is None and (paid := _paid_whatever(lacking, totals, SAME * scale)):
        yield _open(judged, paid)
        return
    found = _explained(setup, judged, lacking, margin, by_chance, form)
    trifles = SAME * scale < max(totals) - min(totals) <= TRIFLE * scale
    # what no text moves is no judgement of answers: whatever makes these differences count is the graver fault
    yield replace(found, severity="warning") if trifles and found.severity == "error" else found


def _lacking(judged: Sequence[JudgedGold], margin: float, rounding: float) -> list[JudgedGold]:
    """Gold answers that earn no more than anything else, or less than a wrong one by more than `margin`.

    Where wrong ones earn more on most problems it need not be by as much: a reward that pays for something else may
    tell texts apart by trifles.
    """
    outranked = sum(row.gold < row.top - rounding for row in judged)
    least = rounding if 2 * outranked > len(judged) else margin
    return [row for row in judged if row.gold <= row.bottom + rounding or row.gold < row.top - least]


def _paid_whatever(lacking: Sequence[JudgedGold], totals: Sequence[float], rounding: float) -> list[JudgedGold]:
    """Problems on which every text earns the most there is to earn; [] unless those are most that are lacking."""
    full = max(totals)
    paid = [row for row in lacking if min(row.gold, row.bottom) >= full - rounding]
    return paid if 2 * len(paid) > len(lacking) and min(totals) < full - rounding else []


def _open(judged: Sequence[JudgedGold], paid: Sequence[JudgedGold]) -> Finding:
    return finding(
        "reward/exploit",
        f"on {len(paid)} of {len(judged)} problems wrong and empty answers earn {paid[0].bottom:.3g}, all that a gold "
        f"answer earns, such as {paid[0].problem.key!r} with the gold answer {paid[0].turns[-1].strip()[-40:]!r}",
        "the reward pays in full where it cannot judge: where it cannot read the gold answer, or finds none",
        "pay nothing, or leave the problem out, where the reward cannot read its own answer",
        severity="error" if len(paid) > len(judged) / 2 else None,
    )


def _one_for_all(setup: ProbeSetup, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """One text that is the gold answer of nearly all problems: saying it always is all there is to learn."""
    counts = Counter(row.turns for row in judged)
    (common, count), total = counts.most_common(1)[0], len(judged)
    if setup.run.task.several_turns or total < 2 * EXPLAINED or count < thresholds["exploit_share"] * total:
        return
    yield finding(
        "reward/exploit",
        f"{count} of {total} different problems have one and the same gold answer, {common[-1][:60]!r}",
        "the answers are those of a single row, a constant or a default, so that one text earns whatever is asked",
        "check the column that the answers are read from; leave most problems with the commonest answer out where the "
        "data are like that",
    )


def _ignores_the_text(setup: ProbeSetup, judged: Sequence[JudgedGold], scale: float) -> bool:
    """Whether every text earns the same on a problem, be it gold, wrong, empty or sampled, and problems differ."""
    answers = [(row.gold, row.empty, *row.others) for row in judged]
    sampled = [tuple(reward.total for reward in group.rewards) for group in setup.groups]
    alike = all(max(totals) - min(totals) <= SAME * scale for totals in (*answers, *sampled))
    return alike and max(row.gold for row in judged) - min(row.gold for row in judged) > SAME * scale


def _textless(judged: Sequence[JudgedGold]) -> Finding:
    low, high = min(row.gold for row in judged), max(row.gold for row in judged)
    return finding(
        "reward/exploit",
        f"on each of {len(judged)} problems gold, wrong, empty and sampled answers all earn the same, and from "
        f"{low:.3g} to {high:.3g} on different problems",
        "the reward judges something that belongs to the problem, such as its prompt, and not the completion",
        "let the reward read the completion's text: keel check-task lists what every attack earns",
        severity="error",
    )


def _pays_for_anything(judged: Sequence[JudgedGold], scale: float) -> bool:
    totals = [total for row in judged for total in (row.gold, row.empty, *row.others)]
    return min(totals) > 0 and max(totals) - min(totals) <= SAME * scale


def _explained(
    setup: ProbeSetup,
    judged: Sequence[JudgedGold],
    lacking: Sequence[JudgedGold],
    margin: float,
    by_chance: bool,
    form: tuple[str, str, int] | None,
) -> Finding:
    """The finding with what would have earned: another form, a part of the answer, another row's, the opposite."""
    average = f"gold answers earn {fmean(row.gold for row in lacking):.3g} on average"
    size = f"{len(lacking)} of {len(judged)} gold answers earn no more than wrong or empty ones: {average}"
    reversed_share = fmean(row.is_least for row in lacking)
    completions = [reward.total for group in setup.groups for reward in group.rewards]
    summed = setup.config.reward.aggregate == "sum"
    bare = max(max(row.gold, row.top) for row in lacking)
    earning = summed and max(completions) > bare + margin  # what no answer without the form does
    written = f"; the model's completions earn {fmean(completions):.3g}"
    if form is not None:
        content, name, count = form
        asked = earning or _asked_for(setup, name)
        what = f"{content} {'' if name == FORMS['{}'] else f'in the form {name} '}earns on {count}"
        return finding(
            "reward/gold",
            f"{size}{written}; {what} of {len(lacking[:EXPLAINED])}"
            + ("; prompts ask for that form, or completions have it" if asked else ""),
            "the reward compares a value, and the gold answer is more than that"
            if name == FORMS["{}"]
            else f"the reward reads answers in a form that gold answers do not have: {name}",
            "let task.gold return what the reward reads, and ask for that form in the prompt (data.system_prompt, or "
            "the task's prompt)",
            severity="note" if asked else "warning" if by_chance or len(lacking) < len(judged) / 2 else "error",
        )
    other = None if reversed_share > 0.9 else _other_row(setup, judged, lacking[:EXPLAINED], margin)
    if reversed_share > 0.9:
        cause = "the sign of the reward is reversed, or it pays for a distance: right answers earn least"
    elif other is not None:
        written += f"; {other}"
        cause = "the reward compares with the answer of another problem: answers and problems have been shifted"
    else:
        cause = "the reward does not know its own answers: it compares with something else, or pays for something else"
    return finding(
        "reward/gold",
        size + written,
        cause,
        "check the reward with task.gold(problem), which must earn the most: keel check-task shows what each part pays",
        severity="warning" if by_chance or len(lacking) < len(judged) / 2 else "error",
    )


def _asked_for(setup: ProbeSetup, name: str) -> bool:
    """Whether the prompts show the form that the reward reads: bare answers in the data are then as they should be."""
    form = next(form for form, called in FORMS.items() if called == name)
    marks = [mark for mark in re.split(r"\s+|\{+\}+|[{}$]", form) if len(mark) > 2]
    decode = setup.policy.tokenizer.decode
    prompts = [decode(list(group.prompt_tokens)) for group in setup.groups]
    return bool(marks) and all(mark in prompt for prompt in prompts for mark in marks)


def _form(setup: ProbeSetup, lacking: Sequence[JudgedGold], margin: float) -> tuple[str, str, int] | None:
    """A part of the gold answer in a form that earns on most of these problems, and another answer in it does not."""
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
    """What of a gold answer may be compared: all of it, its parts, the problem's own answer."""
    gold, answer = row.turns[-1].strip(), row.problem.answer
    answers = answer if isinstance(answer, list | tuple) else [answer]
    behind = re.split(r"####|[Aa]nswer(?: is|:)", gold)[-1].strip(" .\n*")
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", gold)
    candidates = {
        "the gold answer": gold,
        "the gold answer's last number": last_number(gold) or "",
        "what follows its mark": behind,
        "what its tag holds": (last_tag(gold) or "").strip(),
        "what its box holds": boxed[-1] if boxed else "",
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


def _earned(setup: ProbeSetup, row: JudgedGold, texts: Sequence[str]) -> list[float]:
    """What these last turns earn after the gold answer's first ones."""
    return totals_of(setup, row.problem, [(*row.turns[:-1], text) for text in texts])


def _other_row(
    setup: ProbeSetup, judged: Sequence[JudgedGold], lacking: Sequence[JudgedGold], margin: float
) -> str | None:
    """Gold answers of other problems that earn in place of a problem's own, as text; None where most have none."""
    turns = [row.turns for row in judged[:ROWS]]
    matches, offsets = 0, list[int]()
    for number, row in enumerate(lacking):
        if number == HOPELESS and not matches:
            return None
        earned = _earned(setup, row, [gold[-1] for gold in turns])
        better = [i for i, total in enumerate(earned) if total > row.gold + margin]
        best = [i for i in better if earned[i] >= max(earned) - SAME]
        matches += bool(best)
        offsets += [i - judged.index(row) for i in best]
    if 2 * matches <= len(lacking):
        return None
    shift = max(set(offsets), key=offsets.count)
    steady = (
        f", {abs(shift)} {'after' if shift > 0 else 'before'} it in the batch"
        if offsets.count(shift) > matches / 2
        else ""
    )
    return f"on {matches} of {len(lacking)} problems another problem's gold answer{steady} earns more than its own"


def _exploits(setup: ProbeSetup, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Attacks that earn nearly what a gold answer does, on average and on nearly all problems; the best first."""
    if setup.built.judge.remote or setup.failures:
        return
    silent = [float(row.empty >= row.gold - SAME * max(abs(row.gold), SAME)) for row in judged]
    if _nearly_all(silent, thresholds):
        yield _paid("an empty answer", "silence", silent, "", thresholds)
        return
    rows = []
    for entries in _attacked(setup, thresholds).values():
        values = _as_good(entries, thresholds)
        earned = fmean(min(payoff.share, 1.0) for _, payoff in entries)
        if earned >= thresholds["exploit_share"] and _nearly_all(values, thresholds):
            rows.append((fmean(values), fmean(payoff.share for _, payoff in entries), values, *entries[0]))
    if rows:
        _, share, values, attack, payoff = max(rows, key=lambda row: row[:2])
        example = f" ({payoff.text[:60]!r}, {share:.2f} times the gold answer's reward on average)"
        yield _paid(f"the attack {attack.name!r}", attack.family, values, example, thresholds)


def _any_answer(judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Other problems' gold answers, none of them this one's, that all earn what it does, on nearly all problems."""
    compared = [row for row in judged if row.others and row.gold > row.empty]
    if len(compared) < len(judged):  # those with nothing to compare were better than others before them
        return
    paid = [
        float(min(row.others) - row.empty >= thresholds["exploit_share"] * (row.gold - row.empty)) for row in compared
    ]
    if compared and _nearly_all(paid, thresholds):
        found = _paid("the gold answer of any other problem", "wrong", paid, "", thresholds)
        yield replace(found, severity="warning", advice=f"{found.advice}; nothing, where any of them is right")


def _attacked(setup: ProbeSetup, thresholds: Thresholds) -> dict[str, list[tuple[Attack, Payoff]]]:
    """What each attack earns, by its name: on one problem all, on further ones those that luck may still explain."""
    entries: dict[str, list[tuple[Attack, Payoff]]] = {}
    count = _affordable(setup)
    if not count:
        leave_undecided(setup, "reward/exploit", "judging takes too long for attacks on the reward")
    requests = None if setup.judgements >= 2 * ATTACKS else FEW_ATTACKS

    def open_names() -> set[str]:
        shares = {name: _as_good(row, thresholds) for name, row in entries.items()}
        return {name for name, values in shares.items() if _may_pay(values) and not _nearly_all(values, thresholds)}

    def wanted(attack: Attack) -> bool:
        return not entries or attack.name in open_names()

    for look in range(LOOKS if count else 0):
        seed = setup.config.run.seed + look
        for tried in payoffs(setup.run.task, setup.built.judge, count, seed, None, wanted=wanted, requests=requests):
            for attack, payoff in tried:
                if payoff.failure is None and not attack.is_gold:
                    entries.setdefault(attack.name, []).append((attack, payoff))
            if entries and not open_names():
                return entries
    return entries


def _may_pay(values: Sequence[float]) -> bool:
    """Whether an attack may still turn out to pay on nearly all problems: it paid on the first, and failed on few."""
    misses = len(values) - sum(values)
    return misses == 0 or (len(values) > 1 and misses <= max(1.0, len(values) / 10))


def _as_good(entries: Sequence[tuple[Attack, Payoff]], thresholds: Thresholds) -> list[float]:
    """Whether an attack earns about what the gold answer does, problem by problem."""
    return [float(payoff.share >= thresholds["exploit_share"]) for _, payoff in entries]


def _affordable(setup: ProbeSetup) -> int:
    """How many problems are attacked at once: enough to tell from luck; none where the first would take too long."""
    each = ATTACKS * setup.shared.get("seconds a judgement", 0.0)
    return MOST_ATTACKED if each < 4 * SECONDS else 0


def _nearly_all(values: Sequence[float], thresholds: Thresholds) -> bool:
    """Whether so many problems pay that luck is ruled out: an answer that is one of two operands is right by half."""
    by_chance = chance_above(values, thresholds["exploit_luck"]) > level(thresholds)
    return fmean(values) >= thresholds["exploit_share"] and not by_chance


def _paid(what: str, family: str, values: Sequence[float], example: str, thresholds: Thresholds) -> Finding:
    return finding(
        "reward/exploit",
        f"{what}{example} earns {thresholds['exploit_share']:g} of a gold answer's reward or more on "
        f"{sum(values):.0f} of {len(values)} problems",
        f"the reward pays for something else than the answer: a policy learns {LESSONS[family].partition(':')[0]}",
        f"{LESSONS[family].partition(':')[2].strip()}; keel check-task lists what every attack earns",
    )
