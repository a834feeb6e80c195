"""The outcome of a run, and the last lines that `keel train` prints.

The caller passes `EndHooks`, so that this room does not import the lab.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.watchdog import LAUNCH_FLAGS, process_count


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run.

    `exit_status` is 0, 130 or 143 after Ctrl-C or SIGTERM (the run can be resumed), or 1 if a guard stopped the run.
    `stopped` is the guard's reason; the last checkpoint is then the last good one. `best` is the checkpoint with the
    best evaluation of the trained task, if it was kept.
    """

    summary: Mapping[str, Any]
    directory: Path
    steps: int
    exit_status: int = 0
    best: Path | None = None
    stopped: str | None = None

    @property
    def report(self) -> Path:
        return self.directory / "report.html"


def result_line(result: RunOutcome) -> str:
    """One line: accuracy and KL of a finished run, or why it ended early."""
    summary = result.summary
    if summary.get("dry_run"):
        metrics = summary["metrics"]
        return f"dry run: one step on one group took {metrics['time/total_s']:.2f} s; nothing was written"
    if result.stopped is not None:
        return f"stopped by a guard: {result.stopped}; the model is from step {result.steps}; report: {result.report}"
    if result.exit_status:
        return f"stopped after step {result.steps}; resume with: {resume_command(result.directory)}"
    parts = [f"{summary['task']}, {result.steps} steps in {summary['wall_s']:.0f} s"]
    before, after = summary["accuracy"]["before"], summary["accuracy"]["after"]
    if before is not None and after is not None:
        parts.append(f"accuracy {100 * before:.1f}% → {100 * after:.1f}%")
    elif None not in (reward := summary.get("reward", {"before": None})).values():
        parts.append(f"held-out reward {reward['before']:.3f} → {reward['after']:.3f}")
    name = next((name for name in ("exact", "k3") if name in summary["kl"]), None)
    if name is not None:
        parts.append(f"KL(policy‖reference) {summary['kl'][name]['mean']:.4f} nats per token ({name})")
    return f"{'; '.join(parts)}; report: {result.report}"


def next_steps(result: RunOutcome) -> list[str]:
    """Commands to run next, for a run with a report."""
    if result.exit_status > 1 or not result.report.is_file():
        return []
    keel, run = program(), result.directory
    commands = {
        f"{keel} show {run}": "completions, token by token",
        f"{keel} doctor {run}": "findings of the run, worst first",
        f"{keel} train {run} run.name=tighter kl.beta=0.1": "the same run with one option changed",
    }
    width = max(map(len, commands))
    return [
        f"next: open {result.report} in a browser",
        *(f"  {command:<{width}}  {why}" for command, why in commands.items()),
    ]


def program() -> str:
    """`keel`, or its path if it is not on PATH, as under `make train`."""
    installed = Path(sys.executable).with_name("keel")
    if shutil.which("keel") is not None or not installed.is_file():
        return "keel"
    return str(installed.relative_to(Path.cwd()) if installed.is_relative_to(Path.cwd()) else installed)


def resume_command(directory: Path) -> str:
    """The command that resumes an interrupted run, with the same launch flags or number of processes."""
    size = process_count()
    here = size > 1 and os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    flags = os.environ.get(LAUNCH_FLAGS, f"--nproc {size}" if here else "")
    return f"{program()} train --resume {directory} {flags}".rstrip()


@dataclass(frozen=True)
class EndHooks:
    """`findings` returns the findings for findings.json and summary.json; `report` then writes the report."""

    findings: Callable[[Path], list[dict[str, Any]]] | None = None
    report: Callable[[Path], object] | None = None


NO_HOOKS = EndHooks()
