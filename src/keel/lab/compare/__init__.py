"""Drift: how far one model is from another on given prompts, by every estimator, in both directions."""

from keel.lab.compare.measure import Direction, Drift, DriftEstimate, PositionDrift, Sample, TokenDrift, measure_drift
from keel.lab.compare.prompts import read_prompts
from keel.lab.compare.sides import Side, load_pair
from keel.lab.compare.sources import ModelSource, default_reference, resolve

__all__ = [
    "Direction",
    "Drift",
    "DriftEstimate",
    "ModelSource",
    "PositionDrift",
    "Sample",
    "Side",
    "TokenDrift",
    "default_reference",
    "load_pair",
    "measure_drift",
    "read_prompts",
    "resolve",
]
