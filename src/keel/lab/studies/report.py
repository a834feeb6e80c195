"""What a study leaves: points.csv, table.csv, table.md, pictures and one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.lab.studies.folder import FAILED, Outcome, jobs
from keel.lab.studies.grid import Study
from keel.lab.studies.page import study_page
from keel.lab.studies.plots import write_pictures
from keel.lab.studies.results import read_result
from keel.lab.studies.table import points_csv, summarise, table_csv, table_md
from keel.lab.studies.verdict import verdict

NOT_RUN = Outcome(FAILED, "not run")


@dataclass(frozen=True)
class StudyReport:
    """The table and the verdict as text for a terminal, and the files that were written."""

    text: str
    files: tuple[str, ...]


def write_study(study: Study, path: Path, outcomes: Mapping[str, Outcome], command: str = "") -> StudyReport:
    """Read every run of the study and write its tables, pictures and page."""
    path = path.resolve()
    rows = [read_result(job, outcomes.get(job.label, NOT_RUN), study.measure) for job in jobs(path, study)]
    summaries = summarise(rows, study.baseline)
    sentences = verdict(summaries, study.baseline, study.metric, study.axes)
    verdict_text = "".join(f"- {text}\n" for _, text in sentences)
    table = table_md(summaries, study.baseline)
    page = study_page(study.name, command, summaries, study.baseline, sentences)
    files = {
        "points.csv": points_csv(rows),
        "table.csv": table_csv(summaries),
        "table.md": f"{table}\n{verdict_text}",
        "report.html": page,
    }
    for name, content in files.items():
        write_atomic(path / name, content)
    try:
        pictures = write_pictures(summaries, path, study.name)
    except KeelError as error:
        pictures = [f"no pictures: {error}"]
    return StudyReport(f"{table}\n{verdict_text}", (*files, *pictures))
