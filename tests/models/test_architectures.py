"""Ten rows of the page on architectures, of ten kinds; `make test-all` holds all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .architectures import Variant, build
from .sweep import TOLERANCE, judge, rows_of

PAGE = rows_of((Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8"))
TEN = {
    Variant("llama"): ("packed", "llama step"),
    Variant("gpt2"): ("packed", "shared prompts"),
    Variant("ministral3"): ("packed", "shared prompts"),  # scaled queries
    Variant("phi3", "longrope"): ("packed", "switching, shared prompts"),
    Variant("gemma2"): ("padded", "own cache"),  # windows and soft caps
    Variant("qwen3_moe"): ("packed", "shared prompts"),  # experts
    Variant("deepseek_v3"): ("packed", "own cache"),  # latent attention
    Variant("bamba"): ("padded", "own cache"),  # state space and attention
    Variant("minimax"): ("padded", "own cache"),  # linear attention, experts
    Variant("xlnet"): ("refused", "refused"),  # it sees what comes later
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(TEN), ids=str)
def test_a_row_of_the_page_is_what_the_code_does(variant: Variant) -> None:
    outcome = judge(build(variant, seed=1), seed=1)
    assert outcome.error < TOLERANCE, outcome
    assert (outcome.scoring, outcome.sampling) == TEN[variant] == PAGE[str(variant)]
