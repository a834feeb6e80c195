"""What is measured of a finished run besides its own evaluation: its drift from the start, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keel.lab.compare import Direction, Side, load_pair, measure_drift, resolve
from keel.lab.studies.grid import Measure
from keel.lab.studies.sentences import SENTENCES
from keel.run.build import drop_long_prompts
from keel.run.evaluate import configured_tasks
from keel.trainer.checkpoint import no_progress_bars

ESTIMATORS = ("exact", "k1", "k2", "k3")


def measure_run(folder: Path, options: Measure) -> dict[str, Any]:
    """KL between a run's last checkpoint and its start on held-out prompts of every task, and its text likelihood.

    `policy_ref` is KL(policy‖start) on the policy's samples, `ref_policy` KL(start‖policy) on the start's samples.
    """
    policy, start = resolve(str(folder)), resolve(f"{folder}@start")
    config = policy.config
    with no_progress_bars():
        sides = load_pair(policy, start)
    tasks = {}
    for task, split in configured_tasks(config):
        problems = drop_long_prompts(config, sides[0].loaded.tokenizer, task.held_out(options.prompts))
        drift = measure_drift(
            *sides,
            problems,
            samples=options.samples,
            max_tokens=config.rollout.max_completion_length,
            temperature=config.rollout.temperature,
            seed=config.run.seed + 1,
            chat_template=config.data.chat_template,
            system_prompt=config.data.system_prompt,
            microbatch_tokens=config.optim.microbatch_tokens,
        )
        assert drift.ref_policy is not None
        directions = {"policy_ref": _figures(drift.policy_ref), "ref_policy": _figures(drift.ref_policy)}
        tasks[task.name] = {"split": split, **directions}
    likelihood = {"before": text_logprob(sides[1]), "after": text_logprob(sides[0])} if options.text else None
    return {"tasks": tasks, "text_logprob": likelihood}


def _figures(direction: Direction) -> dict[str, Any]:
    """Nats per token and per sequence, by estimator."""
    return {
        unit: {name: {"mean": estimates[name].mean, "se": estimates[name].se} for name in ESTIMATORS}
        for unit, estimates in (("per_token", direction.per_token), ("per_sequence", direction.per_sequence))
    }


def text_logprob(side: Side, lines: Sequence[str] = SENTENCES) -> float:
    """Mean log-probability per token of plain text, in nats; each line by itself, its first token given."""
    tokenizer, total, count = side.loaded.tokenizer, 0.0, 0
    with side.model() as model, torch.no_grad():
        for line in lines:
            ids = torch.tensor([tokenizer.encode(line)], device=side.loaded.device)
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            total += logprobs.gather(1, ids[0, 1:, None]).double().sum().item()
            count += ids.shape[1] - 1
    return total / max(1, count)
