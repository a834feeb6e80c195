"""The completions that a report and the live page show, as HTML."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from keel.doctor.runs import Record, RunRecord, number
from keel.lab.report.episode import completion, legend, prompt
from keel.lab.report.rollouts import as_list, brief, colour_scale

PROBLEMS = 4
PER_PROBLEM = 2
MAX_HTML_BYTES = 3 * 2**20  # of all recorded completions in a report
MAX_LATEST_BYTES = 2**18  # of a step's completions where they are fetched again and again


def pick(rollouts: Sequence[Record]) -> list[tuple[list[Record], list[Record]]]:
    """(first, last) completions of a few problems, the largest distance in steps first.

    If no problem was recorded twice, completions of the first and of the last recorded step.
    """
    by_problem: dict[str, dict[float, list[Record]]] = {}
    for record in rollouts:
        step = number(record.get("step"))
        if step is not None:
            by_problem.setdefault(str(record.get("problem")), {}).setdefault(step, []).append(record)
    twice = [steps for steps in by_problem.values() if len(steps) > 1]
    twice.sort(key=lambda steps: min(steps) - max(steps))
    if twice:
        return [(steps[min(steps)][:PER_PROBLEM], steps[max(steps)][:PER_PROBLEM]) for steps in twice[:PROBLEMS]]
    groups = [records for steps in by_problem.values() for records in steps.values()]
    groups.sort(key=lambda records: number(records[0].get("step")) or 0.0)
    if not groups:
        return []
    first = [records for records in groups if records[0]["step"] == groups[0][0]["step"]]
    last = [records for records in groups if records[0]["step"] == groups[-1][0]["step"]]
    if first == last:
        return [(records[:PER_PROBLEM], []) for records in first[:PROBLEMS]]
    return [(before[:PER_PROBLEM], after[:PER_PROBLEM]) for before, after in zip(first[:PROBLEMS], last, strict=False)]


def section(run: RunRecord) -> str:
    """A few problems before and after, then all that was recorded."""
    return before_and_after(run) + all_completions(run)


def before_and_after(run: RunRecord) -> str:
    """The samples of one run as HTML."""
    pairs = pick(run.rollouts)
    if not pairs:
        return "<p class='muted'>No completions were recorded.</p>"
    shown = [record for pair in pairs for side in pair for record in side]
    kl_max = colour_scale(shown)
    parts = [legend(kl_max, any(as_list(record.get("kl")) for record in shown))]
    for before, after in pairs:
        same = bool(after) and before[0].get("problem") == after[0].get("problem")
        if same or not after:
            parts.append(f"<div class='problem'>{prompt(before[0])}<div class='pair'>")
        else:
            parts.append("<div class='problem'><div class='pair'>")
        for side in (before, after):
            if side:
                side_prompt = "" if same or not after else prompt(side[0])
                cards = "".join(completion(record, kl_max) for record in side)
                parts.append(f"<div><h4>Step {escape(str(side[0].get('step')))}</h4>{side_prompt}{cards}</div>")
        parts.append("</div></div>")
    return "".join(parts)


def all_completions(run: RunRecord, limit: int = MAX_HTML_BYTES) -> str:
    """Every recorded completion, folded step by step, in the order of training.

    Where all would be more than `limit` bytes, the first step, the last and those evenly between them are shown.
    """
    by_step: dict[float, list[Record]] = {}
    for record in run.rollouts:
        step = number(record.get("step"))
        if step is not None:
            by_step.setdefault(step, []).append(record)
    kl_max, size = colour_scale(run.rollouts), 0
    html: dict[float, str] = {}
    for step in _spread(sorted(by_step)):
        page = _step_html(step, by_step[step], kl_max)
        size += len(page.encode("utf-8", "replace"))
        if html and size > limit:
            break
        html[step] = page
    if not html:
        return ""
    left_out = len(by_step) - len(html)
    total = f" of {len(by_step)} recorded; keel show RUN --step N prints the others" if left_out else ""
    heading = f"All recorded completions, {len(html)} step{'s' * (len(html) > 1)}{total}"
    return f"<h3>{heading}</h3>{''.join(html[step] for step in sorted(html))}"


def latest(run: RunRecord, limit: int = MAX_LATEST_BYTES) -> str:
    """The completions of the last step that has some; the first ones where all would be more than `limit` bytes."""
    steps = [step for record in run.rollouts if (step := number(record.get("step"))) is not None]
    if not steps:
        return "<p class='muted'>No completions were recorded yet.</p>"
    records = [record for record in run.rollouts if number(record.get("step")) == steps[-1]]
    shown = fitting(records, limit)
    more = f"<p class='muted'>{len(records) - len(shown)} more: see keel show.</p>" * (len(shown) < len(records))
    return f"<h4>{escape(run.name)}, step {steps[-1]:g}</h4>{completions(shown)}{more}"


def completions(records: Sequence[Record]) -> str:
    """Completions under their prompts, and a legend of the colours."""
    kl_max = colour_scale(records)
    return legend(kl_max, any(as_list(record.get("kl")) for record in records)) + _problems(records, kl_max)


def fitting(records: Sequence[Record], limit: int) -> list[Record]:
    """As many of the first records as have no more than `limit` bytes of HTML, and one at least."""
    kl_max, size = colour_scale(records), 0
    for count, record in enumerate(records):
        size += len(completion(record, kl_max).encode("utf-8", "replace"))
        if count and size > limit:
            return list(records[:count])
    return list(records)


def _spread(steps: Sequence[float]) -> Iterator[float]:
    """The first, the last, the middle, then the middles between those: any first part of them covers the run evenly."""
    spans = deque([(0, len(steps) - 1)])
    yield from dict.fromkeys([*steps[:1], *steps[-1:]])
    while spans:
        low, high = spans.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield steps[middle]
            spans += [(low, middle), (middle, high)]


def _step_html(step: float, records: Sequence[Record], kl_max: float) -> str:
    """One step: each problem's prompt, and its completions under it."""
    rewards = [value for record in records if (value := number(record.get("reward"))) is not None]
    reward_note = f", mean reward {brief(sum(rewards) / len(rewards))}" if rewards else ""
    count = f"{len(records)} completion{'s' * (len(records) > 1)}"
    heading = f"Step {step:g}: {count}{reward_note}"
    return f"<details><summary>{heading}</summary><div>{_problems(records, kl_max)}</div></details>"


def _problems(records: Sequence[Record], kl_max: float) -> str:
    parts = []
    for _, group in groupby(records, key=lambda record: (str(record.get("problem")), bool(record.get("tracked")))):
        of_problem = list(group)
        cards = "".join(completion(record, kl_max) for record in of_problem)
        held_out = "<small>held out</small>" if of_problem[0].get("tracked") else ""
        parts.append(f"<div class='problem'>{held_out}{prompt(of_problem[0])}<div class='pair'>{cards}</div></div>")
    return "".join(parts)
