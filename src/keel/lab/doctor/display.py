"""A diagnosis for a person: the worst first, what to change beside it, and what was not looked at."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.lab.doctor.diagnosis import Diagnosis
from keel.lab.doctor.findings import ranked

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
VERDICTS = {"confirmed": "bold red", "ruled out": "green"}


def show_diagnosis(diagnosis: Diagnosis, console: Console, name: str) -> None:
    """Notes on what was read, findings, hypotheses, what could not be checked, and the verdict."""
    for line in diagnosis.notes:
        console.print(Text.from_ansi(line), style="dim" if "\x1b" not in line else "")
    if diagnosis.findings:
        console.print(_findings(diagnosis))
    if diagnosis.hypotheses:
        console.print(_hypotheses(diagnosis))
    if diagnosis.unchecked:
        console.print(Text(f"not checked ({len(diagnosis.unchecked)}):", style="bold"))
        for line in diagnosis.unchecked:
            console.print(Text(f"  {line}", style="dim"))
    for line in diagnosis.raised_thresholds:
        console.print(Text(f"! {line}", style="bold yellow"))
    console.print(_verdict(diagnosis, name))


def _findings(diagnosis: Diagnosis) -> Table:
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


def _verdict(diagnosis: Diagnosis, name: str) -> Text:
    counts = {kind: sum(f.severity == kind for f in diagnosis.findings) for kind in STYLES}
    counted = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if diagnosis.healthy:
        return Text(f"{name}: healthy" + (f" ({counted})" if counted else ""), style="green")
    return Text(f"{name}: {counted}; first: {ranked(diagnosis.findings)[0].code}", style="bold")
