"""Write docs/results/games.csv and docs/images/games.png: what runs on environments earned, step by step.

python scripts/games_plot.py RUN…      # a run takes the place of the rows of its environment
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib
import yaml

matplotlib.use("agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
CSV, PICTURE = DOCS / "results/games.csv", DOCS / "images/games.png"
COLUMNS = {
    "reward": "reward/mean",
    "correct": "reward/part/correct",
    "turns": "turn/count_mean",
    "kl_k3": "kl/policy_ref/k3/mean",
}
WINDOW = 5


def rows_of(run: Path) -> list[dict[str, str]]:
    name = yaml.safe_load((run / "config.yaml").read_text())["task"]["name"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {"environment": name, "step": str(record["step"])}
        | {column: f"{record[metric]:.4f}" for column, metric in COLUMNS.items()}
        for record in records
    ]


def main() -> None:
    with CSV.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for run in map(Path, sys.argv[1:]):
        new = rows_of(run)
        rows = [row for row in rows if row["environment"] != new[0]["environment"]] + new
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["environment", "step", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    names = list(dict.fromkeys(row["environment"] for row in rows))
    figure, panels = plt.subplots(2, -(-len(names) // 2), figsize=(9, 4.6), layout="constrained", squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.remove()
    for axes, name in zip(panels.flat, names, strict=False):
        earned = [float(row["reward"]) for row in rows if row["environment"] == name]
        means = [sum(earned[i : i + WINDOW]) / len(earned[i : i + WINDOW]) for i in range(0, len(earned), WINDOW)]
        axes.plot(range(1, len(earned) + 1), earned, color="#0b6e6e", alpha=0.35, linewidth=1)
        axes.plot(
            [i * WINDOW + (WINDOW + 1) / 2 for i in range(len(means))], means, "o-", color="#0b6e6e", markersize=4
        )
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step of GRPO after the SFT warm start", fontsize=9)
    figure.supylabel("mean reward of 64 episodes", fontsize=9)
    figure.savefig(PICTURE, dpi=90)


if __name__ == "__main__":
    main()
