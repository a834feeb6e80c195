"""The folder of a study: its definition, its runs and their outcomes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import encode, one_line_errors, read_json, write_atomic
from keel.base.lock import RunLock
from keel.base.redact import masked
from keel.config import Config, load_config
from keel.lab.studies.grid import Point, Study, fingerprint

STUDY, POINTS, WARMSTARTS = "study.json", "points", "starts"
LOG, OUTCOME, DRIFT = "log.txt", "outcome.json", "drift.json"
DONE, STOPPED, FAILED, INTERRUPTED = "done", "stopped", "failed", "interrupted"


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a point under a seed, and the folder of its run."""

    point: Point
    seed: int
    folder: Path
    config: Config

    @property
    def label(self) -> str:
        return f"{self.point.label} seed={self.seed}"


@dataclass(frozen=True)
class JobOutcome:
    """How a run ended (done, stopped by a guard, or failed) and the reason."""

    state: str
    reason: str = ""


def digest(study: Study) -> str:
    """A hash of everything that determines the runs; baseline and metric only affect the report."""
    inputs = {
        "config": fingerprint(study.config),
        "points": [[point.label, fingerprint(point.config)] for point in study.points],
        "seeds": study.seeds,
        "measure": asdict(study.measure),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def open_folder(path: Path, study: Study, threads: int) -> Iterator[int]:
    """Lock the study's folder and yield the number of threads per run.

    Float sums depend on the number of threads, so a study keeps the number of its first start.
    """
    with one_line_errors(f"cannot create {path}"):
        path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path / ".lock")
    try:
        yield _claim(path, study, threads)
    finally:
        lock.release()


def _claim(path: Path, study: Study, threads: int) -> int:
    record, study_digest = path / STUDY, digest(study)
    if record.exists():
        try:
            stored = json.loads(record.read_text(encoding="utf-8"))
            stored_digest, stored_threads = stored["digest"], int(stored["threads"])
        except (ValueError, KeyError, TypeError):
            raise KeelError(f"{record} cannot be read: restore it, or choose another --out") from None
        if stored_digest != study_digest:
            raise KeelError(
                f"{path} contains another study ({_difference(stored, study)}): choose another --out, or delete it"
            )
        return stored_threads
    others = [item.name for item in path.iterdir() if item.name != ".lock"]
    if others:
        raise KeelError(f"{path} is not empty and is not a study ({sorted(others)[0]}): choose another --out")
    write_atomic(record, encode(_record(study, study_digest, threads), indent=2) + "\n")
    return threads


def _record(study: Study, study_digest: str, threads: int) -> dict[str, Any]:
    return {
        "digest": study_digest,
        "name": study.name,
        "seeds": list(study.seeds),
        "points": [{"label": point.label, "settings": masked(dict(point.settings))} for point in study.points],
        "measure": asdict(study.measure),
        "threads": threads,
        "config": masked(study.config.to_dict()),
    }


def _difference(stored: dict[str, Any], study: Study) -> str:
    """The first difference between two definitions: seeds, points or configuration."""
    current = _record(study, "", 0)
    if stored.get("seeds") != current["seeds"]:
        return f"its seeds are {', '.join(map(str, stored.get('seeds', [])))}"
    labels, current_labels = ([p.get("label") for p in record.get("points", [])] for record in (stored, current))
    if labels != current_labels:
        return f"its points are {', '.join(map(str, labels))}"
    return "its configuration differs"


def jobs(path: Path, study: Study) -> list[StudyRun]:
    """Every run, seed by seed within a point, in the order of the grid."""
    planned = []
    for number, point in enumerate(study.points):
        for seed in study.seeds:
            slug = re.sub(r"[^A-Za-z0-9.=_+-]+", "-", point.label)[:80].strip("-")
            name = f"{number:02d}-{slug}-seed{seed}"
            identity = [f"run.seed={seed}", f"run.dir={json.dumps(str(path / POINTS))}", f"run.name={json.dumps(name)}"]
            settings = [*identity, "run.if_exists=resume", "log.console=plain"]
            planned.append(StudyRun(point, seed, path / POINTS / name, load_config(point.config, settings)))
    return planned


def finished_outcome(job: StudyRun) -> JobOutcome | None:
    """The outcome of a finished run, or None if it must be run, resumed or retried."""
    written = read_outcome(job.folder)
    if written is None or written.state not in (DONE, STOPPED):
        return None
    try:
        same = fingerprint(load_config(job.folder / "config.yaml")) == fingerprint(job.config)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return written if same else None


def read_outcome(folder: Path) -> JobOutcome | None:
    """The outcome that a run has written, if any."""
    written = read_json(folder / OUTCOME)
    return JobOutcome(**written) if isinstance(written, dict) and set(written) == {"state", "reason"} else None


def write_outcome(folder: Path, outcome: JobOutcome) -> None:
    """Write the outcome, after all other files of a finished run."""
    write_atomic(folder / OUTCOME, encode(asdict(outcome), indent=2) + "\n")
