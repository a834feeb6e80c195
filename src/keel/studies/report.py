"""What a study leaves: points.csv, table.csv, table.md, pictures and one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keel.loggers.files import write_atomic
from keel.studies.folder import FAILED, Outcome, jobs
from keel.studies.grid import Study
from keel.studies.rows import read_row
from keel.studies.table import points_csv, summarise, table_csv, table_md

NOT_RUN = Outcome(FAILED, "not run")


@dataclass(frozen=True)
class Written:
    """The table and the verdict as text for a terminal."""

    text: str


def write_study(study: Study, path: Path, ended: Mapping[str, Outcome]) -> Written:
    """Read every run of the study and write its tables, pictures and page."""
    path = path.resolve()
    rows = [read_row(job, ended.get(job.label, NOT_RUN), study.measure) for job in jobs(path, study)]
    summaries = summarise(rows, study.baseline)
    table = table_md(summaries, study.baseline)
    write_atomic(path / "points.csv", points_csv(rows))
    write_atomic(path / "table.csv", table_csv(summaries))
    write_atomic(path / "table.md", table)
    return Written(table)
