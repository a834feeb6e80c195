"""Drift: how far one model is from another on given prompts, by every estimator, in both directions."""

from keel.drift.measure import Direction, Drift, Estimate, PositionDrift, Sample, TokenDrift, measure_drift
from keel.drift.prompts import read_prompts
from keel.drift.sides import Side, load_pair
from keel.drift.sources import Source, default_reference, resolve

__all__ = [
    "Direction",
    "Drift",
    "Estimate",
    "PositionDrift",
    "Sample",
    "Side",
    "Source",
    "TokenDrift",
    "default_reference",
    "load_pair",
    "measure_drift",
    "read_prompts",
    "resolve",
]
