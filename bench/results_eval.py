"""The evaluation that all sides of bench/results.py share: Keel's, on whatever weights it is given."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.config import Config, load_config


class Evaluator:
    """Keel's evaluation of whatever weights it is given, with an engine of its own."""

    def __init__(self, config: Config, weights: Path, **changes: Any) -> None:
        from keel.rollout.registry import build_engine
        from keel.run.build import build_policy
        from keel.run.layout import sampler_options
        from keel.trainer.optim import resolve_amp_dtype

        self.config = load_config(config, [f"{name}={json.dumps(value)}" for name, value in changes.items()])
        self.loaded = build_policy(self.config, weights)
        amp_dtype = resolve_amp_dtype(self.config.optim, self.loaded.dtype, self.loaded.device)
        sampler = sampler_options(self.config, self.loaded.device.type, amp_dtype)
        self.engine = build_engine(sampler, self.loaded.model, self.loaded.tokenizer)

    def take(self, weights: Mapping[str, Any]) -> None:
        """Other weights of the same model."""
        self.loaded.model.load_state_dict(weights)
        self.engine.sync(self.loaded.model)

    def measure(self, **changes: Any) -> list[Any]:
        """An EvalResult a task, the trained one first, with these options changed (dots are double underscores)."""
        from keel.run.evaluate import configured_tasks, entries, evaluate_entry

        named = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
        config = load_config(self.config, named)
        chosen = entries(config, configured_tasks(config))
        # one seed for all runs: pass@8 of two policies is drawn under the same noise
        results = [evaluate_entry(config, self.engine, self.loaded.tokenizer, entry, seed=1) for entry in chosen]
        self.engine.release()
        return results

    def close(self) -> None:
        self.engine.close()
        del self.loaded, self.engine
        free_memory()


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def evaluate_whole(config: Config, weights: Path, problems: int) -> dict[str, Any]:
    """Greedy accuracy and pass@8 on all held-out problems; of Countdown also by how many numbers there are."""
    from keel.eval.statistics import wilson

    with closing(Evaluator(config, weights, **{"rollout.max_batch": 1024, "eval.samples": problems})) as evaluator:
        greedy = evaluator.measure(eval__temperature=0, eval__k=[1])[0]
        sampled = evaluator.measure(eval__temperature=None, eval__k=[1, 8])[0]
    by_size: dict[str, list[float]] = {}
    for group, share in zip(greedy.groups, greedy.shares, strict=True):
        by_size.setdefault(str(len(group.problem.info.get("numbers", ()))), []).append(share)
    sizes = {f"greedy_{size}_numbers": fmean(shares) for size, shares in sorted(by_size.items()) if size != "0"}
    return {
        "problems": greedy.problems,
        "greedy": greedy.accuracy,
        "greedy_low": wilson(greedy.shares)[0],
        "greedy_high": wilson(greedy.shares)[1],
        **sizes,
        "pass_1": sampled.accuracy,
        "pass_8": sampled.pass_at[8],
        "pass_8_low": sampled.pass_at_ci95[8][0],
        "pass_8_high": sampled.pass_at_ci95[8][1],
        "truncated": greedy.truncated_fraction,
    }


def exact_kl(config: Config, weights: Path, start: Path) -> dict[str, float]:
    """KL(policy‖start) in nats per token over the whole vocabulary, on 64 held-out problems."""
    from keel.lab.compare import measure_drift
    from keel.run.build import build_named_task, build_policy

    sides = [build_policy(config, folder) for folder in (weights, start)]
    drift = measure_drift(
        *sides,
        build_named_task(config.task, config).held_out(64),
        samples=4,
        max_tokens=config.rollout.max_completion_length,
        temperature=config.rollout.temperature,
        reverse_samples=False,
    )
    exact = drift.policy_ref.per_token["exact"]
    return {"kl_exact": exact.mean, "kl_exact_se": exact.se}
