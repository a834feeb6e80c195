"""One update, forward and back: is all of it finite, and how far does a single step take the policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.base.metrics import Sum
from keel.config import Config
from keel.doctor.advice import warmed_up
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.start import token_kl
from keel.doctor.probes.states import mean_kl, policy_states
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.doctor.weights import backup
from keel.kl import KLState
from keel.losses import global_denominators, objective
from keel.reference.base import RuleReference
from keel.trainer.batch import StepBatch, each_anchor, score_micro, score_policy, score_reference
from keel.trainer.optim import Optimizer
from keel.trainer.state import Anchor, State
from keel.trainer.step import other_terms, penalize_rewards, reject, sampled_kl, with_advantages

FACTORS = (0.5, 1.0, 2.0)
LOWER = tuple(2.0**-k for k in range(2, 13))


@dataclass(frozen=True)
class UpdateResult:
    """What one update did: its loss and gradient norm before clipping, and KL(new‖old) on the visited states."""

    loss: float
    norm: float
    kl: float


@dataclass(frozen=True)
class FirstUpdate:
    """The first update's batch, gradient and loss, the visited states before it, and how far the peak rate takes it.

    Without `real_rewards` signs drawn at random stand in for advantages.
    """

    batch: StepBatch
    gradients: list[Tensor | None]
    loss: float
    before: Tensor
    peak_kl: float
    real_rewards: bool


def probe_update(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The first update at its own learning rate, at half, at double and at the peak; all of it is undone.

    A warm-up is for the first updates, which Adam takes at full length whatever the gradient's noise is; later ones are
    averaged by its momentum, so that the peak has a limit of its own, `kl_per_update_peak`.
    """
    batch, real_rewards = with_signal(scored(setup), setup)
    gradients, loss = loss_gradients(setup, batch)
    own = setup.of_batch.get("own_states")
    before = policy_states(setup) if own is None else own / setup.temperature
    first = setup.run.optimizer.schedule(0)
    results = {factor: step_kl(setup, gradients, loss, before, first * factor) for factor in FACTORS}
    first_update = results[1.0]
    peak = first_update.kl if first == 1.0 else step_kl(setup, gradients, loss, before, 1.0).kl
    figures = {
        "loss": loss,
        "grad_norm": first_update.norm,
        "learning_rate": setup.run.optimizer.learning_rate * first,
        "peak_rate": setup.run.optimizer.learning_rate,
        "kl_after": first_update.kl,
        "kl_after_peak": peak,
        "kl_after_half": results[0.5].kl,
        "kl_after_double": results[2.0].kl,
        "real_rewards": float(real_rewards),
        "room": _room(setup),
    }
    if _too_far(figures, thresholds):
        kl_target = max(thresholds["kl_per_update"], figures["room"]) / thresholds["update_margin"]
        figures["fitting_rate"] = figures["peak_rate"] * next(
            (f for f in LOWER if step_kl(setup, gradients, loss, before, f).kl <= kl_target), LOWER[-1]
        )
    setup.of_batch["update"] = FirstUpdate(batch, gradients, loss, before, peak, real_rewards)
    findings = tuple(_findings(figures, thresholds, setup.config))
    line = (
        f"one update at optim.learning_rate={figures['learning_rate']:g}: loss {loss:.3g}, gradient norm "
        f"{first_update.norm:.3g}, KL to the policy before it {first_update.kl:.2g} nats per token "
        f"({results[0.5].kl:.2g} at half the rate, {results[2.0].kl:.2g} at double)"
        + ("" if real_rewards else "; signs drawn at random stood in for advantages")
    )
    return Outcome("update", findings, figures, (line,))


def scored(setup: KeelSubject) -> StepBatch:
    """The batch as the loop has it before its first update, after the reward's warm-up."""
    run, state = setup.run, start_of(setup)

    def against(view: StepBatch, anchor: Anchor) -> StepBatch:
        return view if anchor.reference is None else score_reference(view, run, anchor)

    def penalized(view: StepBatch, anchor: Anchor) -> StepBatch:
        beta = state.kl_of(anchor).beta
        if anchor.kl.placement == "reward" and beta != 0.0 and anchor.reference is not None:
            view = replace(view, kl=sampled_kl(view, anchor))
        return penalize_rewards(view, anchor, beta)

    batch = reject(score_policy(each_anchor(setup.batch, run, against), run), run)
    return with_advantages(each_anchor(batch, run, penalized), run, run.reward.warmup_steps)


def start_of(setup: KeelSubject) -> State:
    """The state of the run before its first step, with the coefficient that the objective takes."""
    return State(kl=KLState(beta=setup.beta, base=setup.beta))


def with_signal(batch: StepBatch, setup: KeelSubject) -> tuple[StepBatch, bool]:
    """Rewards that do not differ say nothing about the learning rate: seeded signs take the advantages' place.

    So do completions that all leave the policy term.
    """
    advantage, mask = batch.rows.advantages, batch.rows.policy_mask
    assert advantage is not None
    if bool((advantage != 0 if mask is None else (advantage != 0) & mask.any(-1)).any()):
        return batch, True
    generator = torch.Generator().manual_seed(setup.config.run.seed)
    signs = torch.randint(0, 2, advantage.shape[:1], generator=generator).mul(2).sub(1).to(advantage)
    return batch.with_rows(advantages=signs, policy_mask=None), False


def loss_gradients(setup: KeelSubject, batch: StepBatch, **changes: Any) -> tuple[list[Tensor | None], float]:
    """The gradient of the whole batch as one update, and its loss; none of it is left on the weights.

    `changes` are options of the loss that are set otherwise, and `beta`, with which the reference's KL term is alone.
    """
    run, alone = setup.run, "beta" in changes
    beta = changes.pop("beta", setup.beta if batch.rows.ref_logp is not None else 0.0)
    loss = run.loss.model_copy(update=changes)
    counts = global_denominators(batch.rows, setup.loss_length)
    gradients: list[Tensor | None] = []
    total = 0.0
    for scale in _loss_scales(run.optimizer):
        total = 0.0
        for micro in batch.micros:
            scores = score_micro(micro, batch, run)
            more = [] if alone else other_terms(scores, batch, micro, run, start_of(setup))
            out = objective(scores, batch.view(micro), loss, run.kl, beta, counts, pairing=run.pairing, more=more)
            if out.loss.requires_grad:  # a loss that is detached is named by the objective
                (out.loss * scale).backward()
            total += out.loss.item()
        gradients = [p.grad if p.grad is None or scale == 1.0 else p.grad / scale for p in run.optimizer.parameters]
        run.optimizer.inner.zero_grad(set_to_none=True)
        if all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients):
            break
    return gradients, total


def _loss_scales(optimizer: Optimizer) -> tuple[float, ...]:
    """What the loss is multiplied by, so that fp16 does not round its gradient to 0; less where that overflows."""
    if optimizer.scaler is None:
        return (1.0,)
    scale = optimizer.scaler.get_scale()
    return (scale, scale / 2**8, 1.0)


def step_kl(
    setup: KeelSubject, gradients: list[Tensor | None], loss: float, before: Tensor, factor: float, **settings: Any
) -> UpdateResult:
    """What the run's own optimizer does with these gradients at `factor` times its rate; `settings` as AdamW's."""
    with moved(setup, gradients, loss, factor, **settings) as norm:
        return UpdateResult(loss, norm, mean_kl(policy_states(setup), before))


@contextmanager
def moved(
    setup: KeelSubject, gradients: list[Tensor | None], loss: float, factor: float, **settings: Any
) -> Iterator[float]:
    """The policy after one such update; the gradient's norm before clipping comes with it."""
    optimizer = setup.run.optimizer
    with undone(optimizer):
        scale = _loss_scales(optimizer)[0]  # which the step divides by
        for parameter, gradient in zip(optimizer.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient * scale
        for group in optimizer.inner.param_groups:
            group |= settings
        optimizer.schedule = lambda update: factor
        yield optimizer.step({"loss/total": Sum(loss)})["grad/norm"].value


@contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """Whatever happens to weights, moments and schedule inside: afterwards they have the very bits they had."""
    weights = backup(optimizer.parameters)
    state, schedule = copy.deepcopy(optimizer.state_dict()), optimizer.schedule
    try:
        yield
    finally:
        optimizer.schedule = schedule
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter, before in zip(optimizer.parameters, weights, strict=True):
                parameter.copy_(before)


def _room(setup: KeelSubject) -> float:
    """How far an update may take the policy towards a teacher: half of the way, in nats per token."""
    views = zip(setup.batch.views, setup.run.anchors, strict=True)
    to_teachers = [
        token_kl(setup.logp(), ref, setup.mask)
        for view, anchor in views
        if isinstance(anchor.reference, RuleReference) and anchor.reference.teacher is not None
        if (ref := score_reference(view, setup.run, anchor).rows.ref_logp) is not None
    ]
    return max(to_teachers, default=0.0) / 2


def _too_far(figures: dict[str, float], thresholds: Thresholds) -> bool:
    first, peak = (max(thresholds[name], figures["room"]) for name in ("kl_per_update", "kl_per_update_peak"))
    return not (figures["kl_after"] <= first and figures["kl_after_peak"] <= peak)


def _findings(figures: dict[str, float], thresholds: Thresholds, config: Config) -> Iterator[Finding]:
    rate, kl = figures["learning_rate"], figures["kl_after"]
    limit = max(thresholds["kl_per_update"], figures["room"])
    if not (math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])):
        yield finding(
            "optim/non-finite",
            f"the first update has loss {figures['loss']:g} and gradient norm {figures['grad_norm']:g}",
            "a reward, an advantage or a log-probability in the batch is not finite",
            "look for findings on rewards and scoring; in half precision model.dtype may be too narrow",
        )
        return
    if not _too_far(figures, thresholds):
        return
    yield finding(
        "optim/lr-too-high",
        f"one update at optim.learning_rate={rate:g} takes the policy {kl:.3g} nats per token from where it was "
        f"(over {limit:g}); half the rate {figures['kl_after_half']:.3g}, double {figures['kl_after_double']:.3g}, "
        f"the peak rate {figures['peak_rate']:g} takes it {figures['kl_after_peak']:.3g}"
        + ("" if figures["real_rewards"] else "; rewards do not differ, so signs stood in for advantages"),
        "the step is longer than the region in which the advantages were measured; gradient clipping does not "
        "shorten it, because Adam divides by the gradient's own size",
        propose("set {}", {"optim.learning_rate": one_digit(figures["fitting_rate"]), **warmed_up(config.to_dict())}),
        severity=None if figures["real_rewards"] or not kl <= thresholds["update_margin"] * limit else "warning",
    )


def one_digit(value: float) -> float:
    """Rounded down to one digit: 3.7e-4 is 3e-4."""
    size = 10.0 ** math.floor(math.log10(value))
    return math.floor(value / size) * size
