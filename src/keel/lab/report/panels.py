"""The charts of a report: which metrics are drawn together."""

from __future__ import annotations

from collections.abc import Sequence

from keel.doctor.runs import RunRecord, curve_of, interval, number
from keel.lab.plots.charts import Curve, Panel

K1_HINT = "k1 may be negative"
# (title, unit, hint, [(metric, label)]), in the order of the page.
PanelSpec = tuple[str, str, str, list[tuple[str, str]]]
PANELS: list[PanelSpec] = [
    ("Reward", "mean per step", "", [("reward/mean", "mean"), ("reward/penalized", "minus the KL in the reward")]),
    ("KL penalty weight", "β", "", [("kl/beta", "β")]),
    ("KL(policy‖reference) per sequence", "nats per sequence", K1_HINT, [("kl/policy_ref/sequence/mean", "k1")]),
    ("Entropy", "nats per token", "falling fast: the policy stops exploring", [("entropy/mean", "entropy")]),
    ("Gradient norm", "before clipping", "", [("grad/norm", "norm")]),
    ("Completion length", "tokens", "", [("length/mean", "mean"), ("length/max", "longest")]),
    (
        "Clipped ratios",
        "fraction of tokens",
        "a large share means that clipping limits the update",
        [("ratio/clip_low_fraction", "low"), ("ratio/clip_high_fraction", "high")],
    ),
    (
        "Groups without variance",
        "fraction of groups",
        "equal rewards within the group give no policy gradient",
        [("reward/zero_variance_fraction", "zero variance")],
    ),
    (
        "Output",
        "fraction of completions",
        "",
        [("parse/ok_fraction", "parsed"), ("length/truncated_fraction", "truncated")],
    ),
    (
        "Turns and tool calls",
        "per episode",
        "",
        [("turn/count_mean", "model turns"), ("tool/calls_mean", "tool calls")],
    ),
    (
        "Tool call errors",
        "per episode",
        "",
        [
            ("tool/malformed", "malformed call"),
            ("tool/unknown_tool", "unknown tool"),
            ("tool/bad_arguments", "bad arguments"),
            ("tool/failed", "tool failed"),
            ("tool/timeout", "timeout"),
            ("tool/too_many", "too many calls"),
            ("tool/too_long", "result truncated"),
        ],
    ),
    (
        "Episodes without a valid answer",
        "per episode",
        "unfinished: stopped by rollout.max_turns",
        [
            ("answer/missing", "no answer"),
            ("answer/list", "answer is a list"),
            ("answer/unknown_document", "cites an unknown document"),
            ("turn/unfinished_fraction", "unfinished"),
        ],
    ),
    ("Loss", "", "", [("loss/policy", "policy term"), ("loss/kl", "β × KL term")]),
    (
        "KL(sampler‖policy)",
        "nats per token",
        "near 0 if engine and trainer agree",
        [("kl/sampler_policy/k1/mean", "k1"), ("kl/sampler_policy/k3/mean", "k3")],
    ),
    (
        "Effective sample size",
        "share",
        "low: the sampler is far from the policy, or filters remove much probability",
        [("mismatch/ess", "effective fraction"), ("rollout/kept_mass/mean", "probability kept by filters")],
    ),
    (
        "Time per step",
        "seconds",
        "",
        [(f"time/{phase}_s", phase) for phase in ("rollout", "score", "update", "sync", "total")],
    ),
    (
        "Idle time",
        "seconds",
        "trainer waiting for rollouts, sampler waiting for weights",
        [("time/trainer_wait_s", "trainer"), ("time/sampler_wait_s", "sampler")],
    ),
    (
        "Staleness",
        "updates",
        "updates between the sampling weights and the trained weights",
        [("staleness/mean", "mean"), ("staleness/max", "largest")],
    ),
    ("Speed", "tokens per second", "", [("speed/tokens_per_s", "tokens/s")]),
    ("Learning rate", "", "", [("optim/learning_rate", "learning rate")]),
]

ASYNC_PANELS = {"Idle time", "Staleness"}  # only for asynchronous sampling
# For several runs: the total instead of the phases.
TOTAL_TIME: PanelSpec = ("Time per step, all phases", "seconds", "", [("time/total_s", "total")])
LAST = 10  # steps averaged in the chart by depth
REWARD_PART = "reward/part/"
DEPTH = "kl/sampler_policy/depth_"
KL_KINDS = ("k3", "k1", "exact")
FROM_ZERO = {"Completion length", "Time per step", "Speed", "Gradient norm"}
NOTABLE = (
    "guard",
    "rollback",
    "stop",
    "resume",
    "abort",
    "spike",
    "nan",
    "interrupt",
    "over-budget",
    "tool/errors",
    "sampler/",
)
# Charts whose first metric also shows the steps that a rollback discarded, dashed.
WITH_ABANDONED = {"Reward", "Gradient norm", "Learning rate", "KL(policy‖reference) per sequence"}


def panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """Every chart that has data, the most important first; one colour per metric, or per run if there are several."""
    ahead = any(age for run in runs for _, age in run.series("staleness/max"))
    specs = [spec for spec in PANELS if ahead or spec[0] not in ASYNC_PANELS]
    specs = specs if len(runs) == 1 else [TOTAL_TIME if spec[0] == "Time per step" else spec for spec in specs]
    drawn = [_from_metrics(runs, *spec) for spec in specs]
    order = (_accuracy(runs), drawn[0], *_parts(runs), *_kl(runs), *drawn[1:])
    return [panel for panel in (*order, _by_depth(runs)) if panel is not None]


def event_steps(runs: Sequence[RunRecord]) -> list[float]:
    """The event steps that charts mark, for a single run only: with several runs they would hide the curves."""
    if len(runs) != 1:
        return []
    steps = {
        step
        for event in runs[0].events
        if any(part in str(event.get("kind", "")) for part in NOTABLE)
        and (step := number(event.get("step"))) is not None
    }
    return sorted(steps)[:40]


def _from_metrics(
    runs: Sequence[RunRecord], title: str, unit: str, hint: str, names: list[tuple[str, str]]
) -> Panel | None:
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        for order, (metric, label) in enumerate(names):
            if metric == "reward/penalized" and run.series(metric) == run.series("reward/mean"):
                continue
            points = run.series(metric)
            if any(y is not None for _, y in points):
                shown = label if len(names) > 1 or len(runs) == 1 else ""
                curves.append(_series(runs, index, order, shown, points))
    if not curves:
        return None
    if title in WITH_ABANDONED:
        curves += _abandoned(runs, names[0][0])
    return Panel(
        title, unit, curves, hint, event_steps(runs), title in FROM_ZERO | ASYNC_PANELS, checkpoint_steps(runs)
    )


def _by_depth(runs: Sequence[RunRecord]) -> Panel | None:
    """KL(sampler‖policy) by context depth, over the last steps of each run."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        points: list[tuple[float, float | None]] = []
        bounds: list[tuple[float, float] | None] = []
        found = sorted(
            (int(name.removeprefix(DEPTH).partition("/")[0]), name) for name in run.metric_names if _of_depth(name)
        )
        for start, name in found:
            lines = [line for line in run.metrics if number(line.get(name)) is not None][-LAST:]
            mean, se = (
                sum(number(line.get(part)) or 0.0 for line in lines) / max(1, len(lines))
                for part in (name, name.replace("/mean", "/se"))
            )
            points.append((float(start), mean))
            bounds.append((mean - se, mean + se))
        if points:
            curves.append(_series(runs, index, 0, "k3" if len(runs) == 1 else "", points, bounds, dots=True))
    title, hint = (
        "KL(sampler‖policy) by depth",
        "rising: positions or the sampler's KV cache differ; last steps, ± 1 se",
    )
    return Panel(title, "nats per token", curves, hint, x_label="token of the context") if curves else None


def _of_depth(name: str) -> bool:
    return name.startswith(DEPTH) and name.endswith("/mean")


def _parts(runs: Sequence[RunRecord]) -> list[Panel | None]:
    """The unweighted reward parts: one chart for a single run, one chart per part for several."""
    names = sorted({name for run in runs for name in run.metric_names if name.startswith(REWARD_PART)})
    labelled = [(name, name.removeprefix(REWARD_PART)) for name in names]
    if len(runs) == 1:
        return [_from_metrics(runs, "Reward parts", "mean per step, before weights", "", labelled)]
    return [_from_metrics(runs, f"Reward part: {label}", "mean per step", "", [(n, label)]) for n, label in labelled]


def _abandoned(runs: Sequence[RunRecord], metric: str) -> list[Curve]:
    """The steps of a single run that a rollback discarded, in unused colours."""
    attempts = runs[0].abandoned if len(runs) == 1 else ()
    curves = [(name, curve_of(lines, metric)) for name, lines in attempts]
    return [
        Curve(f"abandoned {name}", points, 4 + order, dashed=True)
        for order, (name, points) in enumerate(curves)
        if any(y is not None for _, y in points)
    ]


def checkpoint_steps(runs: Sequence[RunRecord]) -> list[float]:
    """The steps at which checkpoints were saved, of one run only."""
    events = runs[0].events if len(runs) == 1 else ()
    steps = {number(event.get("step")) for event in events if event.get("kind") == "checkpoint"}
    return sorted(step for step in steps if step is not None)


def _series(
    runs: Sequence[RunRecord],
    index: int,
    order: int,
    label: str,
    points: list[tuple[float, float | None]],
    error: Sequence[tuple[float, float] | None] = (),
    dots: bool = False,
) -> Curve:
    """One run: one colour per metric. Several: one colour per run, and dashes for a second metric."""
    if len(runs) == 1:
        return Curve(label, points, order, error, dots)
    return Curve(
        f"{runs[index].name} · {label}" if label else runs[index].name, points, index, error, dots, dashed=order > 0
    )


def _kl(runs: Sequence[RunRecord]) -> list[Panel]:
    """KL per token with standard errors: one chart for a single run, one chart per estimator for several."""
    title, unit = "KL(policy‖reference)", "nats per token"
    hint = "band: ± 1 standard error"
    hints = dict.fromkeys(KL_KINDS, hint) | {"k1": f"{hint}; {K1_HINT}"}
    by_kind = {
        kind: [curve for index in range(len(runs)) if (curve := _kl_curve(runs, index, kind)) is not None]
        for kind in KL_KINDS
    }
    if len(runs) == 1:
        curves = [curve for of_kind in by_kind.values() for curve in of_kind]
        kind = next((kind for kind in KL_KINDS if by_kind[kind]), "k3")
        curves += _abandoned(runs, f"kl/policy_ref/{kind}/mean")
        shown = hints["k1" if by_kind["k1"] else kind]
        panel = Panel(title, unit, curves, shown, event_steps(runs), checkpoints=checkpoint_steps(runs))
        return [panel] if curves else []
    return [Panel(f"{title}, {kind}", unit, curves, hints[kind]) for kind, curves in by_kind.items() if curves]


def _kl_curve(runs: Sequence[RunRecord], index: int, kind: str) -> Curve | None:
    name = f"kl/policy_ref/{kind}"
    lines = [line for line in runs[index].metrics if f"{name}/mean" in line]
    points = [(number(line.get("step")) or 0.0, number(line[f"{name}/mean"])) for line in lines]
    if not any(y is not None for _, y in points):
        return None
    errors = [number(line.get(f"{name}/se")) for line in lines]
    bounds = [
        None if y is None or error is None else (y - error, y + error)
        for (_, y), error in zip(points, errors, strict=True)
    ]
    order = KL_KINDS.index(kind) if len(runs) == 1 else 0
    return _series(runs, index, order, kind if len(runs) == 1 else "", points, bounds if any(bounds) else ())


def _accuracy(runs: Sequence[RunRecord]) -> Panel | None:
    """pass@1 on held-out problems with its 95 % interval: the trained task, and for one run the retained skills."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        for order, ((split, task), lines) in enumerate(run.evaluated.items()):
            if split != "trained" and len(runs) > 1:
                continue
            points = [(number(line.get("step")) or 0.0, number(line.get("pass@1"))) for line in lines]
            bounds = [interval(line.get("ci95")) for line in lines] if split == "trained" else ()
            label = task if split == "trained" else f"{task} (retention)"
            curves.append(_series(runs, index, order, label, points, bounds, dots=True))
    if not any(y is not None for curve in curves for _, y in curve.points):
        return None
    title, events, checkpoints = "Accuracy on held-out problems", event_steps(runs), checkpoint_steps(runs)
    return Panel(title, "pass@1", curves, "bars: 95 % interval", events, checkpoints=checkpoints)
