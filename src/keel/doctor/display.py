"""Print a diagnosis: verdict and findings first, in twenty lines, or everything with `verbose`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.doctor.findings import Diagnosis, Finding, ranked

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
VERDICTS = {"confirmed": "bold red", "ruled out": "green"}
LINES = 20  # lines of the short form, for a terminal of 24
SHOWN = 3  # findings in the short form, if they fit
NARROWEST, UNLIMITED = 40, 10_000  # width in columns: the least one, and one without wrapping
INDENT = "  "
Line = tuple[str, str]  # text and style


def show_diagnosis(diagnosis: Diagnosis, console: Console, name: str, *, verbose: bool = False) -> None:
    """Print the verdict, the findings and the tests that passed. `verbose` adds hypotheses, unchecked codes and notes.

    The short form has twenty lines, or more if the first finding alone needs them. Sentences are never cut.
    """
    width = UNLIMITED if verbose else max(console.width, NARROWEST)
    style = "bold green" if diagnosis.healthy else STYLES[ranked(diagnosis.findings)[0].severity]
    above = [(_verdict_line(diagnosis, name, width), style)]
    raised = [line for sentence in diagnosis.raised_thresholds for line in textwrap.wrap(f"! {sentence}", width)]
    below = [*((line, "bold yellow") for line in raised)]
    if diagnosis.cut:
        below += [(line, "yellow") for line in textwrap.wrap(f"! the policy has had only {diagnosis.cut}", width)]
    if diagnosis.sound:
        below.append((_sound(diagnosis, width), "green"))
    if verbose:
        _print(console, above)
        if diagnosis.findings:
            console.print(_table(diagnosis))
        _print(console, below)
        _rest(diagnosis, console)
    else:
        below.append((_hidden(diagnosis, width), "dim"))
        _print(console, [*above, *_short(diagnosis, width, LINES - len(above) - len(below)), *below])


def verdict(diagnosis: Diagnosis, name: str) -> str:
    """The number of findings by severity, in one line."""
    return f"{name}: {_counted(diagnosis)}"


def _verdict_line(diagnosis: Diagnosis, name: str, width: int) -> str:
    """The verdict in one line. A long name is cut at its start."""
    over = len(verdict(diagnosis, name)) - width
    return verdict(diagnosis, f"…{name[over + 1 :]}" if over > 0 else name)


def _counted(diagnosis: Diagnosis) -> str:
    counts = {kind: sum(f.severity == kind for f in diagnosis.findings) for kind in STYLES}
    counted = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if diagnosis.healthy:
        return "healthy" + (f" ({counted})" if counted else "")
    return counted


def _short(diagnosis: Diagnosis, width: int, room: int) -> list[Line]:
    """Errors and warnings, as many as fit. Remaining lines show causes and symptoms, of the worst finding first."""
    serious = [finding for finding in ranked(diagnosis.findings) if finding.severity != "note"]
    for shown in range(min(SHOWN, len(serious)), 0, -1):
        others = serious[shown:]
        more = f"and {len(others)} more: {_listed(finding.code for finding in others)}; --verbose" if others else ""
        rest = [(line, "yellow") for line in textwrap.wrap(more, width, break_on_hyphens=False)]
        blocks = [_block(finding, width) for finding in serious[:shown]]  # at least one, however long
        if sum(map(len, blocks)) + len(rest) <= room or shown == 1:
            break
    else:
        return []
    for index, finding in enumerate(serious[:shown]):
        left = room - len(rest) - sum(map(len, blocks)) + len(blocks[index])
        symptoms = [other.code for other in diagnosis.findings if other.explained_by == finding.code]
        forms = (_block(finding, width, symptoms, with_cause=with_cause) for with_cause in (True, False))
        blocks[index] = next((form for form in forms if len(form) <= left), blocks[index])
    return [line for block in blocks for line in block] + rest


def _block(finding: Finding, width: int, symptoms: Sequence[str] = (), *, with_cause: bool = False) -> list[Line]:
    """The code, the evidence, the cause if it fits, the advice, and the symptoms that the finding explains."""
    return [
        (f"{finding.severity} {finding.code}", STYLES[finding.severity]),
        *_indented(finding.evidence, "", width),
        *(_indented(finding.cause, "dim", width) if with_cause else ()),
        *_indented(f"→ {finding.advice}", "bold", width),
        *(_indented(f"explains {_listed(symptoms)}", "cyan", width) if symptoms else ()),
    ]


def _indented(text: str, style: str, width: int) -> list[Line]:
    """Text wrapped to the console's width."""
    return [(INDENT + line, style) for line in textwrap.wrap(text, width - len(INDENT), break_on_hyphens=False)]


def _print(console: Console, lines: Iterable[Line]) -> None:
    """Print lines that are already wrapped."""
    for text, style in lines:
        console.print(Text(text, style=style), no_wrap=True, overflow="ignore", crop=False)


def _sound(diagnosis: Diagnosis, width: int) -> str:
    """The names that fit on one line, and the number of others."""
    names = list(diagnosis.sound)
    for count in range(len(names), 0, -1):
        others = f" and {len(names) - count} more" if count < len(names) else ""
        line = f"tried and found sound: {', '.join(names[:count])}{others}"
        if len(line) <= width:
            return line
    return f"tried and found sound: {len(names)}"


def _hidden(diagnosis: Diagnosis, width: int) -> str:
    """The last line, on the parts that the short form omits. Notes are listed by code if they fit."""
    codes = [f.code for f in diagnosis.findings if f.severity == "note" and f.explained_by is None]
    unchecked = f"{len(diagnosis.unchecked)} could not be checked; " if diagnosis.unchecked else ""
    rest = f"{unchecked}more: --verbose"
    named = f"notes: {_listed(codes)}; {rest}" if codes else rest
    return named if len(named) <= width else f"notes: {len(codes)}; {rest}"


def _listed(codes: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(codes))


def _rest(diagnosis: Diagnosis, console: Console) -> None:
    if diagnosis.hypotheses:
        console.print(_hypotheses(diagnosis))
    if diagnosis.unchecked:
        console.print(Text(f"not checked ({len(diagnosis.unchecked)}):", style="bold"))
        for line in diagnosis.unchecked:
            _print(console, _indented(line, "dim", console.width))
    if diagnosis.notes:
        console.print(Text("data that was read and measured:", style="bold"))
        for line in diagnosis.notes:
            console.print(Text.from_ansi(line, style="dim" if "\x1b" not in line else ""))


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(title="Findings, worst first", title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("code", no_wrap=True)
    table.add_column("evidence, likely cause, and → advice", overflow="fold")
    for finding in ranked(diagnosis.findings):
        what = Text.assemble(finding.evidence, "\n", (finding.cause, "dim"), "\n", (f"→ {finding.advice}", "bold"))
        table.add_row(
            Text(f"{finding.code}\n{finding.severity}", style=STYLES[finding.severity]), what, end_section=True
        )
    return table


def _hypotheses(diagnosis: Diagnosis) -> Table:
    table = Table(title="Hypotheses", title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("hypothesis", overflow="fold", max_width=26)
    table.add_column("deciding figure, interactions, and → next action", overflow="fold")
    for item in diagnosis.hypotheses:
        name = Text.assemble(
            f"{item.name} {item.title}\n",
            (item.verdict, VERDICTS.get(item.verdict, "dim")),
            f"\n{item.priority} priority",
        )
        what = Text.assemble(item.figure, "\n", (item.interacts, "dim"), "\n", (f"→ {item.action}", "bold"))
        table.add_row(name, what, end_section=True)
    return table
