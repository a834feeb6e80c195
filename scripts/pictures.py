"""Write the plots and diagrams of the guide pages to docs/images, from Keel's functions and docs/studies.

PYTHONPATH=src python scripts/pictures.py
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from html import escape
from itertools import product
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from keel.base.types import Problem
from keel.envs.rewards.text import cosine, length
from keel.kl.exact import exact_kl
from keel.losses import LossOptions, policy_term

matplotlib.use("agg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parents[1] / "docs/images"
TEAL, AMBER, RED, BLUE, GREY, INK = "#00796b", "#b26a00", "#c0392b", "#3949ab", "#8a8f98", "#263238"
FILLS = {TEAL: "#e0f2f1", AMBER: "#fff3e0", BLUE: "#e8eaf6", GREY: "#f3f4f6"}
plt.rcParams.update({"svg.hashsalt": "keel", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11})


# -- plots


def losses() -> None:
    """The weight of a token in the gradient, against its ratio, for either sign of the advantage."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 3), layout="constrained", sharey=True)
    ratios = torch.linspace(0.02, 3.0, 600, dtype=torch.float64)
    shown = {"grpo": (TEAL, "-"), "dapo": (BLUE, "--"), "gmpo": (AMBER, "-."), "sapo": (RED, "-"), "cispo": (GREY, "-")}
    for axes, sign in zip(panels, (1.0, -1.0), strict=True):
        for name, (colour, style) in shown.items():
            logp = ratios.log()[:, None].requires_grad_()
            ones = torch.ones_like(logp)
            term = policy_term(
                LossOptions(loss_type=name), logp, torch.zeros_like(logp), sign * ones.detach(), ones.bool()
            )
            (gradient,) = torch.autograd.grad(term.loss.sum(), logp)
            axes.plot(ratios, -sign * gradient[:, 0], style, color=colour, label=name, linewidth=2)
        axes.set(xlabel="ratio ρ", title=f"advantage {'above' if sign > 0 else 'below'} 0", ylim=(-0.1, 3.1))
    panels[0].set_ylabel("weight of the token")
    panels[0].legend(frameon=False, fontsize=10)
    save(figure, "losses")


def length_rewards() -> None:
    problem, counts = Problem("", "", "7"), range(0, 1201, 10)
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for right, colour, label in ((1.0, TEAL, "cosine, right answer"), (0.0, RED, "cosine, wrong answer")):
        values = [cosine(problem, "x" * n, ["x" * n], lambda *_, right=right: right).total for n in counts]
        axes.plot(counts, values, color=colour, linewidth=2, label=label)
    values = [length(problem, "x" * n, target=400, scale=400) for n in counts]
    axes.plot(counts, values, "--", color=BLUE, linewidth=2, label="length")
    axes.set(xlabel="characters", ylabel="reward")
    axes.legend(frameon=False, fontsize=10, loc="center right", bbox_to_anchor=(1, 0.52))
    save(figure, "length-rewards")


def layouts() -> None:
    """Bytes that stay on a device, by the table of docs/scaling.md."""
    billions = 7
    devices = {"none": 1, "hybrid,\nshards of 8": 8, "full,\n16 devices": 16, "full,\n64 devices": 64}
    parts = {"weights, gradients, moments": (16, TEAL), "frozen reference": (4, AMBER), "sampler in bf16": (2, BLUE)}
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    left = [0.0] * len(devices)
    for name, (size, colour) in parts.items():
        shards = [1 if name.startswith("sampler") else n for n in devices.values()]
        width = [size * billions / n for n in shards]
        axes.barh(list(devices), width, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 2, row, f"{total:.0f} GB", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="GB on each device, 7 billion parameters", xlim=(0, 175))
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    save(figure, "layouts")


def references() -> None:
    """KL to the start and to the reference, and the reward, of each reference in docs/studies/references-points.csv."""
    with (IMAGES.parent / "studies/references-points.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "done"]
    names = list(dict.fromkeys(row["reference"] for row in rows))
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained", sharey=True)
    kinds = [("kl_policy_ref", "to the start", TEAL, 0), ("kl_reference_exact", "to the reference", AMBER, 0)]
    for column, label, colour, panel in [*kinds, ("reward", "", BLUE, 1)]:
        by_name = [[float(row[column]) for row in rows if row["reference"] == name] for name in names]
        shift = 0 if panel else (-0.2 if colour == TEAL else 0.2)
        for n, values in enumerate(by_name):
            panels[panel].plot(values, [n + shift] * len(values), "o", color=colour, alpha=0.4, markersize=5)
        middle = [sum(values) / len(values) for values in by_name]
        panels[panel].plot(middle, [n + shift for n in range(len(names))], "D", color=colour, label=label, markersize=7)
    panels[0].set(xlabel="exact KL, nats per token", xlim=(0, 0.045), yticks=range(len(names)), yticklabels=names)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=10, loc="center right", handletextpad=0.1)
    panels[1].set_xlabel("reward, last ten steps")
    save(figure, "references")


def divergences() -> None:
    """The Gaussian that minimises either KL to a teacher with two peaks."""
    tokens = torch.arange(60, dtype=torch.float64)
    teacher = (0.6 * torch.exp(-((tokens - 17) ** 2) / 18) + 0.4 * torch.exp(-((tokens - 41) ** 2) / 18)).log()
    teacher = teacher.log_softmax(0)
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    axes.fill_between(tokens, teacher.exp(), color="#d5d8dc", label="teacher")
    kinds = {
        "reverse KL (exact)": (lambda q: exact_kl(q, teacher), TEAL, "-"),
        "forward KL (exact_reverse)": (lambda q: exact_kl(q, teacher, "ref_policy"), RED, "--"),
    }
    for name, (divergence, colour, style) in kinds.items():
        candidates = [
            (-((tokens - centre) ** 2) / (2 * (wide / 4) ** 2)).log_softmax(0)
            for centre, wide in product(range(10, 50), range(8, 80))
        ]
        best: Tensor = min(candidates, key=lambda q: float(divergence(q)))
        axes.plot(tokens, best.exp(), style, color=colour, linewidth=2, label=name)
    axes.set(xlabel="token", ylabel="probability", ylim=(0, None))
    axes.legend(frameon=False, fontsize=10)
    save(figure, "divergences")


def save(figure: plt.Figure, name: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    file = IMAGES / f"{name}.svg"
    figure.savefig(file, metadata={"Date": None})
    file.write_text("".join(f"{line.rstrip()}\n" for line in file.read_text().splitlines()))
    plt.close(figure)


# -- diagrams


class Diagram:
    """Boxes, arrows and words on a white card, so that they are readable on a light and on a dark page."""

    def __init__(self, width: int, height: int) -> None:
        self.size, self.marks = (width, height), [f'<rect width="{width}" height="{height}" rx="8" fill="white"/>']

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], colour: str = GREY, code: int = 9
    ) -> None:
        """A box with centred lines; those from `code` on are in a typewriter's letters."""
        self.marks.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{FILLS[colour]}" stroke="{colour}"/>'
        )
        first = y + height / 2 - 9.5 * (len(lines) - 1) + 5
        for n, line in enumerate(lines):
            self.words(x + width / 2, first + 19 * n, line, "middle", n >= code)

    def words(
        self, x: float, y: float, text: str, anchor: str = "start", code: bool = False, colour: str = INK
    ) -> None:
        family = ' font-family="monospace" font-size="13"' if code else ""
        self.marks.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"{family}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], colour: str = INK) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def save(self, name: str) -> None:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="15"><defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        (IMAGES / f"{name}.svg").write_text("\n".join([head, *self.marks, "</svg>\n"]))


def episode() -> None:
    drawn = Diagram(640, 150)
    parts = [("prompt", GREY), ("turn 1", TEAL), ("reply", GREY), ("turn 2", TEAL), ("reply", GREY), ("turn 3", TEAL)]
    for n, (name, colour) in enumerate(parts):
        drawn.box(16 + 86 * n, 44, 82, 38, [name], colour)
    drawn.arrow((532, 63), (552, 63))
    drawn.box(554, 44, 72, 38, ["reward"], AMBER)
    drawn.words(16, 28, "One completion of three turns. step(text) or a tool writes each reply.")
    drawn.box(16, 104, 18, 18, [], TEAL)
    drawn.words(42, 118, "sampled: in the loss and in the KL")
    drawn.box(330, 104, 18, 18, [], GREY)
    drawn.words(356, 118, "context: action_mask is false")
    drawn.save("episode")


def checks() -> None:
    drawn = Diagram(640, 250)
    steps = [
        (["sampler draws", "DrawnCheck"], 16, 50, TEAL),
        (["tokens, rewards", "check_tokens"], 232, 50, TEAL),
        (["log-probabilities", "check_depth"], 448, 50, TEAL),
        (["weight sync", "SyncCheck"], 16, 156, TEAL),
        (["update"], 232, 156, GREY),
        (["policy term + KL term", "KeelGRPOTrainer", "keel_sync, kl_of"], 448, 156, AMBER),
    ]
    for lines, x, y, colour in steps:
        drawn.box(x, y, 176, 74, lines, colour, 1)
    drawn.arrow((192, 87), (231, 87))
    drawn.arrow((408, 87), (447, 87))
    drawn.arrow((536, 124), (536, 155))
    drawn.arrow((448, 193), (409, 193))
    drawn.arrow((232, 193), (193, 193))
    drawn.arrow((104, 156), (104, 125))
    drawn.words(16, 30, "A step of TRL or verl. Green: Keel checks it. Amber: Keel replaces it.")
    drawn.save("checks")


def parts() -> None:
    rows = [
        ("draw problems", "task.name"),
        ("sample the turns", "model.name  rollout.engine  task.tools"),
        ("judge", "rewards"),
        ("log-probabilities", "model.scorer  reference.kind"),
        ("KL, advantage and loss", "kl.estimator  loss.loss_type"),
        ("update, next β", "kl.controller.name"),
        ("write", "log.extra"),
    ]
    drawn = Diagram(640, 50 + 46 * len(rows))
    drawn.words(20, 30, "a step")
    drawn.words(250, 30, "options that take a part of your own")
    for n, (name, options) in enumerate(rows):
        y = 44 + 46 * n
        drawn.box(20, y, 196, 34, [name])
        drawn.box(250, y, 370, 34, [options], TEAL, 0)
        if n:
            drawn.arrow((118, y - 12), (118, y - 1))
    drawn.save("parts")


def sandbox() -> None:
    drawn = Diagram(640, 262)
    drawn.box(16, 60, 150, 150, ["Keel", "", "compares output", "and JSON values"], TEAL)
    drawn.box(330, 20, 296, 230, [], GREY)
    drawn.words(344, 42, "sandbox: no network, no files")
    drawn.box(350, 58, 256, 74, ["process of the program", "(never sees the tests)"], AMBER)
    drawn.box(350, 164, 256, 70, ["process of the asserts", "(without the program's code)"], BLUE)
    drawn.arrow((166, 80), (349, 80))
    drawn.words(178, 72, "program, calls")
    drawn.arrow((350, 112), (167, 112))
    drawn.words(178, 130, "output, JSON")
    drawn.arrow((166, 186), (349, 186))
    drawn.words(178, 178, "asserts")
    drawn.arrow((350, 204), (167, 204))
    drawn.words(178, 222, "calls, verdict")
    drawn.save("sandbox")


def processes() -> None:
    drawn = Diagram(640, 474)
    drawn.words(236, 28, "process 0", "middle")
    drawn.words(504, 28, "process 1", "middle")
    rows: list[tuple[str, Sequence[str]]] = [
        ("draw", ["all problems: the same on each, by seed and step"]),
        ("sample", ["problems 0, 2, 4, …", "problems 1, 3, 5, …"]),
        ("", ["groups are exchanged: each has all completions and rewards"]),
        ("reference", ["its share of the tokens", "its share of the tokens"]),
        ("", ["ref_logp is summed: each has all of it"]),
        ("advantages", ["KL penalty, rejections: of the whole batch"]),
        ("update", ["its microbatches", "its microbatches"]),
        ("", ["gradients are summed; denominators count all tokens"]),
        ("guard", ["one norm, one decision; AdamW on its shard"]),
        ("sync", ["weights are gathered into each sampler, a tensor at a time"]),
        ("write", ["metrics, checkpoints"]),
    ]
    for n, (name, cells) in enumerate(rows):
        y = 40 + 39 * n
        drawn.words(16, y + 21, name)
        if len(cells) == 1 and name != "write":
            drawn.box(108, y, 516, 32, cells, GREY if name else AMBER)
        else:
            for column, cell in enumerate(cells):
                drawn.box(108 + 268 * column, y, 248, 32, [cell], TEAL)
    drawn.save("processes")


def sampling_ahead() -> None:
    drawn = Diagram(640, 176)
    drawn.words(16, 78, "trainer")
    drawn.words(16, 146, "sampler")
    for n, step in enumerate(("n", "n+1", "n+2")):
        x = 92 + 182 * n
        drawn.words(x, 28, f"step {step}")
        drawn.box(x, 54, 172, 38, ["score, update"], TEAL)
        drawn.box(x + 24, 122, 118, 38, [f"rollouts of n+{n + 1}"], AMBER)
        drawn.arrow((x + 10, 92), (x + 10, 141), (x + 23, 141))
        drawn.words(x + 18, 112, f"weights of {step}")
        if n:
            drawn.arrow((x - 40, 141), (x - 20, 141), (x - 20, 73), (x - 1, 73))
    drawn.save("sampling-ahead")


def main() -> None:
    for draw in (
        losses,
        length_rewards,
        layouts,
        references,
        divergences,
        episode,
        checks,
        parts,
        sandbox,
        processes,
        sampling_ahead,
    ):
        draw()


if __name__ == "__main__":
    main()
