"""The reference of the shipped studies: tables and verdicts, made from the raw figures in docs/studies."""

from __future__ import annotations

import csv
from pathlib import Path

from keel.lab.studies import read_study
from keel.lab.studies.report import verdict
from keel.lab.studies.results import FIGURES, RunResult, SkillResult
from keel.lab.studies.table import PointSummary, summarise, table_md

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ("beta", "estimators", "estimators_exact", "smollm2", "controllers", "references", "losses")
SKILL = ("before", "after", "kl_policy_ref", "kl_ref_policy")
HEAD = """# Tables of the studies

Means and 95 % intervals over seeds, and the verdict of each shipped study
([what they show](../studies.md#shipped-studies)).

"""


def studies_page() -> str:
    return HEAD + "\n".join(f"## {name} {{ #{name} }}\n\n{study_table(name)[0]}" for name in STUDIES)


def study_table(name: str) -> tuple[str, list[PointSummary]]:
    """A study's tables with its verdict, and what they are made of."""
    study = read_study(ROOT / "configs" / "studies" / f"{name}.yaml")
    points = read_points(ROOT / "docs" / "studies" / f"{name.replace('_', '-')}-points.csv")
    summaries = summarise(points, study.baseline)
    sentences = verdict(summaries, study.baseline, study.metric, study.axes)
    return table_md(summaries, study.baseline) + "\n" + "".join(f"- {text}\n" for _, text in sentences), summaries


def read_points(path: Path) -> list[RunResult]:
    """The runs of a points.csv."""
    with path.open(encoding="utf-8") as file:
        return [_run(line) for line in csv.DictReader(file)]


def _run(line: dict[str, str]) -> RunResult:
    columns = list(line)
    numbers = {name: float(value) if value else None for name, value in line.items() if name in (*FIGURES, "wall_s")}
    skills = dict.fromkeys(name.rpartition(":")[0] for name in columns if ":" in name)
    results = {skill: SkillResult(*(float(line[f"{skill}:{part}"]) for part in SKILL)) for skill in skills}
    options = {name: line[name] for name in columns[2 : columns.index("state")]}
    figures = {**dict.fromkeys(FIGURES), **numbers}
    return RunResult(line["point"], int(line["seed"]), line["state"], line["reason"], options, figures, results)
