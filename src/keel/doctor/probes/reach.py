"""Reach: the KL that all updates of the run would cause if they had the same direction.

This is an upper bound of the run's KL. By Pinsker's inequality a KL of `reach_least` nats per completion changes no
success rate by more than √(KL/2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from keel.doctor.advice import either
from keel.doctor.findings import Advice, Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.exploration import entropy, mean_kl, policy_states
from keel.doctor.probes.update import FirstUpdate, gradient_norm, loss_gradients, one_digit, undone

MOST_UPDATES = 10_000  # a longer schedule is sampled at this many updates
USUAL_EPS, USUAL_ADAPTER_SCALE = 1e-8, 2.0
ADVISED_KL = 1e-4  # nats per token of an update at an advised learning rate
IDLE = 1e-3  # share of the peak rate below which an update has no effect
HALF_TYPES = (torch.bfloat16, torch.float16)
FEW_TRAINED = 0.01  # share of the weights below which almost nothing is trained


@dataclass(frozen=True)
class Course:
    """The learning rate over a run relative to its peak: the number of updates, the sum and the maximum of the factors.

    `idle` is the share of updates at less than `IDLE` of the peak.
    """

    updates: int
    total: float
    largest: float
    idle: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.updates


def course(schedule: Callable[[int], float], updates: int) -> Course:
    """Sum a schedule's factors over a run."""
    count = min(updates, MOST_UPDATES)
    factors = [schedule(i * updates // count) for i in range(count)]
    idle = sum(factor < IDLE for factor in factors) / count
    return Course(updates, sum(factors) * updates / count, max(factors), idle)


def held_sum(total: float, decay: float) -> float:
    """The sum of steps with total size `total` under a weight decay of `decay`: (1 − e^(−decay·total)) / decay."""
    return total if decay <= 0 else -math.expm1(-decay * total) / decay


def probe_reach(setup: KeelSubject) -> Outcome:
    """Measure the reach of all updates and of weight decay, and find the reason if it is too short."""
    first: FirstUpdate | None = setup.of_batch.get("update")
    if first is None or not math.isfinite(first.loss):
        return Outcome("reach", unchecked=("optim/no-update, optim/weight-decay: no update could be tried",))
    if entropy(first.before) < setup.thresholds["entropy_collapse"]:
        sure = "the policy is certain of every token, so it has no gradient"
        return Outcome("reach", unchecked=(f"optim/no-update, optim/weight-decay: {sure}",))
    if not first.real_rewards and all(len({c.tokens for c in group.completions}) == 1 for group in setup.groups):
        copies = "the completions of each group are equal, so the random signs that replace advantages cancel"
        return Outcome("reach", unchecked=(f"optim/no-update, optim/weight-decay: {copies}",))
    run, optim = setup.run, setup.config.optim
    per_step = run.loss.num_iterations * run.optim.minibatches
    rates = course(run.optimizer.schedule, setup.config.run.max_steps * per_step)
    # a shorter run is judged as if it had `steps_to_judge` steps
    longer = max(1.0, setup.thresholds["steps_to_judge"] * per_step / rates.updates)
    length = setup.completion_length
    reach = _Reach(setup, first, rates, longer, length, setup.thresholds["reach_least"])
    figures = {"updates": float(rates.updates), "mean_rate": rates.mean, "reach": reach.kl()}
    findings = [*_no_update(reach, figures)] or [*_unweighted(setup)] or [*frozen_findings(setup)]
    if optim.weight_decay > 0:
        decay, total = optim.learning_rate * optim.weight_decay, rates.total * longer
        figures["shrink"] = math.exp(-decay * total)
        figures["decay"] = decay_kl(setup, first, figures["shrink"]) * length
        figures["walk"] = rates.updates * longer * reach.kl(1.0, rounded=False)
        figures["reach_decayed"] = reach.kl(held_sum(total, decay))
        findings += () if findings else _decays(setup, figures, length)
    line = (
        f"reach: if all {rates.updates} updates of the run had the same direction, they would move the policy by "
        f"{figures['reach']:.2g} nats per completion; the learning rate is {rates.mean:.0%} of its peak on average"
        + (f"; weight decay alone {figures['decay']:.2g}" if "decay" in figures else "")
    )
    return Outcome("reach", tuple(findings), figures, (line,))


@dataclass(frozen=True)
class _Reach:
    """The KL in nats per completion after all updates of a run (`longer` times as many for a trial run)."""

    setup: KeelSubject
    first: FirstUpdate
    rates: Course
    longer: float
    length: float
    limit: float

    def kl(self, total: float | None = None, *, rounded: bool = True, **settings: Any) -> float:
        """The KL of one update as long as all updates together. 16-bit weights are rounded after each update."""
        total = self.rates.total * self.longer if total is None else total
        settings = {"weight_decay": 0.0, **settings}
        if rounded and self.halves and self.rates.largest > 0:
            return self._step(self.rates.largest, settings) * (total / self.rates.largest) ** 2
        return self._step(total, settings)

    def _step(self, factor: float, settings: dict[str, Any]) -> float:
        kl = self.first.kl(factor, **settings)
        return 0.0 if kl < 0 else kl * self.length  # negative values are rounding

    @property
    def halves(self) -> bool:
        return all(p.dtype in HALF_TYPES for p in self.setup.run.optimizer.parameters)

    def short(self, kl: float) -> bool:
        return not kl >= self.limit


def _no_update(reach: _Reach, figures: dict[str, float]) -> Iterator[Finding]:
    """A reach that is too short, a rate that never reaches its peak, or one that decays too early; with the reason."""
    rates, setup = reach.rates, reach.setup
    steps = setup.config.run.max_steps
    never, over = rates.largest < 0.5, rates.idle > 0.5
    if not reach.short(figures["reach"]) and not never and not over:
        return
    cause, advice = _reason(reach) if reach.short(figures["reach"]) else _schedule(setup)
    yield finding(
        "loss/no-gradient" if _all_left_out(reach) else "optim/no-update",
        f"all {rates.updates} updates of {steps} steps together move the policy by {figures['reach']:.2g} nats per "
        f"completion if they have the same direction (at least {reach.limit:g} is measurable); one update at the peak "
        f"rate moves it by {reach.first.peak_kl:.2g} nats per token; the mean rate is {rates.mean:.1%} of the peak"
        if reach.short(figures["reach"])
        else f"the rate is at most {rates.largest:.1%} of optim.learning_rate in {steps} steps, {rates.mean:.1%} on "
        f"average, and under {IDLE:.1%} at {rates.idle:.0%} of the updates",
        cause,
        advice,
        severity=None if reach.short(figures["reach"]) or rates.mean < 0.1 else "warning",
    )


def _unweighted(setup: KeelSubject) -> Iterator[Finding]:
    """Advantages whose warm-up is longer than the run. Adam hides their size, and other loss terms outweigh them."""
    warmup, steps = setup.run.reward.warmup_steps, setup.config.run.max_steps
    if warmup <= 2 * steps:
        return
    yield finding(
        "optim/no-update",
        f"the weight of advantages reaches only {steps / warmup:.2g} in {steps} steps",
        f"reward.warmup_steps={warmup} is longer than the run, so advantages never get their full weight",
        propose("set {}", {"reward.warmup_steps": steps // 10}),
        severity="warning",
    )


def frozen_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Almost nothing is trained: only a few vectors, fewer than the model has layers, and no adapter.

    Methods that train only vectors, biases or norms do so in every layer.
    """
    model, trained = setup.policy.model, setup.run.optimizer.parameters
    weights = sum(p.numel() for p in model.parameters())
    count = sum(p.numel() for p in trained)
    layers = getattr(model.config, "num_hidden_layers", 1)
    if setup.policy.lora is not None or hasattr(model, "peft_config") or count >= FEW_TRAINED * weights:
        return
    if len(trained) > layers or any(p.squeeze().ndim > 1 for p in trained):
        return
    known = {id(p) for p in trained}
    names = [name for name, p in model.named_parameters() if id(p) in known]
    yield finding(
        "optim/no-update",
        f"{count} of {weights} weights are trained, no matrix among them: {', '.join(names)}",
        "the other weights are frozen, perhaps by the model loader, and these alone can learn very little",
        "set requires_grad on the weights that should learn, or set model.lora; no change is needed if only these "
        "should learn",
        severity="warning",
    )


@dataclass(frozen=True)
class _Reason:
    """A possible reason for a short reach: whether it applies, and the reach in nats without it."""

    possible: bool
    without: Callable[[], float]
    cause: str
    advice: str | Advice


def _reason(reach: _Reach) -> tuple[str, str | Advice]:
    """The cause and advice for a short reach: the first reason whose removal makes the reach long enough."""
    setup, optim, norm = reach.setup, reach.setup.config.optim, reach.first.norm
    if _all_left_out(reach):
        cause = (
            f"loss.mismatch.kind={setup.run.loss.mismatch.kind} leaves no token: all importance weights are outside "
            "its limits"
        )
        return cause, propose("set {}", {"loss.mismatch.kind": "truncate", "loss.mismatch.floor": None})
    if norm == 0.0:
        return (
            "no gradient reaches a trainable weight although tokens have advantages: the trained weights are not used "
            "in the forward pass, or a part of it is detached",
            "look for findings on loss and scoring; train weights that the forward pass uses (model.lora.targets)",
        )
    kind, scale = str(setup.run.optimizer.parameters[0].dtype).removeprefix("torch."), adapter_scale(setup.policy.model)
    clip, alpha, lora = optim.max_grad_norm or math.inf, scale or math.inf, setup.config.model.lora
    own_lora = lora is not None and lora.adapter is None
    full = reach.rates.updates * reach.longer
    for reason in (
        _Reason(reach.rates.mean < 0.5, lambda: reach.kl(full), *_schedule(setup)),
        _Reason(
            reach.halves,
            lambda: reach.kl(rounded=False),
            f"the weights are {kind}: an update of {optim.learning_rate:g} is less than half a unit in the last place "
            "(ULP) of the weights, so every update is rounded away",
            propose("set {}, so that only passes use 16 bits", {"model.dtype": "float32", "optim.precision": kind}),
        ),
        _Reason(
            optim.eps > USUAL_EPS,
            lambda: reach.kl(eps=USUAL_EPS),
            f"optim.eps={optim.eps:g} is far above the gradient's size (norm {norm:.2g}), so Adam divides by eps "
            "instead",
            propose("set {}", {"optim.eps": USUAL_EPS}),
        ),
        _Reason(
            norm > clip,
            lambda: _unclipped_kl(reach),
            f"optim.max_grad_norm={clip:g} clips a gradient of norm {norm:.2g} to about the size of optim.eps",
            propose("set {}", {"optim.max_grad_norm": 1.0}),
        ),
        _Reason(
            alpha < USUAL_ADAPTER_SCALE,
            lambda: _rescaled_kl(reach),
            f"the adapter is multiplied by alpha / r = {alpha:.2g}, so it has almost no effect",
            propose("set {}", {"model.lora.alpha": USUAL_ADAPTER_SCALE * lora.r})
            if own_lora and lora is not None
            else "give the adapter an alpha of about twice its rank",
        ),
    ):
        if reason.possible and not reach.short(reason.without()):
            return reason.cause, reason.advice
    trained = sum(p.numel() for p in setup.run.optimizer.parameters)
    weights = sum(p.numel() for p in setup.policy.model.parameters())
    if scale is None and trained < FEW_TRAINED * weights:
        unfreeze = "set requires_grad on the weights that should learn, or set model.lora"
        advice = either(unfreeze, _rate(reach), joined="; if only these should learn, ")
        return f"only {trained} of {weights} weights are trained", advice
    cause = f"optim.learning_rate={optim.learning_rate:g} is too small for {setup.config.run.max_steps} steps"
    return cause, _rate(reach)


def _all_left_out(reach: _Reach) -> bool:
    """Whether there is no gradient because the importance weights exclude every token."""
    weighted = reach.setup.run.loss.mismatch.kind != "none"
    return weighted and reach.first.norm == 0.0 and _unweighted_norm(reach) > 0


def _unweighted_norm(reach: _Reach) -> float:
    """The gradient norm with all importance weights set to 1."""
    loss = reach.setup.run.loss.mismatch.model_copy(update={"kind": "none", "floor": None})
    return gradient_norm(loss_gradients(reach.setup, reach.first.batch, mismatch=loss)[0])


def _schedule(setup: KeelSubject) -> tuple[str, Advice]:
    optim, steps = setup.config.optim, setup.config.run.max_steps
    if optim.warmup_steps > steps // 2:
        return (
            f"optim.warmup_steps={optim.warmup_steps} takes more than half of the run's {steps} steps",
            propose("set {}", {"optim.warmup_steps": steps // 10}),
        )
    return (
        f"optim.schedule={optim.schedule} lowers the rate to its end before the run's {steps} steps are over",
        propose(
            "set {}",
            {"optim.schedule": "constant", "optim.decay_steps": None}
            if optim.decay_steps
            else {"optim.schedule": "constant"},
        ),
    )


def _rate(reach: _Reach) -> Advice:
    """A learning rate at which one update causes `ADVISED_KL`. KL grows with the square of the rate."""
    rate = reach.setup.run.optimizer.learning_rate
    for factor in (10.0**k for k in range(13)):
        kl = reach.first.kl(factor, weight_decay=0.0)
        if kl >= ADVISED_KL / 100:
            return propose("set {}", {"optim.learning_rate": one_digit(rate * factor * math.sqrt(ADVISED_KL / kl))})
    return Advice(
        "check that the trained weights affect the output: even 1e12 times optim.learning_rate does not "
        "move this policy"
    )


def _unclipped_kl(reach: _Reach) -> float:
    """The reach without gradient clipping."""
    optimizer, options = reach.setup.run.optimizer, reach.setup.run.optimizer.options
    optimizer.options = options.model_copy(update={"max_grad_norm": None})
    try:
        return reach.kl()
    finally:
        optimizer.options = options


def _adapters(model: nn.Module) -> Iterator[tuple[dict[str, float], str]]:
    """The scaling dict of each peft layer and the name of each active adapter in it."""
    module: Any
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "scaling"):
            yield from ((module.scaling, name) for name in module.active_adapters if name in module.scaling)


def adapter_scale(model: nn.Module) -> float | None:
    """The largest alpha / r of the model's active adapters; None without LoRA."""
    return max((scaling[name] for scaling, name in _adapters(model)), default=None)


def _rescaled_kl(reach: _Reach) -> float:
    """The reach with adapters at the usual scale, which also changes their gradient."""
    adapters = list(_adapters(reach.setup.policy.model))
    scales = [scaling[name] for scaling, name in adapters]
    try:
        for scaling, name in adapters:
            scaling[name] = USUAL_ADAPTER_SCALE
        gradients, loss = loss_gradients(reach.setup, reach.first.batch)
        return replace(reach, first=replace(reach.first, gradients=gradients, loss=loss)).kl()
    finally:
        for (scaling, name), scale in zip(adapters, scales, strict=True):
            scaling[name] = scale


def decay_kl(setup: KeelSubject, first: FirstUpdate, shrink: float) -> float:
    """The KL in nats per token after the decayed weights have shrunk to the share `shrink`."""
    optimizer = setup.run.optimizer
    trained = {id(p) for p, g in zip(optimizer.parameters, first.gradients, strict=True) if g is not None}
    with undone(optimizer), torch.no_grad():
        for group in optimizer.inner.param_groups:
            for parameter in group["params"]:
                if group["weight_decay"] > 0 and id(parameter) in trained:
                    parameter.mul_(shrink)
        return mean_kl(policy_states(setup), first.before)


def _decays(setup: KeelSubject, figures: dict[str, float], length: float) -> Iterator[Finding]:
    """Weight decay that moves the policy further than its updates, exceeds any budget, or undoes updates."""
    limit, decay = setup.thresholds["reach_least"], f"optim.weight_decay={setup.config.optim.weight_decay:g}"
    budget = setup.thresholds["kl_over_budget"] * length
    most = max(limit, min(figures["walk"], budget))
    forgets, held = figures["shrink"] < setup.thresholds["decay_left"], figures["reach_decayed"] < limit
    if figures["decay"] > most:
        evidence = (
            f"over the run, {decay} shrinks every decayed matrix to {figures['shrink']:.2g} of its size; this alone "
            f"moves the policy by {figures['decay']:.2g} nats per completion (over {most:.2g}), and the run's updates "
            f"move it by {figures['walk']:.2g} as a random walk"
        )
    elif forgets or held:
        evidence = (
            f"with {decay}, {figures['shrink']:.1%} of the first update is left at the end of the run"
            + (f" (under {setup.thresholds['decay_left']:.0%})" if forgets else "")
            + f"; all updates together move the policy by at most {figures['reach_decayed']:.2g} nats per completion"
            + (f" (under {limit:g})" if held else "")
            + f", and by {figures['reach']:.2g} without weight decay"
        )
    else:
        return
    yield finding(
        "optim/weight-decay",
        evidence,
        "weight decay moves every matrix towards 0 at each update, independent of the rewards",
        propose("set {}, as is usual in fine-tuning with RL", {"optim.weight_decay": 0.0}),
    )
