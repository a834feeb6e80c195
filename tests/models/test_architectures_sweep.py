"""Every causal architecture of transformers, scored and sampled as its own forward says, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from models.architectures import UNBUILT, Variant, build, names, variants
from models.sweep import TOLERANCE, judge, rows_of

pytestmark = pytest.mark.slow


PAGE = rows_of((Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8"))
transformers.logging.set_verbosity_error()


def test_nothing_is_left_out() -> None:
    assert set(names()) == {variant.name for variant in variants()} | set(UNBUILT)
    assert not {variant.name for variant in variants()} & set(UNBUILT)
    assert list(PAGE) == [str(variant) for variant in variants()]


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_what_is_said_not_to_build_does_not(name: str) -> None:
    with pytest.raises((ValueError, AttributeError, ImportError, StrictDataclassError)):
        build(name)


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_an_architecture_is_what_the_page_says(variant: Variant) -> None:
    outcome = judge(build(variant))
    assert outcome.error < TOLERANCE, outcome
    assert (outcome.scoring, outcome.sampling) == PAGE[str(variant)], outcome
    assert "\n" not in outcome.note


@pytest.mark.parametrize("variant", variants()[::9], ids=str)
def test_other_lengths_give_the_same(variant: Variant) -> None:
    """Windows, chunks, switches and prompts of another seed, which nothing was written against."""
    outcome = judge(build(variant, seed=7), seed=7)
    assert outcome.error < TOLERANCE, outcome
    assert (outcome.scoring, outcome.sampling) == PAGE[str(variant)], outcome
