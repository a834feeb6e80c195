"""Image files with matplotlib: shared by every `--plot`, for panels and evaluations."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.lab.plots.charts import PALETTE, Curve, Panel, wants_log

KINDS = (".png", ".svg", ".pdf")
DPI = 130
CAPTION = "95 % t-intervals over seeds; intervals are clipped at the edges"
EM = 0.65 / 72  # width of a character in inches per point of font size: above the mean of any name
LEGEND_SIZE, NOTE_SIZE, TITLE_SIZE = 8, 7, 11
TAG_RINGS, TAG_DIRECTIONS = 12, 16  # possible positions of a dot's tag: on rings around it


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
        plt.gcf().savefig(path, dpi=DPI)
    except OSError as error:
        raise KeelError(f"cannot write the plot to {path} ({error.strerror}): choose a writable folder") from None
    finally:
        plt.close()


def check_picture(path: Path) -> None:
    """Check the file name of a plot before a long computation."""
    if path.suffix not in KINDS:
        raise KeelError(f"cannot write the plot to {str(path)!r}: end its name in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise KeelError(
            f"cannot write the plot to {path}, because the folder {path.parent} does not exist: choose another folder"
        )


@dataclass(frozen=True)
class LegendEntry:
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
    """Panels in a grid, filled column by column; a column shares its scale. `notes` are lines beside the last chart.

    Panels with names are drawn sideways, one line per name, and share the names on the left.
    """
    columns = max(1, math.ceil(len(panels) / rows))
    names = panels[0].names if panels else ()
    width, height = _size(rows, columns, names, notes)
    legend_columns, labels = _legend_grid([entry.label for entry in legend], width)
    height += 0.15 * sum(label.count("\n") + 1 for label in labels[::legend_columns])
    with picture(path) as plt:
        shared = {"sharey": True} if names else {"sharex": rows > 1, "sharey": "col"}
        size: dict[str, Any] = {"figsize": (width, height), "dpi": DPI}
        figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **size, **shared)
        figure.get_layout_engine().set(w_pad=0.1)  # room between the numbers at the ends of two axes
        grid = [axes[index % rows, index // rows] for index in range(rows * columns)]
        for axis in grid[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(grid, panels, strict=False):
            _horizontal(axis, panel) if panel.names else _draw_curves(axis, panel, small=rows > 2)
            points = 10 if names else 8 if rows > 2 else TITLE_SIZE
            axis.set_title(_wrapped(panel.title, points, width / columns - 0.6), fontsize=points)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        if names:
            axes[0, 0].set_yticks(range(len(names)), names, fontsize=LEGEND_SIZE)
            axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
        if legend:
            lines = [_legend_line(plt, entry) for entry in legend]
            style: dict[str, Any] = {"ncols": legend_columns, "frameon": False, "fontsize": LEGEND_SIZE}
            figure.legend(lines, labels, loc="outside lower center", **style)
        if notes:
            beside = axes[0, -1].transAxes
            axes[0, -1].text(1.02, 1, "\n".join(notes), transform=beside, va="top", fontsize=NOTE_SIZE)
        heading = [title, CAPTION] if names else [title]
        figure.suptitle("\n".join(_wrapped(line, TITLE_SIZE, width) for line in heading), fontsize=TITLE_SIZE)
        _tag(figure, list(zip(grid, panels, strict=False)))


def _size(rows: int, columns: int, names: Sequence[str], notes: Sequence[str]) -> tuple[float, float]:
    """Width and height in inches, without the legend."""
    if names:
        return max(2.5, 0.5 + _inches(names, LEGEND_SIZE)) + 3.1 * columns, 2.4 + 0.26 * len(names)
    if rows > 1:
        return 4.6 * columns, 0.8 + 1.9 * rows
    if notes:
        return 8.0 + max(3.0, _inches(notes, NOTE_SIZE)), max(5.4, 1.2 + 0.19 * len(notes))
    return (11.0 if columns == 1 else 5.8 * columns), 5.4


def _inches(texts: Sequence[str], size: float) -> float:
    return EM * size * max(map(len, texts), default=0)


def _wrapped(text: str, size: float, width: float) -> str:
    """Wrap a text into lines of at most `width` inches."""
    return "\n".join(textwrap.wrap(text, max(12, int(width / (EM * size)))))


def _legend_grid(labels: Sequence[str], width: float) -> tuple[int, list[str]]:
    """The number of legend columns that fit (at most four), and the labels wrapped to a column."""
    handle = 0.6
    columns = max(1, min(4, int(width / (handle + _inches(labels, LEGEND_SIZE)))))
    return columns, [_wrapped(label, LEGEND_SIZE, width / columns - handle) for label in labels]


def _tag(figure: Any, charts: Sequence[tuple[Any, Panel]]) -> None:
    """Place tags beside the dots of each chart without overlap, after the layout."""
    tagged = [
        (axis, series.tag, (x, y))
        for axis, panel in charts
        for series in panel.series
        for x, y, _ in (_measured(series) if series.tag else ())
    ]
    if not tagged:
        return
    from matplotlib.text import Text

    figure.draw_without_rendering()
    taken = [text.get_window_extent() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    for axis, text, position in tagged:
        tag = axis.annotate(text, position, (4, 3), textcoords="offset points", fontsize=8, in_layout=False)
        for distance, angle in _ring_positions():
            tag.set_position((distance * math.cos(angle) - 2, distance * math.sin(angle) - 3))
            box = tag.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _ring_positions() -> Iterator[tuple[float, float]]:
    """(distance in points, angle), nearest first, starting at the upper left, away from a rising line."""
    for ring in range(1, TAG_RINGS + 1):
        for direction in range(TAG_DIRECTIONS):
            yield 8.0 * ring, 3 * math.pi / 4 + 2 * math.pi * direction / TAG_DIRECTIONS


def _legend_line(plt: Any, entry: LegendEntry) -> Any:
    style: dict[str, Any] = {"ls": "--"} if entry.dashed else {"marker": "o", "ls": ""}
    return plt.Line2D([], [], color=PALETTE[entry.colour], **style)


def _horizontal(axis: Any, panel: Panel) -> None:
    """One line per name, with values along the x axis."""
    from matplotlib.transforms import ScaledTranslation

    for index, series in enumerate(panel.series):
        shift = 0.16 * (index - (len(panel.series) - 1) / 2)
        measured = [(x + shift, y, error) for x, y, error in _measured(series)]
        low, high = _error_lengths(measured)
        axis.errorbar(
            [y for _, y, _ in measured], [x for x, _, _ in measured], xerr=[low, high],
            fmt="o", ms=4, lw=1, capsize=2, color=PALETTE[series.colour], label=series.label,
        )  # fmt: skip
    axis.set(xlabel=panel.unit, xlim=panel.y_range)
    if len(panel.series) > 1:
        # below the numbers and the unit
        below = axis.transAxes + ScaledTranslation(0, -0.5, axis.figure.dpi_scale_trans)
        style: dict[str, Any] = {"frameon": False, "fontsize": LEGEND_SIZE, "bbox_transform": below}
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), **style)


def _draw_curves(axis: Any, panel: Panel, *, small: bool) -> None:
    """Curves with their bands, dots with their intervals."""
    for series in panel.series:
        colour, measured = PALETTE[series.colour], _measured(series)
        xs, ys = [x for x, _, _ in measured], [y for _, y, _ in measured]
        if series.dots:
            low, high = _error_lengths(measured)
            axis.errorbar(xs, ys, yerr=[low, high], fmt="o", ms=5, lw=0.7, capsize=2, color=colour, label=series.label)
        else:
            with_gaps = [math.nan if y is None else y for _, y in series.points]
            style = "--" if series.dashed else "-"
            xs = [x for x, _ in series.points]
            axis.plot(xs, with_gaps, style, color=colour, lw=1, zorder=1, label=series.label)
            bands = [(x, *error) for x, _, error in measured if error is not None]
            if bands:
                axis.fill_between(*zip(*bands, strict=True), color=colour, alpha=0.15, lw=0)
    ys = [y for series in panel.series for _, y, _ in _measured(series)]
    if panel.y_range is None and wants_log(ys):
        axis.set_yscale("log")
    if ys and min(ys) < 0 < max(ys):
        axis.axhline(0, color="#888", lw=0.8)
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


def plot_evaluation(data: Mapping[str, Any], path: Path) -> None:
    """Bars of pass@1 and of the largest pass@k with 95 % intervals, beside those of the baseline."""
    records = data["tasks"]
    ks = sorted({int(k) for record in records for k in record.get("pass@k", ())} - {1})
    bars = [(data["model"], "pass@1", lambda r: (r.get("pass@1"), r.get("ci95")))]
    if ks:
        top = str(ks[-1])
        get = lambda r: (r.get("pass@k", {}).get(top), r["pass_at_ci95"].get(top))  # noqa: E731
        bars.append((data["model"], f"pass@{top}", get))
    if data["baseline"] is not None:
        before = [(data["baseline"], name, lambda r, get=get: get(r["baseline"])) for _, name, get in bars]
        bars = [pair for both in zip(before, bars, strict=True) for pair in both]
    width = 0.8 / len(bars)
    colours = ["#b8c4d6", "#2b6cb0", "#ecd0b2", "#c05621"] if data["baseline"] is not None else ["#2b6cb0", "#c05621"]
    with picture(path) as plt:
        figure, axis = plt.subplots(figsize=(max(6.0, 1.2 + 1.1 * len(records) * max(1.5, len(bars) / 1.5)), 4.2))
        for index, ((model, name, get), colour) in enumerate(zip(bars, colours, strict=False)):
            measured = [(i, *get(record)) for i, record in enumerate(records) if get(record)[0] is not None]
            middles = [i + (index - (len(bars) - 1) / 2) * width for i, _, _ in measured]
            values = [100 * value for _, value, _ in measured]
            errors = [
                [max(0.0, 100 * (value - ci[0])) for _, value, ci in measured],
                [max(0.0, 100 * (ci[1] - value)) for _, value, ci in measured],
            ]
            axis.bar(middles, values, width * 0.92, yerr=errors, capsize=3, color=colour, label=f"{name}, {model}")
        axis.set_xticks(range(len(records)), [str(record["task"]) for record in records])
        axis.set(ylabel="correct answers (%), with 95 % intervals", ylim=(0, 105))
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=8)
        figure.tight_layout()
