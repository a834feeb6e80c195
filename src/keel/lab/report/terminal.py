"""Print rollouts, evaluations, checks and audits in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from keel.doctor.runs import Record, number
from keel.kl.facts import MEANINGS
from keel.lab.plots.picture import picture
from keel.lab.report.rollouts import (
    K1_SAMPLE,
    RecordedTurn,
    Token,
    colour_scale,
    cut_note,
    details_of,
    facts,
    fold_title,
    folded,
    message_text,
    messages_of,
    tokens_of,
    turns_of,
)
from keel.verify.oracle import Check

_ABOVE, _BELOW, _GROUND = (214, 96, 18), (37, 99, 195), (28, 30, 36)  # orange, blue, and their background
_CONTEXT = Style(dim=True, italic=True)
_MOST_MOVED = 5
_MIN_SHARE = 0.05  # share of the full colour below which a token keeps the terminal's colour
_REPLY_LINES = 12  # lines of a reply that are shown without --full
# Control characters except tabs and line ends, marks that reverse the direction of text, lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def show_rollouts(
    run: str, step: int, records: Sequence[Record], console: Console, *, recorded: int, full: bool = False
) -> None:
    """Print completions under their prompts; `recorded` is the number of recorded completions of this step.

    The middle of long episodes and the ends of long replies are left out unless `full`. Control characters are
    printed as escapes.
    """
    records = [_printable(record) for record in records]
    kl_max = colour_scale(records)
    count = f"{len(records)} of {recorded} recorded" if len(records) < recorded else f"all {recorded}"
    console.print(Rule(f"[bold]{escape(run)}[/], step {step}: {count} completion(s)", align="left"))
    console.print(_legend(records, kl_max))
    previous: Any = None
    for record in records:
        key = (record.get("problem"), record.get("tracked"))
        if key != previous:
            console.print(_prompt(record))
            previous = key
        console.print(_completion(record, kl_max, full))


def _printable(value: Any) -> Any:
    """Any data with control characters written as escapes, such as `\\x1b`."""
    if isinstance(value, str):
        return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _legend(records: Sequence[Record], kl_max: float) -> Text:
    """A legend of the shown colours and styles."""
    text = Text(style="dim")
    if any(token.kl is not None for record in records for token in tokens_of(record)):
        text.append(f"{K1_SAMPLE}, nats per token: ")
        for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
            kl = share * kl_max
            text.append(f" {kl:+.2g} ", Style(bgcolor=_colour(kl, kl_max), color="#f2f2f2", dim=False))
    else:
        text.append("KL was not measured at this step.")
    if any(not token.sampled for record in records for token in tokens_of(record)):
        text.append("\nitalic", _CONTEXT)
        text.append(": context, not trained on")
    return text


def _prompt(record: Record) -> Panel:
    held_out = " · held out" if record.get("tracked") else ""
    title = f"[bold]problem {escape(str(record.get('problem')))}[/] · group {record.get('group')}{held_out}"
    cut = cut_note(record)
    title += f" · [yellow]{cut}[/]" if cut else ""
    body = Text("\n").join(
        Text.assemble((f"{message['role']}: ", "bold cyan"), message_text(message))
        if message.get("role")
        else Text(message_text(message))
        for message in messages_of(record)
    )
    return Panel(body, title=title, title_align="left", border_style="cyan", padding=(0, 1))


def _completion(record: Record, kl_max: float, full: bool) -> Table:
    """Speaker and text side by side, so that turns are distinguishable without colour; then the figures."""
    turns, tokens = turns_of(record), tokens_of(record)
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(justify="right", width=max([8, *(len(turn.speaker) for turn in turns)]), no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    first, middle, last = (turns, (), ()) if full else folded(turns)
    for turn in first:
        _add_turn(table, turn, kl_max, full)
    if middle:
        table.add_row("…", Text(f"{fold_title(middle)}: keel show --full", "dim"))
    for turn in last:
        _add_turn(table, turn, kl_max, full)
    if not turns:
        table.add_row(Text("policy", "bold green"), Text(str(record.get("completion", ""))))
    if details := details_of(record):
        table.add_row(Text("judge", "bold cyan"), Text(details))
    table.add_row("", _figures(record))
    moved_most = sorted((t for t in tokens if t.kl), key=lambda t: -abs(t.kl or 0.0))[:_MOST_MOVED]
    if moved_most:
        listed = "  ".join(f"{_shown(token).strip() or repr(token.text)} {token.kl:+.3f}" for token in moved_most)
        table.add_row("", Text(f"largest log-ratios: {listed}", style="dim"))
    table.add_row("", "")
    return table


def _add_turn(table: Table, turn: RecordedTurn, kl_max: float, full: bool) -> None:
    text = Text()
    for token in turn.tokens:
        text.append(_shown(token), _style(token, kl_max))
    if not turn.sampled:  # line ends around a message belong to the template
        text = text[len(text.plain) - len(text.plain.lstrip("\n")) :]
        text.rstrip()
        lines = text.split()
        if len(lines) > _REPLY_LINES and not full:
            text = Text("\n").join([*lines[:_REPLY_LINES], Text(f"… {len(lines) - _REPLY_LINES} lines more", "dim")])
    table.add_row(Text(turn.speaker, "bold green" if turn.sampled else "dim"), text)
    if turn.sampled and turn.caption:
        table.add_row("", Text(turn.caption, "dim"))
    if turn.note:
        table.add_row("", Text(turn.note, "cyan"))


def _figures(record: Record) -> Text:
    """Reward and its parts, advantage in the colour of its sign, stop reason, log-ratio."""
    text = Text()
    for position, fact in enumerate(facts(record)):
        text.append(" · " if position else "", "dim")
        style = "bold" if position == 0 else "dim"
        if fact.startswith("advantage"):
            value = number(record.get("advantage")) or 0.0
            style = "green" if value > 0 else "red" if value < 0 else "dim"
        elif record.get("stop_reason") == "length" and fact.startswith("stopped"):
            style = "yellow"
        text.append(fact, style)
    return text


def _style(token: Token, kl_max: float) -> Style:
    if not token.sampled:
        return _CONTEXT
    if token.kl is None or abs(token.kl) < _MIN_SHARE * kl_max:
        return Style()
    return Style(bgcolor=_colour(token.kl, kl_max), color="#f2f2f2")


def _shown(token: Token) -> str:
    """A token's text, with marks at line ends, so that their colour is visible."""
    return token.text.replace("\n", "↵\n") if token.sampled else token.text


def _colour(kl: float, kl_max: float) -> str:
    """Orange above 0, blue below, with a strength that grows up to `kl_max`."""
    strength = min(1.0, abs(kl) / kl_max) ** 0.7  # so that small values are visible
    full = _ABOVE if kl > 0 else _BELOW
    return "#" + "".join(f"{round(g + strength * (f - g)):02x}" for g, f in zip(_GROUND, full, strict=True))


Data = Mapping[str, Any]


def show_evaluation(data: Data, console: Console) -> None:
    """Print the data of `keel eval`: figures of each task, the task's own metrics, and retention against a baseline."""
    records = data["tasks"]
    ks = sorted({int(k) for record in records for k in record.get("pass@k", ())} - {1})
    greedy = " (greedy)" if all(record["greedy"] for record in records) else ""
    table = _table(
        f"{data['model']}, temperature {data['temperature']:g}{greedy}: correct answers, % [95 % interval]", console
    )
    table.add_column("problems\n× samples", justify="right")
    for k in (1, *ks):
        table.add_column(f"pass@{k}", justify="right", no_wrap=True)
    for record in records:
        shares = [_share(record.get("pass@k", {}).get(str(k)), record["pass_at_ci95"].get(str(k))) for k in ks]
        table.add_row(
            _label(record),
            f"{record['n']} × {record['samples']}",
            _share(record.get("pass@1"), record.get("ci95")),
            *shares,
        )
    console.print(table)
    table = _table("completions", console)
    for name in ("reward", "parsed", "truncated", "mean tokens"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            _label(record),
            f"{record['reward']:.3f}",
            f"{100 * record['parsed_fraction']:.1f} %",
            f"{100 * record['truncated_fraction']:.1f} %",
            f"{record['length_mean']:.1f}",
        )
    console.print(table)
    _show_extra(records, console)
    if data["baseline"] is not None:
        _show_retention(data, console)


def _table(title: str, console: Console) -> Table:
    """A table under a title, which may be wider than the table."""
    console.print(title, style="bold", markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("task", overflow="fold")
    return table


def _show_extra(records: Sequence[Data], console: Console) -> None:
    """The tasks' additional metrics, if there are any."""
    rows = [(record, name, value) for record in records for name, value in record.get("extra", {}).items()]
    if not rows:
        return
    with_baseline = any("baseline" in record for record in records)
    table = _table("additional metrics of the tasks", console)
    table.add_column("metric")
    for name in ("before", "after") if with_baseline else ("value",):
        table.add_column(name, justify="right")
    for record, name, value in rows:
        before = record.get("baseline", {}).get("extra", {}).get(name)
        before_cell = ("–" if before is None else f"{before:.4g}",) if with_baseline else ()
        table.add_row(_label(record), name, *before_cell, f"{value:.4g}")
    console.print(table)


def _show_retention(data: Data, console: Console) -> None:
    for figure, scale, unit, form in (("pass@1", 100, ", %", ".1f"), ("reward", 1, " (no answers)", ".3f")):
        records = [record for record in data["tasks"] if figure in record["difference"]]
        if not records:
            continue
        title = f"{figure} before ({data['baseline']}) and after{unit} [95 % interval of the paired difference]"
        table = _table(title, console)
        for name in ("before", "after", "difference"):
            table.add_column(name, justify="right", no_wrap=True)
        for record in records:
            sides = (f"{scale * side[figure]:{form}}" for side in (record["baseline"], record))
            table.add_row(_label(record), *sides, _difference(record["difference"], figure, scale, form))
        console.print(table)
        console.print(f"[dim]interval of the difference: {records[0]['difference']['method']}[/]")


def _label(record: Data) -> str:
    return f"{record['task']} ({record['split']})" if record["split"] != "given" else str(record["task"])


def _share(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "–"
    return escape(f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]")


def _difference(difference: Data, figure: str, scale: float, form: str) -> str:
    """Green for a significant rise, red for a significant fall (the interval excludes 0)."""
    mean, interval = difference[figure], difference["ci95"]
    if interval is None:
        return f"{scale * mean:+{form}}"
    text = escape(f"{scale * mean:+{form}} [{scale * interval[0]:+{form}}, {scale * interval[1]:+{form}}]")
    if interval[0] > 0:
        return f"[green]{text}[/]"
    return f"[red]{text}[/]" if interval[1] < 0 else text


def show_checks(sections: Iterable[tuple[str, list[Check]]], console: Console) -> list[Check]:
    """Print each section when it is done; return all rows."""
    rows: list[Check] = []
    for title, checks in sections:
        table = Table(title=title, title_justify="left", title_style="bold", expand=False)
        table.add_column("", width=1)
        for column in ("fact", "measured", "must be"):
            table.add_column(column, overflow="fold")
        for check in checks:
            mark = "[green]✓[/]" if check.ok else "[bold red]✗[/]"
            table.add_row(mark, check.fact, check.measured, check.expected)
        console.print(table)
        rows += checks
    failed = sum(not row.ok for row in rows)
    verdict = f"[bold red]{failed} of {len(rows)} facts fail[/]" if failed else f"[green]all {len(rows)} facts hold[/]"
    console.print(verdict)
    return rows


DIVERGENCES = {
    "policy||ref": "KL(policy‖ref)",
    "ref||policy": "KL(ref‖policy)",
    "none": "not a KL",
}


def _number(value: float | None) -> str:
    return (
        "overflows" if value is None else f"{value:+.2e}" if abs(value) < 1e-3 or abs(value) > 1e3 else f"{value:+.3f}"
    )


def _gradient(entry: dict[str, Any]) -> str:
    name = entry["gradient"]
    if name in MEANINGS:
        return f"∇{DIVERGENCES[name]}" if name in DIVERGENCES else MEANINGS[name]
    return f"not a gradient of a KL (off by {_number(entry['relative_error']).lstrip('+')} relative)"


def show_audit(report: dict[str, Any], console: Console) -> None:
    """Print the audit of one formula."""
    value, off = report["value"], report["off_policy"]
    table = Table(title=f"Audit of {report['formula']}", title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if report["known_as"]:
        table.add_row("known as", report["known_as"])
    table.add_row("its value estimates", DIVERGENCES[value["estimates"]])
    nearest = DIVERGENCES[value["nearest"]]
    table.add_row("bias, std", f"{_number(value['bias'])}, {_number(value['std'])} of {nearest}, worst case")
    table.add_row("sign", "never negative" if value["nonnegative"] else "can be negative")
    table.add_row("in the loss", _gradient(report["in_loss"]))
    table.add_row("in the advantage", _gradient(report["in_advantage"]))
    table.add_row("in the reward", _gradient(report["in_reward"]))
    table.add_row("in the loss, samples from old", _gradient(off["in_loss"]))
    table.add_row("in the advantage, samples from old", _gradient(off["in_advantage"]))
    table.add_row("in the reward, samples from old", _gradient(off["in_reward"]))
    overflow = report["overflows_at"]
    table.add_row("overflows fp32 at", "never" if overflow is None else f"a log-ratio of {overflow:g} nats")
    table.add_row("advice", report["advice"])
    console.print(table)


def plot_estimators(path: Path) -> None:
    """Draw bias and standard deviation of k1, k2, k3 against the true KL (the Gaussian example)."""
    from keel.verify.values import gaussian_moments

    shifts = [10 ** (-2 + 2.2 * i / 60) for i in range(61)]
    true = [m * m / 2 for m in shifts]
    with picture(path) as plt:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        styles = {"k1": "-", "k2": "--", "k3": "-."}
        for name, style in styles.items():
            moments = [gaussian_moments(name, m) for m in shifts]
            left.plot(true, [abs(bias) for bias, _ in moments], style, label=name, linewidth=2)
            right.plot(true, [std for _, std in moments], style, label=name, linewidth=2)
        left.set(title="bias: only k2 is biased", ylabel="|bias| / true KL", ylim=(-0.02, 0.6))
        right.set(
            title="standard deviation: k1's is large for small KL", ylabel="standard deviation / true KL", yscale="log"
        )
        for axis in (left, right):
            axis.set(xlabel="true KL (nats)", xscale="log")
            axis.grid(alpha=0.3)
            axis.legend()
        figure.suptitle("KL estimators on samples of N(0,1), against N(m,1)")
        figure.tight_layout()
