"""Operators of the fault bench, one of a kind: each is the first finding of what looks at it, with advice to follow."""

from __future__ import annotations

from random import Random

import pytest

from doctor.followed import check_advice, preflight_of
from doctor.schooled import BASE
from faults import losses, references  # noqa: F401
from faults.base import OPERATORS, edited
from keel.config import load_config

pytestmark = pytest.mark.doctor

BASES = (BASE, edited(BASE, {"model.lora": {"r": 4}}), edited(BASE, {"rollout.temperature": 0.7}))
NAMES = (
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
)


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_named_first(name: str) -> None:
    operator = OPERATORS[name]
    config = load_config(operator.apply(next(base for base in BASES if operator.fits(base)), Random(0)), [])
    diagnosis = preflight_of(config, operator.codes[0].partition("/")[0])
    check_advice(config, diagnosis)
    assert [finding.code for finding in diagnosis.findings][:1] in [[code] for code in operator.codes]
    assert not [line for line in diagnosis.unchecked if "Error" in line], diagnosis.unchecked
