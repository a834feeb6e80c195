"""One fault operator of each kind: its code is the first finding of its probe, with applicable advice."""

from __future__ import annotations

from random import Random

import pytest

from doctor.followed import check_advice, preflight_of
from doctor.schooled import BASE
from faults import engines, losses, references, scorers  # noqa: F401
from faults.base import OPERATORS, edited
from keel.config import load_config

pytestmark = pytest.mark.doctor

BASES = (BASE, edited(BASE, {"model.lora": {"r": 4}}), edited(BASE, {"rollout.temperature": 0.7}))
NAMES = (
    "engine/banned-tokens",
    "engine/cached",
    "engine/copies",
    "engine/end-stripped",
    "engine/first-token-no-action",
    "engine/hidden-min-p",
    "engine/hidden-top-k",
    "engine/hidden-top-p",
    "engine/interleaved",
    "engine/logp-in-another-base",
    "engine/logp-of-a-neighbour",
    "engine/logp-plus-constant",
    "engine/logp-without-temperature",
    "engine/one-more-bos",
    "engine/past-the-end",
    "engine/prompt-cut-left",
    "engine/prompt-retokenised",
    "engine/repetition-penalty",
    "engine/secret-temperature",
    "engine/seed-of-the-run",
    "engine/tokens-replaced",
    "kl/controller-nan",
    "kl/controller-negative",
    "kl/controller-silent",
    "kl/controller-without-bound",
    "kl/detached",
    "kl/k1-in-the-loss",
    "kl/wrong-way-round",
    "loss/advantage-ignored",
    "loss/detached",
    "loss/good-ones-only",
    "loss/sign-flipped",
    "loss/times-the-tokens",
    "reference/adapter-on",
    "reference/follows-at-once",
    "reference/layer-missing",
    "reference/moves-when-scored",
    "reference/never-moves",
    "reference/not-saved",
    "reference/other-checkpoint",
    "reference/shared-weights",
    "reference/silently-moving",
    "scorer/one-place-off",
    "scorer/positions-wrong",
    "scorer/prompt-hidden",
    "scorer/random",
    "scorer/rows-detached",
    "scorer/temperature-missing",
    "sync/first-only",
    "sync/lora-missing",
    "sync/never",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_named_first(name: str) -> None:
    operator = OPERATORS[name]
    config = load_config(operator.apply(next(base for base in BASES if operator.fits(base)), Random(0)), [])
    diagnosis = preflight_of(config, operator.codes[0].partition("/")[0])
    check_advice(config, diagnosis)
    assert [finding.code for finding in diagnosis.findings][:1] in [[code] for code in operator.codes]
    assert not [line for line in diagnosis.unchecked if "Error" in line], diagnosis.unchecked
