"""What is wrong with a run, worst first: checks on a run's history, experiments on one batch, readers of peers' logs.

Nothing here imports torch until an experiment runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.base.moved import refuse_renamed
from keel.base.thresholds import Threshold, Thresholds, load_thresholds
from keel.lab.doctor.diagnosis import Diagnosis
from keel.lab.doctor.findings import CODES, Finding, finding, ranked

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(__name__, {"found": "keel.lab.doctor.finding"})

__all__ = ["CODES", "Diagnosis", "Finding", "Threshold", "Thresholds", "finding", "load_thresholds", "ranked"]
