"""One update: whether all values are finite, and how far it moves the policy."""

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
from keel.doctor.measure import Outcome
from keel.doctor.probes.exploration import mean_kl, policy_states
from keel.doctor.probes.start import token_kl
from keel.doctor.subject import backup
from keel.doctor.thresholds import Thresholds
from keel.kl import KLState
from keel.losses import global_denominators, objective
from keel.reference.base import RuleReference
from keel.trainer.batch import StepBatch, each_anchor, score_micro, score_policy, score_reference
from keel.trainer.optim import Optimizer
from keel.trainer.state import Anchor, State
from keel.trainer.step import other_terms, penalize_rewards, reject, sampled_kl, with_advantages

LOWER = tuple(2.0**-k for k in range(2, 13))


@dataclass(frozen=True)
class FirstUpdate:
    """The first update: its batch, gradient and loss, the visited states before it, and the KL at the peak rate.

    Without `real_rewards`, random signs replace the advantages.
    """

    setup: KeelSubject
    batch: StepBatch
    gradients: list[Tensor | None]
    loss: float
    before: Tensor
    real_rewards: bool
    peak_kl: float = math.nan

    def kl(self, factor: float, **settings: Any) -> float:
        """KL(new‖old) in nats per token at the visited states, after one update at `factor` times the peak rate.

        `settings` are options of AdamW. Weights and optimizer are restored.
        """
        with moved(self.setup, self.gradients, self.loss, factor, **settings):
            return mean_kl(policy_states(self.setup), self.before)

    @property
    def norm(self) -> float:
        """The gradient norm over all weights."""
        return gradient_norm(self.gradients)


def gradient_norm(gradients: list[Tensor | None]) -> float:
    """The gradient norm over all weights."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))


def probe_update(setup: KeelSubject) -> Outcome:
    """Measure the KL of the first update at its own learning rate and at the peak rate. Both updates are undone.

    Under Adam, first updates have full length however noisy the gradient is, which a warm-up is meant for. Momentum
    averages later ones, so the peak rate has another limit, `kl_per_update_peak`.
    """
    batch, real_rewards = with_signal(scored(setup), setup)
    own = setup.of_batch.get("own_states")
    before = policy_states(setup) if own is None else own / setup.temperature
    first = FirstUpdate(setup, batch, *loss_gradients(setup, batch), before, real_rewards)
    rate, peak = setup.run.optimizer.schedule(0), setup.run.optimizer.learning_rate
    kl = first.kl(rate)
    first = replace(first, peak_kl=kl if rate == 1.0 else first.kl(1.0))
    figures = {
        "loss": first.loss,
        "grad_norm": first.norm,
        "learning_rate": peak * rate,
        "peak_rate": peak,
        "kl_after": kl,
        "kl_after_peak": first.peak_kl,
        "real_rewards": float(real_rewards),
        "room": _room(setup),
    }
    if _too_far(figures, setup.thresholds):
        most = max(setup.thresholds["kl_per_update"], figures["room"]) / setup.thresholds["update_margin"]
        figures["fitting_rate"] = peak * next((factor for factor in LOWER if first.kl(factor) <= most), LOWER[-1])
    setup.of_batch["update"] = first
    line = (
        f"one update at optim.learning_rate={peak * rate:g}: loss {first.loss:.3g}, gradient norm {first.norm:.3g}, KL "
        f"to the policy before it {kl:.2g} nats per token"
        + ("" if real_rewards else "; random signs were used instead of advantages")
    )
    return Outcome("update", tuple(_findings(figures, setup.thresholds, setup.config)), figures, (line,))


def scored(setup: KeelSubject) -> StepBatch:
    """The batch as in the loop before its first update, after the reward's warm-up."""
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
    """The run's state before its first step, with a valid β."""
    return State(kl=KLState(beta=setup.beta, base=setup.beta))


def with_signal(batch: StepBatch, setup: KeelSubject) -> tuple[StepBatch, bool]:
    """Replace advantages by seeded random signs if all are 0, because the update would otherwise be empty.

    The same is done if all completions are rejected.
    """
    advantage, mask = batch.rows.advantages, batch.rows.policy_mask
    assert advantage is not None
    if bool((advantage != 0 if mask is None else (advantage != 0) & mask.any(-1)).any()):
        return batch, True
    generator = torch.Generator().manual_seed(setup.config.run.seed)
    signs = torch.randint(0, 2, advantage.shape[:1], generator=generator).mul(2).sub(1).to(advantage)
    return batch.with_rows(advantages=signs, policy_mask=None), False


def loss_gradients(setup: KeelSubject, batch: StepBatch, **changes: Any) -> tuple[list[Tensor | None], float]:
    """The gradient and loss of the whole batch as one update. The weights keep no gradient.

    `changes` are other loss options. With `beta`, only the reference's KL term is computed.
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
            if out.loss.requires_grad:  # the objective probe reports a detached loss
                (out.loss * scale).backward()
            total += out.loss.item()
        gradients = [p.grad if p.grad is None or scale == 1.0 else p.grad / scale for p in run.optimizer.parameters]
        run.optimizer.inner.zero_grad(set_to_none=True)
        if all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients):
            break
    return gradients, total


def _loss_scales(optimizer: Optimizer) -> tuple[float, ...]:
    """Loss scales against fp16 underflow of the gradient, the largest first; later ones are used on overflow."""
    if optimizer.scaler is None:
        return (1.0,)
    scale = optimizer.scaler.get_scale()
    return (scale, scale / 2**8, 1.0)


@contextmanager
def moved(
    setup: KeelSubject, gradients: list[Tensor | None], loss: float, factor: float, **settings: Any
) -> Iterator[None]:
    """The policy after one update by the run's own optimizer at `factor` times its rate."""
    optimizer = setup.run.optimizer
    with undone(optimizer):
        scale = _loss_scales(optimizer)[0]  # the optimizer step divides by it
        for parameter, gradient in zip(optimizer.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient * scale
        for group in optimizer.inner.param_groups:
            group |= settings
        optimizer.schedule = lambda update: factor
        optimizer.step({"loss/total": Sum(loss)})
        yield


@contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """Restore weights, moments and schedule exactly."""
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
    """How far one update may move the policy towards a teacher: half of the distance, in nats per token."""
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
            "look for findings on rewards and scoring; in half precision, the range of model.dtype may be too small",
        )
        return
    if not _too_far(figures, thresholds):
        return
    yield finding(
        "optim/lr-too-high",
        f"one update at optim.learning_rate={rate:g} moves the policy by {kl:.3g} nats per token (over {limit:g}); at "
        f"the peak rate of {figures['peak_rate']:g}, an update moves it by {figures['kl_after_peak']:.3g}"
        + (
            ""
            if figures["real_rewards"]
            else "; rewards do not differ, so random signs were used instead of advantages"
        ),
        "the step leaves the region in which the advantages are valid; gradient clipping does not shorten it, because "
        "Adam normalizes the gradient",
        propose("set {}", {"optim.learning_rate": one_digit(figures["fitting_rate"]), **warmed_up(config.to_dict())}),
        severity=None if figures["real_rewards"] or not kl <= thresholds["update_margin"] * limit else "warning",
    )


def one_digit(value: float) -> float:
    """Rounded down to one digit, such as 3.7e-4 to 3e-4."""
    digits, exponent = f"{value:.9e}".split("e")
    return float(f"{digits[0]}e{exponent}")
