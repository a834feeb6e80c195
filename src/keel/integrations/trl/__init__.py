"""Keel inside TRL: `KeelGRPOTrainer` in the place of `GRPOTrainer`, `KeelRunCallback` for a run directory of Keel's.

`SyncCheck`, `DrawnCheck` and `TraceRecorder` are callbacks for GRPOTrainer itself.
"""

from keel.integrations.versions import TRL

TRL.check_version()  # before anything of TRL is imported: another version may not have what is imported below

from keel.integrations.trl.checks import DrawnCheck, SyncCheck, TraceRecorder  # noqa: E402
from keel.integrations.trl.rundir import KeelRunCallback  # noqa: E402
from keel.integrations.trl.trainer import KeelGRPOTrainer  # noqa: E402

__all__ = ["DrawnCheck", "KeelGRPOTrainer", "KeelRunCallback", "SyncCheck", "TraceRecorder"]
