"""A picture in a file by matplotlib: what every `--plot` shares, and panels that a page has as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.lab.plots.charts import PALETTE, Curve, Panel, wants_log

KINDS = (".png", ".svg", ".pdf")


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """matplotlib.pyplot without a screen; the current figure is written to `path` and closed at the end."""
    check_picture(path)
    try:
        import matplotlib
    except ImportError:
        raise KeelError("--plot needs matplotlib: pip install 'keel-rl[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        yield plt
        plt.gcf().savefig(path, dpi=130)
    except OSError as error:
        raise KeelError(f"cannot write the plot to {path}: {error.strerror}: choose a writable folder") from None
    finally:
        plt.close()


def check_picture(path: Path) -> None:
    """Refuse a name that no picture can have; for commands that work long before they draw."""
    if path.suffix not in KINDS:
        raise KeelError(f"cannot write the plot to {str(path)!r}: end its name in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise KeelError(f"cannot write the plot to {path}: there is no folder {path.parent}: choose a writable folder")


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a picture's legend."""

    label: str
    colour: int
    dashed: bool = False


def write_panels(
    path: Path,
    panels: Sequence[Panel],
    title: str,
    *,
    rows: int = 1,
    legend: Sequence[LegendEntry] = (),
    notes: Sequence[str] = (),
) -> None:
    """Panels in a grid, filled column by column; a column has one scale. `notes` are lines beside the last chart.

    Panels with names are drawn sideways, one line per name, and share the names on the left.
    """
    columns = max(1, math.ceil(len(panels) / rows))
    names_count = max((len(panel.names) for panel in panels), default=0)
    size = _size(rows, columns, names_count, len(notes))
    with picture(path) as plt:
        shared = {"sharey": True} if names_count else {"sharex": rows > 1, "sharey": "col"}
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)
        grid = [axes[index % rows, index // rows] for index in range(rows * columns)]
        for axis in grid[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(grid, panels, strict=False):
            _horizontal(axis, panel) if panel.names else _vertical(axis, panel, small=rows > 2)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        if names_count:
            axes[0, 0].set_yticks(range(names_count), panels[0].names, fontsize=8)
            axes[0, 0].set_ylim(names_count - 0.5, -0.5)
            figure.supxlabel("95 % t-intervals over seeds; one that reaches the edge goes on beyond it", fontsize=8)
        if legend:
            lines = [_legend_line(plt, entry) for entry in legend]
            names = [entry.label for entry in legend]
            figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        if notes:
            axes[0, -1].text(1.02, 1, "\n".join(notes), transform=axes[0, -1].transAxes, va="top", fontsize=7)
        figure.suptitle(title, fontsize=11)


def _size(rows: int, columns: int, names_count: int, note_lines: int) -> tuple[float, float]:
    """In inches."""
    if names_count:
        return 2.5 + 3.1 * columns, 2.2 + 0.26 * names_count
    if rows > 1:
        return 4.6 * columns, 0.8 + 1.9 * rows
    return (11.0 if columns == 1 else 5.8 * columns), max(5.5, 1.2 + 0.19 * note_lines)


def _legend_line(plt: Any, entry: LegendEntry) -> Any:
    style: dict[str, Any] = {"ls": "--"} if entry.dashed else {"marker": "o", "ls": ""}
    return plt.Line2D([], [], color=PALETTE[entry.colour], **style)


def _horizontal(axis: Any, panel: Panel) -> None:
    """One line per name, however many there are: values run along the x axis."""
    for index, series in enumerate(panel.series):
        shift = 0.16 * (index - (len(panel.series) - 1) / 2)
        measured = [(x + shift, y, error) for x, y, error in _measured(series)]
        low, high = _error_lengths(measured)
        axis.errorbar(
            [y for _, y, _ in measured], [x for x, _, _ in measured], xerr=[low, high],
            fmt="o", ms=4, lw=1, capsize=2, color=PALETTE[series.colour], label=series.label,
        )  # fmt: skip
    axis.set(title=panel.title, xlabel=panel.unit, xlim=panel.y_range)
    axis.title.set_fontsize(10)
    if len(panel.series) > 1:
        inches = 0.8 + 0.26 * len(panel.names)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.55 / inches))


def _vertical(axis: Any, panel: Panel, *, small: bool) -> None:
    """Curves with their bands, dots with their intervals."""
    for series in panel.series:
        colour, measured = PALETTE[series.colour], _measured(series)
        xs, ys = [x for x, _, _ in measured], [y for _, y, _ in measured]
        if series.dots:
            low, high = _error_lengths(measured)
            axis.errorbar(xs, ys, yerr=[low, high], fmt="o", ms=5, lw=0.7, capsize=2, color=colour)
        else:
            with_gaps = [math.nan if y is None else y for _, y in series.points]
            style = "--" if series.dashed else "-"
            axis.plot([x for x, _ in series.points], with_gaps, style, color=colour, lw=1, zorder=1)
            bands = [(x, *error) for x, _, error in measured if error is not None]
            if bands:
                axis.fill_between(*zip(*bands, strict=True), color=colour, alpha=0.15, lw=0)
        for x, y, _ in measured if series.tag else ():
            axis.annotate(series.tag, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
    ys = [y for series in panel.series for _, y, _ in _measured(series)]
    if panel.y_range is None and wants_log(ys):
        axis.set_yscale("log")
    if ys and min(ys) < 0 < max(ys):
        axis.axhline(0, color="#888", lw=0.8)
    axis.set_title(panel.title, fontsize=8 if small else 11)
    unit, _, x_unit = panel.unit.partition("; across, ")
    axis.set_xlabel(f"{panel.x_label}, {x_unit}" if x_unit else panel.x_label, fontsize=8)
    axis.set_ylabel(unit, fontsize=8)
    axis.set(xlim=panel.x_range, ylim=panel.y_range)
    axis.tick_params(labelsize=7 if small else 9)


MeasuredPoints = list[tuple[float, float, tuple[float, float] | None]]


def _measured(series: Curve) -> MeasuredPoints:
    """(x, y, interval) of the points that have a value."""
    errors = series.error or [None] * len(series.points)
    return [(x, y, error) for (x, y), error in zip(series.points, errors, strict=True) if y is not None]


def _error_lengths(measured: MeasuredPoints) -> tuple[list[float], list[float]]:
    """The length of each interval below and above its value."""
    ends = [(y, error or (y, y)) for _, y, error in measured]
    return [max(0.0, y - low) for y, (low, _) in ends], [max(0.0, high - y) for y, (_, high) in ends]
