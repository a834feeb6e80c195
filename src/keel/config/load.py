"""From YAML, a mapping and dotted overrides to one checked `Config`; every failure is one line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from keel.base.errors import KeelError
from keel.base.moved import current_names
from keel.base.options import PluginOptions
from keel.base.redact import MASK, hide, remember
from keel.base.validation import model_of, no_such_option, one_line, option_names
from keel.config import aliases, text
from keel.config.checks import check
from keel.config.schema import Config
from keel.losses import LossOptions, get_loss

logger = logging.getLogger("keel")
Setting = tuple[str, Any, str]  # dotted name, value, where it was given


def load_config(source: Path | str | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a YAML file, a run's folder or a mapping, with overrides `kl.beta=0.01`.

    Options under the names of other trainers are taken, and a warning of the logger `keel` says what they became.
    """
    config, renamed = read_config(source, overrides)
    for note in renamed:
        logger.warning(note)
    return config


def read_config(
    source: Path | str | Mapping[str, Any] | Config, overrides: Sequence[str] = (), *, installed: bool = True
) -> tuple[Config, list[str]]:
    """Like `load_config`, with the sentences on renamed options as a list; `installed` as in `check`."""
    if isinstance(source, Config):
        data: Mapping[str, Any] = source.to_dict()
    else:
        data = source if isinstance(source, Mapping) else text.read(Path(source))
    where = "the configuration" if isinstance(source, Mapping | Config) else str(source)
    remember(data)
    layers = [list(_settings(data, where)), [leaf for item in overrides for leaf in _override(item)]]
    for name, value, _ in layers[1]:
        remember(value, name)
    _check_masks(layers)
    given = {aliases.normal(name): value for layer in layers for name, value, _ in layer}
    tree: dict[str, Any] = {}
    renamed: list[str] = []
    for layer in layers:
        native, notes = aliases.translate(layer, given, is_option)
        renamed += notes
        for name, value, origin in native:
            put(tree, name, value, origin)
    renamed += _choose_task(tree)
    # a section whose options are all commented out is null in YAML: it has its defaults
    config = validate(current_names({key: value for key, value in tree.items() if value is not None}))
    check(config, installed=installed)
    return config, [hide(note) for note in renamed]


def _check_masks(layers: Sequence[Sequence[Setting]]) -> None:
    """Refuse a configuration that was copied from where secrets are covered."""
    for name, value, origin in (setting for layer in layers for setting in layer):
        if MASK in str(value) and not name.endswith("prompt"):  # a prompt may say so itself
            raise KeelError(
                f"{name} in {origin} has {MASK}, which covers a secret where a configuration is shown: write $NAME "
                "there, and put the secret into the environment"
            )


def _choose_task(tree: dict[str, Any]) -> list[str]:
    """Data without a task are the task `dataset`; returns the sentence that says so."""
    task, data = tree.get("task") or {}, tree.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if path is None or not isinstance(task, dict) or "name" in task:
        return []
    tree["task"] = {"name": "dataset", **task}
    return [f"data.path={text.dump(path)} without a task: task.name=dataset, its rows are the problems"]


def validate(tree: Mapping[str, Any]) -> Config:
    """The model of plain data; types and ranges only, the first mistake as one line."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise KeelError(one_line(error, unknown_option)) from None
    own = get_loss(config.loss.loss_type).options.model_fields.keys() - LossOptions.model_fields.keys()
    for name in config.loss.params.keys() - own:
        raise unknown_option(f"loss.{name}", more=[f"loss.{option}" for option in own])
    return config


# ---------------------------------------------------------------------------------------------- settings


def _settings(data: Mapping[str, Any], where: str) -> Iterator[Setting]:
    """The leaves of a mapping as dotted settings; a part with parameters of its own keeps them as they are."""
    for key, value in leaves("", data):
        yield key, value, where


def leaves(prefix: str, data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Every option of nested mappings by its dotted name."""
    for key, value in data.items():
        if not isinstance(key, str):
            raise KeelError(f"the key {key!r} {'in ' + prefix.rstrip('.') if prefix else ''} must be a word")
        name = prefix + key
        if isinstance(value, Mapping) and value and not _is_leaf(name):
            yield from leaves(name + ".", value)
        else:
            yield name, value


def _is_leaf(name: str) -> bool:
    """Whether what lies below this name is a value of its part rather than options of ours."""
    parent, _, _ = name.rpartition(".")
    found = _find(parent) if parent else None
    return _takes_own(found) and name not in _NAMES


def _override(item: str) -> Iterator[Setting]:
    """One override; a section given whole is merged option by option, a part given whole replaces the old one."""
    name, equals, value = item.partition("=")
    name = name.strip().lstrip("+")
    if not equals or not name:
        raise KeelError(f"cannot read the override {item!r}: write name=value, such as kl.beta=0.01")
    parsed = text.parse(value, f"the value of {name}")
    found = _find(aliases.normal(name))
    if isinstance(parsed, dict) and parsed and found is not None and not issubclass(found, PluginOptions):
        for key, inner in leaves(name + ".", parsed):
            yield key, inner, "the command line"
    else:
        yield name, parsed, "the command line"


def put(tree: dict[str, Any], name: str, value: Any, origin: str) -> None:
    """Set a dotted name in nested dicts; a null section can be opened again by an option inside it."""
    *path, leaf = name.split(".")
    node = tree
    for depth, part in enumerate(path):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise KeelError(f"{name} cannot be set: {'.'.join(path[: depth + 1])} is {text.dump(child)}, not a section")
        node = child
    if isinstance(value, Mapping) and isinstance(node.get(leaf), dict) and not value:
        return  # an empty section changes nothing
    node[leaf] = dict(value) if isinstance(value, Mapping) else value


# ------------------------------------------------------------------------------------------------- names


def is_option(name: str) -> bool:
    """Whether a dotted name is an option of ours, or a parameter of a part that we name."""
    if name in _NAMES:
        return True
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found = _find(".".join(parts[:end]))
        if found is not None:
            return _takes_own(found)
    return False


def _takes_own(section: type[BaseModel] | None) -> bool:
    """Whether a section takes parameters of the part that it names."""
    return section is not None and section.model_config.get("extra") == "allow"


def _find(name: str) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Config
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return None
        model = model_of(model.model_fields[part].annotation)
    return model


_NAMES = option_names(Config)


def unknown_option(name: str, origin: str = "", more: Iterable[str] = ()) -> KeelError:
    """The error for a name that is no option, under our names (and `more`) or those of other trainers."""
    return no_such_option(name, [*_NAMES, *more], also=aliases.table(), origin=origin)
