"""The options that a plug-in declares, in addition to those of its configuration section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from keel.base.errors import KeelError
from keel.base.options import Options
from keel.base.parts import options_class
from keel.base.validation import read_options
from keel.config.schema import Config, plain
from keel.envs.options import TaskOptions
from keel.kl import get_controller
from keel.kl.options import ControllerOptions
from keel.losses import LossOptions, declared_options
from keel.reference.kinds import get_reference
from keel.reference.options import ReferenceOptions
from keel.rollout.options import EngineOptions


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
