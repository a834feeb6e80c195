"""The objective: normalisation of the advantages, and the direction and size of the loss's gradient for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from keel.base.types import Batch, Group, Scores
from keel.doctor.advice import either
from keel.doctor.evidence import SAME, chance_above, level, more_groups
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.controller import LEVELS, controller_findings
from keel.doctor.thresholds import Thresholds
from keel.losses import LossOptions, count_denominators, group_statistics, objective, zero_variance
from keel.losses.advantages import EPSILON
from keel.losses.recipes import get_loss, scale_rewards
from keel.losses.reductions import get_reduction

# ------------------------------------------------------------------------ advantages


def probe_advantage(setup: KeelSubject) -> Outcome:
    """Measure how much the normalisation of advantages amplifies reward differences, and report shuffled rewards."""
    rows, scale = setup.batch.rows, scale_rewards(setup.run.loss)
    assert rows.rewards is not None
    assert rows.group is not None
    finite = bool(rows.rewards.isfinite().all())
    figures: dict[str, float] = {"divides": float(scale != "none")}
    findings: tuple[Finding, ...] = ()
    lines: list[str] = []
    if not finite:
        return Outcome("advantage", unchecked=("advantage/amplified: a reward is not finite",))
    spread = group_spreads(rows.rewards, rows.group)
    figures["groups_with_spread"] = float(len(spread))
    if len(spread):
        figures |= amplification(spread, rows.rewards, scale)
        findings = tuple(_amplified(setup, figures, scale))
        lines.append(
            f"group std from {figures['smallest_std']:.3g} to {figures['largest_std']:.3g}; reward differences are "
            f"multiplied by {figures['amplification']:.3g} (typical), {figures['amplification_max']:.3g} (largest)"
        )
    else:
        lines.append("no group has rewards that differ, so there is no standard deviation to divide by")
    findings = (*findings, *_dealt_out(setup))
    return Outcome("advantage", findings, figures, tuple(lines))


def _dealt_out(setup: KeelSubject) -> Iterator[Finding]:
    """Report rewards that are shuffled within groups, a control experiment in which nothing can be learned."""
    seed = setup.config.reward.shuffle
    if seed is None:
        return
    yield finding(
        "reward/gold",
        f"reward.shuffle={seed} shuffles the rewards within each group: a correct answer earns no more than a wrong "
        "one",
        "this is a control experiment that cannot learn: its metrics do not change because of rewards",
        propose("no change is needed if the control is intended; to train, set {}", {"reward.shuffle": None}),
        severity="warning",
    )


def group_spreads(rewards: Tensor, group: Tensor) -> Tensor:
    """The standard deviations of the groups whose rewards differ, ascending."""
    _, std, _ = group_statistics(rewards.double(), group)
    alive = ~zero_variance(rewards, group)
    per_group = {int(g): float(s) for g, s, a in zip(group, std, alive, strict=True) if bool(a)}
    return torch.tensor(sorted(per_group.values()), dtype=torch.float64)


def amplification(spread: Tensor, rewards: Tensor, scale: str) -> dict[str, float]:
    """1 / (std + ε) if advantages are divided by a standard deviation, else 1."""
    divisors = {"group": spread, "batch": rewards.double().std().reshape(1)}.get(scale)
    times = torch.ones(1) if divisors is None else 1.0 / (divisors + EPSILON)
    return {
        "smallest_std": spread[0].item(),
        "largest_std": spread[-1].item(),
        "amplification": times.median().item(),
        "amplification_max": times.max().item(),
    }


def _amplified(setup: KeelSubject, figures: dict[str, float], scale: str) -> Iterator[Finding]:
    rewards = [abs(reward.total) for group in setup.groups for reward in group.rewards]
    # for rewards on a small scale, small differences are intended
    size = min(1.0, max(*rewards, setup.shared.get("gold size", 1.0)))
    limit = setup.thresholds["advantage_amplification"] / size
    if figures["amplification_max"] <= limit:
        return

    def tiny(groups: Sequence[Group]) -> list[float]:
        """For each group with spread, whether it is amplified beyond the limit."""
        deviations = [stdev(reward.total for reward in group.rewards) for group in groups]
        return [float(1.0 / (deviation + EPSILON) > limit) for deviation in deviations if deviation > SAME]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(tiny(groups), setup.thresholds["healthy_amplified"]) > level(setup.thresholds)

    typical = figures["amplification"] > limit
    if typical and scale == "group":
        groups = more_groups(
            setup, "advantage/amplified", lambda groups: fmean(tiny(groups)) > 0.5 and by_chance(groups)
        )
        typical = not by_chance(groups)
    times = figures["amplification" if typical else "amplification_max"]
    yield finding(
        "advantage/amplified",
        f"the {'typical' if typical else 'smallest'} within-group std is {1 / times - EPSILON:.3g}: reward "
        f"differences are multiplied by {times:.3g} (over {limit:g})",
        f"loss.scale_rewards={scale} divides advantages by a standard deviation near 0, so noise in the reward causes "
        "updates of full size",
        propose(
            "set {} (as dr_grpo does), or make the reward distinguish completions more", {"loss.scale_rewards": "none"}
        ),
        severity=None if typical else "note",
    )


def token_weights(mask: Tensor, reduction: object, max_completion_length: int) -> Tensor:
    """∂loss/∂(a token's term) `[B, T]`: the weight that the reduction gives to each token."""
    values = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device, requires_grad=True)
    total = reduction(values, mask, count_denominators(mask, max_completion_length))  # type: ignore[operator]
    (weights,) = torch.autograd.grad(total, values)
    return weights


# ------------------------------------------------------------------------ gradient of the loss

ROWS = 0.1  # share of completions that may have tokens without gradient
LENGTHS = (7, 4, 5, 3)  # lengths of synthetic completions, in two groups
# log-probability of all tokens under both policies, and the nats by which it is lowered in the second test
COMMON, RARER = -1.0, 4.0
STEP = 0.05  # change of one token's old log-probability in nats, within every clip range of tokens
ROUNDING = 1e-4  # differences below this share of the largest gradient are rounding
ADVANTAGES = (1.0, -0.5, 2.0, -1.5)  # both signs and different sizes, repeated over the completions


def probe_objective(setup: KeelSubject) -> Outcome:
    """Compare ∂loss/∂logp at ratio 1 and β = 0 with −A × the reduction's weight; simulate the controller."""
    mask = setup.mask
    advantage = torch.tensor([ADVANTAGES[i % len(ADVANTAGES)] for i in range(len(mask))], device=mask.device)
    gradient = loss_gradient(setup, advantage)
    reduction = get_reduction(get_loss(setup.run.loss.loss_type).reduction)
    weights = token_weights(mask, reduction, setup.loss_length)
    figures: dict[str, float] = {}
    against = loss_gradient(setup, -advantage)  # shows whether rows without gradient get one for the opposite advantage
    pushes = [*_pushes(setup, gradient, against, advantage[:, None].expand_as(mask), weights, figures)]
    if not pushes or pushes[0].severity == "note":
        pushes = [*ratio_findings(setup, figures)] or pushes
    findings = [*pushes, *controller_findings(setup, figures)]
    line = (
        f"objective: the loss moves {figures.get('pushed', 0.0):.0%} of the tokens in the direction of their "
        f"advantage, with {figures.get('factor', 0.0):.3g} times the weight of its reduction; β is "
        f"{figures['beta_start']:.3g} at first and at most {figures['beta_most']:.3g} in simulations with a KL of up "
        f"to {max(LEVELS):g}"
    )
    return Outcome("objective", tuple(findings), figures, (line,))


def loss_gradient(
    setup: KeelSubject,
    advantage: Tensor,
    *,
    beta: float = 0.0,
    log_ratio: float = 0.0,
    step: Tensor | float = 0.0,
    loss: LossOptions | None = None,
) -> Tensor:
    """∂loss/∂logp `[B, T]` of the configured objective, or of another `loss`.

    `log_ratio` is the log-ratio of reference over policy, equal for all tokens. `step` is the log-ratio of policy over
    sampling policy.
    """
    if "logp" not in setup.of_batch:
        setup.of_batch["logp"] = setup.logp()
    logp = setup.of_batch["logp"]
    rows = Batch(
        action_mask=setup.mask,
        advantages=advantage,
        old_logp=logp - step,
        ref_logp=logp + log_ratio,
        group=setup.batch.rows.group,
    )
    return _derivative(setup, logp, rows, setup.run.loss if loss is None else loss, beta, setup.loss_length)


def _derivative(
    setup: KeelSubject, logp: Tensor, rows: Batch, loss: LossOptions, beta: float, length: int | None
) -> Tensor:
    logp = logp.clone().requires_grad_()
    zero = torch.zeros_like(logp)
    scores = Scores(logp, zero, zero, ref_policy_kl=zero, divergence=zero)
    out = objective(scores, rows, loss, setup.run.kl, beta, pairing=setup.run.pairing, max_completion_length=length)
    if not out.loss.requires_grad:
        return zero
    (gradient,) = torch.autograd.grad(out.loss, logp, allow_unused=True)
    return zero if gradient is None else gradient


def _pushes(
    setup: KeelSubject,
    gradient: Tensor,
    against: Tensor,
    advantage: Tensor,
    weights: Tensor,
    figures: dict[str, float],
) -> Iterator[Finding]:
    """Check −∂loss/∂logp over A × weight for each token, which is 1 for an exact policy gradient."""
    mask = setup.mask
    if not bool(gradient[mask].isfinite().all()):
        return  # the update probe reports a non-finite loss
    push = (-gradient[mask].double() / (advantage[mask] * weights[mask]).double()).nan_to_num(0.0)
    up = advantage[mask] > 0
    alive = push != 0
    figures |= {"pushed": float((push > 0).double().mean())}
    figures["factor"] = float(push[alive].median()) if bool(alive.any()) else 0.0
    loss_name = f"loss.loss_type={setup.config.loss.loss_type}"
    away, dead = _share(push < 0, up), _share(push == 0, up)
    if max(away) > setup.thresholds["loss_wrong_way"]:
        both = min(away) > setup.thresholds["loss_wrong_way"]
        yield finding(
            "loss/sign",
            f"at ratio 1, {away[0]:.0%} of the tokens with a positive advantage are made less likely and "
            f"{away[1]:.0%} of those with a negative one more likely",
            f"{loss_name} has the wrong sign: it trains towards lower rewards"
            if both
            else f"{loss_name} does not use the advantage's sign",
            "let the loss be −A times a function that increases with logp, or use one of Keel's losses",
        )
    elif max(dead) > setup.thresholds["loss_dead_tokens"]:
        yield finding(
            "loss/no-gradient",
            f"∂loss/∂logp is zero on {dead[0]:.0%} of the sampled tokens with a positive advantage and {dead[1]:.0%} "
            "of those with a negative one, at ratio 1 and β = 0",
            f"{loss_name} has no gradient there: logp is detached, or advantages are clamped",
            "check that the loss does not detach logp or clamp advantages, or use one of Keel's losses",
        )
    elif where := left_out(setup, alive | (against[mask] != 0)):
        yield finding(
            "loss/no-gradient",
            f"∂loss/∂logp is zero on {where}, at ratio 1 and β = 0, whatever the advantage",
            f"{loss_name} omits a part of the batch: these tokens are sampled and rewarded but never trained",
            "let the loss cover every row and token of its mask (take lengths from the mask, not from a constant)",
        )
    elif not 1 / setup.thresholds["loss_factor"] <= figures["factor"] <= setup.thresholds["loss_factor"]:
        yield finding(
            "loss/scale",
            f"∂loss/∂logp is {figures['factor']:.3g} times −A × the weight that the reduction gives a token",
            f"{loss_name} is multiplied by a factor, such as the number of tokens, which changes the relative weight "
            "of clipping, kl.beta and the entropy bonus",
            "return the loss of each token before any reduction; Keel applies the reduction afterwards",
        )
    elif float((push / figures["factor"] - 1).abs().max()) > setup.thresholds["loss_uneven"]:
        spread = f"{float(push.min()):.3g} to {float(push.max()):.3g}"
        by = weighed_by(mask, push, advantage[mask], setup.thresholds)
        yield finding(
            "loss/scale",
            f"∂loss/∂logp over −A × the reduction's weight ranges from {spread} over the tokens"
            + (f": it {by}" if by else ""),
            f"{loss_name} weighs tokens or advantages differently than the reduction"
            + (", as when a mean is used instead of a sum, or advantages are normalized twice" if by else ""),
            either(
                "return the loss of each token, with its own ratio" if by else "",
                "no change is needed if this is intended",
            ),
            severity="warning" if by else "note",
        )


def weighed_by(mask: Tensor, push: Tensor, advantage: Tensor, thresholds: Thresholds) -> str:
    """The quantity that explains the weights of tokens, as text: advantage, length or position; "" if none does.

    Advantages of either sign may have different weights.
    """
    row, column = mask.nonzero().unbind(-1)
    begins, ends = mask.int().argmax(-1), mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    lengths = mask.sum(-1)[row]
    for way, power in (("grows with the length of the completion", 1), ("falls with the length of the completion", -1)):
        if len(lengths.unique()) > 1 and _even(push / lengths.double() ** power, thresholds):
            return way
    for way, place in (
        ("the distance to the end of the completion", ends[row] - column),
        ("the position", column - begins[row]),
    ):
        values = [push[place == number] for number in place.unique()]
        means = [float(part.mean()) for part in values]
        steady = means in (sorted(means), sorted(means, reverse=True))
        if len(means) > 2 and steady and all(_even(part, thresholds) for part in values):
            far = max(means) > thresholds["loss_factor"] * min(means)
            return f"depends mostly on {way}" if far else ""
    alike = [push[advantage == value] for value in advantage.unique()]
    signs = [push[sign] for sign in (advantage > 0, advantage < 0) if bool(sign.any())]
    by_size = all(_even(part, thresholds) for part in alike) and not all(_even(part, thresholds) for part in signs)
    return "depends on the size of the advantage" if by_size else ""


def _even(values: Tensor, thresholds: Thresholds) -> bool:
    return float(values.max() - values.min()) <= thresholds["loss_uneven"] * float(values.abs().max())


def left_out(setup: KeelSubject, alive: Tensor) -> str:
    """The share of tokens without gradient, as text, if more than `ROWS` of the completions lack some; "" otherwise.

    Completions of one token and truncated ones are not counted, since a loss may leave them out on purpose.
    """
    tokens = alive.split(setup.mask.sum(1).tolist())
    ended = [completion.stop_reason != "length" for completion in setup.batch.completions]
    rows = [row for row, is_whole in zip(tokens, ended, strict=True) if len(row) > 1 and is_whole]
    dead = [int((~row).sum()) for row in rows]
    if sum(count > 0 for count in dead) <= ROWS * len(rows):
        return ""
    return (
        f"{sum(dead)} of the {sum(map(len, rows))} tokens of complete completions (at most {max(dead)} per completion)"
    )


def _share(where: Tensor, up: Tensor) -> tuple[float, float]:
    """The share of tokens among those with a positive advantage and among those with a negative one."""
    chosen = (where[up], where[~up])
    return tuple(float(part.double().mean()) if len(part) else 0.0 for part in chosen)  # type: ignore[return-value]


def ratio_findings(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """Losses may use log-probabilities only in ratios, each between a token's new and its own old one."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    flat, device = torch.full(mask.shape, COMMON), setup.mask.device

    def derivative(logp: Tensor, old: Tensor) -> Tensor:
        rows = Batch(
            action_mask=mask.to(device),
            advantages=torch.tensor(ADVANTAGES, device=device),
            old_logp=old.to(device),
            ref_logp=logp.to(device),
            group=torch.arange(len(mask), device=device) // 2,
        )
        return _derivative(setup, logp.to(device), rows, setup.run.loss, 0.0, max(LENGTHS)).cpu()

    try:
        common, rare = (derivative(logp, logp) for logp in (flat, flat - RARER))
        changes = []
        for row, column in mask.nonzero().tolist():
            old = flat.clone()
            old[row, column] -= STEP
            changes.append(((derivative(flat, old) - common).abs() > ROUNDING * common.abs().max())[mask])
        # [N, N]: whether the gradient of a token depends on the old log-probability of another
        moved = torch.stack(changes)
    except Exception:  # a user's loss may raise on unexpected rows
        return
    alive = mask & (common != 0)
    if not bool(alive.any()) or not bool(torch.stack([common, rare]).isfinite().all()):
        return
    times = figures["pushed_rare"] = float((rare[alive] / common[alive]).abs().median())
    limit, loss_name = setup.thresholds["loss_by_probability"], f"loss.loss_type={setup.config.loss.loss_type}"
    own, rows_of = moved.diagonal(), mask.nonzero()[:, 0]
    others = moved & ~torch.eye(len(moved), dtype=torch.bool)
    in_row = (others & (rows_of == rows_of[:, None])).sum(-1)  # earlier tokens of a completion may weigh all later ones
    if not bool(own.any()) and bool(others.any()) and int(in_row.max()) <= 1:
        yield finding(
            "loss/clip",
            f"of {len(moved)} tokens of synthetic completions, none gets another gradient when its own old "
            f"log-probability changes by {STEP:g} nats, but for {int(others.any(-1).sum())} of them the gradient of "
            "another token changes",
            f"{loss_name} computes ratios with the old log-probability of another token: these ratios are far from 1 "
            "at the first update and do not measure how far the policy has moved",
            "take the ratio of inputs.logp and inputs.old_logp at the same position (do not roll, slice or flip only "
            "one of them)",
        )
    elif not 1 / limit <= times <= limit:
        rule = "rare tokens" if times > 1 else "likely tokens"
        yield finding(
            "loss/scale",
            f"if all tokens become less likely by a factor of e^{RARER:g} under both the old and the new policy, so "
            f"that ratios stay 1, the gradient of the median token becomes {times:.3g} times as large (allowed: "
            f"1/{limit:g} to {limit:g})",
            f"{loss_name} weighs tokens by their probability instead of the ratio: {rule} dominate the update",
            "use the ratio exp(logp − old_logp), or logp alone; no change is needed if this weight is intended",
            severity="warning",
        )
