"""The gradient of training's log-probabilities against that of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from random import Random

import torch
from torch import Tensor, nn

from keel.doctor.derivative import wrong_derivatives
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import in_half_precision
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.modes import eval_mode, is_active_dropout, no_dropout
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import Text, most_logits, perturbed_weights
from keel.trainer.batch import score_micro

ROUNDINGS = 8  # units of float32's, as sums of hundreds have
ROUNDED_OFF = 0.25  # of what two gradients differ by
GRADIENT_TIMES = 4  # as much room for a logit that is differentiated
SURE = 0.1  # of a token whose log-probability answers to its logits by less: rounding decides there


def _gradient_error(setup: KeelSubject) -> tuple[float, float]:
    """∂Σ w·logp/∂θ by training's pass over its batch against the model's own forward: how far off, and its size.

    The weights `w` of the tokens have random signs, so that no two mistakes cancel out, and grow where the model is
    sure: there a log-probability hardly answers to its logits, and a token without a gradient would not be missed.
    """
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    weights, row = _token_weights(setup), 0
    actual = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for micro in setup.batch.micros:
        logp = score_micro(micro, setup.batch, setup.run).logp
        weighted = (logp * weights[row : row + len(logp), : logp.shape[1]]).sum()
        if weighted.requires_grad:
            _add_gradient(actual, weighted, parameters)
        row += len(logp)
    expected = _own_gradient(setup, weights, parameters)
    own, size = max(_norm(expected), 1e-30), _norm(actual)
    off = _norm([a.sub_(e) for a, e in zip(actual, expected, strict=True)])
    return off / own, size / own


def _own_gradient(setup: KeelSubject, weights: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The same of the model's own forward: completions of equal length together, as far as there is room."""
    gradient = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    texts = [(group.prompt_tokens, c.tokens) for group in setup.groups for c in group.completions]
    alike: dict[tuple[int, int], list[int]] = {}  # lengths of prompt and completion: rows
    for row, (prompt, tokens) in enumerate(texts):
        alike.setdefault((len(prompt), len(tokens)), []).append(row)
    room = most_logits(setup.policy.device) // (GRADIENT_TIMES * setup.vocabulary)
    for (given, written), rows in alike.items():
        at_once = min(32, max(1, room // (given + written)))
        for part in (rows[i : i + at_once] for i in range(0, len(rows), at_once)):
            logp = _own_logp(setup, [texts[row] for row in part])
            _add_gradient(gradient, (logp * weights[part, : logp.shape[1]]).sum(), parameters)
    return gradient


def _rounding(setup: KeelSubject) -> float:
    """How far the model's own gradient moves, of its size, where weights move by a few units of rounding."""
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    weights = _token_weights(setup)
    before = _own_gradient(setup, weights, parameters)
    own = max(_norm(before), 1e-30)
    with ExitStack() as moved:
        for dtype in {p.dtype for p in parameters}:
            rounded = [p for p in parameters if p.dtype == dtype and bool(p.any())]  # 0 is exact
            units = ROUNDINGS if dtype == torch.float32 else 1
            moved.enter_context(perturbed_weights(rounded, units * torch.finfo(dtype).eps, seed=7))
        after = _own_gradient(setup, weights, parameters)
    return _norm([a.sub_(b) for a, b in zip(after, before, strict=True)]) / own


def _token_weights(setup: KeelSubject) -> Tensor:
    """`[B, T]`: over the size of ∂logp/∂logits (1 − p of the token, −p of others); 0 where nothing is trained."""
    tokens, signs = setup.tokens(), Random(0)
    weights = torch.zeros(tokens.shape, device=tokens.device)
    for i, logits in setup.each_logits():
        p = (logits / setup.temperature).softmax(-1)
        own = p.gather(-1, tokens[i, : len(p), None]).squeeze(-1)
        answers = (1 - 2 * own + p.square().sum(-1)).clamp_min(0).sqrt()
        drawn = torch.tensor([signs.choice((-1.0, 1.0)) for _ in range(len(p))], device=p.device)
        weights[i, : len(p)] = drawn / answers.clamp_min(SURE)
    return weights * setup.mask


def _own_logp(setup: KeelSubject, texts: Sequence[Text]) -> Tensor:
    """log p `[n, t]` of the completions' tokens by the model's own forward; prompts and completions of equal length."""
    ids = torch.tensor([[*prompt, *tokens] for prompt, tokens in texts], device=setup.policy.device)
    given = len(texts[0][0])
    logits = setup.policy.model(input_ids=ids, use_cache=False).logits[:, given - 1 : -1].float()
    logp = (logits / setup.temperature).log_softmax(-1)
    return logp.gather(-1, ids[:, given:, None]).squeeze(-1)


def gradient_findings(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """The gradient in the mode of training, without autocast; where it is off, whether evaluation mode mends it."""
    narrow, setup.run.amp_dtype = setup.run.amp_dtype, None
    try:
        limit = thresholds["gradient_error_half" if in_half_precision(setup) else "gradient_error"]
        yield from _gradient_findings(setup, figures, limit)
    finally:
        setup.run.amp_dtype = narrow


def _gradient_findings(setup: KeelSubject, figures: dict[str, float], limit: float) -> Iterator[Finding]:
    error, size = _gradient_error(setup)
    figures["gradient_error"] = error
    if not error > limit:
        yield from _of_the_model(setup)
        return
    with eval_mode(setup.policy.model):
        eval_error, _ = _gradient_error(setup)
        by_rounding = 0.0 if eval_error <= limit else _rounding(setup)
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
    elif by_rounding < ROUNDED_OFF * eval_error:  # else the model is one whose gradient is rounding's
        yield finding(
            "scoring/gradient",
            f"the gradient of training's log-probabilities is {size:.3g} times the size of the model's own and off by "
            f"{error:.3g} of it, although their values agree",
            "model.scorer detaches a part of what it computes, or runs without gradient",
            "return log-probabilities that autograd can follow back to every trainable weight",
        )


def _of_the_model(setup: KeelSubject) -> Iterator[Finding]:
    """The model's own gradient against how far its log-probabilities go; 16 bits round such steps away."""
    model = setup.policy.model
    if any(p.itemsize < 4 for p in model.parameters()):
        return
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    group = max(setup.groups, key=lambda group: len(group.completions[0].tokens))

    def logp() -> Tensor:
        return _own_logp(setup, [(group.prompt_tokens, group.completions[0].tokens)]).sum()

    with eval_mode(model):
        gradients = torch.autograd.grad(logp(), [p for _, p in named], allow_unused=True)
        whole = [torch.zeros_like(p) if g is None else g for g, (_, p) in zip(gradients, named, strict=True)]
        padding = {f"{name}.weight": row for name, row in _padding_rows(model)}
        wrong = wrong_derivatives(named, whole, lambda: float(logp()), padding)
    if wrong:
        name, measured, slope = wrong[0]
        yield finding(
            "scoring/gradient",
            f"moving {name} changes log-probabilities by {measured:.3g} a unit where autograd says {slope:.3g}; "
            f"{len(wrong)} directions are off",
            "a layer or a hook of the model changes gradients on their way: reverses, scales or cuts them",
            "take hooks on parameters, gradient reversal and detach() out of the model that is trained",
        )


def _padding_rows(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Embeddings' rows that torch never trains, which may be the end token's as well."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield name, module.padding_idx


def _norm(parts: Sequence[Tensor]) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())


def _add_gradient(total: Sequence[Tensor], value: Tensor, weights: Sequence[nn.Parameter]) -> None:
    """In place, weight by weight: nothing of the size of them all is made beside the gradient itself."""
    for part, gradient in zip(total, torch.autograd.grad(value, weights, allow_unused=True), strict=True):
        if gradient is not None:
            part.add_(gradient)
