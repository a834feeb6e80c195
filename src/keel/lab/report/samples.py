"""The completions in a report and on the live page, as HTML."""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from keel.doctor.runs import Record, RunRecord, number
from keel.lab.report.rollouts import (
    K1_SAMPLE,
    RecordedTurn,
    Token,
    as_list,
    brief,
    colour_scale,
    cut_note,
    details_of,
    facts,
    fold_title,
    folded,
    message_text,
    messages_of,
    turns_of,
)

PROBLEMS = 4
PER_PROBLEM = 2
MAX_HTML_BYTES = 3 * 2**20  # bytes of all recorded completions in a report
MAX_LATEST_BYTES = 2**18  # bytes of a step's completions on the live page, which fetches them repeatedly


def legend(kl_max: float, measured: bool = True) -> str:
    """The legend of the colours."""
    if not measured:
        return (
            "<p class='legend kl'><span class='muted'>KL was not measured. Grey: not sampled by the policy, not "
            "trained on.</span></p>"
        )
    return (
        "<p class='legend kl'><span class='ramp'></span>"
        f"<span class='muted'>{K1_SAMPLE}: blue −{kl_max:.2g} · none 0 · orange +{kl_max:.2g} nats per token; "
        "grey: not sampled by the policy, not trained on. "
        "Hover or tap a token for its value.</span></p>"
    )


def prompt(record: Record) -> str:
    """The prompt of the model, and the number of its truncated tokens."""
    messages = messages_of(record)
    lines = [f"{m['role']}: {message_text(m)}" if m.get("role") else message_text(m) for m in messages]
    cut = f"<p class='muted'>{escape(cut_note(record))}</p>" if cut_note(record) else ""
    return f"<pre class='prompt'>{escape(chr(10).join(lines))}</pre>{cut}"


def completion(record: Record, kl_max: float) -> str:
    """One completion with its reward, parts, advantage and stop reason."""
    caption = escape(" · ".join(facts(record)))
    drawing, seen = picture(record), details_of(record)
    judged = f"<pre class='details'>{escape(seen)}</pre>" if seen else ""
    return f"<div class='completion'>{turns(record, kl_max)}{drawing}{judged}<p class='muted'>{caption}</p></div>"


def picture(record: Record) -> str:
    """The task's SVG of an answer as an image, in which a browser runs no scripts and loads nothing."""
    svg = record.get("picture")
    if not isinstance(svg, str) or not svg.lstrip().startswith("<svg"):
        return ""
    return f"<img class='picture' alt='' src='data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}'>"


def turns(record: Record, kl_max: float) -> str:
    """The tokens of a completion: turns have captions, and the middle of a long episode is folded.

    Plain text if tokens and KL do not match.
    """
    taken = turns_of(record)
    if not taken:
        return f"<pre>{escape(str(record.get('completion', '')))}</pre>"
    if not taken[0].caption:
        return f"<pre>{''.join(_spans(taken[0].tokens, kl_max))}</pre>"
    first, middle, last = ("".join(_turn(turn, kl_max) for turn in part) for part in folded(taken))
    fold = f"<details><summary>{fold_title(folded(taken)[1])}</summary><div>{middle}</div></details>" if middle else ""
    return f"<div class='episode'>{first}{fold}{last}</div>"


def _turn(turn: RecordedTurn, kl_max: float) -> str:
    note = f"<pre class='note'>{escape(turn.note)}</pre>" if turn.note else ""
    return (
        f"<div class='turn{'' if turn.sampled else ' heard'}'><p><b>{turn.speaker}</b> {escape(turn.caption)}</p>"
        f"<pre>{''.join(_spans(turn.tokens, kl_max))}</pre>{note}</div>"
    )


def _spans(turn: Sequence[Token], kl_max: float) -> Iterator[str]:
    """One span per token; neighbours without a KL are one span."""
    for measured, stretch in groupby(turn, key=lambda token: token.kl is not None):
        if measured:
            yield from (span(token.text, token.kl, False, kl_max) for token in stretch)
        else:
            unmeasured = list(stretch)
            yield span("".join(token.text for token in unmeasured), None, not unmeasured[0].sampled, kl_max)


def span(token: str, kl: float | None, context: bool, kl_max: float) -> str:
    """One token, with the strength of its colour from 0 to 1 for the style sheet."""
    if kl is None:
        return f"<span class='t x'>{escape(token)}</span>" if context else f"<span class='t'>{escape(token)}</span>"
    strength = min(1.0, abs(kl) / kl_max)
    sign = "p" if kl > 0 else "n"
    return f"<span class='t {sign}' style='--a:{strength:.2f}' title='log-ratio {kl:+.4f} nats'>{escape(token)}</span>"


def pick(rollouts: Sequence[Record]) -> list[tuple[list[Record], list[Record]]]:
    """(first, last) completions of a few problems; those with the most steps in between come first.

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
    """A few problems before and after training, then all recorded completions."""
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
    """Every recorded completion, folded by step, in the order of training.

    Above `limit` bytes, only the first and the last step and evenly spaced ones between them are shown.
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


def latest(run: RunRecord) -> str:
    """The completions of the last step with any; only the first ones if all would exceed `MAX_LATEST_BYTES`."""
    steps = [step for record in run.rollouts if (step := number(record.get("step"))) is not None]
    if not steps:
        return "<p class='muted'>No completions were recorded yet.</p>"
    records = [record for record in run.rollouts if number(record.get("step")) == steps[-1]]
    shown = fitting(records, MAX_LATEST_BYTES)
    more = f"<p class='muted'>{len(records) - len(shown)} more: see keel show.</p>" * (len(shown) < len(records))
    return f"<h4>{escape(run.name)}, step {steps[-1]:g}</h4>{completions(shown)}{more}"


def completions(records: Sequence[Record]) -> str:
    """Completions under their prompts, and a legend of the colours."""
    kl_max = colour_scale(records)
    return legend(kl_max, any(as_list(record.get("kl")) for record in records)) + _problems(records, kl_max)


def fitting(records: Sequence[Record], limit: int) -> list[Record]:
    """The first records with at most `limit` bytes of HTML in total, at least one."""
    kl_max, size = colour_scale(records), 0
    for count, record in enumerate(records):
        size += len(completion(record, kl_max).encode("utf-8", "replace"))
        if count and size > limit:
            return list(records[:count])
    return list(records)


def _spread(steps: Sequence[float]) -> Iterator[float]:
    """The first, the last, the middle, then the middles between those, so that any prefix covers the run evenly."""
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
