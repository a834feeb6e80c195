"""Keel inside TRL: `KeelGRPOTrainer` replaces `GRPOTrainer`, and `KeelRunCallback` writes a Keel run directory.

`SyncCheck`, `DrawnCheck` and `TraceRecorder` are callbacks for GRPOTrainer itself.
"""

from keel.integrations.versions import TRL

TRL.check_version()  # before importing TRL, because another version may lack the names imported below

from keel.integrations.trl.checks import DrawnCheck, SyncCheck, TraceRecorder  # noqa: E402
from keel.integrations.trl.rundir import KeelRunCallback  # noqa: E402
from keel.integrations.trl.trainer import KeelGRPOTrainer  # noqa: E402

__all__ = ["DrawnCheck", "KeelGRPOTrainer", "KeelRunCallback", "SyncCheck", "TraceRecorder"]
