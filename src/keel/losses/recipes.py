"""Policy losses by name: surrogate, reduction, limits and option checks. Loads without torch."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from keel.base.errors import KeelError, first_line, unknown
from keel.base.options import Options, read_options
from keel.base.parts import import_object, is_import_path, parameters_of
from keel.losses.options import Limits, LossOptions, SapoOptions, SharedLossOptions, check_mismatch

if TYPE_CHECKING:
    from keel.losses.policy import LossInputs, PolicyTerm

# A policy loss: a function of its inputs and options; the type of its second parameter declares the options.
Term = Callable[["LossInputs", Any], "PolicyTerm"]


@dataclass(frozen=True)
class Recipe:
    """A named loss: its surrogate, its reduction, its default limits and the advantage scaling of its paper.

    `low` or `high` is None if the loss has no such limit. A loss without `has_ratio` allows only one update per batch.
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
        """The options class of the term: the type of its second parameter, by default `SharedLossOptions`."""
        try:
            _, second = inspect.signature(self.term, eval_str=True).parameters.values()
        except Exception as error:  # the type of a user's options may be any expression
            raise KeelError(
                f"the type of a loss's options cannot be read: {first_line(error)}: import the type at run "
                "time, not under TYPE_CHECKING"
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


@dataclass(frozen=True)
class Surrogate:
    """A named surrogate of `keel.losses.policy` and its options. It imports torch only when called."""

    name: str
    options: type[Options] = SharedLossOptions

    def __call__(self, inputs: LossInputs, options: Any) -> PolicyTerm:
        term: Term = getattr(importlib.import_module("keel.losses.policy"), self.name)
        return term(inputs, options)

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        declared = {"inputs": inspect.Parameter.empty, "options": self.options}
        return inspect.Signature([inspect.Parameter(name, kind, annotation=type_) for name, type_ in declared.items()])


CLIPPED = Surrogate("clipped")
LOSSES: Mapping[str, Recipe] = MappingProxyType(
    {
        "policy_gradient": Recipe(
            Surrogate("policy_gradient"), low=None, high=None, takes_level=False, has_ratio=False
        ),
        "grpo": Recipe(CLIPPED, "sequence_mean", takes_delta=True),
        "bnpo": Recipe(CLIPPED, "token_mean", takes_delta=True),
        "dr_grpo": Recipe(CLIPPED, "constant", scale_rewards="none", takes_delta=True),
        "dapo": Recipe(CLIPPED, high=0.28, takes_delta=True),
        "gspo": Recipe(CLIPPED, "sequence_mean", low=3e-4, high=4e-4, level="sequence", takes_delta=True),
        "cispo": Recipe(Surrogate("cispo"), low=None, high=5.0),
        "gmpo": Recipe(Surrogate("gmpo"), "sequence_mean", low=0.4, high=0.4, takes_level=False),
        "sapo": Recipe(Surrogate("sapo", SapoOptions), "sequence_mean", low=None, high=None),
    }
)


def get_loss(loss_type: str) -> Recipe:
    """The named loss, or a user's own `module:attr`: a `Recipe`, or a function of (inputs, options)."""
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
            "docs/extending.md"
        )
    return recipe


def declared_options(loss: LossOptions) -> Options:
    """The loss's declared options, validated. Fields that are also in the section are taken from the section."""
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
                f"({section[name].default!r}): rename it, or declare it as keel.losses.LossOptions does"
            )
    values = {name: getattr(loss, name) for name in shared}
    return read_options(declared, {**values, **loss.params}, "loss")


def _bare(annotation: Any) -> Any:
    """A type without its constraints, because a loss may have narrower ones."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    return frozenset(map(_bare, get_args(annotation))) if get_origin(annotation) in (Union, UnionType) else annotation


def check_loss(loss: LossOptions) -> None:
    """Refuse options that the loss ignores or that contradict it."""
    declared_options(loss)
    resolve_limits(loss)
    check_mismatch(loss.mismatch)
    if loss.dynamic_sampling and loss.baseline == "none":
        raise KeelError(
            "loss.dynamic_sampling does not apply to loss.baseline=none, where equal rewards have a gradient: "
            "leave one of them out"
        )


def resolve_limits(loss: LossOptions) -> Limits:
    """The resolved clip limits. Raises for options that the loss ignores or that contradict it."""
    recipe, name = get_loss(loss.loss_type), loss.loss_type
    capped = recipe.low is None and recipe.high is not None  # `high` is then a limit of the ratio itself
    if loss.epsilon is not None and capped:
        raise KeelError(
            f"loss.epsilon does not apply to {name}, which caps the ratio from above: set loss.epsilon_high"
        )
    for option in ("epsilon", "epsilon_high") if recipe.high is None else ():
        if getattr(loss, option) is not None:
            raise KeelError(f"loss.{option} does not apply to {name}, which does not clip: leave it out")
    low = recipe.low if loss.epsilon is None else loss.epsilon
    high = loss.epsilon_high if loss.epsilon_high is not None else recipe.high if loss.epsilon is None else loss.epsilon
    low, high = math.inf if low is None else low, math.inf if high is None else high
    if capped and high < 1:
        raise KeelError(
            f"{name}'s epsilon_high caps the ratio itself and must be at least 1, got {high}: try {recipe.high}"
        )
    for option in _options_of_other_losses(recipe):
        if getattr(loss, option) != type(loss).model_fields[option].default:
            raise KeelError(f"loss.{option} does not apply to {name}: leave it out")
    if loss.delta is not None:
        if not recipe.takes_delta:
            raise KeelError(f"loss.delta does not apply to {name}: leave it out")
        if loss.delta <= 1 + high:
            raise KeelError(f"loss.delta must be above 1 + epsilon_high = {1 + high:g}, got {loss.delta:g}")
    level = loss.importance_sampling_level or recipe.level
    if level != recipe.level and not recipe.takes_level:
        raise KeelError(f"loss.importance_sampling_level={level} does not apply to {name}: leave it out")
    return Limits(low, high, level)


def _options_of_other_losses(recipe: Recipe) -> set[str]:
    """Options of other built-in losses that this one does not have."""
    declared = {name for other in LOSSES.values() for name in other.options.model_fields}
    return declared - SharedLossOptions.model_fields.keys() - recipe.options.model_fields.keys()


def scale_rewards(loss: LossOptions) -> str:
    """The scaling of advantages: the option, or the loss's default."""
    return loss.scale_rewards or get_loss(loss.loss_type).scale_rewards


def loss_defaults(loss: LossOptions) -> dict[str, Any]:
    """The values that this loss uses for options that are null."""
    recipe, limits = get_loss(loss.loss_type), resolve_limits(loss)
    defaults: dict[str, Any] = {"importance_sampling_level": limits.level, "scale_rewards": scale_rewards(loss)}
    defaults |= {} if recipe.low is None else {"epsilon": limits.low}
    defaults |= {} if recipe.high is None else {"epsilon_high": limits.high}
    return {name: value for name, value in defaults.items() if getattr(loss, name) is None}
