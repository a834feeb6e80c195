"""What is wrong with a run, worst first: checks on a run's history, experiments on one batch, readers of peers' logs.

Nothing here imports torch until an experiment runs.
"""

from __future__ import annotations

from keel.doctor.diagnosis import Diagnosis
from keel.doctor.findings import CODES, Finding, finding, ranked
from keel.doctor.thresholds import Threshold, Thresholds, load_thresholds

__all__ = ["CODES", "Diagnosis", "Finding", "Threshold", "Thresholds", "finding", "load_thresholds", "ranked"]
