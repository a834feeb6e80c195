"""Options under the names of other trainers, read from peers.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from keel.base.errors import KeelError
from keel.config import peer_values, text
from keel.config.peer_values import CONDITIONS, CONVERSIONS, Convert, Given, Options, Settings, data, full, group_size

Setting = tuple[str, Any, str]  # dotted name, value, where it was given
IsOption = Callable[[str], bool]
# Sections in which other trainers keep options of the policy, its rollouts and its training.
SECTIONS = frozenset(
    {"actor", "algo", "algorithm", "args", "checkpointing", "config", "generation", "grpo", "grpo_config", "loss_fn"}
    | {"hyperparameters", "kwargs", "optimizer", "peft", "policy", "ppo", "sampling", "sampling_params"}
    | {"train", "trainer", "training", "training_args"}
)
# Sections of what Keel does not have.
WITHOUT = {
    "critic": "GRPO has no critic, and rewards are not discounted",
    "reward_model": "rewards are functions, named in rewards: [{name, weight}]",
}


@dataclass(frozen=True)
class Alias:
    """One name: what it becomes, how its value is converted, and what differs.

    `target` is the option as the documentation shows it, empty where there is no counterpart. Without `convert` the
    value is taken as it is, or refused where there is no target. An empty result changes nothing, for the reason in
    `unneeded` where there is one.
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
        """The options that this name and value stand for."""
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
            raise KeelError(f"{self.name} is {text.dump(value)}: that makes no {self.target or 'sense'}") from None

    def _given(self, value: Any, settings: Settings) -> Given:
        return Given(self.name, self.target, self.reason, self.values, value, settings)

    def unread(self, value: Any, settings: Settings) -> str | None:
        """Where alone the option is read, if it is not read here; empty where that needs no words."""
        given = self._given(value, settings)
        return next((note for test, note in map(CONDITIONS.__getitem__, self.when) if not test(given)), None)


@cache
def tables() -> Mapping[str, list[Alias]]:
    """The aliases of each origin."""
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
    convert = CONVERSIONS.get(use) or (getattr(peer_values, use) if use else None)
    note = next((CONDITIONS[name][1] for name in conditions), "")
    row["target"] = row.pop("to", "")
    return {"note": note, **row, "convert": convert, "when": conditions, "unless": full(origin, unless)}


@cache
def table() -> dict[str, Alias]:
    """Every alias by name."""
    return {alias.name: alias for aliases in tables().values() for alias in aliases}


def defaults(origin: str) -> dict[str, Any]:
    """What a peer does where its file is silent, in general or beside a switch, as in "verl with vllm"."""
    peer = origin.partition(" ")[0]
    return {full(peer, name): value for name, value in data()["defaults"][origin].items()}


def find(name: str, is_option: IsOption) -> Alias | None:
    """The alias that a name stands for: by itself, without the sections before it, or in a section that is not its own.

    `kl_loss_coef` and `actor.kl_loss_coef` end verl's name, `grpo.beta` is `beta`, and `warmstart.lr` is the
    `learning_rate` of that section. What is an option here is never the end of another trainer's name.
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
    """A name without the sections of other trainers that it begins with."""
    section, _, rest = name.partition(".")
    return without_sections(rest) if rest and section in SECTIONS else name


def _named(name: str) -> Alias | None:
    """The alias of that name, or the one whose dotted name ends in it; a single word is too little of a name."""
    if name in table():
        return table()[name]
    if "." not in name and "_" not in name:
        return None
    rows = ((whole, alias) for whole, alias in table().items() if not whole.startswith("distillation."))  # named whole
    endings = [alias for whole, alias in rows if whole.endswith(f".{name}")]
    return endings[0] if len({alias.target for alias in endings}) == 1 else None


def by_name(given: Settings, is_option: IsOption) -> dict[str, Any]:
    """Settings under the names that the table has, which its conversions look for."""
    aliases = {name: find(name, is_option) for name in map(normal, given)}
    values = {normal(name): value for name, value in given.items()}
    return {name if alias is None else alias.name: values[name] for name, alias in aliases.items()}


def translate(layer: Sequence[Setting], settings: Settings, is_option: IsOption) -> tuple[list[Setting], list[str]]:
    """A layer of settings under Keel's names, and one sentence for each that had another name.

    Two settings of one layer that disagree about an option are refused; a later layer overrides an earlier one.
    """
    result: dict[str, Setting] = {}
    given: dict[str, tuple[str, Any]] = {}
    notes = []
    for raw_name, value, origin in layer:
        name = normal(raw_name)
        alias = find(name, is_option)
        if alias is not None and is_option(name) and (value is None or isinstance(value, Mapping)):
            alias = None  # a section of Keel's that shares its name with another trainer's option
        options = {name: value} if alias is None else alias.apply(value, settings)
        for target, converted in options.items():
            if target in result and result[target][1] != converted:
                earlier, other = given[target]
                raise disagree(target, (earlier, text.dump(other)), (name, text.dump(value)))
            result[target] = (target, converted, origin)
            given[target] = (name, value)
        if alias is not None and options != {name: value}:
            notes.append(_sentence(name, value, options, alias, settings) + _counted(options, settings))
    return list(result.values()), notes


def normal(name: str) -> str:
    """A flag's name as an option's: leading dashes go, inner ones are underscores."""
    return name.lstrip("-").replace("-", "_")


def disagree(target: str, first: tuple[str, str], second: tuple[str, str]) -> KeelError:
    """The refusal of two settings, each (name, value as shown), that give one option two values."""
    if first[0] == second[0]:
        return KeelError(f"{first[0]} is given twice, as {first[1]} and as {second[1]}: keep one")
    return KeelError(f"{first[0]}={first[1]} and {second[0]}={second[1]} disagree about {target}: keep one")


def _counted(options: Options, settings: Settings) -> str:
    """What a batch of other trainers' units comes to in completions."""
    prompts = options.get("rollout.prompts_per_step")
    if not isinstance(prompts, int):
        return ""
    group = group_size(settings)
    return f" ({prompts} prompts × {group} completions = {prompts * group} completions a step)"


def _sentence(name: str, value: Any, options: Options, alias: Alias, settings: Settings) -> str:
    if options:
        return f"{name} became " + " ".join(f"{key}={text.dump(item)}" for key, item in options.items())
    if not alias.target:
        return f"{name}={text.dump(value)} changes nothing: {alias.note}"
    default = alias.unneeded or "what was given beside it leaves it without effect, or it is the default"
    return f"{name}={text.dump(value)} ({alias.target}) changes nothing: {alias.unread(value, settings) or default}"
