"""Check the gradient of training's log-probabilities by the model's own forward and by finite differences.

Two passes through one model have the same gradient error if a layer's backward is wrong. Finite differences do not use
autograd and therefore show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from random import Random

import torch
from torch import Tensor, nn

from keel.doctor.findings import Finding, finding
from keel.doctor.gap import eval_mode, in_half_precision, is_active_dropout, no_dropout
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.subject import Text, most_logits, perturbed_weights
from keel.trainer.batch import score_micro

ROUNDINGS = 8  # units of fp32 rounding, as in sums of hundreds of terms
ROUNDED_OFF = 0.25  # a gradient error is reported if rounding explains less than this share of it
GRADIENT_TIMES = 4  # memory factor of logits with gradients

STEP = 0.01  # nats by which a step should change the log-probability; 1000 times the rounding of an fp32 sum
RELATIVE = 0.02  # largest step, as a share of a tensor's RMS
RELATIVE_ZEROS = 0.1  # the same for a random direction, along which slopes are small
NOISE = 1e-3  # nats; smaller changes are rounding
WRONG = 0.5  # tolerated share of the slope; curvature over such a step is a few hundredths
STEADY = 0.1  # tolerated difference of the slope between two step sizes, as a share
TENSORS, SECONDS = 32, 0.5  # number of tensors, and time limit in seconds
SURE = 0.1  # skip tokens whose log-probability depends on their logits by less, where rounding dominates


def _gradient_error(setup: KeelSubject) -> tuple[float, float]:
    """Relative error and size of ∂Σ w·logp/∂θ in training's pass, against the model's own forward.

    The weights `w` have random signs, so that errors do not cancel. They are larger where the model is sure:
    log-probabilities hardly depend on the logits there, and a missing gradient would otherwise not show.
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
    """The same gradient by the model's own forward, with completions of equal length batched as memory allows."""
    gradient = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    texts = [(group.prompt_tokens, c.tokens) for group in setup.groups for c in group.completions]
    alike: dict[tuple[int, int], list[int]] = {}  # (prompt length, completion length): rows
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
    """The relative change of the model's own gradient when weights change by a few units of rounding."""
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    weights = _token_weights(setup)
    before = _own_gradient(setup, weights, parameters)
    own = max(_norm(before), 1e-30)
    with ExitStack() as moved:
        for dtype in {p.dtype for p in parameters}:
            rounded = [p for p in parameters if p.dtype == dtype and bool(p.any())]  # 0 has no rounding error
            units = ROUNDINGS if dtype == torch.float32 else 1
            moved.enter_context(perturbed_weights(rounded, units * torch.finfo(dtype).eps, seed=7))
        after = _own_gradient(setup, weights, parameters)
    return _norm([a.sub_(b) for a, b in zip(after, before, strict=True)]) / own


def _token_weights(setup: KeelSubject) -> Tensor:
    """`[B, T]`: ± the inverse size of ∂logp/∂logits (1 − p for the token, −p for others); 0 for untrained tokens."""
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
    """log p `[n, t]` of completions by the model's own forward, for prompts and completions of equal lengths."""
    ids = torch.tensor([[*prompt, *tokens] for prompt, tokens in texts], device=setup.policy.device)
    given = len(texts[0][0])
    logits = setup.policy.model(input_ids=ids, use_cache=False).logits[:, given - 1 : -1].float()
    logp = (logits / setup.temperature).log_softmax(-1)
    return logp.gather(-1, ids[:, given:, None]).squeeze(-1)


def gradient_findings(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """Check the gradient in training mode without autocast. If it is wrong, test whether evaluation mode fixes it."""
    narrow, setup.run.amp_dtype = setup.run.amp_dtype, None
    try:
        limit = setup.thresholds["gradient_error_half" if in_half_precision(setup) else "gradient_error"]
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
            f"the relative error of the gradient of log-probabilities is {error:.3g} in training mode and "
            f"{eval_error:.1g} in evaluation mode; active dropout layers: "
            f"{', '.join(active[:3]) or 'none known to torch'}",
            "dropout is on in the policy's training pass, and off in the reference and the sampler",
            no_dropout(setup.config),
        )
    elif by_rounding < ROUNDED_OFF * eval_error:  # otherwise rounding dominates this model's gradient
        yield finding(
            "scoring/gradient",
            f"the gradient of training's log-probabilities has {size:.3g} times the norm of the model's own gradient "
            f"and a relative error of {error:.3g}, although the values agree",
            "model.scorer detaches a part of its computation, or runs without gradients",
            "return log-probabilities through which autograd reaches every trainable weight",
        )


def _of_the_model(setup: KeelSubject) -> Iterator[Finding]:
    """Check the model's own gradient by finite differences. Skipped for 16-bit weights, which round such steps away."""
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
            f"the slope of log-probabilities along {name} is {measured:.3g} by finite differences and {slope:.3g} by "
            f"autograd; {len(wrong)} directions differ",
            "a layer or a hook of the model changes gradients in the backward pass: it reverses, scales or cuts them",
            "remove parameter hooks, gradient reversal and detach() from the trained model",
        )


def _padding_rows(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Padding rows of embeddings, which torch never trains; the end token may share them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield name, module.padding_idx


def _norm(parts: Sequence[Tensor]) -> float:
    return float(torch.stack([part.float().norm() for part in parts]).norm())


def _add_gradient(total: Sequence[Tensor], value: Tensor, weights: Sequence[nn.Parameter]) -> None:
    """Accumulate the gradient in place, weight by weight, without a second copy of all gradients."""
    for part, gradient in zip(total, torch.autograd.grad(value, weights, allow_unused=True), strict=True):
        if gradient is not None:
            part.add_(gradient)


# ------------------------------------------------------------------------ finite differences


def wrong_derivatives(
    named: Sequence[tuple[str, nn.Parameter]],
    gradients: Sequence[Tensor],
    value: Callable[[], float],
    untrained: Mapping[str, int] = {},
) -> list[tuple[str, float, float]]:
    """Tensors whose gradient differs from the measured slope of `value` along it, with both slopes.

    The first entry may be all tensors together. Tensors with very small gradients, and zero entries within a tensor,
    are moved along a random direction, since a weight that changes the value must have a gradient. `untrained` lists
    rows that intentionally have none.
    """
    generator, began = torch.Generator().manual_seed(0), time.monotonic()
    wrong = []
    stride = max(1, -(-len(named) // TENSORS))
    single = [([parameter], [gradient], name) for (name, parameter), gradient in zip(named, gradients, strict=True)]
    every = [parameter for _, parameter in named]
    for weights, slopes, name in [(every, list(gradients), "all weights together"), *single[::stride]]:
        whole = name == "all weights together"
        if time.monotonic() - began > SECONDS and not whole:
            break
        if (found := _wrong_slope(weights, slopes, value, generator)) is not None:
            wrong.append((name, *found))
        elif not whole and (found := _wrong_zeros(weights[0], slopes[0], value, generator, untrained.get(name))):
            wrong.append((f"entries without gradient of {name}", *found))
    return wrong


def _wrong_slope(
    weights: Sequence[nn.Parameter], gradients: Sequence[Tensor], value: Callable[[], float], generator: torch.Generator
) -> tuple[float, float] | None:
    """The measured slope along a unit direction and the gradient's, if they differ."""
    size = _norm([weight.detach() for weight in weights]) or 1.0
    slope, farthest = _norm(gradients), RELATIVE * size
    if slope * farthest > NOISE:
        direction = [gradient.float() / slope for gradient in gradients]
        step = min(STEP / slope, farthest)
    else:
        noise = [torch.randn(w.shape, generator=generator).to(w.device) for w in weights]
        length, step = _norm(noise), farthest
        direction = [part / length for part in noise]
        slope = sum(float((g.float() * d).sum()) for g, d in zip(gradients, direction, strict=True))
    return _another(weights, direction, slope, step, value)


def _wrong_zeros(
    weight: nn.Parameter,
    gradient: Tensor,
    value: Callable[[], float],
    generator: torch.Generator,
    untrained: int | None,
) -> tuple[float, float] | None:
    """The slope along entries with gradient 0, although other entries of their tensor have one."""
    still = gradient == 0
    if untrained is not None:
        still[untrained] = False
    if not bool(still.any()) or bool(still.all()):
        return None
    noise = torch.randn(weight.shape, generator=generator).to(weight.device) * still
    step = RELATIVE_ZEROS * _norm([weight.detach() * still])
    return _another([weight], [noise / _norm([noise])], 0.0, step, value) if step else None


def _another(
    weights: Sequence[nn.Parameter],
    direction: Sequence[Tensor],
    slope: float,
    step: float,
    value: Callable[[], float],
) -> tuple[float, float] | None:
    measured = _central(weights, direction, step, value)
    if not _differ(measured, slope, step):
        return None
    again = _central(weights, direction, step / 2, value)  # with curvature, half the step would give another slope
    steady = abs(again - measured) <= STEADY * max(abs(again), abs(slope))
    return (again, slope) if steady and _differ(again, slope, step / 2) else None


def _differ(measured: float, slope: float, step: float) -> bool:
    largest = max(abs(measured), abs(slope))
    return abs(measured - slope) > WRONG * largest and step * largest > NOISE


@torch.no_grad()
def _central(
    weights: Sequence[nn.Parameter], direction: Sequence[Tensor], step: float, value: Callable[[], float]
) -> float:
    """(f(w + εd) − f(w − εd)) / 2ε. Every weight is restored exactly."""
    originals = [weight.detach().clone() for weight in weights]
    values = []
    try:
        for sign in (1.0, -1.0):
            for weight, before, part in zip(weights, originals, direction, strict=True):
                weight.copy_(before + sign * step * part)
            values.append(value())
    finally:
        for weight, before in zip(weights, originals, strict=True):
            weight.copy_(before)
    return (values[0] - values[1]) / (2 * step)
