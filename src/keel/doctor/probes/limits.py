"""Limits that are too tight: clip range, rejected completions, skipped updates, KL budgets, staleness, triggers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from keel.base.parts import is_import_path
from keel.base.types import Group
from keel.doctor.advice import either
from keel.doctor.evidence import at_least, chance_above, level, more_groups
from keel.doctor.findings import Finding, Severity, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.objective import loss_gradient
from keel.doctor.probes.update import FirstUpdate, moved, one_digit
from keel.losses import LossOptions
from keel.losses.mismatch import behaviour_logp, mismatch_weights
from keel.trainer.batch import StepBatch

SCATTER = 0.1  # least step-to-step variation of gradient norms


def probe_limits(setup: KeelSubject) -> Outcome:
    """Check that the configured limits leave room for the least movement that learning needs."""
    first: FirstUpdate | None = setup.of_batch.pop("update", None)  # removed, since no later probe uses its gradients
    if first is None or not (math.isfinite(first.loss) and first.peak_kl > 0):
        codes = "kl/rejects-all, loss/clip, guard/skips-all, sampler/too-old"
        return Outcome("limits", unchecked=(f"{codes}: no update could be tried",))
    figures: dict[str, float] = {}
    findings = (
        *_rejects(setup, first, figures),
        *clip_findings(setup, figures),
        *_skips(setup, figures),
        *_budget(setup, first),
        *_too_old(setup, first, figures),
        *_triggered(setup, first),
        *_left_out(setup, figures),
    )
    return Outcome("limits", findings, figures)


def _rejects(setup: KeelSubject, first: FirstUpdate, figures: dict[str, float]) -> Iterator[Finding]:
    """The share of completions over kl.collect_max after the policy has moved by `kl_not_learning`.

    Samples of the moved policy scored by the reference are replaced by samples of the old policy scored by the moved
    one: the distance is the same. More are drawn while the result is not significant; a problem is one observation.
    """
    limit = setup.config.kl.collect_max
    if limit is None or setup.run.reference is None:
        return
    distance, most = setup.thresholds["kl_not_learning"], setup.thresholds["rejected_most"]
    ratios: list[Tensor] = []  # [completions] for each group

    def shares(groups: Sequence[Group]) -> list[float]:
        while more := groups[len(ratios) :]:  # the batch first, which is packed already
            batch = setup.pack(more) if ratios else setup.batch
            values = _log_ratios(setup, first, batch, distance)
            ratios.extend(values.split([len(group.completions) for group in batch.groups]))
        return [float((values > limit).double().mean()) for values in ratios]

    def chance_of(groups: Sequence[Group]) -> float:
        return chance_above(shares(groups), most)

    def undecided(groups: Sequence[Group]) -> bool:
        return fmean(shares(groups)) > most and chance_of(groups) > level(setup.thresholds)

    groups = more_groups(setup, "kl/rejects-all", undecided)
    chance, values = chance_of(groups), torch.cat(ratios)
    over, count = int((values > limit).sum()), len(values)
    figures["rejected"] = over / count
    if chance > level(setup.thresholds):
        return
    usual = float(f"{max(10 * distance, 5 * float(values.abs().quantile(0.9))):.1g}")
    yield finding(
        "kl/rejects-all",
        f"when the policy is {distance:g} nats per token from the reference, as every learning policy will be, {over} "
        f"of {count} completions of {len(groups)} problems exceed kl.collect_max={limit:g} (over {most:.0%}; p-value "
        f"{chance:.1g})",
        "the KL of a single completion is mostly noise: completions that the policy has just learned to prefer leave "
        "the policy term, while their KL penalty remains",
        propose("set {}, or {}", {"kl.collect_max": usual}, {"kl.collect_max": None}),
    )


def _log_ratios(setup: KeelSubject, first: FirstUpdate, batch: StepBatch, level: float) -> Tensor:
    """The mean log-ratio of each completion between the policy and itself after an update of `level` nats per token.

    For cut completions, deviations from the mean are scaled to those of full ones, by the square root of the length.
    """
    mask, before = batch.rows.action_mask, setup.logp(batch)
    with moved(setup, first.gradients, first.loss, math.sqrt(level / first.peak_kl), weight_decay=0.0):
        ratio = before - setup.logp(batch)
    values = ratio.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp_min(1)
    if setup.cut_from is None:
        return values
    shorter = float(mask.sum()) / len(mask) / setup.completion_length
    return values.mean() + math.sqrt(min(1.0, shorter)) * (values - values.mean())


def _skips(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """The spike guard's skip rate on log-normal gradient norms with the least usual variation."""
    guards, spike = setup.config.guards, setup.run.limits.grad_spike
    if guards.on_spike != "skip":
        return
    figures["skipped"] = 0.5 * math.erfc(math.log(max(spike, 1e-9)) / SCATTER / math.sqrt(2))
    if not figures["skipped"] > setup.thresholds["skipped_most"]:
        return
    yield finding(
        "guard/skips-all",
        f"if gradient norms vary by {SCATTER:.0%} from step to step, guards.grad_spike={spike:g} with on_spike=skip "
        f"skips {figures['skipped']:.0%} of the updates (over {setup.thresholds['skipped_most']:.0%})",
        "ordinary norms count as spikes; skipped norms are left out of the running median, which then falls further",
        propose("set {}, or {}", {"guards.grad_spike": 10.0}, {"guards.on_spike": "warn"}),
    )


def _budget(setup: KeelSubject, first: FirstUpdate) -> Iterator[Finding]:
    """A KL budget that stops or rolls back the run before anything can be learned."""
    budget = setup.config.kl.budget
    if budget is None or budget.action == "warn":
        return
    length = setup.completion_length
    allowed = budget.max * (length if budget.unit == "per_token" else 1.0)
    update = first.peak_kl * setup.run.optimizer.schedule(0) ** 2 * length
    least = setup.thresholds["reach_least"]
    if allowed >= max(least, update):
        return
    advised = float(f"{setup.thresholds['kl_over_budget'] * (1.0 if budget.unit == 'per_token' else length):.1g}")
    yield finding(
        "guard/skips-all",
        f"kl.budget.max={budget.max:g} allows {allowed:.2g} nats per completion; the first update alone uses "
        f"{update:.2g}, and below {least:g} no change of the policy is measurable",
        f"kl.budget.action={budget.action} ends or rolls back the run before the policy can learn anything",
        propose("set {}", {"kl.budget.max": advised}),
    )


def _too_old(setup: KeelSubject, first: FirstUpdate, figures: dict[str, float]) -> Iterator[Finding]:
    """Samples so old that updates have moved the policy too far from the one that drew them.

    Over a few steps, updates are a random walk. Over many, their directions add up.
    """
    run = setup.run
    age = min(run.rollout.max_staleness, setup.config.run.max_steps)
    per_step = first.peak_kl * run.loss.num_iterations * run.optim.minibatches
    deep = age > setup.thresholds["sample_age"]  # up to `sample_age` steps, the limit is that of one update
    # over many steps, distances add up and the KL grows quadratically
    figures["sample_age_kl"] = (age * age if deep else age) * per_step
    limit = setup.thresholds["sampler_kl_error" if deep else "kl_per_update_peak"]
    if age == 0 or not figures["sample_age_kl"] > limit or first.peak_kl > setup.thresholds["kl_per_update_peak"]:
        return  # optim/lr-too-high reports updates that are too large
    younger = min(int(setup.thresholds["sample_age"]) // 2, int(limit / setup.thresholds["update_margin"] / per_step))
    slower = math.sqrt(limit / setup.thresholds["update_margin"] / figures["sample_age_kl"])
    yield finding(
        "sampler/too-old",
        f"samples may be {age} steps old; in these, updates of {first.peak_kl:.2g} nats per token each move the "
        f"policy by {figures['sample_age_kl']:.2g} {'if they have the same direction' if deep else 'as a random walk'} "
        f"(over {limit:g})",
        f"rollout.max_staleness={run.rollout.max_staleness}: the samples come from a policy that is too far away for "
        "importance weights to correct",
        propose(
            "set {}, or {}",
            {"rollout.max_staleness": younger},
            {"optim.learning_rate": one_digit(run.optimizer.learning_rate * slower)},
        ),
    )


def _triggered(setup: KeelSubject, first: FirstUpdate) -> Iterator[Finding]:
    """A kl_triggered reference whose threshold a single step exceeds."""
    run = setup.run
    if run.reference is None or run.reference.kind != "kl_triggered":
        return
    threshold = float(setup.config.reference.params.get("threshold", math.inf))
    update = first.peak_kl * run.loss.num_iterations * run.optim.minibatches
    if threshold >= update:
        return
    yield finding(
        "reference/follows",
        f"one step moves the policy by {update:.2g} nats per token, and the reference is replaced at "
        f"reference.threshold={threshold:g}",
        "the reference is replaced by the policy at every step: the KL stays near 0 and does not constrain the policy",
        either(
            propose("set {}, or {}", {"reference.threshold": 0.1}, {"reference": {"kind": "auto"}}),
            "no change is needed if the KL should limit single steps, as in mirror descent",
            joined="; ",
        ),
    )


def _left_out(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """Tokens whose importance weight lies outside the limits of loss.mismatch, which sets it to 0."""
    options, logp = setup.run.loss.mismatch, setup.logp()
    sampled = behaviour_logp(setup.batch.rows, logp, options.level)
    if options.kind not in ("mask", "icepop") or sampled is None:
        return
    zero = (mismatch_weights(logp, sampled, setup.mask, options) == 0) & setup.mask
    shares = (zero.sum(-1) / setup.mask.sum(-1).clamp(min=1)).tolist()  # completions are independent, tokens are not
    figures["left_out"] = float(zero.sum() / setup.mask.sum().clamp(min=1))
    most = setup.thresholds["sampler_rejected"] / 2
    if figures["left_out"] <= most:
        return
    yield finding(
        "loss/no-gradient",
        f"{figures['left_out']:.0%} of the sampled tokens have an importance weight of 0 before the first update: "
        f"their ratio of policy over sampler is outside [{options.floor or 0:g}, {options.cap:g}]",
        f"loss.mismatch.kind={options.kind} excludes tokens that should be trained: its limits are narrower than the "
        "sampler's difference, which may be rounding or an error",
        propose("set {}", {"loss.mismatch.kind": "truncate", "loss.mismatch.cap": 2.0, "loss.mismatch.floor": None}),
        severity=None if at_least(shares, level(setup.thresholds)) > most else "warning",
    )


# ------------------------------------------------------------------------ clip range

CLIPS = ("epsilon", "epsilon_high", "delta")  # limits of the ratio
# losses with soft limits and their default values
GATES = {"sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}}
CUT = 0.01  # share of the gradient at ratio 1 below which a token counts as clipped
# log-ratios in nats that every clip range should clip, and that every limit of weights should bound
FAR_RATIO, HUGE_RATIO = 1.0, 4.0
# least change of log p per update, in nats: of a token, and of the mean over a sequence
LEAST_MOVE, OF_SEQUENCE = 1e-3, 1e-5
RATIO_ROUNDING = 1e-4  # of a token's gradient: far above fp32 rounding, far below the effect of a ratio of e


def clip_findings(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """The gradient at ratios other than 1, for the configured loss and for the same loss with default limits.

    −min(ρA, clip(ρ)A) clips a token only if it has moved far enough in the direction of its advantage. At most one
    finding.
    """
    run, config, limit = setup.run, setup.config.loss, setup.thresholds["clipped_moved"]
    if run.loss.num_iterations * run.optim.minibatches == 1 and run.rollout.max_staleness == 0:
        return
    up = torch.ones(len(setup.mask), device=setup.mask.device)
    both = torch.where(torch.arange(len(up), device=up.device) % 2 == 0, up, -up)
    back, ahead = (_cut(setup, run.loss, both, way * FAR_RATIO) for way in (-1, 1))
    figures |= {"clipped_back": back, "clipped_far": ahead}
    loss_name, users_own = f"loss.loss_type={config.loss_type}", is_import_path(config.loss_type)
    right = "use the smaller of ρA and clip(ρ)A, as in −torch.minimum(ρA, clip(ρ)A), or use one of Keel's losses"
    if back > limit:
        yield finding(
            "loss/clip",
            f"at ratios of e and 1/e, the gradient is clipped for {back:.0%} of the tokens that moved against their "
            f"advantage (over {limit:.0%}), and for {ahead:.0%} of those that moved with it",
            f"{loss_name} clips the wrong side: updates that overshoot continue, and wrong moves are not corrected"
            if ahead < 1 - limit
            else (
                f"{loss_name} clips the ratio without regard to the advantage: a token that moved the wrong way "
                "cannot move back"
            ),
            right,
            severity=None if ahead < 1 - limit else "warning",
        )
        return
    usual: dict[str, float | None] = {**dict.fromkeys(CLIPS), **GATES.get(config.loss_type, {})}
    chosen = {name: getattr(config, name) for name in usual if not users_own and getattr(config, name) != usual[name]}
    if not chosen and not users_own:
        return
    own = run.loss.model_copy(update=usual) if chosen else None
    least = OF_SEQUENCE if _of_sequences(setup) else LEAST_MOVE
    tight = [
        way
        for way, signs in (("up", up), ("down", -up))
        if _cut(setup, run.loss, signs, least) > limit and not (own and _cut(setup, own, signs, least) > limit / 2)
    ]
    pushed, usually = (0.0 if loss is None else _pushed(setup, loss, up) for loss in (run.loss, own))
    evidence = cause = ""
    severity: Severity = "warning"
    if tight:
        evidence = f"over {limit:.0%} of the tokens that moved {' or '.join(tight)} by {least:g} nats have no gradient"
        cause = "the clip range leaves almost no room on that side, so further updates of a batch are clipped"
        severity = "error" if len(tight) == 2 else "warning"
    elif pushed > 0.9 * math.exp(HUGE_RATIO) > 2 * usually:
        evidence = (
            f"the gradient of tokens with a positive advantage is {pushed:.3g} times as large at a ratio of "
            f"{math.exp(HUGE_RATIO):.3g} as at 1"
        )
        cause = "the ratio is not limited, so further updates of a batch amplify its first one"
    elif own is not None and ahead < 1 - limit < limit < _cut(setup, own, both, FAR_RATIO):
        evidence = f"at a ratio of e, the gradient of {ahead:.0%} of the tokens is clipped"
        cause = "the range clips nothing, so several updates of a batch may move far from the sampling policy"
    elif users_own and _is_blind(setup, both):
        evidence = (
            f"the gradient of every token is the same at ratios from {math.exp(-HUGE_RATIO):.2g} to "
            f"{math.exp(HUGE_RATIO):.3g} as at 1, although a batch is used several times"
        )
        cause = "the loss ignores the ratio: later updates of a batch treat its samples as new ones"
    if evidence:
        options = ", ".join(f"loss.{name}={value:g}" for name, value in chosen.items())
        yield finding(
            "loss/clip",
            evidence + (", unlike with the loss's default limits" if own else ""),
            f"{options or loss_name}: {cause}",
            propose("set {}, which is the loss's default", {f"loss.{name}": usual[name] for name in chosen})
            if chosen
            else right,
            severity=severity,
        )


def _of_sequences(setup: KeelSubject) -> bool:
    """Whether the clip range applies to sequences: then other tokens' ratios clip a token whose own ratio is 1.

    Completions of one token cannot distinguish the two.
    """
    ones, mask = torch.ones(len(setup.mask), device=setup.mask.device), setup.mask
    first = mask & (mask.cumsum(-1) == 1)
    others, longer = mask & ~first, first & (mask.sum(-1) > 1)[:, None]
    moved, sampled = (loss_gradient(setup, ones, step=FAR_RATIO * where).abs()[longer] for where in (others, 0 * mask))
    return not bool(longer.any()) or float((moved <= CUT * sampled).double().mean()) > 0.05


def _gradients(setup: KeelSubject, loss: LossOptions, signs: Tensor, nats: float) -> tuple[Tensor, Tensor]:
    """∂loss/∂logp `[N]` of tokens that have moved `nats` in the direction of their advantage, and at ratio 1."""
    step = nats * signs[:, None].expand(setup.mask.shape)
    return tuple(loss_gradient(setup, signs, step=by, loss=loss)[setup.mask] for by in (step, 0.0))  # type: ignore[return-value]


def _cut(setup: KeelSubject, loss: LossOptions, signs: Tensor, nats: float) -> float:
    """The share of tokens with almost no gradient after such a move."""
    moved, sampled = _gradients(setup, loss, signs, nats)
    return float((moved.abs() <= CUT * sampled.abs()).double().mean())


def _pushed(setup: KeelSubject, loss: LossOptions, signs: Tensor) -> float:
    """The gradient of the median token at a very large ratio over that at ratio 1."""
    moved, sampled = _gradients(setup, loss, signs, HUGE_RATIO)
    return float((moved / sampled).nan_to_num(0.0).median())


def _is_blind(setup: KeelSubject, signs: Tensor) -> bool:
    """Whether the gradient is equal at every ratio, up to rounding."""
    pairs = [_gradients(setup, setup.run.loss, signs, by) for by in (FAR_RATIO, -FAR_RATIO, HUGE_RATIO, -HUGE_RATIO)]
    scale = float(pairs[0][1].abs().max())
    return scale > 0 and all(float((moved - sampled).abs().max()) <= RATIO_ROUNDING * scale for moved, sampled in pairs)
