"""The reference of options: every section of the configuration, and the parameters of every part that has a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keel.base.options import Options
from keel.base.parts import options_class, parameters_of
from keel.config import text
from keel.config.schema import Config, plain
from keel.envs.registry import PACKAGES, TASKS, LazyTask
from keel.envs.rewards.registry import REWARDS
from keel.kl import CONTROLLERS
from keel.losses import LOSSES
from keel.reference.kinds import KINDS, TEACHERS
from pages.tables import anchored, prose, table

HEAD = """# Options

Every option with its default, what it may be, and its sentence, made from the classes that declare them. `keel train
CONFIG --print-config` shows the same for one configuration, with what `auto` and `null` stand for there. Options are
written in a YAML file, as `section.option=value` behind a command, or as `{section: {option: value}}` in Python;
under the names of other trainers too ([Options of other trainers](peer-options.md)). What is not listed is
refused with the nearest name.

"""
COLUMNS = ("option", "default", "may be", "")
NUMBERS = {int: "a whole number", float: "a number"}
# (heading, sentence, option that names the part, parts by name, parameters that Keel gives, how many are positional)
PARTS: list[tuple[str, str, str, Mapping[str, Any], tuple[str, ...], int]] = [
    ("Tasks", "Beside `task.name`.", "task", TASKS, ("data",), 0),
    ("Environments", "Beside `task.name=PACKAGE:ENVIRONMENT`.", "task", PACKAGES, (), 1),
    ("Rewards", "Beside `name` in an entry of `rewards`.", "rewards", REWARDS, ("turns", "task"), 2),
    ("Controllers", "Beside `kl.controller.name`.", "kl.controller", CONTROLLERS, ("beta", "episodes_per_step"), 0),
    ("References", "Beside `reference.kind`.", "reference", KINDS, (), 1),
    ("Teachers", "Beside `reference.model` and `kl.teacher.model`.", "reference", TEACHERS, (), 3),
]


def options_page() -> str:
    sections = [_section(name, field) for name, field in Config.model_fields.items()]
    return HEAD + "\n\n".join([*sections, *(_parts(*row) for row in PARTS), _losses()]) + "\n"


def _section(name: str, field: FieldInfo) -> str:
    owned = _classes(field.annotation)
    whole = [] if isinstance(field.default, BaseModel) else [_row(name, field)]  # null, or a list of entries
    rows = [*whole, *(_row(dotted, leaf) for cls in owned for dotted, leaf in _leaves(cls, f"{name}."))]
    about = prose(field.description or "")
    return f"## {name}\n\n{about}\n\n{table(COLUMNS, rows)}"


def _leaves(cls: type[BaseModel], path: str) -> Iterator[tuple[str, FieldInfo]]:
    """The options of a class and of the sections inside it, by dotted name."""
    for name, field in cls.model_fields.items():
        inner = _classes(field.annotation)
        if field.default is None or not inner or not isinstance(field.default, BaseModel):
            yield path + name, field
        for section in inner:
            yield from _leaves(section, f"{path}{name}.")


def _classes(annotation: Any) -> list[type[Options]]:
    """The option classes in a type: of a section, of one that may be null, of the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [cls for inner in get_args(annotation) for cls in _classes(inner)]


def _row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    default = "" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
    return anchored(name), default, _may_be(field.annotation, field.metadata), prose(field.description or "")


def _value(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True) or value.model_dump()
    return text.dump(plain([v.model_dump() if isinstance(v, BaseModel) else v for v in value]
                           if isinstance(value, tuple | list) else value))  # fmt: skip


def _may_be(annotation: Any, metadata: Any = ()) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _may_be(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_may_be(inner, metadata) for inner in arguments))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (tuple, list):
        entries = [inner for inner in arguments if inner is not Ellipsis]
        count = "" if Ellipsis in arguments or origin is list else f"{len(entries)} of: "
        return f"a list of {count}{' or '.join(dict.fromkeys(map(_may_be, entries)))}"
    if annotation is NoneType:
        return "null"
    if annotation is bool:
        return "true, false"
    if annotation in NUMBERS:
        return f"{NUMBERS[annotation]}{_bounds(_flat(metadata))}"
    if annotation is str:
        return "a text"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return "a mapping" if origin is dict or annotation is dict else ""


def _flat(metadata: Any) -> list[Any]:
    return [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _bounds(metadata: list[Any]) -> str:
    signs = ((Ge, "≥", "ge"), (Gt, ">", "gt"), (Le, "≤", "le"), (Lt, "<", "lt"), (MinLen, "at least", "min_length"))
    found = [f"{sign} {getattr(item, name):g}" for item in metadata for kind, sign, name in signs
             if isinstance(item, kind)]  # fmt: skip
    return f" {', '.join(found)}" if found else ""


def _parts(heading: str, about: str, option: str, parts: Mapping[str, Any], given: tuple[str, ...], first: int) -> str:
    """One table a part: what it is, and its parameters."""
    pages = [_part(name, _factory(part), given, first) for name, part in parts.items()]
    return f"## {heading}\n\n{about}\n\n" + "\n\n".join(pages)


def _factory(part: Any) -> Callable[..., Any]:
    return part.load() if isinstance(part, LazyTask) else part


def _part(name: str, factory: Callable[..., Any], given: tuple[str, ...], first: int) -> str:
    declared = options_class(factory)
    if declared is not None:
        rows = [(f"`{path}`", *_row(path, field)[1:]) for path, field in _leaves(declared, "")]
        return f"### `{name}`\n\n{_first(factory)}\n\n{table(('parameter', *COLUMNS[1:]), rows)}"
    parameters = list((parameters_of(factory) or {}).values())[first:]
    rows = [(f"`{p.name}`", "" if p.default is p.empty else f"`{_value(p.default)}`", _may_be(p.annotation))
            for p in parameters if p.name not in given and p.kind is not p.VAR_KEYWORD]  # fmt: skip
    shown = table(("parameter", "default", "may be"), rows) if rows else "It has no parameters."
    return f"### `{name}`\n\n{_first(factory)}\n\n{shown}"


def _losses() -> str:
    """What each loss averages over, and its own clip range; the options of all of them stand in the section `loss`."""
    rows = [
        (
            f"`{name}`",
            f"`{recipe.reduction}`",
            _range(recipe.low, recipe.high),
            recipe.scale_rewards,
            _first(recipe.term),
        )
        for name, recipe in LOSSES.items()
    ]
    head = ("loss", "mean over", "clip range below, above 1", "rewards scaled by", "policy term")
    return (
        "## Losses\n\nWhat `loss.loss_type` may be, with what holds where the options do not say otherwise.\n\n"
        + table(head, rows)
    )


def _range(low: float | None, high: float | None) -> str:
    return ", ".join("–" if limit is None else f"{limit:g}" for limit in (low, high))


def _first(part: Callable[..., Any]) -> str:
    """The first paragraph of a docstring."""
    return prose((inspect.getdoc(part) or "").split("\n\n")[0])
