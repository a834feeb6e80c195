"""The picture of an evaluation: bars with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.lab.plots.picture import picture


def plot_evaluation(data: Mapping[str, Any], path: Path) -> None:
    """Bars of pass@1 and of the largest pass@k with 95 % intervals, the baseline's beside them."""
    records = data["tasks"]
    ks = sorted({int(k) for record in records for k in record.get("pass@k", ())} - {1})
    bars = [(data["model"], "pass@1", lambda r: (r.get("pass@1"), r.get("ci95")))]
    if ks:
        top = str(ks[-1])
        get = lambda r: (r.get("pass@k", {}).get(top), r["pass_at_ci95"].get(top))  # noqa: E731
        bars.append((data["model"], f"pass@{top}", get))
    if data["baseline"] is not None:
        before = [(data["baseline"], name, lambda r, get=get: get(r["baseline"])) for _, name, get in bars]
        bars = [pair for both in zip(before, bars, strict=True) for pair in both]
    width = 0.8 / len(bars)
    colours = ["#b8c4d6", "#2b6cb0", "#ecd0b2", "#c05621"] if data["baseline"] is not None else ["#2b6cb0", "#c05621"]
    with picture(path) as plt:
        figure, axis = plt.subplots(figsize=(max(6.0, 1.2 + 1.1 * len(records) * max(1.5, len(bars) / 1.5)), 4.2))
        for index, ((model, name, get), colour) in enumerate(zip(bars, colours, strict=False)):
            measured = [(i, *get(record)) for i, record in enumerate(records) if get(record)[0] is not None]
            middles = [i + (index - (len(bars) - 1) / 2) * width for i, _, _ in measured]
            values = [100 * value for _, value, _ in measured]
            errors = [
                [max(0.0, 100 * (value - ci[0])) for _, value, ci in measured],
                [max(0.0, 100 * (ci[1] - value)) for _, value, ci in measured],
            ]
            axis.bar(middles, values, width * 0.92, yerr=errors, capsize=3, color=colour, label=f"{name}, {model}")
        axis.set_xticks(range(len(records)), [str(record["task"]) for record in records])
        axis.set(ylabel="right answers (%), with 95 % intervals", ylim=(0, 105))
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=8)
        figure.tight_layout()
