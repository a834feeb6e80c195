"""Build a checked `Config` from YAML or a mapping and dotted overrides. Every error is one line.

`choose` finds the configuration among the command-line arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from keel.base.errors import KeelError
from keel.base.options import (
    Options,
    PluginOptions,
    accepts_name,
    model_of,
    one_line,
    option_names,
    unknown_option_error,
)
from keel.base.parts import options_class, parameters_of
from keel.base.redact import MASK, redact_text, register_secrets
from keel.config import peers, text
from keel.config.checks import check
from keel.config.peers import Setting
from keel.config.schema import Config
from keel.losses import LossOptions, get_loss

logger = logging.getLogger("keel")


def load_config(source: Path | str | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """Load and check the configuration of a YAML file, a run folder or a mapping, with overrides like `kl.beta=0.01`.

    Option names of other trainers are translated; the logger `keel` warns with the new names.
    """
    config, renamed = read_config(source, overrides)
    for note in renamed:
        logger.warning(note)
    return config


def read_config(
    source: Path | str | Mapping[str, Any] | Config, overrides: Sequence[str] = (), *, installed: bool = True
) -> tuple[Config, list[str]]:
    """Like `load_config`, but return the notes on renamed options as a list. `installed` is as in `check`."""
    if isinstance(source, Config):
        data: Mapping[str, Any] = source.to_dict()
    else:
        data = source if isinstance(source, Mapping) else text.read(Path(source))
    origin = "the configuration" if isinstance(source, Mapping | Config) else str(source)
    register_secrets(data)
    from_source = [(name, value, origin) for name, value in flatten_options("", data)]
    layers = [from_source, [setting for override in overrides for setting in _override(override)]]
    for name, value, _ in layers[1]:
        register_secrets(value, name)
    _check_masks(layers)
    settings = peers.by_name({name: value for layer in layers for name, value, _ in layer}, is_option)
    tree: dict[str, Any] = {}
    renamed: list[str] = []
    for layer in layers:
        native, notes = peers.translate(layer, settings, is_option)
        renamed += notes
        renamed += _drop_parameters(tree, native)
        for name, value, _ in native:
            set_option(tree, name, value)
    renamed += _choose_task(tree)
    # a section whose options are all commented out is null in YAML; it gets its defaults
    given = {key: value for key, value in tree.items() if value is not None}
    config = validate(given, [name for layer in layers for name, _, _ in layer])
    check(config, installed=installed)
    return config, [redact_text(note) for note in renamed]


def _check_masks(layers: Sequence[Sequence[Setting]]) -> None:
    """Refuse a configuration that was copied from output with masked secrets."""
    for name, value, origin in (setting for layer in layers for setting in layer):
        if MASK in str(value) and not name.endswith("prompt"):  # a prompt may contain the mask as text
            raise KeelError(
                f"{name} in {origin} contains {MASK}, the mask of a secret in printed configurations: write $NAME and "
                "set the environment variable"
            )


def _drop_parameters(tree: dict[str, Any], layer: Sequence[Setting]) -> list[str]:
    """Remove the parameters of plug-ins that a later layer of settings replaces, and return a note for each plug-in.

    The new plug-in starts from its own defaults and the values of that layer.
    """
    notes = []
    for option, value, _ in layer:
        path, _, leaf = option.rpartition(".")
        section, given = _section(path) if path else None, _at(tree, path)
        if (
            section is None
            or not issubclass(section, Options)
            or leaf != section.named_by
            or not isinstance(given, dict)
        ):
            continue
        before = given.get(leaf, section.model_fields[leaf].default)
        fields = section.model_fields
        own = [
            name
            for name, old in given.items()
            if name not in fields or (name in section.of_parts and old != fields[name].default)
        ]
        if value == before or not own:
            continue
        left_out = ", ".join(f"{path}.{name}={text.dump(given.pop(name))}" for name in own)
        notes.append(f"{option}={text.dump(value)} drops the parameters of {before}: {left_out}")
    return notes


def _at(tree: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name in nested mappings, or None."""
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _choose_task(tree: dict[str, Any]) -> list[str]:
    """Select the task `dataset` if data.path is given without a task, and return a note about it."""
    task, data = tree.get("task") or {}, tree.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if path is None or not isinstance(task, dict) or "name" in task:
        return []
    tree["task"] = {"name": "dataset", **task}
    return [f"data.path={text.dump(path)} without a task: using task.name=dataset"]


def validate(tree: Mapping[str, Any], given: Sequence[str] = ()) -> Config:
    """Check types and ranges of plain data. The first error is one line that uses the name the user wrote."""

    def unknown(name: str) -> KeelError:
        inside = [option for option in given if option.startswith(f"{name}.") and option.isprintable()]
        task = tree.get("task")
        task_name = task.get("name") if isinstance(task, Mapping) else None
        given_name = inside[0] if inside and not is_option(name) else name
        return unknown_option(given_name, task=task_name if isinstance(task_name, str) else Config().task.name)

    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise KeelError(one_line(error, unknown, instead=_instead)) from None
    declared = get_loss(config.loss.loss_type).options.model_fields.keys() - LossOptions.model_fields.keys()
    for name in config.loss.params.keys() - declared:
        raise unknown_option(f"loss.{name}", more=[f"loss.{option}" for option in declared])
    return config


# ---------------------------------------------------------------------------------------------- settings


def flatten_options(prefix: str, data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to (dotted name, value); the values of a plug-in's parameters are not flattened."""
    for key, value in data.items():
        if not isinstance(key, str):
            raise KeelError(f"the key {key!r} {'in ' + prefix.rstrip('.') if prefix else ''} must be a string")
        name = prefix + key
        if isinstance(value, Mapping) and value and not _is_leaf(name):
            yield from flatten_options(name + ".", value)
        else:
            yield name, value


def _is_leaf(name: str) -> bool:
    """Whether the mapping at this name is a parameter of a plug-in, not a section of options."""
    parent, _, leaf = name.rpartition(".")
    section = _section(parent) if parent else None
    if section is None:
        return False
    if leaf in section.model_fields:
        return accepts_name(section.model_fields[leaf].annotation)
    return _takes_parameters(section)


def _override(override: str) -> Iterator[Setting]:
    """Parse one override. A mapping is merged into a section option by option, but replaces a plug-in's section."""
    name, equals, value = override.partition("=")
    name = name.strip().lstrip("+")
    if not equals or not name:
        raise KeelError(f"cannot read the override {override!r}: write name=value, such as kl.beta=0.01")
    parsed = text.parse(value, f"the value of {name}")
    section = _section(peers.normal(name))
    if isinstance(parsed, dict) and parsed and section is not None and not issubclass(section, PluginOptions):
        for key, inner in flatten_options(name + ".", parsed):
            yield key, inner, "the command line"
    else:
        yield name, parsed, "the command line"


def set_option(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in nested dicts; null sections on the path become dicts."""
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
    """Whether a dotted name is an option or a parameter of a plug-in."""
    if name in _NAMES:
        return True
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        section = _section(".".join(parts[:end]))
        if section is not None:
            return _takes_parameters(section)
    return False


def _takes_parameters(section: type[BaseModel] | None) -> bool:
    """Whether a section accepts parameters of the plug-in that it names."""
    return section is not None and section.model_config.get("extra") == "allow"


def _section(name: str) -> type[BaseModel] | None:
    """The options class at a dotted name, or None."""
    model: type[BaseModel] | None = Config
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return None
        model = model_of(model.model_fields[part].annotation)
    return model


_NAMES = option_names(Config)


def _instead(name: str, value: Any) -> str:
    """Advice if a value is given where a section is expected: set the section's first option if the value fits."""
    item = _items(name.partition("[")[0])
    section = item or _section(name)
    if section is None or not section.model_fields:  # the section has no options to suggest
        return ""
    first = next(iter(section.model_fields))
    options = value if isinstance(value, Mapping) else {first: value}
    try:
        section.model_validate(options)
    except ValidationError:
        return f"expected a {'list of sections' if item else 'section'}, with {', '.join(section.model_fields)}"
    if item is None:
        return f"write {name}.{first}={text.dump(value)}"
    return f"write {text.dump(options)}" if "[" in name else f"write {name}={text.dump([options])}"


def _items(name: str) -> type[BaseModel] | None:
    """The options class of the items of a list of sections, or None."""
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return model_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def _task_parameters(task: str) -> list[str]:
    """The parameter names of a task; empty if the task cannot be imported."""
    from keel.envs.registry import get_task  # slow to import

    try:
        factory = get_task(task)
    except KeelError:
        return []
    declared = options_class(factory)
    return list((parameters_of(factory) or {}) if declared is None else declared.model_fields)


def _tasks_with(parameter: str) -> list[str]:
    """The built-in tasks with this parameter."""
    from keel.envs.registry import TASKS

    return [task for task in TASKS if parameter in _task_parameters(task)]


def unknown_option(name: str, origin: str = "", more: Iterable[str] = (), task: str = "") -> KeelError:
    """The error for an unknown option, with the closest names of Keel (and `more`) or of other trainers.

    `task` is the configured task; its parameters are suggested too.
    """
    where = f" in {origin}" if origin else ""
    section, _, rest = name.partition(".")
    if rest and section in peers.UNSUPPORTED_SECTIONS:
        return KeelError(f"unknown option {name}{where}: {peers.UNSUPPORTED_SECTIONS[section]}")
    known = [*_NAMES, *more, *(f"task.{parameter}" for parameter in (_task_parameters(task) if task else ()))]
    alias = peers.find(rest, is_option) if "_" in rest else None
    if alias is not None and alias.target:
        same = [option for option in known if option.endswith(f".{rest}") and option != alias.target]
        return KeelError(f"unknown option {name}{where}: did you mean {' or '.join([alias.target, *same[:2]])}?")
    leaf = name.rpartition(".")[2]
    is_leaf = any(option.rpartition(".")[2] == leaf for option in known)
    if section not in Config.model_fields and not is_leaf and (tasks := _tasks_with(leaf)):
        return KeelError(f"unknown option {name}{where}: did you mean task.{leaf} (of {', '.join(tasks)})?")
    others = {other: alias.target for other, alias in peers.table().items() if alias.target}
    return unknown_option_error(name, known, also=others, origin=origin, meant=peers.without_sections(name))


def qualify_task_option(override: str) -> str:
    """Prefix an override with `task.` if its name has no section of the configuration."""
    key = override.lstrip("+").partition("=")[0]
    return override if key.partition(".")[0] in Config.model_fields else f"task.{override}"


def _names_data(override: str) -> bool:
    name = peers.normal(override.partition("=")[0])
    alias = peers.table().get(name)
    return name == "data.path" or (alias is not None and alias.target == "data.path")


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / "config.yaml").is_file()


def choose(paths: Sequence[str], *, resume: bool = False, overrides: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return the configuration's path and the overrides that it implies.

    Without a path this is `default`, or `own_data` if the overrides name data, since the warm start of `default` is
    for its own task. `--resume RUN` keeps writing to the folder RUN, even if that folder was moved, is a link, or is
    given as `.`.
    """
    if len(paths) > 1 + resume:
        extra = paths[1 + resume]
        raise KeelError(f"{extra!r} is a second configuration: give one, and write options as name=value")
    if not paths:
        return "own_data" if any(map(_names_data, overrides)) else "default", []
    run = Path(paths[-1]).expanduser()
    if not resume:
        return paths[0], []
    if is_run(run):
        folder = run.resolve() if run.is_symlink() or run.name in ("", "..") else run
        return paths[0], [f"run.dir={text.dump(str(folder.parent))}", f"run.name={text.dump(folder.name)}"]
    if len(paths) == 2 or run.is_dir():
        raise KeelError(f"nothing to resume at {run}: the folder has no config.yaml; give a run folder")
    return paths[0], []
