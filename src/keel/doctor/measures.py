"""The measures of a preflight, in order. Measures of errors that invalidate others come first."""

from __future__ import annotations

import inspect
from typing import Any

from keel.doctor.asking import measure_format
from keel.doctor.loading import measure_loading
from keel.doctor.measure import Measure
from keel.doctor.probes.balance import probe_balance
from keel.doctor.probes.collection import probe_collection, probe_truncation
from keel.doctor.probes.exploration import probe_evaluation, probe_exploration
from keel.doctor.probes.kl_term import probe_kl_term
from keel.doctor.probes.limits import probe_limits
from keel.doctor.probes.masks import probe_masks
from keel.doctor.probes.model import probe_model
from keel.doctor.probes.objective import probe_advantage, probe_objective
from keel.doctor.probes.prompts import probe_prompts
from keel.doctor.probes.reach import probe_reach
from keel.doctor.probes.reference import probe_reference
from keel.doctor.probes.sampler import probe_sampler
from keel.doctor.probes.travel import probe_travel
from keel.doctor.probes.update import probe_update
from keel.doctor.scoring import measure_scoring
from keel.doctor.sync import measure_sync


def _probe(name: str, probe: Any, *codes: str, **how: Any) -> Measure:
    """A measure from a probe, a function of (subject, thresholds)."""
    about = (inspect.getdoc(probe) or "").splitlines()[0]
    return Measure(name, lambda subject: probe(subject, subject.thresholds), about, codes, **how)


MEASURES: tuple[Measure, ...] = (
    _probe("model", probe_model),
    _probe("prompts", probe_prompts),
    Measure("prompt format", measure_format, measure_format.__doc__ or "", ("prompt/format",), needs=("golds",)),
    Measure(
        "loading",
        measure_loading,
        measure_loading.__doc__ or "",
        ("model/tokenizer", "model/missing-weights"),
        needs=("golds",),
    ),
    _probe("collection", probe_collection, skill=True),
    _probe("travel", probe_travel, passes=True),
    _probe("exploration", probe_exploration, passes=True),
    _probe("masks", probe_masks, passes=True),
    Measure("scoring", measure_scoring, measure_scoring.__doc__ or "", ("scoring/*",), ("score",), passes=True),
    _probe("sampler", probe_sampler, passes=True),
    Measure(
        "weight sync",
        measure_sync,
        measure_sync.__doc__ or "",
        ("sampler/stale",),
        needs=("sample", "sync"),
        passes=True,
        quick=False,
    ),
    _probe("reference", probe_reference, passes=True),
    _probe("advantage", probe_advantage, skill=True),
    _probe("objective", probe_objective),
    _probe("kl_term", probe_kl_term, "kl/reversed", "kl/no-gradient", "kl/scale", passes=True, quick=False),
    _probe("update", probe_update, passes=True, skill=True),  # the next three reuse its first update
    _probe("reach", probe_reach, passes=True),
    _probe("balance", probe_balance, passes=True),
    _probe("limits", probe_limits, passes=True),
    _probe("truncation", probe_truncation, skill=True),
    _probe("evaluation", probe_evaluation, "eval/train-gap", quick=False),
)

__all__ = ["MEASURES"]
