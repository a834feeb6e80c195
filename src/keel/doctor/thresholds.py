"""Alarm thresholds with unit, source and reason. They can be overridden; less sensitive ones are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, unknown
from keel.base.yaml_text import load_package_yaml
from keel.trainer.options import GuardLimits

if TYPE_CHECKING:
    from keel.config import Config


@dataclass(frozen=True)
class Threshold:
    """An alarm threshold; `alarm` is above or below. `over` and `at_least` bound its valid values."""

    name: str
    value: float
    unit: str
    source: str
    reason: str
    alarm: str = "above"
    over: float = -math.inf
    at_least: float = -math.inf

    def loosened_to(self, value: float) -> bool:
        """Whether this value makes the alarm less sensitive."""
        return value > self.value if self.alarm == "above" else value < self.value


@dataclass(frozen=True)
class Thresholds:
    """All thresholds. `thresholds["kl_explosion"]` is the value in force."""

    table: Mapping[str, Threshold]
    shipped: Mapping[str, Threshold]

    def __getitem__(self, name: str) -> float:
        if name not in self.table:
            raise unknown("threshold", name, self.table)
        return self.table[name].value

    @property
    def raised(self) -> tuple[str, ...]:
        """One sentence for each alarm that is less sensitive than the default."""
        return tuple(
            f"threshold {name} {'raised' if shipped.alarm == 'above' else 'lowered'} from {shipped.value:g} "
            f"to {self.table[name].value:g} ({shipped.unit}): this alarm is less sensitive than the default"
            for name, shipped in self.shipped.items()
            if shipped.loosened_to(self.table[name].value)
        )


@cache
def shipped_thresholds() -> Mapping[str, Threshold]:
    """The default thresholds from thresholds.yaml by name. Rows without a value use the trainer's GuardLimits."""
    rows, limits = load_package_yaml("keel.doctor", "thresholds.yaml"), asdict(GuardLimits())
    values = {name: float(row.pop("value") if "value" in row else limits[name]) for name, row in rows.items()}
    return {name: Threshold(name, values[name], **row) for name, row in rows.items()}


def load_thresholds(overrides: Mapping[str, Any] | Sequence[str] = ()) -> Thresholds:
    """The defaults with overrides: a mapping name → value, or texts `name=value`."""
    return _overridden(shipped_thresholds(), _parsed(overrides))


def thresholds_of(config: Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] = ()) -> Thresholds:
    """The thresholds of a run, for guards, doctor and report.

    `config` is a configuration as plain data. Its `guards.grad_spike` and `doctor.thresholds` override the defaults.
    `overrides` take precedence over both.
    """
    guards, doctor = (_section(config, name) for name in ("guards", "doctor"))
    guard_values = {name: guards[name] for name in ("grad_spike",) if name in guards}
    base = _overridden(shipped_thresholds(), guard_values).table
    return _overridden(base, {**_section(doctor, "thresholds"), **_parsed(overrides)})


def check_thresholds(config: Config) -> None:
    """Raise an error for unknown or non-numeric thresholds in a configuration, or if `guards` sets another value."""
    given = config.doctor.thresholds.params
    thresholds = load_thresholds(given)
    for name in given.keys() & type(config.guards).model_fields.keys():
        guard, default = getattr(config.guards, name), type(config.guards).model_fields[name].default
        if guard not in (default, thresholds[name]):
            raise KeelError(
                f"guards.{name} is {guard:g} and doctor.thresholds.{name} is {thresholds[name]:g}: both set the same "
                "threshold, give one of them"
            )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _overridden(shipped: Mapping[str, Threshold], overrides: Mapping[str, Any]) -> Thresholds:
    table = dict(shipped)
    for name, value in overrides.items():
        if name not in shipped:
            raise unknown("threshold", name, shipped)
        table[name] = replace(shipped[name], value=_number(shipped[name], value))
    return Thresholds(table, shipped)


def _parsed(overrides: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    """Convert texts `name=value` to a mapping; a mapping is returned unchanged."""
    if isinstance(overrides, Mapping):
        return overrides
    for override in overrides:
        if "=" not in override:
            raise KeelError(f"threshold {override!r} is not name=value, such as kl_over_budget=0.4")
    return {name.strip(): value.strip() for name, _, value in (override.partition("=") for override in overrides)}


def _number(threshold: Threshold, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise KeelError(f"threshold {threshold.name} must be a finite number, not {value!r}")
    if number <= threshold.over:
        raise KeelError(f"threshold {threshold.name} is {number:g}: it must be above {threshold.over:g}")
    if number < threshold.at_least:
        raise KeelError(f"threshold {threshold.name} is {number:g}: it must be at least {threshold.at_least:g}")
    return number
