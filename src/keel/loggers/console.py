"""Console output: a live panel on a terminal, elsewhere one plain line per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from keel.loggers.base import Logger

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


PROGRESS_S = 5.0  # seconds between progress lines of a phase without steps


class ConsoleLogger(Logger):
    """Show step, ETA, reward, KL ± standard error, β, clip fraction, gradient norm, tokens/s and last evaluation."""

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self._console: Console = Console(file=stream, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._first = start_step
        self._clock = clock
        self._started_at: float | None = None
        self._step = start_step
        self._metrics: Mapping[str, float] = {}
        self._evaluations: dict[str, str] = {}
        # split/task: step and extra metrics of the first evaluation
        self._first_extra: dict[str, tuple[int, Mapping[str, float]]] = {}
        self._use_live = self._console.is_terminal if live is None else live
        self._live: Any = None
        self._progress_at: float | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Refresh the panel, or print a line."""
        if self._started_at is None:  # the ETA starts after the first step, whose start time is unknown
            self._started_at, self._first = self._clock(), step
        self._step, self._metrics = step, metrics
        if self._use_live:
            self._refresh()
        else:
            self._print(step_line(step, self._total, metrics, self._eta()))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Print an evaluation, and show each task's last one in the panel."""
        line, key = evaluation_line(record), f"{record.get('split')}/{record.get('task')}"
        self._evaluations[key] = f"{line}  (step {step})"
        self._print(f"eval at step {step}: {line}")
        extra = record.get("extra")
        if extra:
            for row in extra_figures(step, extra, self._first_extra.setdefault(key, (step, extra))):
                self._print(row)
        if self._live is not None:
            self._refresh()

    def event(self, kind: str, **fields: Any) -> None:
        """Print one line, above the panel if there is one."""
        self._print(event_line(kind, fields))

    def progress(self, label: str, done: int, total: int, detail: str) -> None:
        """Print a line every PROGRESS_S seconds."""
        now = self._clock()
        if self._progress_at is None:
            self._progress_at = now
        elif now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            self._print(f"{label} {done}/{total}  {detail}")

    def close(self) -> None:
        """Leave the last panel on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _eta(self) -> float | None:
        if self._started_at is None or self._step <= self._first:
            return None
        each = (self._clock() - self._started_at) / (self._step - self._first)
        return each * max(0, self._total - self._step)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _refresh(self) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        self._live.update(self._panel(), refresh=True)

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        eta = self._eta()
        head.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=max(1, self._total), completed=self._step),
            f"ETA {duration(eta)}" if eta is not None else "ETA …",
        )
        body = Table.grid(padding=(0, 3))
        cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in figures(self._metrics)]
        for start in range(0, len(cells), 4):
            body.add_row(*cells[start : start + 4])
        lines = [Text(f"eval {line}", style="dim") for line in self._evaluations.values()]
        return Panel(Group(head, body, *lines), title="keel", title_align="left", border_style="blue")


def kl_name(metrics: Mapping[str, float]) -> str | None:
    """The KL to show: k3 (the least noisy sampled estimator), else exact, else k1."""
    for name in ("k3", "exact", "k1"):
        if f"kl/policy_ref/{name}/mean" in metrics:
            return name
    return None


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """A run's main metrics as (label, value); unmeasured ones are left out."""
    shown: list[tuple[str, str]] = []

    def add(label: str, name: str, form: str) -> None:
        if name in metrics:
            shown.append((label, format(metrics[name], form)))

    add("reward", "reward/mean", ".3f")
    kind = kl_name(metrics)
    if kind is not None:
        value = f"{metrics[f'kl/policy_ref/{kind}/mean']:.4f}"
        error = metrics.get(f"kl/policy_ref/{kind}/se")
        shown.append((f"KL {kind}", value if error is None else f"{value} ± {error:.4f}"))
    add("β", "kl/beta", ".3g")
    clips = [metrics[name] for name in ("ratio/clip_low_fraction", "ratio/clip_high_fraction") if name in metrics]
    if clips:
        shown.append(("clipped", f"{100 * sum(clips):.1f}%"))
    add("grad", "grad/norm", ".3g")
    add("length", "length/mean", ".1f")
    add("tok/s", "speed/tokens_per_s", ",.0f")
    return shown


def step_line(step: int, total: int, metrics: Mapping[str, float], eta: float | None) -> str:
    """One step in one plain line."""
    parts = [f"step {step:>{len(str(total))}}/{total}", *(f"{label} {value}" for label, value in figures(metrics))]
    if eta is not None:
        parts.append(f"ETA {duration(eta)}")
    return "  ".join(parts)


def evaluation_line(record: Mapping[str, Any]) -> str:
    """`task pass@1 62.0% [55.1, 68.4], pass@8 80.0% (n 64)`."""
    text = str(record.get("task", "task"))
    if record.get("split") == "retention":
        text += " (retention)"
    value = record.get("pass@1")
    if value is not None:
        text += f" pass@1 {100 * value:.1f}%"
        interval = record.get("ci95")
        if interval and None not in interval:
            text += f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    elif record.get("reward") is not None:
        text += f" reward {record['reward']:.3f}"
    for k, value in dict(record.get("pass@k") or {}).items():
        if str(k) != "1" and value is not None:
            text += f", pass@{k} {100 * value:.1f}%"
    if record.get("n") is not None:
        text += f" (n {record['n']})"
    return text


def extra_figures(step: int, now: Mapping[str, float], first: tuple[int, Mapping[str, float]]) -> list[str]:
    """A task's extra metrics as a table: one row per metric, now and at the first evaluation."""
    first_step, before = first
    width = max(len(name) for name in now)
    rows = [(name, before.get(name), value) for name, value in now.items()]
    if first_step == step:
        return [f"  {name:<{width}}  {value:8.4g}" for name, _, value in rows]
    head = f"  {'':<{width}}  {f'step {first_step}':>8}  {f'step {step}':>8}"
    return [
        head,
        *(
            f"  {name:<{width}}  {'–' if was is None else format(was, '.4g'):>8}  {value:8.4g}"
            for name, was, value in rows
        ),
    ]


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    """`· step 12 guard/skipped: message` or the fields as name=value; always one line."""
    if fields.get("message"):
        details = str(fields["message"])
    else:
        details = ", ".join(f"{name}={short(value)}" for name, value in fields.items() if name not in ("step", "time"))
    step = fields.get("step")
    where = f"step {step} " if step else ""
    return " ".join(f"· {where}{kind}{': ' if details else ''}{details}".split())


def short(value: object) -> str:
    """A value as at most 200 characters; floats have four significant digits."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"


def duration(seconds: float) -> str:
    """`45s`, `3m 05s` or `2h 10m`."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02d}s"
    return f"{total // 3600}h {total % 3600 // 60:02d}m"
