"""Print rollouts in the terminal: speakers, trained tokens, log-ratios and rewards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from keel.doctor.runs import Record, number
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
    """Print completions under their prompts; `recorded` is how many this step has.

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
