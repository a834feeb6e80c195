"""The tables of the shipped studies are made of the raw figures beside the docs."""

import sys
from pathlib import Path

import pytest

from keel.lab.studies.table import skill_columns

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from pages.studies import STUDIES, studies_page, study_table


@pytest.fixture(scope="module")
def page():
    return studies_page()


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_has_its_row(name, page):
    table, summaries = study_table(name)
    assert skill_columns(summaries)
    assert all(f"| {summary.label}" in table for summary in summaries)
    assert f"## {name} {{ #{name} }}\n\n{table}" in page
