"""Translate option names of other trainers to Keel's, from the tables in peers.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from keel.base import yaml_text as text
from keel.base.errors import KeelError
from keel.config import peer_conversions, peer_values
from keel.config.peer_conversions import gradient
from keel.config.peer_values import (
    CONDITIONS,
    ESTIMATOR,
    IN_LOSS,
    Convert,
    Given,
    Options,
    Settings,
    choice,
    data,
    full,
    group_size,
    is_positive,
)

Setting = tuple[str, Any, str]  # dotted name, value, where it was given
IsOption = Callable[[str], bool]
# Section names of other trainers for policy, rollout and training options.
SECTIONS = frozenset(
    {"actor", "algo", "algorithm", "args", "checkpointing", "config", "generation", "grpo", "grpo_config", "loss_fn"}
    | {"hyperparameters", "kwargs", "optimizer", "peft", "policy", "ppo", "sampling", "sampling_params"}
    | {"train", "trainer", "training", "training_args"}
)
# Sections of other trainers without a counterpart in Keel.
UNSUPPORTED_SECTIONS = {
    "critic": "GRPO has no critic and no discount",
    "reward_model": "rewards are functions, named in rewards: [{name, weight}]",
}

# Short conversions; the longer ones are functions in MODULES.
CONVERSIONS: Mapping[str, Convert] = {
    "unchanged": lambda given: given.to(given.value),
    "is_set": lambda given: given.to(bool(given.value)),
    "section": lambda given: given.to({}),
    "null_is_zero": lambda given: given.to(0.0 if given.value is None else given.value),
    "positive_or_zero": lambda given: given.to(given.value if is_positive(given) else 0),
    "max_zero": lambda given: given.to(max(0, given.value) if isinstance(given.value, int) else given.value),
    "kl_loss_type": lambda given: {**choice(given), **({} if given.value == "full" else gradient(given))},
    "kl_estimator": lambda given: {**choice(given), **(gradient(given) if given.get(IN_LOSS) is True else {})},
    "norm_adv": lambda given: {} if (is_on := choice(given)) and given.get(ESTIMATOR) == "rloo" else is_on,
    "clip_low_high": lambda given: dict(zip(("loss.epsilon", "loss.epsilon_high"), given.value, strict=True)),
    "pass_at": lambda given: given.to([1] if given.value == 1 else [1, given.value]),
    "vllm_engines": lambda given: given.to("vllm" if given.value else "native"),
    "betas": lambda given: given.to([given.first("adam_beta1", default=0.9), given.first("adam_beta2", default=0.999)]),
    "truncation": lambda given: given.to("drop" if given.get("data.filter_overlong_prompts") is True else given.value),
}
MODULES = (peer_values, peer_conversions)


@dataclass(frozen=True)
class Alias:
    """One option name of another trainer: its Keel option, the conversion of its value, and differences.

    `target` is the option as the documentation shows it, empty if there is no counterpart. Without `convert` the value
    is used unchanged, or refused if there is no target. An empty result of `apply` means that nothing has to be set;
    `unneeded` gives the reason.
    """

    name: str
    target: str = ""
    note: str = ""
    convert: Convert | None = None
    unneeded: str = ""
    reason: str = ""  # why a value is refused
    values: Any = ()
    refuse: Mapping[Any, str] = field(default_factory=dict)
    also: Options = field(default_factory=dict)
    when: tuple[str, ...] = ()
    unless: str = ""

    def apply(self, value: Any, settings: Settings) -> Options:
        """The Keel options for this name and value."""
        given = self._given(value, settings)
        if not self.target and self.convert is None:
            raise KeelError(f"{self.name} has no counterpart: {self.note}")
        try:
            if given.get(self.unless) is not None or self.unread(value, settings) is not None:
                return {}
            if isinstance(value, str | None) and value in self.refuse:
                raise given.refused(self.refuse[value])
            return {**self.also, **(self.convert or CONVERSIONS["unchanged"])(given)}
        except KeelError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            target = f" for {self.target}" if self.target else ""
            raise KeelError(f"{self.name} is {text.dump(value)}: this is not a valid value{target}") from None

    def _given(self, value: Any, settings: Settings) -> Given:
        return Given(self.name, self.target, self.reason, self.values, value, settings)

    def unread(self, value: Any, settings: Settings) -> str | None:
        """None if the other trainer reads the option here, else the condition under which it does (may be empty)."""
        given = self._given(value, settings)
        return next((note for test, note in map(CONDITIONS.__getitem__, self.when) if not test(given)), None)


@cache
def tables() -> Mapping[str, list[Alias]]:
    """The aliases of each trainer."""
    found: dict[str, list[Alias]] = {origin: [] for origin in ("Keel", "TRL", "verl", "OpenRLHF", "other")}

    def add(origin: str, names: str, **row: Any) -> None:
        found[origin] += [Alias(full(origin, name), **row) for name in names.split()]

    for option, names_of in data()["same"].items():
        for origin, names in names_of.items():
            add(origin, names, target=option)
    for origin, rows in data()["converted"].items():
        for names, row in rows.items():
            add(origin, names, **_converted(origin, **row))
    for origin, reasons in data()["needless"].items():
        for names, why in reasons.items():
            for name, _, fits in (word.partition("=") for word in names.split()):
                add(origin, name, **_needless(why, [text.parse(fits, name)] if fits else []))
    for row in data()["single"]:
        for origin in found.keys() & row.keys():
            add(origin, row[origin], **{**_needless(row["why"], [1, None]), "note": f"refused above 1: {row['why']}"})
    for origin, reasons in data()["refused"].items():
        for names, why in reasons.items():
            if isinstance(why, str):
                add(origin, names, note=why)
            else:
                target, advice = why
                note = f"refused: {advice.replace('{value}', '…')}"
                add(origin, names, target=target, note=note, reason=advice, convert=peer_values.refuse)
    return found


def _needless(why: str, fits: list[Any]) -> dict[str, Any]:
    unneeded = f"refused unless {' or '.join(map(text.dump, fits))}" if fits else ""
    return {"note": why, "reason": why, "values": fits, "convert": peer_values.needless, "unneeded": unneeded}


def _converted(origin: str, *, use: str = "", when: str = "", unless: str = "", **row: Any) -> dict[str, Any]:
    conditions = tuple(when.split())
    if "only" in row:
        return {**_needless(row["note"], row["only"]), "when": conditions}
    use = use or ("choice" if "values" in row else "unchanged" if {*row} - {"to", "note"} or when or unless else "")
    functions = (getattr(module, use) for module in MODULES if hasattr(module, use))
    convert = CONVERSIONS.get(use) or (next(functions) if use else None)
    note = next((CONDITIONS[name][1] for name in conditions), "")
    row["target"] = row.pop("to", "")
    return {"note": note, **row, "convert": convert, "when": conditions, "unless": full(origin, unless)}


@cache
def table() -> dict[str, Alias]:
    """Every alias by name."""
    return {alias.name: alias for aliases in tables().values() for alias in aliases}


def defaults(origin: str) -> dict[str, Any]:
    """The defaults of another trainer, in general or with a switch, as in "verl with vllm"."""
    peer = origin.partition(" ")[0]
    return {full(peer, name): value for name, value in data()["defaults"][origin].items()}


def find(name: str, is_option: IsOption) -> Alias | None:
    """Find the alias of a name: the name itself, without its leading sections, or inside a Keel section.

    `kl_loss_coef` and `actor.kl_loss_coef` are suffixes of verl's name, `grpo.beta` is `beta`, and `warmstart.lr` is
    `warmstart.learning_rate`. A Keel option never matches as a suffix.
    """
    if name in table():
        return table()[name]
    if is_option(name):
        return None
    if (alias := _named(name)) is not None:
        return alias
    parts = name.split(".")
    for cut in range(1, len(parts)):
        section, alias = ".".join(parts[:cut]), _named(".".join(parts[cut:]))
        if alias is None:
            continue
        if SECTIONS.issuperset(parts[:cut]):
            return alias
        same_section = f"{section}.{alias.target.rpartition('.')[2]}"
        if same_section == alias.target:
            return alias
        if is_option(same_section) and alias.convert is None:
            return Alias(name, same_section)
    return None


def without_sections(name: str) -> str:
    """Strip leading sections of other trainers from a name."""
    section, _, rest = name.partition(".")
    return without_sections(rest) if rest and section in SECTIONS else name


def _named(name: str) -> Alias | None:
    """The alias with this name or, for names with `.` or `_`, with this suffix if it is unambiguous."""
    if name in table():
        return table()[name]
    if "." not in name and "_" not in name:
        return None
    # names in `distillation` must be given in full
    rows = ((whole, alias) for whole, alias in table().items() if not whole.startswith("distillation."))
    endings = [alias for whole, alias in rows if whole.endswith(f".{name}")]
    return endings[0] if len({alias.target for alias in endings}) == 1 else None


def by_name(given: Settings, is_option: IsOption) -> dict[str, Any]:
    """Settings by the canonical names of the table, which conversions look up."""
    aliases = {name: find(name, is_option) for name in map(normal, given)}
    values = {normal(name): value for name, value in given.items()}
    return {name if alias is None else alias.name: values[name] for name, alias in aliases.items()}


def translate(layer: Sequence[Setting], settings: Settings, is_option: IsOption) -> tuple[list[Setting], list[str]]:
    """Translate a layer of settings to Keel's names, with one note for each translated name.

    Conflicting settings in one layer raise an error; a later layer overrides an earlier one.
    """
    result: dict[str, Setting] = {}
    given: dict[str, tuple[str, Any]] = {}
    notes = []
    for raw_name, value, origin in layer:
        name = normal(raw_name)
        alias = find(name, is_option)
        if alias is not None and is_option(name) and (value is None or isinstance(value, Mapping)):
            alias = None  # a Keel section with the name of another trainer's option
        options = {name: value} if alias is None else alias.apply(value, settings)
        for target, converted in options.items():
            if target in result and result[target][1] != converted:
                earlier, other = given[target]
                raise conflict_error(target, (earlier, text.dump(other)), (name, text.dump(value)))
            result[target] = (target, converted, origin)
            given[target] = (name, value)
        if alias is not None and options != {name: value}:
            notes.append(_sentence(name, value, options, alias, settings) + _counted(options, settings))
    return list(result.values()), notes


def normal(name: str) -> str:
    """Normalise a flag: strip leading dashes and replace inner ones by underscores."""
    return name.lstrip("-").replace("-", "_")


def conflict_error(target: str, first: tuple[str, str], second: tuple[str, str]) -> KeelError:
    """The error for two settings, each (name, shown value), that give one option different values."""
    if first[0] == second[0]:
        return KeelError(f"{first[0]} is given twice, as {first[1]} and as {second[1]}: keep one")
    return KeelError(f"{first[0]}={first[1]} and {second[0]}={second[1]} conflict: both set {target}; keep one")


def _counted(options: Options, settings: Settings) -> str:
    """The size of a translated batch in completions."""
    prompts = options.get("rollout.prompts_per_step")
    if not isinstance(prompts, int):
        return ""
    group = group_size(settings)
    return f" ({prompts} prompts × {group} completions = {prompts * group} completions a step)"


def _sentence(name: str, value: Any, options: Options, alias: Alias, settings: Settings) -> str:
    if options:
        return f"{name} became " + " ".join(f"{key}={text.dump(item)}" for key, item in options.items())
    if not alias.target:
        return f"{name}={text.dump(value)} has no effect: {alias.note}"
    default = alias.unneeded or "it is the default, or other settings disable it"
    return f"{name}={text.dump(value)} ({alias.target}) has no effect: {alias.unread(value, settings) or default}"
