"""Check that a checkpoint restores Keel's own state; TRL's is not checked."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from keel.doctor.findings import finding
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.checkpoint import load_state, save_state
from keel.integrations.trl.preflight.batch import Subject

_TRLS = "resume: TRL's own part of a checkpoint (weights, optimizer, schedule, order of the data) is not tried"


def probe_resume(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Save controller, guards and reference into a folder and load them again."""
    if not subject.keel:
        return Outcome("resume", unchecked=(_TRLS,))
    trainer = subject.trainer
    state, batches, reference = trainer.keel_state, trainer._batches, trainer.keel_reference
    print_before = reference.fingerprint()
    with tempfile.TemporaryDirectory(prefix="keel-doctor-") as folder:
        save_state(Path(folder), state, batches, reference, trainer._start)
        loaded = load_state(Path(folder), reference, trainer._start)
    same = loaded is not None and asdict(loaded[0]) == asdict(state) and loaded[1] == batches
    figures = {"state_equal": float(same), "reference_equal": float(reference.fingerprint() == print_before)}
    if all(figures.values()):
        return Outcome("resume", (), figures, ("resume: controller and reference come back equal",), (_TRLS,))
    lost = finding(
        "reference/not-saved",
        f"after saving and loading, the state is {'equal' if same else 'another'} and the reference "
        f"{'equal' if figures['reference_equal'] else 'another'}",
        "a controller or reference of one's own does not save all that it has",
        "let state_dict and load_state_dict hold everything that moves",
    )
    return Outcome("resume", (lost,), figures, unchecked=(_TRLS,))


__all__ = ["probe_resume"]
