"""`keel doctor RUN`: read a log, check it, and save the findings of Keel's own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import encode, write_atomic
from keel.doctor.checks import check_history
from keel.doctor.findings import Diagnosis
from keel.doctor.readers import is_run, read_history, runs_below
from keel.doctor.readers.trainers import history_of, is_keel_run
from keel.doctor.runs import RunRecord
from keel.doctor.thresholds import thresholds_of
from keel.loggers.rundir import FINDINGS

LISTED = 10  # runs that an error message lists


def examine(
    path: Path | str, mapping: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Diagnosis:
    """The diagnosis of the log at `path`. `mapping` names a table's columns and `overrides` are thresholds."""
    if Path(path).is_dir():
        _refuse_folder_of_runs(Path(path))
    history = read_history(Path(path), dict(mapping or {}))
    # options of other trainers may have the same names as Keel's
    config = history.config if history.source == "keel" else {}
    return check_history(history, thresholds_of(config, overrides))


def examine_run(run: RunRecord) -> Diagnosis:
    """The diagnosis of a Keel run that is already read and may still be running."""
    return check_history(history_of(run), run.thresholds)


def _refuse_folder_of_runs(path: Path) -> None:
    """Raise an error for a folder that contains several runs, with the names of these runs."""
    runs = [] if is_run(path) else sorted(runs_below(path), key=lambda run: (-_changed(run), str(run)))
    if not runs:
        return  # let the readers read it, or report what they expect
    names = ", ".join(str(run.relative_to(path)) for run in runs[:LISTED])
    older = f" and {len(runs) - LISTED} older" if len(runs) > LISTED else ""
    contained = "one run" if len(runs) == 1 else f"{len(runs)} runs, newest first"
    raise KeelError(
        f"{path} is not a run, but contains {contained}: {names}{older}; give one of them, such as {runs[0]}"
    )


def _changed(run: Path) -> float:
    """When a run was last written to."""
    return max((file.stat().st_mtime for file in run.iterdir()), default=0.0)


def write_findings(path: Path, diagnosis: Diagnosis) -> Path:
    """Write findings.json of a Keel run atomically."""
    if not is_keel_run(path):
        raise KeelError(
            f"--write stores the findings in the folder of a Keel run, and {path} is not one: remove --write"
        )
    file = path / FINDINGS
    lines = ",\n".join("  " + encode(finding) for finding in diagnosis.as_dict()["findings"])
    write_atomic(file, f"[\n{lines}\n]\n" if lines else "[]\n")
    return file
