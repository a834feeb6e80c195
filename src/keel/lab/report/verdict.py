"""What the figures say, in words: computed from the run's files alone, and no stronger than they allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.lab.judge import Accuracy, accuracies, kl_limit
from keel.lab.report.rollouts import brief
from keel.lab.runs import RunRecord, interval, number


def state(run: RunRecord) -> tuple[str, str]:
    """(kind, words): completed, stopped, aborted, running or interrupted."""
    done = f"{run.steps} of {run.max_steps} steps" if run.max_steps else f"{run.steps} steps"
    ended = [str(event.get("kind", "")) for event in run.events]
    said = str((run.summary or {}).get("status", ""))
    if "abort" in said or (ended and any("abort" in kind for kind in ended[-3:])):
        return "aborted", f"aborted after {done}"
    if run.summary is not None:
        if run.max_steps and run.steps < run.max_steps:
            return "stopped", f"stopped after {done}"
        return "completed", f"completed, {done}"
    if run.running:
        return "running", f"still running, {done}"
    return "interrupted", f"not finished: {done}, no summary, and no process is at work on it"


def accuracy(run: RunRecord) -> Accuracy | None:
    """Of the trained task: from the summary, or from the first and last evaluation of a run without one."""
    summary = run.summary or {}
    said = summary.get("accuracy")
    if isinstance(said, Mapping) and number(said.get("after")) is not None:
        return Accuracy(
            str(summary.get("task", "task")),
            number(said.get("before")),
            number(said.get("after")),
            interval(said.get("ci95_before")),
            interval(said.get("ci95_after")),
        )
    return next(iter(accuracies(run.evaluations, retention=False).values()), None)


def retention(run: RunRecord) -> list[Accuracy]:
    """Of every other skill; intervals from eval.jsonl, which the summary does not carry."""
    measured = accuracies(run.evaluations, retention=True)
    said = (run.summary or {}).get("retention")
    if not isinstance(said, Mapping) or not said:
        return list(measured.values())
    rows = []
    for skill, pair in said.items():
        known = measured.get(str(skill))
        pair = pair if isinstance(pair, Mapping) else {}
        before, after = number(pair.get("before")), number(pair.get("after"))
        rows.append(
            Accuracy(str(skill), before, after, known.ci_before if known else None, known.ci_after if known else None)
        )
    return rows


def kl_figures(run: RunRecord) -> dict[str, tuple[float, float | None]]:
    """(mean, standard error) by estimator: the summary's, else the last measured step's."""
    said = (run.summary or {}).get("kl")
    figures: dict[str, tuple[float, float | None]] = {}
    for kind in ("k3", "exact", "k1", "k2", "sequence"):
        entry: Any = said.get(kind) if isinstance(said, Mapping) else None
        mean = number(entry.get("mean")) if isinstance(entry, Mapping) else number(entry)
        error = number(entry.get("se")) if isinstance(entry, Mapping) else None
        if mean is None and not isinstance(said, Mapping):
            mean, error = run.last(f"kl/policy_ref/{kind}/mean"), run.last(f"kl/policy_ref/{kind}/se")
        if mean is not None:
            figures[kind] = (mean, error)
    return figures


def per_token_kl(figures: Mapping[str, tuple[float, float | None]]) -> tuple[str, float, float | None] | None:
    """The best figure there is, with its name: exact where measured, as k3's mean may hang on a few tokens."""
    return next(((kind, *figures[kind]) for kind in ("exact", "k3", "k1", "k2") if kind in figures), None)


def sentences(run: RunRecord) -> list[tuple[str, str]]:
    """The verdict, a (tone, sentence) at a time; tone is good, warn, bad or plain."""
    return [
        _progress(run),
        *_guard_words(run),
        *_accuracy_words(run),
        *_kl_words(run),
        *_retention_words(run),
        _finding_words(run),
    ]


def _progress(run: RunRecord) -> tuple[str, str]:
    kind, words = state(run)
    tone = {"completed": "good", "aborted": "bad", "interrupted": "warn", "stopped": "warn"}.get(kind, "plain")
    wall = number((run.summary or {}).get("wall_s"))
    return tone, f"The run is {words}" + (f", in {wall / 60:.1f} minutes." if wall is not None else ".")


def _guard_words(run: RunRecord) -> list[tuple[str, str]]:
    """What the guards did: skipped updates, rollbacks and, where it ended the run, the stop; nothing if nothing."""
    counted = {kind: [e for e in run.events if e.get("kind") == kind] for kind in ("guard/skipped", "rollback", "stop")}
    skipped, rollbacks, stops = counted.values()
    words = []
    if skipped:
        words.append(f"{len(skipped)} step{'s' * (len(skipped) > 1)} with a skipped update")
    if rollbacks:
        words.append(f"{len(rollbacks)} rollback{'s' * (len(rollbacks) > 1)}")
    said = [("warn", f"Guards: {', '.join(words)}.")] if words else []
    said += [("warn", f"At step {event.get('step')}: {event.get('message')}.") for event in rollbacks]
    ended = stops and run.summary is not None and state(run)[0] == "stopped"
    return said + ([("bad", f"Stopped by a guard: {stops[-1].get('message')}.")] if ended else [])


def _accuracy_words(run: RunRecord) -> list[tuple[str, str]]:
    found = accuracy(run)
    paid = (run.summary or {}).get("reward")
    if (found is None or found.after is None) and isinstance(paid, Mapping) and number(paid.get("after")) is not None:
        text = f"Held-out reward {brief(paid.get('before'))} → {brief(paid.get('after'))}"
        return [("plain", f"{text}; the problems have no answers, so nothing is right or wrong.")]
    if found is None or (found.before is None and found.after is None):
        return [("plain", "Accuracy on held-out problems has not been measured yet.")]
    if found.after is None:
        return [
            (
                "plain",
                f"{found.task}: {percent(found.before)} before training{ci(found.ci_before)}; not measured since.",
            )
        ]
    if found.before is None:
        return [
            ("plain", f"{found.task}: {percent(found.after)} now{ci(found.ci_after)}; not measured before training.")
        ]
    change = 100 * (found.after - found.before)
    if change == 0:
        words = f"{found.task}: {percent(found.after)} on held-out problems, as before training{ci(found.ci_after)}."
        return [("warn", words)]
    text = f"{found.task}: {percent(found.before)} → {percent(found.after)} on held-out problems ({change:+.1f} points"
    if found.overlap is None:
        return [("plain", text + "; no intervals, so it may be chance).")]
    text += f"; 95 % intervals {span(found.ci_before)} → {span(found.ci_after)})"
    if found.overlap:
        return [("warn", text + ". The intervals overlap: the change may be chance.")]
    words = "a gain" if change > 0 else "a loss"
    return [("good" if change > 0 else "bad", text + f". The intervals do not overlap: {words} beyond chance.")]


def _kl_words(run: RunRecord) -> list[tuple[str, str]]:
    figures = kl_figures(run)
    per_token = per_token_kl(figures)
    if per_token is None:
        return [("plain", "KL to the reference was not measured.")]
    kind, mean, error = per_token
    when = "at the end" if run.summary else "so far"
    text = f"KL(policy‖reference) {when}: {measured(mean, error)} nats per token ({kind})"
    if "sequence" in figures:
        text += f", {measured(*figures['sequence'])} nats per sequence"
    beta = number((run.summary or {}).get("beta"))
    beta = run.last("kl/beta") if beta is None else beta
    if beta is not None:
        text += f", under β = {beta:g}"
    limit = kl_limit(run.config, run.thresholds).value
    if mean > limit:
        return [("warn", f"{text}. That is more than {limit:g} nats per token: the policy is far from its reference.")]
    return [("plain", text + ".")]


def _retention_words(run: RunRecord) -> list[tuple[str, str]]:
    rows = [row for row in retention(run) if row.before is not None and row.after is not None]
    if not rows:
        return [("plain", "Retention of other skills was not measured.")]
    lost = [row for row in rows if row.change(run.thresholds) == "dropped"]
    if lost:
        named = ", ".join(f"{row.task} {percent(row.before)} → {percent(row.after)}" for row in lost)
        return [("warn", f"Retention: {len(lost)} of {len(rows)} other skills dropped: {named}.")]
    words = "the other skill" if len(rows) == 1 else f"the {len(rows)} other skills"
    if any(row.fell for row in rows):
        return [
            ("good", f"Retention: {words} lost at most {100 * run.thresholds['retention_drop']:g} % of what was there.")
        ]
    return [("good", f"Retention: {words} held within {'its' if len(rows) == 1 else 'their'} intervals.")]


def _finding_words(run: RunRecord) -> tuple[str, str]:
    if run.findings is None:
        codes = (run.summary or {}).get("findings")
        if isinstance(codes, list):
            return ("warn" if codes else "good"), f"Findings: {', '.join(map(str, codes)) or 'none'}."
        return "plain", "Findings: not judged yet."
    if not run.findings:
        return "good", "Findings: none."
    counts = {
        kind: sum(1 for finding in run.findings if finding.get("severity") == kind)
        for kind in ("error", "warning", "note")
    }
    said = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    tone = "bad" if counts["error"] else "warn" if counts["warning"] else "plain"
    codes = ", ".join(str(finding.get("code", "?")) for finding in run.findings)
    return tone, f"Findings: {', '.join(said) or len(run.findings)} ({codes})."


def percent(value: float | None) -> str:
    """`62.5 %`, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def span(bounds: tuple[float, float] | None) -> str:
    """`55–69 %`."""
    return "–" if bounds is None else f"{100 * bounds[0]:.0f}–{100 * bounds[1]:.0f} %"


def ci(bounds: tuple[float, float] | None) -> str:
    """` (95 % interval 55–69 %)`, or nothing."""
    return "" if bounds is None else f" (95 % interval {span(bounds)})"


def measured(mean: float, error: float | None) -> str:
    """`0.021 ± 0.002`."""
    return f"{mean + 0.0:.3g}" + ("" if error is None else f" ± {error:.2g}")
