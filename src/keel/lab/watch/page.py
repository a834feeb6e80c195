"""The live page: sections of the report that are fetched again when they change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from keel.doctor.judge import guard_stop
from keel.doctor.runs import RunRecord
from keel.lab.report import samples
from keel.lab.report import sections as tables
from keel.lab.report.html import block, charts, data_element, document, per_run, resource, verdict
from keel.loggers.console import duration

RECENT = 50  # number of last steps averaged for the remaining time
ENDED_KINDS = ("completed", "stopped", "aborted", "interrupted", "gone")  # states in which a run writes nothing more


@dataclass(frozen=True)
class RunView:
    """A run on the page; `record` is None while its folder is empty, `error` explains outdated parts."""

    name: str
    path: Path
    record: RunRecord | None
    kind: str
    error: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: its element's id, its HTML, and a digest to detect changes."""

    name: str
    html: str
    digest: str


def title(runs: Sequence[RunView]) -> str:
    """The run's name, or all of them."""
    return ", ".join(run.name for run in runs)


def sections(runs: Sequence[RunView]) -> Iterator[Section]:
    """All sections, in the order of the page."""
    records = [run.record for run in runs if run.record is not None]
    makers: dict[str, Callable[[], str]] = {
        "state": lambda: states(runs),
        "curves": lambda: curves(records),
        "findings": lambda: block("Findings", findings(records)),
        "rollouts": lambda: block("Latest rollouts", side_by_side([samples.latest(record) for record in records])),
        "timeline": lambda: block("Timeline", per_run(records, tables.timeline, opened=False, folded=True)),
        "options": lambda: options(records),
    }
    for name, make in makers.items():
        html = make()
        yield Section(name, html, hashlib.sha256(html.encode("utf-8", "replace")).hexdigest()[:16])


def whole_page(runs_title: str, drawn: Sequence[Section], refresh_s: float) -> str:
    """The page with all sections, and the script that fetches them again."""
    places = "".join(f"<div id='{part.name}' data-digest='{part.digest}'>{part.html}</div>" for part in drawn)
    body = (
        f"<header><p class='muted'>Keel watch</p><h1>{escape(runs_title)}</h1>"
        f"<p id='live' class='muted' role='status' data-refresh='{refresh_s:g}'></p></header>{places}"
    )
    style, script = (resource(name, "keel.lab.watch") for name in ("watch.css", "watch.js"))
    return document(runs_title, body, None, style=style, script=script, sources="; connect-src 'self'")


def states(runs: Sequence[RunView]) -> str:
    """A table of all runs: progress, main figures, verdict."""
    return side_by_side([_state(run, index, len(runs)) for index, run in enumerate(runs)])


def _state(run: RunView, index: int, count: int) -> str:
    error = f"<p class='gone'>{escape(run.error)}</p>" if run.error else ""
    if run.record is None:
        text = f"Nothing has been written to {run.path} yet."
        content = f"<p class='muted'>{escape(text)}</p>{error}"
        return f"<section class='verdict'><h2>{escape(run.name)}</h2>{content}</section>"
    if run.kind == "gone":
        text = f"{run.path} was deleted or moved; the data below were read before."
        return verdict(replace(run.record, running=False), index, count, f"<p class='gone'>{escape(text)}</p>")
    return verdict(run.record, index, count, progress(run.record, run.kind) + error)


def progress(run: RunRecord, kind: str) -> str:
    """A progress bar, the step, and the remaining time of a running run or why a run ended."""
    total = run.max_steps
    bar = f"<progress max='{total}' value='{min(run.steps, total)}'></progress>" if total else ""
    text = f"step {run.steps} of {total}" if total else f"step {run.steps}"
    left = seconds_left(run)
    if kind == "running" and left is not None:
        text += f" · about {duration(left)} left (without evaluations)"
    elif kind != "running":
        text += f" · {kind}"
    warmups = [str(event.get("message")) for event in run.events if event.get("kind") == "warmstart"]
    if warmups and not run.steps:
        text += f" · warm start: {warmups[-1]}"
    reason = why_ended(run, kind)
    return f"{bar}<p class='progress'>{escape(text)}</p>" + (f"<p class='why'>{escape(reason)}</p>" if reason else "")


def seconds_left(run: RunRecord) -> float | None:
    """The mean time of the last steps times the number of remaining steps; None if either is unknown."""
    times = [value for _, value in run.series("time/total_s")[-RECENT:] if value is not None]
    if not times or run.max_steps is None:
        return None
    return sum(times) / len(times) * max(0, run.max_steps - run.steps)


def why_ended(run: RunRecord, kind: str) -> str:
    """Why a run ended before its last step, from its events."""
    if kind in ("running", "completed"):
        return ""
    guard = guard_stop(run)
    if guard is not None:
        return f"Stopped by a guard: {guard}."
    kinds = ("interrupted", "out-of-memory", "resume")
    endings = [event for event in run.events if event.get("kind") in kinds]
    if endings and endings[-1].get("kind") != "resume":
        return str(endings[-1].get("message", ""))
    if kind == "interrupted":
        return f"Killed or failed; resume with: keel train --resume {run.path}"
    return ""


def findings(runs: Sequence[RunRecord]) -> str:
    """The doctor's findings for each log, or a note that it has not been examined yet."""

    def articles(run: RunRecord) -> str:
        if run.findings is None:
            return "<p class='muted'>Not examined yet.</p>"
        return tables.findings(run) or "<p class='muted'>None so far.</p>"

    return per_run(runs, articles, opened=True)


def curves(runs: Sequence[RunRecord]) -> str:
    """The report's curves, with all runs in the same charts, and their numbers for the pointer."""
    shown, data = charts(runs)
    return block("Curves", shown) + data_element(data)


def options(runs: Sequence[RunRecord]) -> str:
    """The options in which the runs differ, and every run's configuration."""
    differing = block("Options that differ", tables.differences(runs) or "<p class='muted'>None.</p>")
    whole = block("Configuration", per_run(runs, tables.configuration, opened=False, folded=True))
    return (differing if len(runs) > 1 else "") + whole


def side_by_side(parts: Sequence[str]) -> str:
    """Parts side by side, or below each other on a narrow screen."""
    return f"<div class='beside'>{''.join(f'<div>{part}</div>' for part in parts)}</div>"
