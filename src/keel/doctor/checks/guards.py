"""Guards: what they did, in their own words, and whether they skip what is usual."""

from __future__ import annotations

from keel.doctor.advice import changes, either, setting
from keel.doctor.checks.base import RECENT, CheckResults, not_recorded
from keel.doctor.findings import CODES, finding
from keel.doctor.history import History
from keel.doctor.thresholds import Thresholds


def guards(history: History, thresholds: Thresholds) -> CheckResults:
    """What the loop's guards did, in their own words."""
    if not any(event.get("kind") in ("stop", "rollback") for event in history.events):
        return
    from keel.trainer.guards import guard_findings

    for fields in guard_findings(history.events):
        if fields["code"] in CODES:  # a log made by hand may name any
            yield finding(**fields)


def skips(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of updates that guards have skipped."""
    code, skipped = "guard/skips-all", history.get("guard/skipped")
    if skipped is None:
        yield not_recorded(code, "the share of skipped updates")
    elif len(skipped.finite) >= RECENT and skipped.mean > thresholds["skipped_most"]:
        reasons = {"guard/nonfinite": "not finite", "guard/spike": "spikes", "guard/over_budget": "over the KL budget"}
        shares = {text: series.mean for name, text in reasons.items() if (series := history.get(name)) is not None}
        counted = ", ".join(f"{100 * share:.0f} % {text}" for text, share in shares.items() if share > 0)
        yield finding(
            code,
            f"guards skipped {100 * skipped.mean:.0f} % of the updates over {skipped.span}"
            + (f" ({counted})" if counted else ""),
            "a guard that is for the rare answers to the usual: its limit lies within what ordinary updates scatter by",
            either(
                setting("{}", changes(history.config, {"guards.on_spike": "warn"}) if history.source == "keel" else {}),
                "a looser limit of the guard; events.jsonl names which one skipped",
            ),
        )


CHECKS = (skips, guards)
