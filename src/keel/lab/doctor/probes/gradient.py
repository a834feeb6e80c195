"""The gradient of training's log-probabilities against that of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from keel.base.thresholds import Thresholds
from keel.lab.doctor.bench import Bench
from keel.lab.doctor.findings import Finding, found
from keel.lab.doctor.probes.gap import in_half
from keel.lab.doctor.probes.modes import drops, in_mode, no_dropout
from keel.trainer.batch import score_micro


def _gradient_error(bench: Bench) -> tuple[float, float]:
    """∂Σlogp/∂θ by training's pass against the model's own forward, on one completion: how far off, and its size."""
    weights = [p for p in bench.policy.model.parameters() if p.requires_grad]
    group = max(bench.groups, key=lambda group: len(group.completions[0].tokens))
    single = replace(group, completions=group.completions[:1], rewards=group.rewards[:1])
    batch = bench.pack([single])
    scored = score_micro(batch.micros[0], batch, bench.run).logp.sum()
    ids = torch.tensor([[*group.prompt_tokens, *group.completions[0].tokens]], device=bench.policy.device)
    logits = bench.policy.model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_tokens) - 1 : -1].float()
    logp = (logits / bench.temperature).log_softmax(-1)
    own = logp.gather(-1, ids[0, len(group.prompt_tokens) :, None]).sum()
    wanted = _flat(own, weights)
    given = _flat(scored, weights) if scored.requires_grad else torch.zeros_like(wanted)
    error = float((given - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return error, float(given.norm() / wanted.norm().clamp_min(1e-30))


def gradient_findings(bench: Bench, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """The gradient in the mode of training; where it is off, whether evaluation mode mends it."""
    error, size = _gradient_error(bench)
    figures["gradient_error"] = error
    limit = thresholds["gradient_error_half" if in_half(bench) else "gradient_error"]
    if not error > limit:
        return
    with in_mode(bench.policy.model, training=False):
        calm, _ = _gradient_error(bench)
    if calm <= limit:
        active = [name for name, module in bench.policy.model.named_modules() if drops(module)]
        yield found(
            "scoring/dropout",
            f"the gradient of log-probabilities is off by {error:.3g} of its size in training mode, by {calm:.1g} in "
            f"evaluation mode; active dropout layers: {', '.join(active[:3]) or 'none known to torch'}",
            "dropout is on in the policy's pass: the first update makes policy and reference differ by it",
            no_dropout(bench.config),
        )
    else:
        yield found(
            "scoring/gradient",
            f"the gradient of training's log-probabilities is {size:.3g} times the size of the model's own and off by "
            f"{error:.3g} of it, although their values agree",
            "model.scorer detaches a part of what it computes, or runs without gradient",
            "return log-probabilities that autograd can follow back to every trainable weight",
        )


def _flat(value: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    found_gradients = torch.autograd.grad(value, weights, allow_unused=True)
    parts = zip(found_gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten().float() for g, w in parts])
