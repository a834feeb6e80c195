"""The gradient of training's log-probabilities against that of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.gap import in_half_precision
from keel.lab.doctor.probes.modes import eval_mode, is_active_dropout, no_dropout
from keel.lab.doctor.setup import ProbeSetup
from keel.trainer.batch import score_micro


def _gradient_error(setup: ProbeSetup) -> tuple[float, float]:
    """∂Σlogp/∂θ by training's pass against the model's own forward, on one completion: how far off, and its size."""
    weights = [p for p in setup.policy.model.parameters() if p.requires_grad]
    group = max(setup.groups, key=lambda group: len(group.completions[0].tokens))
    single = replace(group, completions=group.completions[:1], rewards=group.rewards[:1])
    batch = setup.pack([single])
    scored = score_micro(batch.micros[0], batch, setup.run).logp.sum()
    ids = torch.tensor([[*group.prompt_tokens, *group.completions[0].tokens]], device=setup.policy.device)
    logits = setup.policy.model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_tokens) - 1 : -1].float()
    logp = (logits / setup.temperature).log_softmax(-1)
    forward_logp = logp.gather(-1, ids[0, len(group.prompt_tokens) :, None]).sum()
    expected = _flat(forward_logp, weights)
    actual = _flat(scored, weights) if scored.requires_grad else torch.zeros_like(expected)
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    return error, float(actual.norm() / expected.norm().clamp_min(1e-30))


def gradient_findings(setup: ProbeSetup, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """The gradient in the mode of training; where it is off, whether evaluation mode mends it."""
    error, size = _gradient_error(setup)
    figures["gradient_error"] = error
    limit = thresholds["gradient_error_half" if in_half_precision(setup) else "gradient_error"]
    if not error > limit:
        return
    with eval_mode(setup.policy.model):
        eval_error, _ = _gradient_error(setup)
    if eval_error <= limit:
        active = [name for name, module in setup.policy.model.named_modules() if is_active_dropout(module)]
        yield finding(
            "scoring/dropout",
            f"the gradient of log-probabilities is off by {error:.3g} of its size in training mode, by "
            f"{eval_error:.1g} in evaluation mode; active dropout layers: "
            f"{', '.join(active[:3]) or 'none known to torch'}",
            "dropout is on in the policy's pass: the first update makes policy and reference differ by it",
            no_dropout(setup.config),
        )
    else:
        yield finding(
            "scoring/gradient",
            f"the gradient of training's log-probabilities is {size:.3g} times the size of the model's own and off by "
            f"{error:.3g} of it, although their values agree",
            "model.scorer detaches a part of what it computes, or runs without gradient",
            "return log-probabilities that autograd can follow back to every trainable weight",
        )


def _flat(value: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(value, weights, allow_unused=True)
    parts = zip(gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten().float() for g, w in parts])
