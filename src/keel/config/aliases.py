"""Options under the names of other trainers: one table of data that loading and docs/migrate.md both read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from keel.base.errors import KeelError
from keel.config import text
from keel.config.alias import Alias, Options, Settings
from keel.config.aliases_keel import KEEL
from keel.config.aliases_openrlhf import CRITIC, OPENRLHF
from keel.config.aliases_other import OTHER
from keel.config.aliases_trl import TRL
from keel.config.aliases_verl import VERL

Setting = tuple[str, Any, str]  # dotted name, value, where it was given
IsOption = Callable[[str], bool]
# Sections in which other trainers keep options of the policy, its rollouts and its training.
SECTIONS = frozenset(
    {"actor", "algo", "algorithm", "args", "checkpointing", "config", "generation", "grpo", "grpo_config", "loss_fn"}
    | {"hyperparameters", "kwargs", "optimizer", "peft", "policy", "ppo", "sampling", "sampling_params"}
    | {"train", "trainer", "training", "training_args"}
)
# Sections of what Keel does not have.
WITHOUT = {"critic": CRITIC, "reward_model": "rewards are functions, named in rewards: [{name, weight}]"}


@cache
def tables() -> tuple[tuple[str, list[Alias]], ...]:
    """The aliases of each origin."""
    return ("Keel", KEEL), ("TRL", TRL), ("verl", VERL), ("OpenRLHF", OPENRLHF), ("other", OTHER)


@cache
def table() -> dict[str, Alias]:
    """Every alias by name."""
    return {alias.name: alias for _, aliases in tables() for alias in aliases}


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
    endings = [alias for full_name, alias in table().items() if full_name.endswith(f".{name}")]
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
            notes.append(_sentence(name, value, options, alias))
    return list(result.values()), notes


def normal(name: str) -> str:
    """A flag's name as an option's: leading dashes go, inner ones are underscores."""
    return name.lstrip("-").replace("-", "_")


def disagree(target: str, first: tuple[str, str], second: tuple[str, str]) -> KeelError:
    """The refusal of two settings, each (name, value as shown), that give one option two values."""
    if first[0] == second[0]:
        return KeelError(f"{first[0]} is given twice, as {first[1]} and as {second[1]}: keep one")
    return KeelError(f"{first[0]}={first[1]} and {second[0]}={second[1]} disagree about {target}: keep one")


def _sentence(name: str, value: Any, options: Options, alias: Alias) -> str:
    if not options:
        no_effect = alias.unneeded or "what was given beside it leaves it without effect, or it is the default"
        option = f" ({alias.target})" if alias.target else ""
        return f"{name}={text.dump(value)}{option} changes nothing: {no_effect if alias.target else alias.note}"
    return f"{name} became " + " ".join(f"{key}={text.dump(item)}" for key, item in options.items())
