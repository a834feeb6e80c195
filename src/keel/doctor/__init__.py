"""Diagnose a run: checks on its history, experiments on one batch, and readers of other trainers' logs.

torch is not imported until an experiment runs.
"""

from __future__ import annotations

from keel.doctor.findings import CODES, Diagnosis, Finding, finding, ranked
from keel.doctor.thresholds import Threshold, Thresholds, load_thresholds

__all__ = ["CODES", "Diagnosis", "Finding", "Threshold", "Thresholds", "finding", "load_thresholds", "ranked"]
