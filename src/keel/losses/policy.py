"""Policy terms: `[B, T]` losses per token, before any reduction. One function a surrogate, one table of losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import torch
from torch import Tensor

from keel.base.errors import KeelError, first_line, unknown
from keel.base.imports import import_object, is_import_path
from keel.base.moved import refuse_renamed
from keel.base.options import Options
from keel.base.parts import parameters_of
from keel.base.validation import read_options
from keel.kl.ratios import clamp_through, finite_floor, importance_ratio, log_ratio, select
from keel.losses.inputs import Limits, LossInputs, PolicyTerm
from keel.losses.mismatch import check_mismatch
from keel.losses.options import LossOptions, SharedLossOptions
from keel.losses.sapo import sapo

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(__name__, {"LossSpec": "keel.losses.LossOptions"})

# A policy loss: what it is made of and its own options, which the type of its second parameter declares.
Term = Callable[[LossInputs, Any], PolicyTerm]


def policy_gradient(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−A·log π: the plain policy gradient, without a ratio. Right on-policy only."""
    ratio = importance_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    return PolicyTerm(-inputs.advantages * finite_floor(select(inputs.logp, inputs.mask)), ratio)


def clipped(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) (PPO 1707.06347); δ caps ρ from above on the unclipped side too.

    Without δ a negative advantage leaves ρ unbounded above (INTELLECT-2's two-sided clip bounds it).
    """
    ratio, limits, advantages = inputs.ratio(), inputs.limits, inputs.advantages
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    outer = ratio if options.delta is None else ratio.clamp_max(options.delta)
    loss = -torch.minimum(outer * advantages, inside * advantages)
    low = (ratio < 1 - limits.low) & (advantages < 0)
    high = (ratio > 1 + limits.high) & (advantages > 0)
    return PolicyTerm(loss, ratio, low, high)


def cispo(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−sg(min(ρ, ε_high))·A·log π (MiniMax-M1 2506.13585): the weight is clipped, every token keeps its gradient."""
    ratio, cap = inputs.ratio(), inputs.limits.high
    weight = ratio.clamp_max(cap).detach()
    high = (ratio > cap) & (inputs.advantages > 0)
    loss = -weight * inputs.advantages * finite_floor(select(inputs.logp, inputs.mask))
    return PolicyTerm(loss, ratio, clipped_high=high)


def gmpo(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−A·(Π_t ρ̂_t)^{1/|o|} (GMPO 2507.20673): log-ratios clipped per token on the side that the advantage favours."""
    limits, advantages, mask = inputs.limits, inputs.advantages, inputs.mask
    log_rho = -log_ratio(inputs.logp, inputs.old_logp, mask, clamp=None).d
    low, high = (log_rho < -limits.low) & (advantages < 0), (log_rho > limits.high) & (advantages > 0)
    clipped_log_rho = torch.where(
        advantages > 0,
        log_rho.clamp_max(limits.high),
        torch.where(advantages < 0, log_rho.clamp_min(-limits.low), log_rho),
    )
    mean = select(clipped_log_rho, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    weight = clamp_through(mean, 20.0)[0].exp()
    return PolicyTerm(-weight * advantages, clamp_through(log_rho, 20.0)[0].exp(), low, high)


@dataclass(frozen=True)
class Recipe:
    """A named loss: its surrogate, its reduction, its default limits and the advantage scaling of its paper.

    `low` and `high` are None where the loss has no such limit; without `has_ratio` it is right for one update a batch.
    """

    term: Term
    reduction: str = "token_mean"
    low: float | None = 0.2
    high: float | None = 0.2
    level: str = "token"
    scale_rewards: str = "group"
    takes_level: bool = True
    takes_delta: bool = False
    has_ratio: bool = True

    @cached_property
    def options(self) -> type[Options]:
        """The options that the term asks for by the type of its second parameter; untyped, those of every loss."""
        try:
            _, second = inspect.signature(self.term, eval_str=True).parameters.values()
        except Exception as error:  # the type of a user's options may be any expression
            raise KeelError(
                f"the type of a loss's options cannot be read: {first_line(error)}; import it where it is run"
            ) from None
        declared = second.annotation
        if declared in (second.empty, Any):
            return SharedLossOptions
        if not (isinstance(declared, type) and issubclass(declared, Options)):
            raise KeelError(
                f"a loss's {second.name} is declared as {getattr(declared, '__name__', declared)}: derive it from "
                "keel.base.options.Options, see docs/extending.md"
            )
        return declared


LOSSES: Mapping[str, Recipe] = MappingProxyType(
    {
        "policy_gradient": Recipe(policy_gradient, low=None, high=None, takes_level=False, has_ratio=False),
        "grpo": Recipe(clipped, "sequence_mean", takes_delta=True),
        "bnpo": Recipe(clipped, "token_mean", takes_delta=True),
        "dr_grpo": Recipe(clipped, "constant", scale_rewards="none", takes_delta=True),
        "dapo": Recipe(clipped, high=0.28, takes_delta=True),
        "gspo": Recipe(clipped, "sequence_mean", low=3e-4, high=4e-4, level="sequence", takes_delta=True),
        "cispo": Recipe(cispo, low=None, high=5.0),
        "gmpo": Recipe(gmpo, "sequence_mean", low=0.4, high=0.4, takes_level=False),
        "sapo": Recipe(sapo, "sequence_mean", low=None, high=None),
    }
)


def get_loss(loss_type: str) -> Recipe:
    """The loss of that name, or a user's own `module:attr`: a `Recipe`, or a function of (inputs, options)."""
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    if not is_import_path(loss_type):
        raise unknown("loss_type", loss_type, LOSSES)
    loss = import_object(loss_type, "loss.loss_type", callable_only=False)
    if not (isinstance(loss, Recipe) or callable(loss)):
        raise KeelError(f"loss.loss_type={loss_type} is a {type(loss).__name__}: give a policy loss or a Recipe")
    recipe = loss if isinstance(loss, Recipe) else Recipe(loss)
    names = parameters_of(recipe.term) or ()
    if len(names) != 2:
        raise KeelError(
            f"loss.loss_type={loss_type} takes ({', '.join(names)}): a policy loss takes (inputs, options), see "
            "docs/upgrading.md"
        )
    return recipe


def declared_options(loss: LossOptions) -> Options:
    """The options that the loss declares, checked; a field that the section has as well is taken from there."""
    declared = get_loss(loss.loss_type).options
    if isinstance(loss, declared) and not loss.params:
        return loss
    section = type(loss).model_fields
    shared = declared.model_fields.keys() & section.keys()
    for name in sorted(shared):
        own = declared.model_fields[name]
        if (own.default, _bare(own.annotation)) != (section[name].default, _bare(section[name].annotation)):
            raise KeelError(
                f"loss.loss_type={loss.loss_type} declares {name} with another type or default than every loss has "
                f"({section[name].default!r}): call it otherwise, or declare it as keel.losses.LossOptions does"
            )
    values = {name: getattr(loss, name) for name in shared}
    return read_options(declared, {**values, **loss.params}, "loss")


def _bare(annotation: Any) -> Any:
    """A type without its ranges: those a loss may narrow."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    return frozenset(map(_bare, get_args(annotation))) if get_origin(annotation) in (Union, UnionType) else annotation


def check_loss(loss: LossOptions) -> None:
    """Refuse what the loss would ignore or turn upside down."""
    declared_options(loss)
    resolve_limits(loss)
    check_mismatch(loss.mismatch)
    if loss.dynamic_sampling and loss.baseline == "none":
        raise KeelError("loss.dynamic_sampling has no meaning with loss.baseline=none, where equal rewards still teach")


def resolve_limits(loss: LossOptions) -> Limits:
    """The clip limits to use; what the loss would ignore or turn upside down is refused."""
    recipe, name = get_loss(loss.loss_type), loss.loss_type
    capped = recipe.low is None and recipe.high is not None  # only from above, and at the ratio itself
    if loss.epsilon is not None and capped:
        raise KeelError(
            f"loss.epsilon has no meaning with {name}, which caps the ratio from above: set loss.epsilon_high"
        )
    for option in ("epsilon", "epsilon_high") if recipe.high is None else ():
        if getattr(loss, option) is not None:
            raise KeelError(f"loss.{option} has no meaning with {name}, which does not clip: leave it out")
    low = recipe.low if loss.epsilon is None else loss.epsilon
    high = loss.epsilon_high if loss.epsilon_high is not None else recipe.high if loss.epsilon is None else loss.epsilon
    low, high = math.inf if low is None else low, math.inf if high is None else high
    if capped and high < 1:
        raise KeelError(
            f"{name}'s epsilon_high caps the ratio itself and must be at least 1, got {high}: try {recipe.high}"
        )
    for option in _options_of_other_losses(recipe):
        if getattr(loss, option) != type(loss).model_fields[option].default:
            raise KeelError(f"loss.{option} has no meaning with {name}: leave it out")
    if loss.delta is not None:
        if not recipe.takes_delta:
            raise KeelError(f"loss.delta has no meaning with {name}: leave it out")
        if loss.delta <= 1 + high:
            raise KeelError(f"loss.delta must be above 1 + epsilon_high = {1 + high:g}, got {loss.delta:g}")
    level = loss.importance_sampling_level or recipe.level
    if level != recipe.level and not recipe.takes_level:
        raise KeelError(f"loss.importance_sampling_level={level} has no meaning with {name}: leave it out")
    return Limits(low, high, level)


def _options_of_other_losses(recipe: Recipe) -> set[str]:
    """Options that built-in losses have of their own, and this one has not."""
    declared = {name for other in LOSSES.values() for name in other.options.model_fields}
    return declared - SharedLossOptions.model_fields.keys() - recipe.options.model_fields.keys()


def scale_rewards(loss: LossOptions) -> str:
    """How advantages are scaled: as asked for, or as the loss's paper does."""
    return loss.scale_rewards or get_loss(loss.loss_type).scale_rewards


def loss_defaults(loss: LossOptions) -> dict[str, Any]:
    """Option → what its null stands for under this loss."""
    recipe, limits = get_loss(loss.loss_type), resolve_limits(loss)
    defaults: dict[str, Any] = {"importance_sampling_level": limits.level, "scale_rewards": scale_rewards(loss)}
    defaults |= {} if recipe.low is None else {"epsilon": limits.low}
    defaults |= {} if recipe.high is None else {"epsilon_high": limits.high}
    return {name: value for name, value in defaults.items() if getattr(loss, name) is None}


def policy_term(
    loss: LossOptions, logp: Tensor, old_logp: Tensor | None, advantages: Tensor, mask: Tensor
) -> PolicyTerm:
    """The per-token policy loss `[B, T]`; `old_logp` None means that this is the batch's first update."""
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    if advantages.shape[0] != logp.shape[0] or advantages.shape[-1] not in (1, logp.shape[-1]):
        raise KeelError(f"advantages has shape {tuple(advantages.shape)}, logp {tuple(logp.shape)}: give [B] or [B, T]")
    old_logp = logp.detach() if old_logp is None else old_logp
    advantages = advantages.to(logp.device).expand_as(logp)
    inputs = LossInputs(logp, old_logp, advantages, mask, resolve_limits(loss))
    return get_loss(loss.loss_type).term(inputs, declared_options(loss))
