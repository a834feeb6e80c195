"""Print the tables of `keel verify` and audits, and plot the estimators."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from keel.lab.plots.picture import picture
from keel.verify.check import Check
from keel.verify.values import gaussian_moments


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
    "zero": "zero",
}


def _number(value: float | None) -> str:
    return (
        "overflows" if value is None else f"{value:+.2e}" if abs(value) < 1e-3 or abs(value) > 1e3 else f"{value:+.3f}"
    )


def _gradient(entry: dict[str, Any]) -> str:
    name = entry["gradient"]
    if name in ("policy||ref", "ref||policy"):
        return f"∇{DIVERGENCES[name]}"
    if name == "zero":
        return "zero: no regularisation"
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
    table.add_row("in the reward", _gradient(report["in_reward"]))
    table.add_row("in the loss, samples from old", _gradient(off["in_loss"]))
    table.add_row("in the reward, samples from old", _gradient(off["in_reward"]))
    overflow = report["overflows_at"]
    table.add_row("overflows fp32 at", "never" if overflow is None else f"a log-ratio of {overflow:g} nats")
    table.add_row("advice", report["advice"])
    console.print(table)


def plot_estimators(path: Path) -> None:
    """Draw bias and standard deviation of k1, k2, k3 against the true KL (the Gaussian example)."""
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
