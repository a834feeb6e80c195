"""How far the run can take the policy: all of its updates at their own rates, were they all to point one way.

What does not move then never will. By Pinsker's inequality a KL of `reach_least` nats per completion changes no
success rate by more than √(KL/2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keel.doctor.findings import Advice, Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.exploration import entropy
from keel.doctor.probes.states import mean_kl, policy_states
from keel.doctor.probes.trained import frozen_findings
from keel.doctor.probes.update import FirstUpdate, loss_gradients, one_digit, step_kl, undone
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome

MOST_UPDATES = 10_000  # a longer course is looked at in as many places
USUAL_EPS, USUAL_ADAPTER_SCALE = 1e-8, 2.0
ADVISED_KL = 1e-4  # nats per token that an update at an advised rate takes
CUT_SHORT = 0.05  # of an update's length that clipping leaves: one in twenty is as good as none
IDLE = 1e-3  # of the peak rate: an update that moves nothing
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Course:
    """The learning rate over a run, as factors of its peak: of so many updates, their sum and the largest.

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
    """A schedule's factors added up over a run."""
    count = min(updates, MOST_UPDATES)
    factors = [schedule(i * updates // count) for i in range(count)]
    idle = sum(factor < IDLE for factor in factors) / count
    return Course(updates, sum(factors) * updates / count, max(factors), idle)


def held_sum(total: float, decay: float) -> float:
    """What steps that add up to `total` come to beside a decay of `decay` for each: (1 − e^(−decay·total)) / decay."""
    return total if decay <= 0 else -math.expm1(-decay * total) / decay


def probe_reach(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The gradient's own displacement over the whole run, weight decay's, and why there is none where there is none."""
    first: FirstUpdate | None = setup.of_batch.get("update")
    if first is None or not math.isfinite(first.loss):
        return Outcome("reach", unchecked=("optim/no-update, optim/weight-decay: no update could be tried",))
    if entropy(first.before) < thresholds["entropy_collapse"]:
        sure = "a policy that is certain of all that it draws has no gradient"
        return Outcome("reach", unchecked=(f"optim/no-update, optim/weight-decay: {sure}",))
    if not first.real_rewards and all(len({c.tokens for c in group.completions}) == 1 for group in setup.groups):
        copies = "completions of a group are copies, whose signs in place of advantages take each other away"
        return Outcome("reach", unchecked=(f"optim/no-update, optim/weight-decay: {copies}",))
    run, optim = setup.run, setup.config.optim
    per_step = run.loss.num_iterations * run.optim.minibatches
    rates = course(run.optimizer.schedule, setup.config.run.max_steps * per_step)
    longer = max(1.0, thresholds["steps_to_judge"] * per_step / rates.updates)  # a trial run is judged as a short one
    length = setup.completion_length
    reach = _Reach(setup, first, rates, longer, length, thresholds["reach_least"])
    figures = {"updates": float(rates.updates), "mean_rate": rates.mean, "reach": reach.kl()}
    findings = (
        [*_no_update(reach, figures)] or [*_cut_short(reach)] or [*_unweighted(setup)] or [*frozen_findings(setup)]
    )
    if optim.weight_decay > 0:
        decay, total = optim.learning_rate * optim.weight_decay, rates.total * longer
        figures["shrink"] = math.exp(-decay * total)
        figures["decay"] = decay_kl(setup, first, figures["shrink"]) * length
        figures["walk"] = rates.updates * longer * reach.kl(1.0, rounded=False)
        figures["reach_decayed"] = reach.kl(held_sum(total, decay))
        findings += () if findings else _decays(setup, figures, length, thresholds)
    line = (
        f"reach: all {rates.updates} updates of the run, were they to point one way, take the policy "
        f"{figures['reach']:.2g} nats per completion away; the rate is {rates.mean:.0%} of its peak on average"
        + (f"; weight decay alone {figures['decay']:.2g}" if "decay" in figures else "")
    )
    return Outcome("reach", tuple(findings), figures, (line,))


@dataclass(frozen=True)
class _Reach:
    """The distance in nats per completion after all updates of a run (`longer` times as many in a trial run)."""

    setup: KeelSubject
    first: FirstUpdate
    rates: Course
    longer: float
    length: float
    limit: float

    def kl(self, total: float | None = None, *, rounded: bool = True, **settings: Any) -> float:
        """One update as long as all together; where weights of 16 bits round each one, as often as it is made."""
        total = self.rates.total * self.longer if total is None else total
        settings = {"weight_decay": 0.0, **settings}
        if rounded and self.halves and self.rates.largest > 0:
            return self._step(self.rates.largest, settings) * (total / self.rates.largest) ** 2
        return self._step(total, settings)

    def _step(self, factor: float, settings: dict[str, Any]) -> float:
        first = self.first
        kl = step_kl(self.setup, first.gradients, first.loss, first.before, factor, **settings).kl
        return 0.0 if kl < 0 else kl * self.length  # rounding

    @property
    def halves(self) -> bool:
        return all(p.dtype in HALF_TYPES for p in self.setup.run.optimizer.parameters)

    def short(self, kl: float) -> bool:
        return not kl >= self.limit


def _no_update(reach: _Reach, figures: dict[str, float]) -> Iterator[Finding]:
    """Too short a reach, a rate that never arrives or soon ends; the reason is what mends it when it is taken away."""
    rates, setup = reach.rates, reach.setup
    steps = setup.config.run.max_steps
    never, over = rates.largest < 0.5, rates.idle > 0.5
    if not reach.short(figures["reach"]) and not never and not over:
        return
    cause, advice = _reason(reach) if reach.short(figures["reach"]) else _schedule(setup)
    at_most = math.sqrt(min(figures["reach"], reach.limit) / 2)
    yield finding(
        "loss/no-gradient" if _all_left_out(reach) else "optim/no-update",
        f"all {rates.updates} updates of {steps} steps"
        + (f" (counted as {reach.longer * steps:.0f})" if reach.longer > 1 else "")
        + f", were they to point one way, take the policy {figures['reach']:.2g} nats per completion from where it is "
        f"(at least {reach.limit:g} can be seen: a success rate moves by {at_most:.1%} at most); one at the peak rate "
        f"{setup.run.optimizer.learning_rate:g} takes it {reach.first.peak_kl:.2g} nats per token; the rate is "
        f"{rates.mean:.1%} of that on average"
        if reach.short(figures["reach"])
        else f"the rate is at most {rates.largest:.1%} of optim.learning_rate in {steps} steps, {rates.mean:.1%} on "
        f"average, and under {IDLE:.1%} at {rates.idle:.0%} of the updates",
        cause,
        advice,
        severity=None if reach.short(figures["reach"]) or rates.mean < 0.1 else "warning",
    )


def _cut_short(reach: _Reach) -> Iterator[Finding]:
    """Clipping that takes nearly all of an update away: Adam makes up for any clip, unless its eps is what is left."""
    clip, norm = reach.setup.config.optim.max_grad_norm, gradient_norm(reach.first.gradients)
    if clip is None or norm <= clip:
        return
    with _unclipped(reach.setup):
        free = reach.kl(1.0, rounded=False)
    if not reach.kl(1.0, rounded=False) < CUT_SHORT**2 * free:
        return
    yield finding(
        "optim/no-update",
        f"an update takes the policy {reach.kl(1.0, rounded=False):.2g} nats per completion, and {free:.2g} where its "
        "gradient is not clipped",
        f"optim.max_grad_norm={clip:g} cuts a gradient of norm {norm:.2g} down to next to optim.eps",
        propose("set {}", {"optim.max_grad_norm": 1.0}),
    )


def _unweighted(setup: KeelSubject) -> Iterator[Finding]:
    """Advantages whose weight never arrives: Adam hides their size, and everything beside them outweighs them."""
    warmup, steps = setup.run.reward.warmup_steps, setup.config.run.max_steps
    if warmup <= 2 * steps:
        return
    yield finding(
        "optim/no-update",
        f"the advantages' weight rises to {steps / warmup:.2g} of its size in {steps} steps",
        f"reward.warmup_steps={warmup} is longer than the run: rewards never count for what they are worth",
        propose("set {}", {"reward.warmup_steps": steps // 10}),
        severity="warning",
    )


def _reason(reach: _Reach) -> tuple[str, str | Advice]:
    """What keeps the policy where it is: each candidate is taken away in turn, and the first that mends it is named."""
    setup, optim, first = reach.setup, reach.setup.config.optim, reach.first
    full = reach.rates.updates * reach.longer
    norm = gradient_norm(first.gradients)
    if _all_left_out(reach):
        cause = f"loss.mismatch.kind={setup.run.loss.mismatch.kind} leaves no token in: the sampler's are all outside"
        return cause, propose("set {}", {"loss.mismatch.kind": "truncate", "loss.mismatch.floor": None})
    if norm == 0.0:
        return (
            "no gradient reaches a trainable weight although tokens have advantages: the weights that are trained are "
            "not those that compute, or something on the way is detached",
            "look for findings on loss and scoring; train weights that the forward pass uses (model.lora.targets)",
        )
    if reach.rates.mean < 0.5 and not reach.short(reach.kl(full)):
        return _schedule(setup)
    if reach.halves and not reach.short(reach.kl(rounded=False)):
        kind = str(setup.run.optimizer.parameters[0].dtype).removeprefix("torch.")
        advice = {"model.dtype": "float32", "optim.precision": kind}
        return (
            f"the weights are {kind}: an update of {optim.learning_rate:g} is less than half of their last digit, and "
            "each one is rounded away",
            propose("set {}, so that passes stay in 16 bits and weights do not", advice),
        )
    if optim.eps > USUAL_EPS and not reach.short(reach.kl(eps=USUAL_EPS)):
        return (
            f"optim.eps={optim.eps:g} is far above the gradient's size (norm {norm:.2g}), so that Adam divides by it",
            propose("set {}", {"optim.eps": USUAL_EPS}),
        )
    clip = optim.max_grad_norm
    if clip is not None and norm > clip:
        with _unclipped(setup):
            free = reach.kl()
        if not reach.short(free):
            cause = f"optim.max_grad_norm={clip:g} cuts a gradient of norm {norm:.2g} down to next to optim.eps"
            return cause, propose("set {}", {"optim.max_grad_norm": 1.0})
    scale = adapter_scale(setup.policy.model)
    if scale is not None and scale < USUAL_ADAPTER_SCALE and not reach.short(_rescaled_kl(reach)):
        lora = setup.config.model.lora
        cause = f"the adapter is multiplied by alpha / r = {scale:.2g}: whatever it learns counts for nothing"
        if lora is None or lora.adapter is not None:
            return cause, "give the adapter an alpha of about twice its rank"
        return cause, propose("set {}", {"model.lora.alpha": USUAL_ADAPTER_SCALE * lora.r})
    trained = sum(p.numel() for p in setup.run.optimizer.parameters)
    weights = sum(p.numel() for p in setup.policy.model.parameters())
    few = f": only {trained} of {weights} weights are trained" if scale is None and trained < 0.01 * weights else ""
    cause = f"optim.learning_rate={optim.learning_rate:g} is too small for {setup.config.run.max_steps} steps{few}"
    return cause, _rate(reach)


def _all_left_out(reach: _Reach) -> bool:
    """Whether there is no gradient because the mismatch's weights leave no token in."""
    weighted = reach.setup.run.loss.mismatch.kind != "none"
    return weighted and gradient_norm(reach.first.gradients) == 0.0 and _unweighted_norm(reach) > 0


def _unweighted_norm(reach: _Reach) -> float:
    """The gradient's norm with every weight of the sampler's mismatch at 1."""
    loss = reach.setup.run.loss.mismatch.model_copy(update={"kind": "none", "floor": None})
    return gradient_norm(loss_gradients(reach.setup, reach.first.batch, mismatch=loss)[0])


def _schedule(setup: KeelSubject) -> tuple[str, Advice]:
    optim, steps = setup.config.optim, setup.config.run.max_steps
    if optim.warmup_steps > steps // 2:
        return (
            f"optim.warmup_steps={optim.warmup_steps} is as long as the run of {steps} steps: the rate never arrives",
            propose("set {}", {"optim.warmup_steps": steps // 10}),
        )
    return (
        f"optim.schedule={optim.schedule} has brought the rate to its end before the run's {steps} steps are over",
        propose(
            "set {}",
            {"optim.schedule": "constant", "optim.decay_steps": None}
            if optim.decay_steps
            else {"optim.schedule": "constant"},
        ),
    )


def _rate(reach: _Reach) -> Advice:
    """A rate at which one update takes `ADVISED_KL`, found by trying: KL grows with its square."""
    first, rate = reach.first, reach.setup.run.optimizer.learning_rate
    for factor in (10.0**k for k in range(13)):
        kl = step_kl(reach.setup, first.gradients, first.loss, first.before, factor, weight_decay=0.0).kl
        if kl >= ADVISED_KL / 100:
            return propose("set {}", {"optim.learning_rate": one_digit(rate * factor * math.sqrt(ADVISED_KL / kl))})
    return Advice("raise optim.learning_rate: no rate up to 1e12 times as large moves this policy either")


def gradient_norm(gradients: list[Tensor | None]) -> float:
    """The length of a gradient over all weights."""
    squares = [float(g.double().square().sum()) for g in gradients if g is not None]
    return math.sqrt(sum(squares))


@contextmanager
def _unclipped(setup: KeelSubject) -> Iterator[None]:
    optimizer, options = setup.run.optimizer, setup.run.optimizer.options
    optimizer.options = options.model_copy(update={"max_grad_norm": None})
    try:
        yield
    finally:
        optimizer.options = options


def _adapters(model: nn.Module) -> Iterator[tuple[dict[str, float], str]]:
    """The scales of peft's layers, and the name of each active adapter among them."""
    module: Any
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "scaling"):
            yield from ((module.scaling, name) for name in module.active_adapters if name in module.scaling)


def adapter_scale(model: nn.Module) -> float | None:
    """The largest alpha / r of the model's active adapters; None without LoRA."""
    return max((scaling[name] for scaling, name in _adapters(model)), default=None)


def _rescaled_kl(reach: _Reach) -> float:
    """The reach with adapters at the usual scale: their gradient is another one then, too."""
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
    """KL in nats per token after the decayed weights have shrunk to `shrink` of what they are."""
    optimizer = setup.run.optimizer
    trained = {id(p) for p, g in zip(optimizer.parameters, first.gradients, strict=True) if g is not None}
    with undone(optimizer), torch.no_grad():
        for group in optimizer.inner.param_groups:
            for parameter in group["params"]:
                if group["weight_decay"] > 0 and id(parameter) in trained:
                    parameter.mul_(shrink)
        return mean_kl(policy_states(setup), first.before)


def _decays(setup: KeelSubject, figures: dict[str, float], length: float, thresholds: Thresholds) -> Iterator[Finding]:
    """Decay that takes the policy further than a random walk of its updates, or out of any budget; or undoes them."""
    limit, decay = thresholds["reach_least"], f"optim.weight_decay={setup.config.optim.weight_decay:g}"
    budget = thresholds["kl_over_budget"] * length
    if figures["decay"] > max(limit, min(figures["walk"], budget)):
        evidence = (
            f"over the run {decay} shrinks every matrix to {figures['shrink']:.2g} of itself and takes the policy "
            f"{figures['decay']:.2g} nats per completion away; the run's updates as a random walk {figures['walk']:.2g}"
        )
    elif figures["shrink"] < thresholds["decay_left"] or figures["reach_decayed"] < limit:
        evidence = (
            f"{decay} leaves {figures['shrink']:.1%} of what the first update adds at the run's end (under "
            f"{thresholds['decay_left']:.0%}): all updates together reach {figures['reach_decayed']:.2g} nats per "
            f"completion beside it, {figures['reach']:.2g} without"
        )
    else:
        return
    yield finding(
        "optim/weight-decay",
        evidence,
        "the decay pulls every weight to 0 at each update, whatever the rewards say, and more strongly than they do",
        propose("set {}, as fine-tuning with RL usually has it", {"optim.weight_decay": 0.0}),
    )
