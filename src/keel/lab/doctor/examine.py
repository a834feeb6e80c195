"""`keel doctor RUN`: read what training left behind, check it, and keep the findings of Keel's own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import encode, write_atomic
from keel.base.thresholds import thresholds_of
from keel.lab.doctor.checks import check_history
from keel.lab.doctor.diagnosis import Diagnosis
from keel.lab.doctor.readers import read_history
from keel.lab.doctor.readers.keel_run import is_keel_run
from keel.loggers.rundir import FINDINGS


def examine(
    path: Path | str, mapping: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Diagnosis:
    """What the log at `path` says; `mapping` names a table's columns, `overrides` are thresholds."""
    history = read_history(Path(path), dict(mapping or {}))
    config = history.config if history.source == "keel" else {}  # a peer's options may only look like Keel's
    return check_history(history, thresholds_of(config, overrides))


def write_findings(path: Path, diagnosis: Diagnosis) -> Path:
    """findings.json of a Keel run, whole or not at all."""
    if not is_keel_run(path):
        raise KeelError(f"--write keeps findings in the folder of a Keel run, which {path} is not: leave it out")
    file = path / FINDINGS
    lines = ",\n".join("  " + encode(finding) for finding in diagnosis.as_dict()["findings"])
    write_atomic(file, f"[\n{lines}\n]\n" if lines else "[]\n")
    return file
