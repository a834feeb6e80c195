"""The tables of docs/studies.md are what Keel makes of the raw figures beside them."""

import csv
from pathlib import Path

import pytest

from keel.lab.studies import read_study
from keel.lab.studies.results import FIGURES, RunResult, SkillResult
from keel.lab.studies.table import skill_columns, summarise, table_md
from keel.lab.studies.verdict import verdict

DOCS = Path(__file__).parents[3] / "docs"
PARTS = ("before", "after", "kl_policy_ref", "kl_ref_policy")


def read_points(path):
    """The runs of a points.csv."""
    with path.open(encoding="utf-8") as file:
        return [read_row(line) for line in csv.DictReader(file)]


def read_row(line):
    columns = list(line)
    numbers = {name: float(value) if value else None for name, value in line.items() if name in (*FIGURES, "wall_s")}
    skills = dict.fromkeys(name.rpartition(":")[0] for name in columns if ":" in name)
    results = {skill: SkillResult(*(float(line[f"{skill}:{part}"]) for part in PARTS)) for skill in skills}
    options = {name: line[name] for name in columns[2 : columns.index("state")]}
    figures = {**dict.fromkeys(FIGURES), **numbers}
    return RunResult(line["point"], int(line["seed"]), line["state"], line["reason"], options, figures, results)


def tables(name):
    """(the tables, the verdict as a list) of a study that comes with Keel, from its raw figures."""
    study = read_study(DOCS.parent / "configs" / "studies" / f"{name}.yaml")
    summaries = summarise(read_points(DOCS / "studies" / f"{name.replace('_', '-')}-points.csv"), study.baseline)
    sentences = verdict(summaries, study.baseline, study.metric, study.axes)
    return table_md(summaries, study.baseline), "".join(f"- {text}\n" for _, text in sentences), summaries


@pytest.mark.parametrize("name", ["beta", "smollm2", "controllers", "references", "losses"])
def test_the_tables_are_made_of_the_raw_figures(name):
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    table, sentences, summaries = tables(name)
    assert skill_columns(summaries)
    assert f"{table}\n{sentences}\n" in text


def test_the_verdict_on_the_estimators_is_made_of_the_raw_figures():
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    *sentences, frontier = tables("estimators")[1].splitlines(keepends=True)
    assert frontier.startswith("- On the frontier")  # too long a list for the page
    assert "".join(sentences) in text
