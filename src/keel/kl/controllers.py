"""Controllers of β: fixed, scheduled, or driven by the measured KL. `init` and `update` return a serialisable state.

Every controller declares the unit of the KL that it reads (`per_token`: mean nats per token; `per_sequence`: nats
summed over a sequence). It keeps β within bounds, ignores a non-finite KL, and supports a linear warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.kl.options import KLTermOptions

UNITS = ("per_token", "per_sequence")


@dataclass(frozen=True)
class KLState:
    """A controller's state; `beta` is the coefficient of this step."""

    beta: float
    base: float  # the coefficient before warm-up scales it
    step: int = 0
    smoothed: float | None = None
    integral: float = 0.0
    previous_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KLState:
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            wrong = sorted(set(data) ^ known)
            raise KeelError(f"the controller's saved state does not fit: missing or unknown: {', '.join(wrong)}")
        for name, value in data.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            if not (number or (value is None and name in ("smoothed", "previous_error"))):
                raise KeelError(f"the controller's saved state does not fit: {name} is {value!r}, not a finite number")
        if data["beta"] < 0:
            raise KeelError(f"the controller's saved state does not fit: beta is {data['beta']!r}, below 0")
        return cls(**data)


@runtime_checkable
class BetaController(Protocol):
    """The interface of a β controller."""

    @property
    def unit(self) -> str: ...

    def init(self) -> KLState: ...

    def update(self, state: KLState, kl: float | None) -> KLState: ...


Rule = Callable[[KLState, float], KLState]


@dataclass(frozen=True)
class RuleController:
    """The class of all built-in controllers: a rule for the base coefficient, bounds, and a linear warm-up.

    `rule` maps (state, measured KL) to a state with a new `base`. It is not called if the KL is missing or not finite.
    `schedule` sets the base from the step alone.
    """

    beta: float
    unit: str = "per_token"
    warmup_steps: int = 0
    bounds: tuple[float, float] = (0.0, math.inf)
    rule: Rule | None = None
    schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        low, high = self.bounds
        if self.unit not in UNITS:
            raise unknown("unit", self.unit, UNITS)
        if not (math.isfinite(self.beta) and self.beta >= 0):
            raise KeelError(f"kl.beta must be finite and not negative, got {self.beta}")
        if not 0 <= low <= high:
            raise KeelError(f"the controller's bounds must satisfy 0 ≤ low ≤ high, got {low} and {high}")
        if self.beta > 0 or self.rule is None:  # with a rule, β = 0 is replaced by the lower bound
            _within("kl.beta", self.beta, self.bounds)
        if self.warmup_steps < 0:
            raise KeelError(f"warmup_steps must not be negative, got {self.warmup_steps}")

    def _with_beta(self, state: KLState) -> KLState:
        low, high = self.bounds
        base = min(max(state.base, low), high)
        factor = min(1.0, state.step / self.warmup_steps) if self.warmup_steps else 1.0
        return replace(state, base=base, beta=base * factor)

    def init(self) -> KLState:
        """The state at step 0. With a warm-up, β is 0."""
        base = self.schedule(0) if self.schedule else self.beta
        return self._with_beta(KLState(beta=base, base=base))

    def update(self, state: KLState, kl: float | None) -> KLState:
        """The state for the next step, given the KL of this step (None if it was not measured)."""
        warm = state.step >= self.warmup_steps  # rules wait for the end of warm-up, to prevent integral windup
        if self.rule is not None and warm and kl is not None and math.isfinite(kl):
            state = self.rule(state, kl)
        state = replace(state, step=state.step + 1)
        if self.schedule is not None:
            state = replace(state, base=self.schedule(state.step))
        return self._with_beta(state)


def _target(target: float) -> float:
    if not (math.isfinite(target) and target > 0):
        raise KeelError(f"kl.controller.target must be positive (nats, in the controller's unit), got {target}")
    return target


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise KeelError(f"kl.controller.{name} must be positive, got {value}")
    return value


def _not_negative(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise KeelError(f"kl.controller.{name} must be finite and not negative, got {value}")
    return value


def _within(option: str, value: float, bounds: tuple[float, float]) -> float:
    if not bounds[0] <= value <= bounds[1]:
        bound, limit = ("low", bounds[0]) if value < bounds[0] else ("high", bounds[1])
        raise KeelError(
            f"{option} is {value:g} but kl.controller.{bound} is {limit:g}, which would replace it: set {option} "
            f"within the controller's bounds, or change kl.controller.{bound}"
        )
    return value


def _can_multiply(beta: float, low: float) -> None:
    if beta == 0 and low == 0:
        raise KeelError(
            "kl.beta is 0, and this controller multiplies β, so β would stay 0: set kl.beta or kl.controller.low "
            "above 0"
        )


def fixed(
    beta: float, unit: str = "per_token", warmup_steps: int = 0, low: float = 0.0, high: float = math.inf
) -> RuleController:
    """Constant β, after an optional linear warm-up from 0."""
    return RuleController(beta, unit, warmup_steps, (low, high))


def warmup(
    beta: float, steps: int, unit: str = "per_token", low: float = 0.0, high: float = math.inf
) -> RuleController:
    """β rises linearly from 0 to `beta` over `steps` steps and is then constant."""
    _positive("steps", steps)
    return RuleController(beta, unit, steps, (low, high))


def linear(
    beta: float,
    end: float,
    steps: int,
    unit: str = "per_token",
    warmup_steps: int = 0,
    low: float = 0.0,
    high: float = math.inf,
) -> RuleController:
    """β changes linearly from `beta` to `end` over `steps` steps and is then constant."""
    _positive("steps", steps)
    _within("kl.controller.end", _not_negative("end", end), (low, high))

    def at(step: int) -> float:
        return beta + (end - beta) * min(1.0, step / steps)

    return RuleController(beta, unit, warmup_steps, (low, high), schedule=at)


def cosine(
    beta: float,
    end: float,
    steps: int,
    unit: str = "per_token",
    warmup_steps: int = 0,
    low: float = 0.0,
    high: float = math.inf,
) -> RuleController:
    """β changes from `beta` to `end` by a cosine schedule over `steps` steps and is then constant."""
    _positive("steps", steps)
    _within("kl.controller.end", _not_negative("end", end), (low, high))

    def at(step: int) -> float:
        return end + (beta - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    return RuleController(beta, unit, warmup_steps, (low, high), schedule=at)


# Default bounds of multiplicative rules. Such a rule cannot change a β of 0 or infinity.
BOUNDS = (1e-6, 100.0)

# (high, up, low, down, bounds): KL > high·target → β·up; KL < low·target → β·down. Bounds are those of the source.
STEP_PRESETS: dict[str, tuple[float, float, float, float, tuple[float, float]]] = {
    "ppo": (1.5, 2.0, 1 / 1.5, 0.5, BOUNDS),
    "tutorial": (1.5, 1.5, 0.5, 0.75, BOUNDS),
    "gentle": (1.5, 1.1, 0.5, 0.9, (0.001, 1.0)),
    "wide": (2.0, 1.5, 0.5, 0.8, BOUNDS),
}


def step_rule(
    beta: float,
    target: float = 0.05,
    preset: str = "ppo",
    unit: str = "per_token",
    warmup_steps: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> RuleController:
    """Increase β if the KL is above a band around the target, and decrease it if the KL is below the band.

    Presets: PPO (1707.06347), and three from practice.
    """
    if preset not in STEP_PRESETS:
        raise unknown("step-rule preset", preset, STEP_PRESETS)
    above, up, below, down, bounds = STEP_PRESETS[preset]
    _target(target)
    bounds = (bounds[0] if low is None else low, bounds[1] if high is None else high)
    _can_multiply(beta, bounds[0])

    def rule(state: KLState, kl: float) -> KLState:
        factor = up if kl > above * target else down if kl < below * target else 1.0
        return replace(state, base=state.base * factor)

    return RuleController(beta, unit, warmup_steps, bounds, rule)


def ziegler(
    beta: float = 0.15,
    target: float = 6.0,
    episodes_per_step: int = 1,
    horizon: int = 10_000,
    unit: str = "per_sequence",
    warmup_steps: int = 0,
    low: float = BOUNDS[0],
    high: float = BOUNDS[1],
) -> RuleController:
    """β ← β(1 + n/horizon · clip(KL/target − 1, ±0.2)) with n episodes per step (Ziegler et al. 1909.08593)."""
    gain = _positive("episodes_per_step", episodes_per_step) / _positive("horizon", horizon)
    _target(target)
    _can_multiply(beta, low)

    def rule(state: KLState, kl: float) -> KLState:
        error = min(max(kl / target - 1.0, -0.2), 0.2)
        return replace(state, base=state.base * (1.0 + gain * error))

    return RuleController(beta, unit, warmup_steps, (low, high), rule)


def dual_ascent(
    beta: float,
    target: float,
    learning_rate: float = 0.1,
    smoothing: float = 0.0,
    log_space: bool = True,
    unit: str = "per_token",
    warmup_steps: int = 0,
    low: float = 1e-6,
    high: float = 10.0,
) -> RuleController:
    """β as the multiplier of the constraint KL ≤ target: β ← [β + η(KL − ε)]₊, or log β ← log β + η(KL/ε − 1).

    `smoothing` replaces the KL by its exponential moving average. β integrates the error, so the lag of the average
    makes β overshoot.
    """
    _target(target)
    _positive("learning_rate", learning_rate)
    if not 0 <= smoothing < 1:
        raise KeelError(f"kl.controller.smoothing must be in [0, 1), got {smoothing}")
    if log_space:
        _can_multiply(beta, low)

    def rule(state: KLState, kl: float) -> KLState:
        mean = kl if state.smoothed is None else smoothing * state.smoothed + (1 - smoothing) * kl
        if log_space:
            exponent = min(max(learning_rate * (mean / target - 1.0), -1.0), 1.0)
            base = max(state.base, low) * math.exp(exponent)
        else:
            base = max(0.0, state.base + learning_rate * (mean - target))
        return replace(state, base=base, smoothed=mean)

    return RuleController(beta, unit, warmup_steps, (low, high), rule)


def pid(
    beta: float,
    target: float,
    proportional: float = 0.1,
    integral: float = 0.01,
    derivative: float = 0.01,
    unit: str = "per_token",
    warmup_steps: int = 0,
    low: float = 0.0,
    high: float = 10.0,
) -> RuleController:
    """β = β₀ + [Kp·e + Ki·Σe + Kd·(Δe)₊]₊ with e = KL/target − 1 (Stooke et al. 2020).

    Anti-windup: the integral is limited to the range between 0 and the value at which it alone gives the upper bound.
    """
    _target(target)
    for name, gain in (("proportional", proportional), ("integral", integral), ("derivative", derivative)):
        _not_negative(name, gain)
    largest = (high - beta) / integral if integral > 0 else 0.0

    def rule(state: KLState, kl: float) -> KLState:
        error = min(kl / target - 1.0, 1e9)  # finite for any KL
        rise = 0.0 if state.previous_error is None else max(0.0, error - state.previous_error)
        total = min(max(0.0, state.integral + error), max(0.0, largest))
        correction = max(0.0, proportional * error + integral * total + derivative * rise)
        return replace(state, base=beta + correction, integral=total, previous_error=error)

    return RuleController(beta, unit, warmup_steps, (low, high), rule)


CONTROLLERS: Mapping[str, Callable[..., BetaController]] = MappingProxyType(
    {
        "fixed": fixed,
        "warmup": warmup,
        "linear": linear,
        "cosine": cosine,
        "step": step_rule,
        "ziegler": ziegler,
        "dual": dual_ascent,
        "pid": pid,
    }
)


def get_controller(name: str) -> Callable[..., BetaController]:
    """The factory of the named controller, or of a user's own `module:attr`."""
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    if is_import_path(name):
        factory: Callable[..., BetaController] = import_object(name, "kl.controller.name")
        return factory
    raise unknown("controller", name, CONTROLLERS)


def controller_from_options(kl: KLTermOptions, episodes_per_step: int) -> BetaController:
    """The controller that the options name. `episodes_per_step` is passed to controllers with that parameter."""
    return _build(kl.controller.name, kl.beta, kl.controller.params, episodes_per_step=episodes_per_step)


def build_controller(name: str, beta: float, **parameters: Any) -> BetaController:
    """The named controller with its parameters. An unknown parameter raises an error that lists the valid ones."""
    return _build(name, beta, parameters)


def _build(name: str, beta: float, params: Mapping[str, Any], **offered: Any) -> BetaController:
    make = get_controller(name)
    offered = {key: value for key, value in offered.items() if key not in params}
    arguments = part_arguments(f"controller {name}", make, params, section="kl.controller", positional=1, **offered)
    controller = make_part(f"kl.controller.name={name}", make, beta, **arguments)
    if not isinstance(controller, BetaController):
        raise KeelError(
            f"kl.controller.name={name} returned a {type(controller).__name__}: it must have unit, init and update, as "
            "in keel.kl.BetaController"
        )
    return controller
