"""The verdict of a run in sentences, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.doctor.judge import (
    SEVERITIES,
    Accuracy,
    accuracies,
    finding_name,
    finding_sentence,
    guard_stop,
    kl_limit,
    state,
    worst_finding,
)
from keel.doctor.runs import RunRecord, interval, number
from keel.lab.report.rollouts import brief

Sentence = tuple[str, str]  # tone (good, warn, bad or plain), text
STATE_TONES = {"completed": "good", "stopped": "warn", "aborted": "bad", "running": "plain", "interrupted": "warn"}
SEVERITY_TONES = {"error": "bad", "warning": "warn"}  # notes are plain


def accuracy(run: RunRecord) -> Accuracy | None:
    """Accuracy on the trained task: from the summary, or from the first and last evaluation of a run without one."""
    summary = run.summary or {}
    stated = summary.get("accuracy")
    if isinstance(stated, Mapping) and number(stated.get("after")) is not None:
        return Accuracy(
            str(summary.get("task", "task")),
            number(stated.get("before")),
            number(stated.get("after")),
            interval(stated.get("ci95_before")),
            interval(stated.get("ci95_after")),
        )
    return next(iter(accuracies(run.evaluations, retention=False).values()), None)


def retention(run: RunRecord) -> list[Accuracy]:
    """Accuracy on every other skill; intervals come from eval.jsonl, since the summary does not have them."""
    measured = accuracies(run.evaluations, retention=True)
    stated = (run.summary or {}).get("retention")
    if not isinstance(stated, Mapping) or not stated:
        return list(measured.values())
    rows = []
    for skill, pair in stated.items():
        pair = pair if isinstance(pair, Mapping) else {}
        before, after = number(pair.get("before")), number(pair.get("after"))
        known = measured.get(str(skill), Accuracy(str(skill), None, None, None, None))
        rows.append(Accuracy(str(skill), before, after, known.ci_before, known.ci_after))
    return rows


def kl_figures(run: RunRecord) -> dict[str, tuple[float, float | None]]:
    """(mean, standard error) by estimator: the summary's, else the last measured step's."""
    stated = (run.summary or {}).get("kl")
    figures: dict[str, tuple[float, float | None]] = {}
    for kind in ("k3", "exact", "k1", "k2", "sequence"):
        entry: Any = stated.get(kind) if isinstance(stated, Mapping) else None
        mean = number(entry.get("mean")) if isinstance(entry, Mapping) else number(entry)
        error = number(entry.get("se")) if isinstance(entry, Mapping) else None
        if mean is None and not isinstance(stated, Mapping):
            mean, error = run.last(f"kl/policy_ref/{kind}/mean"), run.last(f"kl/policy_ref/{kind}/se")
        if mean is not None:
            figures[kind] = (mean, error)
    return figures


def per_token_kl(figures: Mapping[str, tuple[float, float | None]]) -> tuple[str, float, float | None] | None:
    """The best available estimate with its name: exact if measured, since a few tokens may dominate the mean of k3."""
    return next(((kind, *figures[kind]) for kind in ("exact", "k3", "k1", "k2") if kind in figures), None)


def last_beta(run: RunRecord) -> float | None:
    """β at the end: the summary's, else the last step's."""
    beta = number((run.summary or {}).get("beta"))
    return run.last("kl/beta") if beta is None else beta


def labels(run: RunRecord) -> list[Sentence]:
    """Short labels: the worst error or warning, if any, and the state.

    A completed run is good only if it was examined without errors and warnings.
    """
    kind, _ = state(run)
    tone, worst = STATE_TONES[kind], worst_finding(run.findings)
    if tone == "good" and (worst is not None or run.findings is None):
        tone = "plain"
    named = [] if worst is None else [(SEVERITY_TONES[worst["severity"]], finding_name(worst))]
    return [*named, (tone, kind)]


def sentences(run: RunRecord) -> list[Sentence]:
    """The verdict of a run, its worst finding first."""
    return [
        *_finding_sentences(run),
        _progress_sentence(run),
        *_guard_sentences(run),
        _accuracy_sentence(run),
        _kl_sentence(run),
        _retention_sentence(run),
    ]


def _progress_sentence(run: RunRecord) -> Sentence:
    _, ending = state(run)
    wall = number((run.summary or {}).get("wall_s"))
    return labels(run)[-1][0], f"The run is {ending}" + (f", in {wall / 60:.1f} minutes." if wall is not None else ".")


def _guard_sentences(run: RunRecord) -> list[Sentence]:
    """The guards' actions: skipped updates, rollbacks and, if it ended the run, the stop."""
    skipped, rollbacks = ([e for e in run.events if e.get("kind") == kind] for kind in ("guard/skipped", "rollback"))
    counts = []
    if skipped:
        counts.append(f"{len(skipped)} step{'s' * (len(skipped) > 1)} with a skipped update")
    if rollbacks:
        counts.append(f"{len(rollbacks)} rollback{'s' * (len(rollbacks) > 1)}")
    sentences = [("warn", f"Guards: {', '.join(counts)}.")] if counts else []
    sentences += [("warn", f"At step {event.get('step')}: {event.get('message')}.") for event in rollbacks]
    reason = guard_stop(run) if state(run)[0] == "stopped" else None
    return sentences + ([] if reason is None else [("bad", f"Stopped by a guard: {reason}.")])


def _accuracy_sentence(run: RunRecord) -> Sentence:
    trained, reward = accuracy(run), (run.summary or {}).get("reward")
    unmeasured = trained is None or trained.after is None
    if unmeasured and isinstance(reward, Mapping) and number(reward.get("after")) is not None:
        text = f"Held-out reward {brief(reward.get('before'))} → {brief(reward.get('after'))}"
        return "plain", f"{text}; the problems have no answers, so there is no accuracy."
    if trained is None or (trained.before is None and trained.after is None):
        return "plain", "Accuracy on held-out problems has not been measured yet."
    task, before, after = trained.task, percent(trained.before), percent(trained.after)
    if trained.after is None:
        return "plain", f"{task}: {before} before training{ci(trained.ci_before)}; not measured since."
    if trained.before is None:
        return "plain", f"{task}: {after} now{ci(trained.ci_after)}; not measured before training."
    change = 100 * (trained.after - trained.before)
    if change == 0:
        return "warn", f"{task}: {after} on held-out problems, unchanged{ci(trained.ci_after)}."
    text = f"{task}: {before} → {after} on held-out problems ({change:+.1f} points"
    if trained.overlap is None:
        return "plain", f"{text}; no intervals, so its significance is unknown)."
    text += f"; 95 % intervals {span(trained.ci_before)} → {span(trained.ci_after)})"
    if trained.overlap:
        return "warn", f"{text}. The intervals overlap, so the change is not shown to be significant."
    tone, direction = ("good", "gain") if change > 0 else ("bad", "loss")
    return tone, f"{text}. The intervals do not overlap: a significant {direction}."


def _kl_sentence(run: RunRecord) -> Sentence:
    figures = kl_figures(run)
    per_token = per_token_kl(figures)
    if per_token is None:
        return "plain", "KL to the reference was not measured."
    kind, mean, error = per_token
    when = "at the end" if run.summary else "so far"
    text = f"KL(policy‖reference) {when}: {mean_and_error(mean, error)} nats per token ({kind})"
    if "sequence" in figures:
        text += f", {mean_and_error(*figures['sequence'])} nats per sequence (k1)"
    beta = last_beta(run)
    if beta is not None:
        text += f", at β = {beta:g}"
    limit = kl_limit(run.config, run.thresholds).value
    if mean > limit:
        return "warn", f"{text}. The limit is {limit:g} nats per token."
    return "plain", f"{text}."


def _retention_sentence(run: RunRecord) -> Sentence:
    rows = [row for row in retention(run) if row.before is not None and row.after is not None]
    if not rows:
        return "plain", "Retention of other skills was not measured."
    lost = [row for row in rows if row.change(run.thresholds) == "dropped"]
    if lost:
        listed = ", ".join(f"{row.task} {percent(row.before)} → {percent(row.after)}" for row in lost)
        return "warn", f"Retention: {len(lost)} of {len(rows)} other skills dropped: {listed}."
    skills = "the other skill" if len(rows) == 1 else f"the {len(rows)} other skills"
    if any(row.fell for row in rows):
        drop = 100 * run.thresholds["retention_drop"]
        return "good", f"Retention: {skills} lost at most {drop:g} % of their accuracy."
    return "good", f"Retention: {skills} held within {'its' if len(rows) == 1 else 'their'} intervals."


def _finding_sentences(run: RunRecord) -> list[Sentence]:
    """The worst finding with its evidence, then the number of findings of each severity."""
    worst = worst_finding(run.findings)
    if worst is None:
        return [_count_sentence(run)]
    return [(SEVERITY_TONES[worst["severity"]], finding_sentence(worst)), _count_sentence(run)]


def _count_sentence(run: RunRecord) -> Sentence:
    if run.findings is None:
        codes = (run.summary or {}).get("findings")
        if isinstance(codes, list):
            return ("warn" if codes else "good"), f"Findings: {', '.join(map(str, codes)) or 'none'}."
        return "plain", "Findings: not examined yet."
    if not run.findings:
        return "good", "Findings: none."
    counts = {kind: sum(finding.get("severity") == kind for finding in run.findings) for kind in SEVERITIES}
    listed = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    worst = worst_finding(run.findings)
    tone = "plain" if worst is None else SEVERITY_TONES[worst["severity"]]
    codes = ", ".join(str(finding.get("code", "?")) for finding in run.findings)
    return tone, f"Findings: {', '.join(listed) or len(run.findings)} ({codes})."


def percent(value: float | None) -> str:
    """`62.5 %`, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def span(bounds: tuple[float, float] | None) -> str:
    """`55–69 %`."""
    return "–" if bounds is None else f"{100 * bounds[0]:.0f}–{100 * bounds[1]:.0f} %"


def ci(bounds: tuple[float, float] | None) -> str:
    """` (95 % interval 55–69 %)`, or nothing."""
    return "" if bounds is None else f" (95 % interval {span(bounds)})"


def mean_and_error(mean: float, error: float | None) -> str:
    """`0.021 ± 0.002`."""
    return f"{mean + 0.0:.3g}" + ("" if error is None else f" ± {error:.2g}")
