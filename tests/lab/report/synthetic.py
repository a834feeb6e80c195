"""Run directories that look like real ones, written with the real loggers, for tests and for looking at a report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from keel.loggers import JsonlLogger, MultiLogger, RunDirectory

CONFIG = """\
run:
  name: {name}
  dir: runs
  seed: {seed}
  max_steps: {max_steps}
model:
  name: tiny
  dtype: auto
task:
  name: arithmetic
kl:
  beta: {beta}
  estimator: k3
  placement: loss
  controller:
    name: fixed
loss:
  loss_type: grpo
optim:
  learning_rate: 0.0005
"""

FINDINGS = [
    {
        "code": "output/truncated",
        "severity": "warning",
        "evidence": "18 % of the completions of step 40 were cut at 24 tokens",
        "cause": "max_completion_length is short for this task",
        "advice": "raise rollout.max_completion_length to 48",
    },
    {
        "code": "kl/unneeded",
        "severity": "note",
        "evidence": "beta 0.01 with a rule-based verifier",
        "cause": "the reward cannot be over-optimised",
        "advice": "try kl.beta=0 and compare",
    },
]


def wilson(share: float, n: int) -> list[float]:
    """The 95 % interval of a share."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [middle - margin, middle + margin]


def metrics_at(step: int, total: int, beta: float, noise: random.Random) -> dict[str, float]:
    """One line of the contract's metrics."""
    done = step / total
    learned = 1 / (1 + math.exp(-9 * (done - 0.35)))
    reward = 0.34 + 0.5 * learned + noise.gauss(0, 0.035)
    kl = (0.14 * learned + 0.002) / (1 + 30 * beta) * (1 + noise.gauss(0, 0.1))
    se = 0.08 * kl + 0.001
    line = {
        "reward/mean": reward,
        "reward/std": 0.4,
        "reward/part/exact": reward - 0.05,
        "reward/part/format": 0.9 + 0.1 * learned,
        "reward/within_group_std": 0.3 - 0.2 * learned,
        "reward/zero_variance_fraction": 0.1 + 0.5 * learned + noise.gauss(0, 0.04),
        "loss/total": noise.gauss(0, 0.02) + beta * kl,
        "loss/policy": noise.gauss(0, 0.02),
        "loss/kl": beta * kl,
        "loss/kl_share": 0.05,
        "kl/policy_ref/sequence/mean": kl * 9,
        "kl/sampler_policy/k1/mean": noise.gauss(0, 1e-5),
        "kl/sampler_policy/k3/mean": 1e-6,
        "kl/old_policy/k3/mean": 1e-4,
        "kl/beta": beta,
        "kl/clamped_fraction": 0.0,
        "kl/rejected_fraction": 0.0,
        "logp/policy_mean": -0.4 + 0.2 * learned,
        "logp/ref_mean": -0.5,
        "logp/sampler_gap_max": 1e-4,
        "entropy/mean": 0.9 - 0.55 * learned + noise.gauss(0, 0.02),
        "ratio/clip_low_fraction": abs(noise.gauss(0.01, 0.005)),
        "ratio/clip_high_fraction": abs(noise.gauss(0.02, 0.008)),
        "ratio/max": 1.6,
        "ratio/ess": 0.97,
        "grad/norm": abs(noise.gauss(1.2 - 0.5 * learned, 0.2)),
        "grad/clip_factor": 0.9,
        "optim/learning_rate": 5e-4 * min(1.0, step / 5),
        "guard/skipped": 0.0,
        "guard/rollbacks": 0.0,
        "length/mean": 9 + 2 * learned + noise.gauss(0, 0.2),
        "length/max": 24.0,
        "length/truncated_fraction": 0.18 - 0.1 * learned,
        "parse/ok_fraction": 0.8 + 0.19 * learned,
        "time/rollout_s": abs(noise.gauss(0.9, 0.05)),
        "time/score_s": abs(noise.gauss(0.25, 0.02)),
        "time/update_s": abs(noise.gauss(0.6, 0.04)),
        "time/sync_s": 0.01,
        "time/total_s": 1.8,
        "speed/tokens_per_s": noise.gauss(3100, 90),
        "memory/peak_gib": 0.7,
    }
    for kind, value, error in (
        ("k1", kl * (1 + noise.gauss(0, 0.3)), 3 * se),
        ("k3", kl, se),
        ("exact", kl * 1.02, se),
    ):
        for name, entry in (("mean", value), ("se", error), ("min", 0.0), ("max", 9 * kl), ("p95", 3 * kl)):
            line[f"kl/policy_ref/{kind}/{name}"] = entry
    if step == total // 2:  # a skipped update still writes a complete line
        line |= {"grad/norm": math.nan, "guard/skipped": 1.0}
    return line


def rollout(step: int, problem: int, sample: int, right: bool, noise: random.Random) -> dict[str, Any]:
    """One recorded completion of `a + b` with its tokens and their KL."""
    a, b = 17 + problem, 26 + 3 * problem
    answer = a + b if right else a + b + noise.choice([-10, 1, 10])
    tokens = [*f"{a} + {b} ", "= ", "<answer>", *str(answer), "</answer>", "<eos>"]
    kl: list[float | None] = [noise.gauss(0.0, 0.02) for _ in tokens]
    for index in (-4, -3):
        kl[index] = abs(noise.gauss(0.8, 0.3)) if step > 1 else noise.gauss(0, 0.03)
    return {
        "problem": f"add/{problem}",
        "group": problem,
        "prompt": f"What is {a} + {b}? Think & answer inside <answer></answer>.",
        "messages": None,
        "completion": "".join(tokens[:-1]),
        "tokens": tokens,
        "kl": kl,
        "reward": 1.1 if right else 0.1,
        "parts": {"exact": float(right), "format": 1.0},
        "advantage": 0.7 if right else -0.7,
        "stop_reason": "eos",
    }


def make_run(
    path: Path, *, beta: float = 0.01, seed: int = 0, total: int = 100, upto: int | None = None, finish: bool = True
) -> Path:
    """A run of `total` steps, stopped at `upto`; `finish` writes findings and summary."""
    noise = random.Random(seed)
    upto = total if upto is None else upto
    with RunDirectory.create(path) as run:
        run.write_text("config.yaml", CONFIG.format(name=path.name, seed=seed, max_steps=total, beta=beta))
        run.write_json(
            "env.json",
            {"keel": "0.1.0", "python": "3.12.4", "platform": "Linux", "device": {"kind": "cpu", "threads": 2},
             "packages": {"torch": "2.13.0", "transformers": "5.17.0"}},
        )  # fmt: skip
        ticks = iter(range(10**6))
        log = MultiLogger(JsonlLogger(run), clock=lambda: 1.79e9 + next(ticks))
        log.event("start", message="warm start done, 300 steps")
        before = evaluate(log, 0, 0.36, noise)
        after = before
        for step in range(1, upto + 1):
            log.step(step, metrics_at(step, total, beta, noise))
            if step in (1, total // 2, total):
                chance = 0.35 if step == 1 else 0.85
                records = [rollout(step, p, s, noise.random() < chance, noise) for p in range(5) for s in range(2)]
                log.rollouts(step, records)
            if step == total // 2:
                log.event("guard/skipped", reason="the gradient was not finite")
            if step % 20 == 0:
                after = evaluate(log, step, 0.36 + 0.45 / (1 + math.exp(-9 * (step / total - 0.35))), noise)
                log.event("checkpoint", path=f"checkpoints/step-{step}")
        if finish:
            write_summary(run, before, after, upto, beta, log)
        log.close()
    return path


def evaluate(log: MultiLogger, step: int, share: float, noise: random.Random) -> dict[str, tuple[float, list[float]]]:
    """Write the evaluation lines of one step; (accuracy, interval) by task."""
    results: dict[str, tuple[float, list[float]]] = {}
    accuracies = {"add": (share, "trained"), "subtract": (0.62 - step / 3000, "retention"), "copy": (0.97, "retention"),
            "reverse": (0.8 - 0.6 * (share - 0.36), "retention")}  # fmt: skip
    for task, (value, split) in accuracies.items():
        n = 200
        value = round(n * min(1.0, max(0.0, value + noise.gauss(0, 0.01)))) / n
        results[task] = (value, wilson(value, n))
        log.evaluation(
            step,
            {"task": task, "pass@1": value, "pass@k": {"1": value, "8": min(1.0, value + 0.2)},
             "ci95": wilson(value, n), "reward": value, "n": n, "split": split},
        )  # fmt: skip
    return results


def write_summary(run: RunDirectory, before: Any, after: Any, steps: int, beta: float, log: MultiLogger) -> None:
    """findings.json and summary.json as the contract has them."""
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    kl = {kind: {"mean": lines[-1][f"kl/policy_ref/{kind}/mean"], "se": lines[-1][f"kl/policy_ref/{kind}/se"]}
          for kind in ("k1", "k3", "exact")}  # fmt: skip
    kl["sequence"] = {"mean": lines[-1]["kl/policy_ref/sequence/mean"], "se": 0.02}
    run.write_json("findings.json", FINDINGS)
    run.write_json(
        "summary.json",
        {
            "task": "add",
            "steps": steps,
            "accuracy": {"before": before["add"][0], "after": after["add"][0], "ci95_before": before["add"][1],
                         "ci95_after": after["add"][1]},
            "retention": {t: {"before": before[t][0], "after": after[t][0]} for t in before if t != "add"},
            "kl": kl,
            "beta": beta,
            "wall_s": 192.4,
            "findings": [finding["code"] for finding in FINDINGS],
        },
    )  # fmt: skip
    log.event("finished", steps=steps)


if __name__ == "__main__":
    import sys

    folder = Path(sys.argv[1])
    make_run(folder / "beta-0.01")
    make_run(folder / "beta-0", beta=0.0, seed=1)
    make_run(folder / "beta-1", beta=1.0, seed=2, upto=64, finish=False)
