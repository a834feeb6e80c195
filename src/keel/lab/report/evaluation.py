"""Print the tables of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
