"""Drift: the KL between two models on given prompts, by every estimator, in both directions."""

from keel.lab.compare.measure import (
    Direction,
    Drift,
    DriftEstimate,
    MeasuredCompletion,
    PositionDrift,
    TokenDrift,
    measure_drift,
)
from keel.lab.compare.sides import ModelSource, Side, default_reference, load_pair, read_prompts, resolve

__all__ = [
    "Direction",
    "Drift",
    "DriftEstimate",
    "MeasuredCompletion",
    "ModelSource",
    "PositionDrift",
    "Side",
    "TokenDrift",
    "default_reference",
    "load_pair",
    "measure_drift",
    "read_prompts",
    "resolve",
]
