"""A configuration as text: read it from YAML files, print it as YAML that loads to the same configuration.

`resolved` gives the effective values of `null` and `auto`, `plugin_options` the options that a plug-in declares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from keel.base.errors import KeelError
from keel.base.options import Options, read_options
from keel.base.parts import options_class
from keel.base.redact import masked
from keel.base.yaml_text import dump, parse
from keel.config.checks import kl_pairing, kl_terms
from keel.config.schema import Config, plain
from keel.envs.options import TaskOptions
from keel.kl import get_controller
from keel.kl.options import ControllerOptions
from keel.losses import LossOptions, declared_options, loss_defaults
from keel.reference.kinds import get_reference
from keel.reference.options import ReferenceOptions
from keel.rollout.options import EngineOptions


def read(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file or a run folder."""
    path = find(path.expanduser())
    if path.is_dir():
        config = path / "config.yaml"
        if not config.is_file():
            raise KeelError(f"{path} is a folder without a config.yaml: give a YAML file or a run folder")
        path = config
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeelError(f"no configuration at {path}: check the path{_neighbours(path)}") from None
    except UnicodeDecodeError:
        raise KeelError(f"{path} is not a UTF-8 text file: give a YAML configuration") from None
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from None
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise KeelError(
            f"{path} contains a {type(data).__name__}: a configuration is a mapping such as 'kl: {{beta: 0.01}}'"
        )
    return data


_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")  # installed, or in a clone


def find(path: Path) -> Path:
    """The path itself, or the shipped configuration with this name: `default` is configs/default.yaml."""
    if path.exists() or not _may_be_shipped(path):
        return path
    shipped = (folder / f"{path.name}.yaml" for folder in _SHIPPED)
    return next((file for file in shipped if file.is_file()), path)


def _may_be_shipped(path: Path) -> bool:
    return not path.suffix and len(path.parts) == 1


def _neighbours(path: Path) -> str:
    """The configurations with a similar name: YAML files of the same folder, and shipped ones for a plain name."""
    named = {file.stem: str(file) for file in _yaml_files(path.parent)}
    if _may_be_shipped(path):
        named = {**{file.stem: file.stem for folder in _SHIPPED for file in _yaml_files(folder)}, **named}
    similar = [named[stem] for stem in get_close_matches(path.stem, named)]
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.y*ml"))
    except OSError:
        return []


def absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of data files absolute, so that a run can be resumed from any folder.

    Paths that do not exist (names on a hub) are left unchanged.
    """
    resolved = copy.deepcopy(settings)
    warmstart = resolved.get("warmstart") or {}
    evaluated = (resolved.get("eval") or {}).get("tasks") or ()
    tasks = [
        task for task in (resolved.get("task"), *evaluated, *(warmstart.get("task") or ())) if isinstance(task, dict)
    ]
    sections = [resolved.get("data"), warmstart, *tasks, *(task.get("data") for task in tasks)]
    for section in sections:
        for name in ("path", "eval_path"):
            if isinstance(section, dict) and section.get(name):
                section[name] = _absolute(section[name])
    return resolved


def _absolute(path: Any) -> Any:
    if isinstance(path, list | tuple):
        return [_absolute(item) for item in path]
    expanded = Path(path).expanduser()
    return str(expanded.absolute()) if expanded.exists() else path


__all__ = ["absolute_paths", "dump", "find", "parse", "read"]


COLUMN = 40  # the column of comments


def plugin_options(section: BaseModel, path: str) -> Options | None:
    """The declared options of the plug-in that a section names, with the given values.

    None if the plug-in has no options class or cannot be imported: a configuration can be shown without its plug-ins.
    """
    try:
        if isinstance(section, LossOptions):
            return declared_options(section)
        factory = _factory(section)
    except KeelError:
        return None
    declared = None if factory is None else options_class(factory)
    return None if declared is None else read_options(declared, section.model_extra or {}, path)


def _factory(section: BaseModel) -> Callable[..., Any] | None:
    from keel.envs.registry import get_task  # slow to import
    from keel.rollout.registry import find_engine

    match section:
        case ControllerOptions():
            return get_controller(section.name)
        case ReferenceOptions():
            return None if section.kind == "auto" else get_reference(section.kind)
        case TaskOptions():
            return get_task(section.name)
        case EngineOptions():
            return find_engine(section.name)
    return None


def plugin_defaults(config: Config) -> dict[str, Any]:
    """The defaults of all options that the configuration's plug-ins declare, by dotted name."""
    sections: dict[str, BaseModel] = {
        "task": config.task,
        "rollout.engine": config.rollout.named_engine,
        "kl.controller": config.kl.controller,
        "reference": config.reference,
        "loss": config.loss,
    }
    if config.kl.teacher is not None:
        sections["kl.teacher.controller"] = config.kl.teacher.controller
    defaults: dict[str, Any] = {}
    for path, section in sections.items():
        options = plugin_options(section, path)
        for name, field in type(options).model_fields.items() if options is not None else ():
            if name not in type(section).model_fields and not field.is_required():
                default = field.get_default(call_default_factory=True)
                defaults[f"{path}.{name}"] = plain(default.model_dump() if isinstance(default, BaseModel) else default)
    return defaults


def show_config(config: Config) -> str:
    """The configuration as YAML with comments, which also give the values of `null` and `auto`. Secrets are masked."""
    return "\n".join(_lines(config, "", "", resolved(config))) + "\n"


def _lines(model: BaseModel, path: str, indent: str, resolved_values: dict[str, Any]) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value, dotted = getattr(model, name), path + name
        sentence = field.description or ""
        if dotted in resolved_values:
            sentence += f" Here: {dump(resolved_values[dotted])}."
        if isinstance(value, BaseModel):
            yield _line(f"{indent}{name}:", sentence)
            yield from _lines(value, dotted + ".", indent + "  ", resolved_values)
        else:
            yield _line(f"{indent}{name}: {dump(masked(_data(value), name))}", sentence)
    for name, value, sentence in _parameters(model, path):
        yield _line(f"{indent}{dump(name)}: {dump(masked(_data(value), name))}", sentence)


def _parameters(model: BaseModel, path: str) -> Iterator[tuple[str, Any, str]]:
    """The parameters of the plug-in that a section names, with their descriptions if it declares them."""
    generic = f"A parameter of this {path.rstrip('.').rpartition('.')[2]}."
    options = plugin_options(model, path.rstrip("."))
    if options is None:
        yield from ((name, value, generic) for name, value in (model.model_extra or {}).items())
        return
    for name, field in type(options).model_fields.items():
        if name not in type(model).model_fields:
            yield name, getattr(options, name), field.description or generic


def _data(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    return [_data(item) for item in value] if isinstance(value, tuple | list) else value


def _line(setting: str, sentence: str) -> str:
    return f"{setting:<{COLUMN}}  # {sentence}" if sentence else setting


def resolved(config: Config) -> dict[str, Any]:
    """The effective values of options that are `null` or `auto` in this configuration, by dotted name."""
    stands_for = {f"loss.{name}": value for name, value in loss_defaults(config.loss).items()}
    for option, term in kl_terms(config.kl).items():
        if term.gradient == "auto":
            pairing = kl_pairing(config, term)
            in_loss = pairing.placement == "loss" and pairing.level == "token"
            stands_for[f"{option}.gradient"] = str(pairing.form) if in_loss else "default of the pairing"
        if term.needs_exact and not term.exact:
            stands_for[f"{option}.exact"] = True
    if config.reference.kind == "auto":
        stands_for["reference.kind"] = "adapter_off" if config.model.lora else "frozen"
    if config.optim.decay_steps is None and config.optim.schedule != "constant":
        stands_for["optim.decay_steps"] = config.run.max_steps
    if config.eval.temperature is None:
        stands_for["eval.temperature"] = config.rollout.temperature
    return stands_for
