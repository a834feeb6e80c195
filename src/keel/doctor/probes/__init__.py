"""The experiments of the preflight, in the order in which they run: what breaks others comes first."""

from __future__ import annotations

from keel.doctor.probes.advantage import probe_advantage
from keel.doctor.probes.balance import probe_balance
from keel.doctor.probes.collection import probe_collection
from keel.doctor.probes.evaluation import probe_evaluation
from keel.doctor.probes.exploration import probe_exploration
from keel.doctor.probes.kl_term import probe_kl_term
from keel.doctor.probes.limits import probe_limits
from keel.doctor.probes.masks import probe_masks
from keel.doctor.probes.model import probe_model
from keel.doctor.probes.objective import probe_objective
from keel.doctor.probes.prompts import probe_prompts
from keel.doctor.probes.reach import probe_reach
from keel.doctor.probes.reference import probe_reference
from keel.doctor.probes.result import Probe, ProbeResult
from keel.doctor.probes.sampler import probe_sampler
from keel.doctor.probes.scoring import probe_scoring
from keel.doctor.probes.sync import probe_sync
from keel.doctor.probes.travel import probe_travel
from keel.doctor.probes.truncation import probe_truncation
from keel.doctor.probes.update import probe_update

PROBES: list[tuple[str, Probe]] = [
    ("model", probe_model),
    ("prompts", probe_prompts),
    ("collection", probe_collection),
    ("travel", probe_travel),
    ("exploration", probe_exploration),
    ("masks", probe_masks),
    ("scoring", probe_scoring),
    ("sampler", probe_sampler),
    ("weight sync", probe_sync),
    ("reference", probe_reference),
    ("advantage", probe_advantage),
    ("objective", probe_objective),
    ("kl_term", probe_kl_term),
    ("update", probe_update),
    ("reach", probe_reach),
    ("balance", probe_balance),
    ("limits", probe_limits),
    ("truncation", probe_truncation),
    ("evaluation", probe_evaluation),
]

__all__ = ["PROBES", "Probe", "ProbeResult"]
