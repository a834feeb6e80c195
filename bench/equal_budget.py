"""Compare the points of a study at equal budgets: held-out accuracy after equally many completions, and seconds.

    python bench/equal_budget.py runs/studies/curriculum docs/studies/curriculum.csv

The CSV has a row for each evaluation of each run: completions, seconds of the steps and groups with signal up to it,
and the accuracy. A budget is what every run reached. The accuracy there is interpolated between evaluations.
Differences from the first point are paired over seeds, with their 95 % t-interval.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from keel.eval.statistics import Estimate, estimate, paired

Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(run: Path) -> list[Row]:
    """One row for each evaluation of a run."""
    point, _, seed = run.name.partition("-")[2].rpartition("-seed")
    generations = yaml.safe_load((run / "config.yaml").read_text())["rollout"]["num_generations"]
    spent, at = {"completions": 0, "seconds": 0.0, "groups_with_signal": 0}, {}
    at[0] = dict(spent)
    for step in lines(run / "metrics.jsonl"):
        completions = round(step["speed/tokens_per_s"] * step["time/total_s"] / step["length/mean"])
        spent["completions"] += completions
        spent["seconds"] += step["time/total_s"]
        spent["groups_with_signal"] += round(completions / generations * (1 - step["reward/zero_variance_fraction"]))
        at[step["step"]] = {name: round(value, 1) for name, value in spent.items()}
    return [
        {"point": point, "seed": int(seed), "step": e["step"], **at[e["step"]], "accuracy": round(e["pass@1"], 4)}
        for e in lines(run / "eval.jsonl")
    ]


def percent(value: Estimate | None, *, difference: bool = False) -> str:
    if value is None:
        return ""
    text = f"{100 * value.mean:+.1f}" if difference else f"{100 * value.mean:.1f} %"
    return text if value.margin is None else f"{text} ± {100 * value.margin:.1f}"


def table(rows: list[Row]) -> list[str]:
    """A row of Markdown for each point."""
    runs: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        runs.setdefault(row["point"], {}).setdefault(row["seed"], []).append(row)
    ends = [run[-1] for seeds in runs.values() for run in seeds.values()]
    budgets = {name: min(end[name] for end in ends) for name in ("completions", "seconds")}
    head = ["problems", "start", "groups with signal"]
    for name, budget in budgets.items():
        head += [f"after {budget:,} {name}", "difference"]
    text, first = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)], next(iter(runs))

    def reached(point: str, name: str, figure: str) -> dict[int, float]:
        return {
            seed: float(np.interp(budgets[name], [row[name] for row in run], [row[figure] for row in run]))
            for seed, run in runs[point].items()
        }

    for point, seeds in runs.items():
        start = estimate([run[0]["accuracy"] for run in seeds.values()])
        signal = estimate(list(reached(point, "completions", "groups_with_signal").values()))
        assert signal is not None
        cells = [point, percent(start), f"{signal.mean:,.0f}"]
        for name in budgets:
            own = reached(point, name, "accuracy")
            other = None if point == first else paired(reached(first, name, "accuracy"), own)
            cells += [percent(estimate(list(own.values()))), percent(other, difference=True)]
        text.append("| " + " | ".join(cells) + " |")
    return text


def main() -> None:
    study, path = map(Path, sys.argv[1:3])
    rows = [row for run in sorted((study / "points").iterdir()) for row in rows_of(run)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
