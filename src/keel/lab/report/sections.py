"""The tables of a report: findings, comparison, retention, timeline, configuration, versions. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from keel.doctor.judge import Accuracy, worst_first
from keel.doctor.runs import Record, RunRecord, number
from keel.lab.report.rollouts import brief
from keel.lab.report.verdict import (
    SEVERITY_TONES,
    Sentence,
    accuracy,
    ci,
    kl_figures,
    labels,
    last_beta,
    mean_and_error,
    per_token_kl,
    percent,
    retention,
    span,
)

EVENTS_SHOWN = 300
# Events whose kind contains one of these are coloured as warnings.
ALARMING = ("abort", "guard", "rollback", "stop", "over-budget", "dropped", "nan", "error", "damaged", "lost")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells under a head of text. It scrolls sideways on a narrow screen."""
    if not rows:
        return ""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<div class='scroll'><table class='{kind}'><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def findings(run: RunRecord) -> str:
    """The findings in the run's findings.json."""
    return finding_articles(run.findings or ())


def finding_articles(items: Iterable[Record]) -> str:
    """Each finding with its evidence, cause and advice, the worst first."""
    parts = []
    for item in worst_first(items):
        severity = str(item.get("severity", "note"))
        tone = SEVERITY_TONES.get(severity, "plain")
        lines = "".join(
            f"<dt>{name}</dt><dd>{escape(text_of(item[name]))}</dd>"
            for name in ("evidence", "cause", "advice")
            if item.get(name)
        )
        code = escape(str(item.get("code", "?")))
        parts.append(
            f"<article class='finding {tone}'><h4><code>{code}</code> {escape(severity)}</h4><dl>{lines}</dl></article>"
        )
    return "".join(parts)


def text_of(value: Any) -> str:
    """Text unchanged; a mapping as name: value."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {text_of(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def comparison(runs: Sequence[RunRecord]) -> str:
    """The runs side by side, a row each."""
    rows = []
    for index, run in enumerate(runs):
        trained, kl = accuracy(run), kl_figures(run)
        per_token = per_token_kl(kl)
        skills = [row for row in retention(run) if row.before is not None and row.after is not None]
        worst = min(skills, key=lambda row: (row.after or 0) - (row.before or 0), default=None)
        beta = last_beta(run)
        wall = number((run.summary or {}).get("wall_s"))
        codes = [str(item.get("code", "?")) for item in run.findings or ()]
        rows.append(
            [
                f"<i class='key k{index % 8}'></i> {escape(run.name)}",
                pills(labels(run), "<br>"),
                str(run.steps),
                percent(trained.before) if trained else "–",
                f"{percent(trained.after)}<br><small>{span(trained.ci_after)}</small>" if trained else "–",
                points(trained),
                "–" if per_token is None else f"{mean_and_error(*per_token[1:])}<br><small>{per_token[0]}</small>",
                mean_and_error(*kl["sequence"]) if "sequence" in kl else "–",
                "–" if beta is None else f"{beta:g}",
                "–" if worst is None else f"{escape(worst.task)} {points(worst)}",
                "–" if wall is None else f"{wall / 60:.1f}",
                escape(", ".join(codes)) or "–",
            ]
        )
    head = ["run", "verdict", "steps", "before", "after (95 %)", "points", "KL / token", "KL / sequence (k1)", "β"]
    return table([*head, "worst retention", "minutes", "findings"], rows, "numbers wide")


def pills(words: Iterable[Sentence], between: str = " ") -> str:
    """Labels in the colours of their tones."""
    return between.join(f"<span class='pill {tone}'>{escape(word)}</span>" for tone, word in words)


def points(row: Accuracy | None) -> str:
    """The change in percentage points, or a dash."""
    if row is None or row.before is None or row.after is None:
        return "–"
    return f"{100 * (row.after - row.before):+.1f}"


def differences(runs: Sequence[RunRecord]) -> str:
    """The options in which the runs differ."""
    flats = [flatten(run.config) for run in runs]
    names = sorted({name for flat in flats for name in flat})
    rows = []
    for name in names:
        values = [text_of(flat.get(name, "–")) for flat in flats]
        if len(set(values)) > 1 and name != "run.name":
            rows.append([f"<code>{escape(name)}</code>", *(escape(value) for value in values)])
    return table(["option", *(run.name for run in runs)], rows)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Record:
    """A configuration by dotted names, as in overrides."""
    flat: Record = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def retention_table(run: RunRecord) -> str:
    """Accuracy before and after of every skill, the trained one first."""
    trained = accuracy(run)
    rows = []
    for row in ([trained] if trained else []) + retention(run):
        verdict = row.change(run.thresholds)
        tone = {"dropped": "bad", "improved": "good"}.get(verdict, "plain")
        name = escape(row.task) + (" <small>(trained)</small>" if row is trained else "")
        cells = [
            f"{percent(value)}<br><small>{span(bounds) if bounds else ''}</small>"
            for value, bounds in ((row.before, row.ci_before), (row.after, row.ci_after))
        ]
        rows.append([name, *cells, points(row), f"<span class='pill {tone}'>{verdict}</span>"])
    if not rows:
        return "<p class='muted'>No evaluation was recorded.</p>"
    return table(["skill", "before", "after", "points", "verdict"], rows, "numbers") + task_figures(run)


def task_figures(run: RunRecord) -> str:
    """The tasks' additional metrics at an evaluation, such as the parts of a reward or tool calls."""
    rows = []
    for (split, task), lines in run.evaluated.items():
        first, last = (_extra(line) for line in (lines[0], lines[-1]))
        name = escape(task) + (" <small>(trained)</small>" if split == "trained" else "")
        for figure in dict.fromkeys([*first, *last]):
            before, after = number(first.get(figure)), number(last.get(figure)) if len(lines) > 1 else None
            change = "–" if before is None or after is None else f"{after - before:+.3f}"
            rows.append([name, escape(str(figure)), *(brief(value) for value in (before, after)), change])
    head = ["skill", "metric", "before", "after", "change"]
    return f"<div class='below'>{table(head, rows, 'numbers')}</div>" if rows else ""


def _extra(line: Record) -> Record:
    extra = line.get("extra")
    return dict(extra) if isinstance(extra, Mapping) else {}


def timeline(run: RunRecord) -> str:
    """The events in order: step, time since the start, kind, and the other fields."""
    if not run.events:
        return "<p class='muted'>No events were recorded.</p>"
    shown, left_out = list(run.events), 0
    if len(shown) > EVENTS_SHOWN:
        left_out = len(shown) - EVENTS_SHOWN
        shown = shown[: EVENTS_SHOWN // 2] + shown[-EVENTS_SHOWN // 2 :]
    start = next((moment for event in run.events if (moment := seconds(event.get("time"))) is not None), None)
    rows = []
    for event in shown:
        kind = str(event.get("kind", "?"))
        rest = {name: value for name, value in event.items() if name not in ("step", "kind", "time", "message")}
        details = [str(event["message"])] if event.get("message") else []
        details += [text_of(rest)] if rest else []
        tone = "warn" if any(part in kind for part in ALARMING) else "plain"
        step = event.get("step")
        rows.append(
            [
                escape("–" if step is None else str(step)),
                escape(since(seconds(event.get("time")), start)),
                f"<span class='pill {tone}'>{escape(kind)}</span>",
                escape(" · ".join(details)),
            ]
        )
    note = f"<p class='muted'>{left_out} events in the middle are omitted.</p>" if left_out else ""
    began = (
        ""
        if start is None
        else f"<p class='muted'>Started {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC.</p>"
    )
    return began + table(["step", "time", "event", ""], rows, "events") + note


def seconds(value: Any) -> float | None:
    """Seconds since 1970, from a number or an ISO date."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    moment = number(value)
    return moment if moment is not None and 0 <= moment < 4e9 else None


def since(moment: float | None, start: float | None) -> str:
    """The time since the start, such as `+3:05`."""
    if moment is None or start is None:
        return ""
    elapsed = int(max(0.0, moment - start))
    hours, minutes = elapsed // 3600, elapsed % 3600 // 60
    return f"+{hours}:{minutes:02d}:{elapsed % 60:02d}" if hours else f"+{minutes}:{elapsed % 60:02d}"


def configuration(run: RunRecord) -> str:
    """The text of the run's config.yaml."""
    if run.config_text is None:
        return "<p class='muted'>config.yaml does not exist.</p>"
    return f"<pre class='config'>{escape(run.config_text)}</pre>"


def versions(run: RunRecord) -> str:
    """env.json as a table."""
    rows = [[f"<code>{escape(name)}</code>", escape(text_of(value))] for name, value in flatten(run.env).items()]
    return table(["", ""], rows, "versions") or "<p class='muted'>env.json does not exist.</p>"


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """(label, figure, small print) for the cards under the verdict."""
    cards: list[tuple[str, str, str]] = []
    trained, kl = accuracy(run), kl_figures(run)
    if trained and trained.before is not None and trained.after is not None:
        change = f"{100 * trained.before:.1f} → {100 * trained.after:.1f} %"
        cards.append(("accuracy", change, f"{trained.task}, held out"))
    elif trained and trained.before is not None:
        cards.append(("accuracy before", percent(trained.before), trained.task + ci(trained.ci_before)))
    per_token = per_token_kl(kl)
    if per_token is not None:
        cards.append(("KL per token", mean_and_error(*per_token[1:]), f"nats, {per_token[0]} ± se"))
    if "sequence" in kl:
        cards.append(("KL per sequence", mean_and_error(*kl["sequence"]), "nats, k1 ± se"))
    reward = run.last("reward/mean")
    if reward is not None:
        cards.append(("reward", f"{reward:.3g}", "mean of the last step"))
    beta = run.last("kl/beta")
    if beta is not None:
        cards.append(("β", f"{beta:g}", "KL coefficient"))
    return cards
