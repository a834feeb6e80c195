"""Draw docs/images/kl-terms.png from docs/studies/estimators-points.csv: what three KL terms do as β rises.

python scripts/readme_plot.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
TERMS = {
    "k3 in reward": ("k3 in the reward", "#c0392b", "s"),
    "k1 in loss, plain": ("k1 in the loss", "#8a8a8a", "D"),
    "k3 in loss": ("k3 in the loss, with Keel's gradient", "#0b6e6e", "o"),
}


def main() -> None:
    kl: dict[tuple[str, float], list[float]] = defaultdict(list)
    with (DOCS / "studies/estimators-points.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["state"] == "done" and row["kl.beta"]:
                kl[row["penalty"], float(row["kl.beta"])].append(float(row["kl_policy_ref"]))
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for name, (label, colour, marker) in TERMS.items():
        betas = sorted(beta for term, beta in kl if term == name and beta > 0)
        for seed in range(2):
            axes.plot(betas, [kl[name, beta][seed] for beta in betas], marker, color=colour, alpha=0.5, markersize=4)
        means = [sum(kl[name, beta]) / len(kl[name, beta]) for beta in betas]
        axes.plot(betas, means, marker=marker, color=colour, linewidth=2, label=label)
    axes.set(xscale="log", ylim=(0, None), xlabel="β", ylabel="KL(policy‖reference), nats per token")
    axes.set_title("The same β, three KL terms (80 steps of GRPO, two seeds)", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(DOCS / "images/kl-terms.png", dpi=160)


if __name__ == "__main__":
    main()
