"""A chart as data, and as inline SVG, which needs no network and no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

Point = tuple[float, float | None]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22
MAX_POINTS = 400
ROUNDING = 1e-6  # a curve with a smaller relative change counts as constant
# page.css must have the same number of colours
PALETTE = (
    "#1f6fd6",
    "#d9660f",
    "#16916f",
    "#a33ea1",
    "#b58900",
    "#d2385b",
    "#4a8fa8",
    "#6b6b6b",
)
COLOURS, GREY = len(PALETTE), 7  # number of distinguishable colours


@dataclass(frozen=True)
class Curve:
    """One curve: a gap where y is None; `error` (same length) draws a band or, with `dots`, error bars.

    `tag` labels the dots in an image file.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    error: Sequence[tuple[float, float] | None] = ()
    dots: bool = False
    dashed: bool = False
    tag: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart: title, unit, hint, curves, and the steps of events and checkpoints.

    Values outside of `x_range` or `y_range` are clipped; by default the ranges fit all values.
    """

    title: str
    unit: str
    series: Sequence[Curve]
    hint: str = ""
    events: Sequence[float] = ()
    from_zero: bool = False
    checkpoints: Sequence[float] = ()
    x_label: str = "step"  # unit of the x axis; steps are whole numbers
    names: Sequence[str] = ()  # labels of x = 0, 1, 2, … if the x axis has no unit
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Scale:
    """Map data to pixels, on a linear or logarithmic scale."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def svg(panel: Panel) -> str:
    """The chart; an empty string if no curve has a value."""
    drawn = [thin(series) for series in panel.series]
    xs = [x for series in drawn for x, y in series.points if y is not None]
    ys = [y for series in drawn for _, y in series.points if y is not None]
    if not xs:
        return ""
    log = panel.y_range is None and wants_log(ys)
    bounds = [edge for series in drawn for pair in series.error if pair for edge in pair]
    y = y_axis(ys if log else ys + bounds, log, panel.from_zero)
    if panel.y_range is not None:
        y = Scale(*panel.y_range, HEIGHT - BOTTOM, TOP)
    x = Scale(*(panel.x_range or (min(xs), max(xs))), LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title, quote=True)}"'
        f' data-x="{x.low:.10g},{x.high:.10g},{x.start},{x.end}"{" data-log" if log else ""}>'
    ]
    parts += grid(x, y, integers=panel.x_label == "step", names=panel.names)
    parts += [
        f'<line class="mark" x1="{x.at(step):.1f}" x2="{x.at(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for step in panel.events
        if x.low <= step <= x.high
    ]
    parts += [
        f'<line class="save" x1="{x.at(step):.1f}" x2="{x.at(step):.1f}" y1="{HEIGHT - BOTTOM - 5}"'
        f' y2="{HEIGHT - BOTTOM}"/>'
        for step in panel.checkpoints
        if x.low <= step <= x.high
    ]
    drawn.reverse()  # the first series is the most important one: on top
    parts += [band(series, x, y) for series in drawn if series.error and not series.dots]
    parts += [curve(series, x, y) for series in drawn]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>')
    return "".join(parts)


def constants(panel: Panel) -> str:
    """The values of a chart whose curves are all constant, with their unit; empty if a curve changes.

    A curve with gaps counts as changing. Charts with intervals or single points are always drawn.
    """
    by_value: dict[str, list[str]] = {}
    if any(any(series.error) for series in panel.series) or all(len(series.points) < 2 for series in panel.series):
        return ""
    for series in panel.series:
        values = [y for _, y in series.points if y is not None]
        if not values:
            continue
        if len(values) < len(series.points) or max(values) - min(values) > ROUNDING * max(map(abs, values)):
            return ""
        by_value.setdefault(f"{values[-1]:.4g}", []).append(series.label)
    if not by_value:
        return ""
    named = [f"{', '.join(labels)} {value}" for value, labels in by_value.items()]
    text = "; ".join(named) if len(named) > 1 else next(iter(by_value))
    return f"{text} ({panel.unit})" if panel.unit else text


def thin(series: Curve) -> Curve:
    """Reduce to about MAX_POINTS points; the minimum and maximum of every bin stay, so that spikes are visible."""
    count = len(series.points)
    if count <= MAX_POINTS:
        return series
    stretch = math.ceil(2 * count / MAX_POINTS)
    indices: set[int] = {0, count - 1}
    for start in range(0, count, stretch):
        values = [(y, i) for i in range(start, min(count, start + stretch)) if (y := series.points[i][1]) is not None]
        indices |= {min(values)[1], max(values)[1]} if values else {start}
    ordered = sorted(indices)
    error = [series.error[i] for i in ordered] if series.error else ()
    points = [series.points[i] for i in ordered]
    return replace(series, points=points, error=error)


def wants_log(ys: Sequence[float]) -> bool:
    """Whether to use a log axis: all values are positive and the largest is over 50 times the median."""
    ordered = sorted(ys)
    return len(ordered) > 4 and ordered[0] > 0 and ordered[-1] > 50 * ordered[len(ordered) // 2]


def y_axis(values: Sequence[float], log: bool, from_zero: bool) -> Scale:
    """The range of the values with a margin; a flat line is in the middle."""
    low, high = min(values), max(values)
    if low == high == 0:
        high = 1.0
    bottom, top = HEIGHT - BOTTOM, TOP
    if log:
        return Scale(low / 1.2, high * 1.2, bottom, top, log=True)
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, bottom, top)


def ticks(low: float, high: float) -> list[float]:
    """At most five round numbers (1, 2 or 5 times a power of ten) between low and high."""
    if not high > low:
        return [low]
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    for factor in (1, 2, 5, 10, 20, 50, 100):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < 5:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between low and high, or the two ends if there are fewer than two."""
    powers = [10.0**i for i in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return powers[:: max(1, len(powers) // 4)] if len(powers) > 1 else [float(f"{low:.2g}"), float(f"{high:.2g}")]


def tick_text(value: float) -> str:
    """A short form of the number: 12k, 0.05, 2e-6."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        digits, _, power = f"{value:.5e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    if size >= 1e4:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def grid(x: Scale, y: Scale, integers: bool = True, names: Sequence[str] = ()) -> list[str]:
    """Horizontal lines with their numbers, and steps, or names, along the bottom."""
    parts = []
    for value in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{tick_text(value)}</text>')
    named = [(float(index), name) for index, name in enumerate(names)]
    for value, name in named or [(value, tick_text(value)) for value in ticks(x.low, x.high)]:
        if value == int(value) or not integers:  # steps are whole numbers
            at = x.at(value)
            anchor = "end" if at > WIDTH - RIGHT - 12 else "middle"
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 7}" text-anchor="{anchor}">{escape(name)}</text>')
    return parts


def curve(series: Curve, x: Scale, y: Scale) -> str:
    """A line with gaps; isolated points, and all points of evaluations, are dots."""
    colour = series.colour % COLOURS
    commands: list[str] = []
    dots: list[str] = []
    points = list(series.points)
    for index, (step, value) in enumerate(points):
        if value is None:
            continue
        at = f"{x.at(step):.1f} {y.at(value):.1f}"
        before = index > 0 and points[index - 1][1] is not None
        after = index + 1 < len(points) and points[index + 1][1] is not None
        commands.append(f"{'L' if before else 'M'}{at}")
        if series.dots or not (before or after):
            dots.append(f'<circle class="d{colour}" cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" r="2.6"/>')
            bounds = series.error[index] if series.error else None
            if bounds:
                dots.append(
                    f'<line class="c{colour}" x1="{x.at(step):.1f}" x2="{x.at(step):.1f}" '
                    f'y1="{y.at(bounds[0]):.1f}" y2="{y.at(bounds[1]):.1f}"/>'
                )
    dash = ' stroke-dasharray="5 3"' if series.dashed else ""
    return f'<path class="c{colour}" d="{"".join(commands)}"{dash}/>' + "".join(dots)


def band(series: Curve, x: Scale, y: Scale) -> str:
    """The area between the error bounds, one polygon per unbroken segment."""
    parts: list[str] = []
    stretch: list[tuple[float, float, float]] = []

    def close() -> None:
        if len(stretch) > 1:
            upper = [f"{x.at(step):.1f},{y.at(high):.1f}" for step, _, high in stretch]
            lower = [f"{x.at(step):.1f},{y.at(low):.1f}" for step, low, _ in reversed(stretch)]
            parts.append(f'<polygon class="b{series.colour % COLOURS}" points="{" ".join(upper + lower)}"/>')
        stretch.clear()

    for (step, value), bounds in zip(series.points, series.error, strict=True):
        if value is None or bounds is None:
            close()
        else:
            stretch.append((step, *bounds))
    close()
    return "".join(parts)
