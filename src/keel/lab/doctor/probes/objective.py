"""The objective: does the loss push each sampled token the way of its advantage, and does β stay a coefficient?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from keel.base.errors import first_line
from keel.base.thresholds import Thresholds
from keel.base.types import Batch, Scores
from keel.kl.controllers import UNITS
from keel.lab.doctor.advice import no_penalty
from keel.lab.doctor.findings import Finding, finding, propose
from keel.lab.doctor.probes.advantage import token_weights
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.setup import ProbeSetup
from keel.losses import LossOptions, objective
from keel.losses.policy import get_loss
from keel.losses.reductions import get_reduction

ADVANTAGES = (1.0, -0.5, 2.0, -1.5)  # both signs, and sizes that differ: one after the other over the completions
LEVELS = (1e-4, 0.05, 10.0)  # measured KL that a controller is tried on: nothing, a usual one, an explosion
UPDATES = 200
PER_TOKEN = 0.05  # nats: the usual target of a controller


def probe_objective(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """∂loss/∂logp at ratio 1 and β = 0 against −A × the reduction's weight; the controller on made-up series of KL."""
    mask = setup.mask
    advantage = torch.tensor([ADVANTAGES[i % len(ADVANTAGES)] for i in range(len(mask))], device=mask.device)
    gradient = loss_gradient(setup, advantage)
    reduction = get_reduction(get_loss(setup.run.loss.loss_type).reduction)
    weights = token_weights(mask, reduction, setup.loss_length)
    figures: dict[str, float] = {}
    findings = [
        *_pushes(setup, gradient, advantage[:, None].expand_as(mask), weights, figures, thresholds),
        *([*_steered(setup, figures, thresholds)] or _targets(setup, thresholds)),
    ]
    line = (
        f"objective: the loss moves {figures.get('pushed', 0.0):.0%} of the tokens the way of their advantage, "
        f"{figures.get('factor', 0.0):.3g} times as far as its reduction says; β is {figures['beta_start']:.3g} at "
        f"first and at most {figures['beta_most']:.3g} on series of KL up to {max(LEVELS):g}"
    )
    return ProbeResult("objective", tuple(findings), figures, (line,))


def loss_gradient(
    setup: ProbeSetup,
    advantage: Tensor,
    *,
    beta: float = 0.0,
    log_ratio: float = 0.0,
    step: Tensor | float = 0.0,
    loss: LossOptions | None = None,
) -> Tensor:
    """∂loss/∂logp `[B, T]` of the configured objective, or of another `loss`.

    `log_ratio` is that of the reference over the policy, the same for every token, `step` that of the policy over the
    one that sampled.
    """
    if "logp" not in setup.of_batch:
        setup.of_batch["logp"] = setup.logp()
    logp = setup.of_batch["logp"].clone().requires_grad_()
    rows = Batch(
        action_mask=setup.mask,
        advantages=advantage,
        old_logp=logp.detach() - step,
        ref_logp=logp.detach() + log_ratio,
        group=setup.batch.rows.group,
    )
    out = objective(
        Scores(logp, torch.zeros_like(logp), torch.zeros_like(logp)),
        rows,
        setup.run.loss if loss is None else loss,
        setup.run.kl,
        beta,
        pairing=setup.run.pairing,
        max_completion_length=setup.loss_length,
    )
    if not out.loss.requires_grad:
        return torch.zeros_like(logp)
    (gradient,) = torch.autograd.grad(out.loss, logp, allow_unused=True)
    return torch.zeros_like(logp) if gradient is None else gradient


def _pushes(
    setup: ProbeSetup,
    gradient: Tensor,
    advantage: Tensor,
    weights: Tensor,
    figures: dict[str, float],
    thresholds: Thresholds,
) -> Iterator[Finding]:
    """Each token's push −∂loss/∂logp over A × weight: 1 wherever the loss is what it says."""
    mask = setup.mask
    if not bool(gradient[mask].isfinite().all()):
        return  # a loss that is not finite is named by the update
    push = (-gradient[mask].double() / (advantage[mask] * weights[mask]).double()).nan_to_num(0.0)
    up = advantage[mask] > 0
    alive = push != 0
    figures |= {"pushed": float((push > 0).double().mean())}
    figures["factor"] = float(push[alive].median()) if bool(alive.any()) else 0.0
    loss_name = f"loss.loss_type={setup.config.loss.loss_type}"
    away, dead = _share(push < 0, up), _share(push == 0, up)
    if max(away) > thresholds["loss_wrong_way"]:
        both = min(away) > thresholds["loss_wrong_way"]
        yield finding(
            "loss/sign",
            f"at ratio 1 {away[0]:.0%} of the tokens with a positive advantage are made less likely and {away[1]:.0%} "
            "of those with a negative one more likely",
            f"{loss_name} has its sign reversed: it trains towards what earns less"
            if both
            else f"{loss_name} does not use the advantage's sign",
            "let the loss be −A times something that grows with logp, or use a loss of Keel's own",
        )
    elif max(dead) > thresholds["loss_dead_tokens"]:
        yield finding(
            "loss/no-gradient",
            f"∂loss/∂logp is zero on {dead[0]:.0%} of the sampled tokens with a positive advantage and {dead[1]:.0%} "
            "of those with a negative one, at ratio 1 and β = 0",
            f"{loss_name} carries no gradient there: logp is detached, or an advantage is cut off",
            "check that the loss does not detach logp or clamp advantages, or use a loss of Keel's own",
        )
    elif where := left_out(mask, alive):
        yield finding(
            "loss/no-gradient",
            f"∂loss/∂logp is zero on {where} of every completion, {float((~alive).double().mean()):.0%} of the sampled "
            "tokens, at ratio 1 and β = 0, and on no other token",
            f"{loss_name} cuts completions: what is written there is sampled, earns and is never trained",
            "let the loss cover every token of the mask that it is given (lengths from the mask, not a constant)",
        )
    elif not 1 / thresholds["loss_factor"] <= figures["factor"] <= thresholds["loss_factor"]:
        yield finding(
            "loss/scale",
            f"∂loss/∂logp is {figures['factor']:.3g} times −A × the weight that the reduction gives a token",
            f"{loss_name} is multiplied by something, such as the number of tokens: clipping, kl.beta and the entropy "
            "bonus then weigh against another loss than they were set for",
            "return the loss of each token before any reduction; the reduction is applied to it afterwards",
        )
    elif float((push / figures["factor"] - 1).abs().max()) > thresholds["loss_uneven"]:
        yield finding(
            "loss/scale",
            f"∂loss/∂logp over −A × the reduction's weight goes from {float(push.min()):.3g} to "
            f"{float(push.max()):.3g} over the tokens",
            f"{loss_name} weighs tokens or advantages in a way of its own",
            "nothing, if that is meant",
            severity="note",
        )


def left_out(mask: Tensor, alive: Tensor) -> str:
    """Which tokens of every completion have no gradient, as text, where their place decides it; `alive` is `mask`'s."""
    rows = [alive[mask.nonzero()[:, 0] == row].tolist() for row in range(len(mask))]
    rows = [row for row in rows if row]
    if all(all(row) for row in rows):
        return ""
    for end, ordered in (("first", rows), ("last", [row[::-1] for row in rows])):
        for count in sorted({row.index(False) for row in ordered if not all(row)}):
            if count and all(row == [i < count for i in range(len(row))] for row in ordered):
                return f"all but the {end} {count} tokens" if count > 1 else f"all but the {end} token"
        for count in sorted({row.index(True) for row in ordered if any(row)}):
            if count and all(row == [i >= count for i in range(len(row))] for row in ordered):
                return f"the {end} {count} tokens" if count > 1 else f"the {end} token"
    return ""


def _share(where: Tensor, up: Tensor) -> tuple[float, float]:
    """The share of tokens among those with a positive and with a negative advantage."""
    chosen = (where[up], where[~up])
    return tuple(float(part.double().mean()) if len(part) else 0.0 for part in chosen)  # type: ignore[return-value]


def _steered(setup: ProbeSetup, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """β from the start and after every update on KL that stays small, usual or huge, with steps that measured none."""
    name, configured = setup.config.kl.controller.name, setup.config.kl.beta
    figures |= {"beta_start": math.nan, "beta_most": math.nan}
    mend = "return a state whose beta is finite, 0 or more, and bounded (keel.kl.controllers.RuleController has bounds)"
    try:
        controller = setup.run.controller
        unit, start = controller.unit, float(controller.init().beta)
        series = {level: _betas(setup, level) for level in LEVELS}
    except Exception as error:  # a controller of one's own may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        yield finding("kl/controller", f"kl.controller={name} raises {why}", "the controller is broken", mend)
        return
    every = [start, *(beta for betas in series.values() for beta in betas)]
    figures |= {"beta_start": start, "beta_most": max(every)}
    limit = max(thresholds["controller_beta"], 10 * configured)
    wrong = next(((level, i, b) for level, betas in series.items() for i, b in enumerate(betas) if not b >= 0), None)
    high = next(((level, i, b) for level, betas in series.items() for i, b in enumerate(betas) if b > limit), None)
    if unit not in UNITS:
        evidence = f"kl.controller={name} reads a KL in the unit {unit!r}, which is neither {' nor '.join(UNITS)}"
        yield finding("kl/controller", evidence, "the loop cannot tell which KL to give it", f"set unit={UNITS[0]!r}")
    elif not (math.isfinite(start) and start >= 0) or wrong is not None:
        where = f"β = {start:g} at the start" if wrong is None or not start >= 0 else _at(*wrong)
        cause = "a coefficient below 0 rewards distance from the reference, one that is no number breaks the loss"
        yield finding("kl/controller", f"kl.controller={name} gives {where}", cause, mend)
    elif high is not None:
        cause = f"the coefficient grows without a bound: kl.beta={configured:g} was asked for"
        yield finding("kl/controller", f"kl.controller={name} gives {_at(*high)} (over {limit:g})", cause, mend)
    elif configured > 0 and max(every) == 0:
        yield finding(
            "kl/controller",
            f"kl.controller={name} gives β = 0 at the start and after {UPDATES} updates, whatever the KL is",
            f"kl.beta={configured:g} never acts",
            propose("mend the controller, or set {} if no penalty is wanted", no_penalty(setup.config.to_dict())),
            severity="warning",
        )


def _at(level: float, update: int, beta: float) -> str:
    return f"β = {beta:.3g} after {update + 1} updates at a KL of {level:g}"


def _targets(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """A target beyond any useful KL never raises β; one below what can be seen raises it before anything is learned."""
    options, controller = setup.config.kl.controller, setup.run.controller
    target = (options.model_extra or {}).get("target")
    if not isinstance(target, int | float) or not setup.config.kl.steers:
        return
    length = setup.completion_length
    most, least = max(thresholds["kl_explosion_floor"] * length, thresholds["kl_explosion"]), thresholds["reach_least"]
    tokens = 1.0 if controller.unit == "per_sequence" else length
    start = float(controller.init().base)
    lax = target * tokens > most and max(_betas(setup, most / tokens)) <= start
    tight = target * tokens < least and _betas(setup, least / tokens)[-1] > start
    if not lax and not tight:
        return
    unit = controller.unit.replace("_", " ")
    usual = float(f"{PER_TOKEN if unit == 'per token' else PER_TOKEN * length:.1g}")
    yield finding(
        "kl/controller",
        f"kl.controller.target={target:g} nats {unit}, {target * tokens:.3g} per completion of {length:.3g} tokens: β "
        + (
            f"never rises above {start:g}, not at {most / tokens:.3g} nats {unit}, where the policy has left every "
            "useful range"
            if lax
            else f"rises from {start:g} at {least / tokens:.2g} nats {unit}, where nothing can be seen to change"
        ),
        "the target is in another unit than the controller's, or mistyped: "
        + ("nothing reaches it, and β only falls" if lax else "everything passes it, and β only rises"),
        propose("set {}", {"kl.controller.target": usual}),
        severity="warning" if lax else None,  # a β that only rises rules the update in the end
    )


def _betas(setup: ProbeSetup, level: float) -> list[float]:
    controller, betas = setup.run.controller, []
    state = controller.init()
    for update in range(UPDATES):
        measured = (None, math.nan)[update // 10 % 2] if update % 10 == 9 else level
        state = controller.update(state, measured)
        betas.append(float(state.beta))
    return betas
