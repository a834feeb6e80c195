"""A diagnosis for a person: verdict and findings first, in a few lines; with `verbose` all that was looked at."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.lab.doctor.diagnosis import Diagnosis
from keel.lab.doctor.findings import ranked

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
VERDICTS = {"confirmed": "bold red", "ruled out": "green"}
SHOWN = 5  # findings of the short form
WIDE = 100  # columns in which the evidence of most findings is one line
INDENT = "  "


def show_diagnosis(diagnosis: Diagnosis, console: Console, name: str, *, verbose: bool = False) -> None:
    """The verdict, the findings, and what was found sound; with `verbose` also hypotheses, what was not checked, notes.

    In the short form evidence and cause have a line or two; what to change is never cut.
    """
    console.print(Text(verdict(diagnosis, name), style="bold green" if diagnosis.healthy else "bold"))
    if verbose and diagnosis.findings:
        console.print(_table(diagnosis))
    elif not verbose:
        _short(diagnosis, console)
    for line in diagnosis.raised_thresholds:
        console.print(Text(f"! {line}", style="bold yellow"))
    if diagnosis.sound:
        console.print(Text(_sound(diagnosis, 10_000 if verbose else console.width), style="green"))
    if verbose:
        _rest(diagnosis, console)
    else:
        console.print(Text(_hidden(diagnosis), style="dim"))


def verdict(diagnosis: Diagnosis, name: str) -> str:
    """One line: how many of what, and what to look at first."""
    counts = {kind: sum(f.severity == kind for f in diagnosis.findings) for kind in STYLES}
    counted = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if diagnosis.healthy:
        return f"{name}: healthy" + (f" ({counted})" if counted else "")
    return f"{name}: {counted}; first: {ranked(diagnosis.findings)[0].code}"


def _short(diagnosis: Diagnosis, console: Console) -> None:
    """Errors and warnings in four lines each, and what each of them explains."""
    serious = [finding for finding in ranked(diagnosis.findings) if finding.severity != "note"]
    for finding in serious[:SHOWN]:
        console.print(Text(f"{finding.severity} {finding.code}", style=STYLES[finding.severity]))
        _print(console, finding.evidence, at_most=2 if console.width < WIDE else 1)
        _print(console, finding.cause, "dim", at_most=1)
        _print(console, f"→ {finding.advice}", "bold")
        symptoms = [other.code for other in diagnosis.findings if other.explained_by == finding.code]
        if symptoms:
            _print(console, f"explains {_listed(symptoms)}", "cyan")
    if len(serious) > SHOWN:
        console.print(Text(f"and {_listed(finding.code for finding in serious[SHOWN:])}", style="yellow"))


def _print(console: Console, text: str, style: str = "", *, at_most: int | None = None) -> None:
    """Indented lines of the console's width; what is over `at_most` of them is cut with an ellipsis."""
    lines = textwrap.wrap(
        text, console.width - len(INDENT), max_lines=at_most, placeholder=" …", break_on_hyphens=False
    )
    for line in lines:
        console.print(Text(INDENT + line, style=style), no_wrap=True, overflow="ignore", crop=False)


def _sound(diagnosis: Diagnosis, width: int) -> str:
    """The names that one line has room for, and how many others there are."""
    names = list(diagnosis.sound)
    for count in range(len(names), 0, -1):
        others = f" and {len(names) - count} more" if count < len(names) else ""
        line = f"tried and found sound: {', '.join(names[:count])}{others}"
        if len(line) <= width:
            return line
    return f"tried and found sound: {len(names)}"


def _hidden(diagnosis: Diagnosis) -> str:
    """The last line: what the short form leaves out."""
    notes = _listed(f.code for f in diagnosis.findings if f.severity == "note" and f.explained_by is None)
    unchecked = f"{len(diagnosis.unchecked)} could not be checked; " if diagnosis.unchecked else ""
    return f"{f'notes: {notes}; ' if notes else ''}{unchecked}more: --verbose"


def _listed(codes: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(codes))


def _rest(diagnosis: Diagnosis, console: Console) -> None:
    if diagnosis.hypotheses:
        console.print(_hypotheses(diagnosis))
    if diagnosis.unchecked:
        console.print(Text(f"not checked ({len(diagnosis.unchecked)}):", style="bold"))
        for line in diagnosis.unchecked:
            _print(console, line, "dim")
    if diagnosis.notes:
        console.print(Text("what was read and measured:", style="bold"))
        for line in diagnosis.notes:
            console.print(Text.from_ansi(line, style="dim" if "\x1b" not in line else ""))


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(title="Findings, worst first", title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("code", no_wrap=True)
    table.add_column("evidence, likely cause, and → what to change", overflow="fold")
    for finding in ranked(diagnosis.findings):
        what = Text.assemble(finding.evidence, "\n", (finding.cause, "dim"), "\n", (f"→ {finding.advice}", "bold"))
        table.add_row(
            Text(f"{finding.code}\n{finding.severity}", style=STYLES[finding.severity]), what, end_section=True
        )
    return table


def _hypotheses(diagnosis: Diagnosis) -> Table:
    table = Table(title="Hypotheses", title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("hypothesis", overflow="fold", max_width=26)
    table.add_column("the figure that decides, what it interacts with, and → what to do next", overflow="fold")
    for item in diagnosis.hypotheses:
        name = Text.assemble(
            f"{item.name} {item.title}\n",
            (item.verdict, VERDICTS.get(item.verdict, "dim")),
            f"\n{item.priority} priority",
        )
        what = Text.assemble(item.figure, "\n", (item.interacts, "dim"), "\n", (f"→ {item.action}", "bold"))
        table.add_row(name, what, end_section=True)
    return table
