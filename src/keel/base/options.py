"""Types of options: strict about values, lenient about YAML's spelling of numbers."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError
from pydantic_core import PydanticCustomError

from keel.base.errors import KeelError, did_you_mean, nearest
from keel.base.yaml_text import dump

MIN_TEMPERATURE = 1e-6  # the lowest temperature above 0
MAX_FLOAT = 1e38  # near the largest fp32 number, 3.4e38
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def as_number(value: Any) -> Any:
    """Parse numbers that YAML 1.1 reads as text, such as 1e-6; refuse booleans."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) else value


def _in_32_bits(value: float) -> float:
    """Refuse numbers beyond fp32."""
    if abs(value) > MAX_FLOAT:
        raise PydanticCustomError("too_large", "{message}", {"message": f"a number between ±{MAX_FLOAT:g}"})
    return value


Float = Annotated[float, BeforeValidator(as_number), Field(allow_inf_nan=False), AfterValidator(_in_32_bits)]
Int = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
NonNegativeInt = Annotated[int, Strict(), Field(ge=0)]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]
Fraction = Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]


def _temperature(value: float) -> float:
    """0 is greedy; dividing logits by less than MIN_TEMPERATURE overflows."""
    if 0 < value < MIN_TEMPERATURE:
        message = f"0, which is greedy, or at least {MIN_TEMPERATURE:g}; logits divided by a smaller number overflow"
        raise PydanticCustomError("too_cold", "{message}", {"message": message})
    return value


Temperature = Annotated[NonNegativeFloat, AfterValidator(_temperature)]


@dataclass(frozen=True)
class RequiresOption:
    """Annotation of an option that is read only if the option `other` of its section has one of `values`."""

    other: str
    values: tuple[Any, ...]


class Options(BaseModel):
    """A section of the configuration: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    named_by: ClassVar[str] = ""  # the option that names the part whose parameters are in this section
    of_parts: ClassVar[frozenset[str]] = frozenset()  # options of this section that only some parts read

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the named part: all keys that the section does not declare."""
        return dict(self.model_extra or {})


class PluginOptions(Options):
    """A part named by string, with its own parameters beside its name."""

    model_config = ConfigDict(extra="allow")
    named_by = "name"


T = TypeVar("T", bound=BaseModel)


def read_options(model: type[T], values: Mapping[str, Any], section: str) -> T:
    """Validate a section's plain values; the first mistake raises a KeelError that names the option."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = option_names(model, f"{section}.")
        raise KeelError(one_line(error, lambda name: unknown_option_error(name, known), section)) from None


def check_unread_options(options: BaseModel, prefix: str = "") -> None:
    """Refuse options that are set but not read, because another option of their section is off."""
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if isinstance(value, BaseModel):
            check_unread_options(value, f"{prefix}{name}.")
        for item in field.metadata:
            if (
                isinstance(item, RequiresOption)
                and value != field.default
                and getattr(options, item.other) not in item.values
            ):
                fitting = " or ".join(map(dump, item.values))
                raise KeelError(
                    f"{prefix}{name}={dump(value)} has no effect with {prefix}{item.other}="
                    f"{dump(getattr(options, item.other))}: leave it out, or set {prefix}{item.other}={fitting}"
                )


def option_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted option names, sections included."""
    names = []
    for key, field in model.model_fields.items():
        names.append(prefix + key)
        inner = model_of(field.annotation)
        if inner is not None:
            names += option_names(inner, f"{prefix}{key}.")
    return names


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model of `X` or `X | None`; None for lists of models and for parts that may be a bare name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if accepts_name(annotation):
        return None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            model = model_of(inner)
            if model is not None:
                return model
    return None


def accepts_name(annotation: Any) -> bool:
    """Whether an option takes a part with parameters or its bare name: `X | str`."""
    inner = typing.get_args(annotation)
    return str in inner and any(isinstance(part, type) and issubclass(part, BaseModel) for part in inner)


LIST_OPTIONS = "`keel train --print-config` shows every option"


def similar_options(name: str, known: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Options with a similar full name or last part; without any, options with the same words.

    `aliases` maps other accepted names to options.
    """
    section, _, leaf = name.rpartition(".")
    meant: dict[str, list[str]] = {}
    for spelling, option in [*((option, option) for option in known), *aliases.items()]:
        for part in dict.fromkeys((spelling, spelling.rpartition(".")[2])):
            meant.setdefault(part, []).append(option)
    inside = [option for option in known if section and option.rpartition(".")[0] == section]
    near = nearest(name, meant, 0.9) or nearest(name, inside, 0.8) or nearest(leaf, meant, 0.8)
    if near is not None:
        return list(dict.fromkeys(meant[near]))[:3]
    words = set(re.split(r"[._-]", name))
    same = {option for part in meant if words <= set(re.split(r"[._]", part)) for option in meant[part]}
    return sorted(same) if len(same) <= 5 else []  # a word shared by many options identifies none


def unknown_option_error(
    name: str, known: Sequence[str], *, also: Mapping[str, str] | None = None, origin: str = "", meant: str = ""
) -> KeelError:
    """The error for an unknown option, with the suggestions of `similar_options`.

    `meant` is the part of the name to compare, by default all of it.
    """
    sections, known, section = [option for option in known if "." not in option], sorted(known), name.rpartition(".")[0]
    inside = [option.rpartition(".")[2] for option in known if option.rpartition(".")[0] == section] if section else []
    near = similar_options(meant or name, known, also or {})
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif inside:
        hint = f"{section} has {', '.join(inside)}"
    else:
        hint = f"no similar option; {LIST_OPTIONS}" + (f", the sections are {', '.join(sections)}" if sections else "")
    return KeelError(f"unknown option {name}{' in ' + origin if origin else ''}: {hint}")


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list such as [1, 8]",
    "list_type": "a list such as [a, b]",
    "dict_type": "a mapping such as {name: value}",
    "none_required": "null",
    "model_type": "a section such as {name: value}",
    "model_attributes_type": "a section such as {name: value}",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def one_line(
    error: ValidationError,
    unknown_option: Callable[[str], KeelError],
    section: str = "",
    instead: Callable[[str, Any], str] = lambda name, value: "",
) -> str:
    """The first error in one line; unknown names first, since a misspelt option often causes the rest.

    `instead(name, value)` gives advice for a plain value where a section or a list of sections is expected.
    """
    errors, prefix = error.errors(include_url=False), f"{section}." if section else ""
    for item in errors:
        if item["type"] == "extra_forbidden":
            return str(unknown_option(prefix + _dotted(item["loc"])))
    item = _likeliest(errors)
    name, value, context = prefix + _dotted(item["loc"]), item["input"], item.get("ctx", {})
    if item["type"] == "missing":
        return f"{name} is required: set it"
    bounds = [f"{bound} {context[key]:g}" for key, bound in _BOUNDS.items() if key in context]
    if bounds:
        return f"{name} is {dump(value)}: it must be {' and '.join(bounds)}"
    if item["type"] == "literal_error":
        options = _literals(context["expected"])
        return f"{name} is {_show(value)}: {did_you_mean(value, options)}it must be one of {', '.join(options)}"
    expected = _EXPECTED.get(item["type"])
    if item["type"] in ("tuple_type", "model_type") and (advice := instead(name, value)):
        return f"{name} is {_show(value)}: {advice}"
    if item["type"] in ("too_short", "too_long"):
        length = context.get("min_length", context.get("max_length"))
        expected = f"a list of {'at least' if item['type'] == 'too_short' else 'at most'} {length}"
    elif item["type"] == "string_too_short":
        expected = "a non-empty text"
    if expected is None and item["type"] == "value_error":
        expected = "a number"
    if expected is None:
        expected = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ").strip()
    return f"{name} is {_show(value)}: expected {expected}"


def _likeliest(errors: Sequence[Any]) -> Any:
    """The deepest error of a union's branches: its branch matched the value best."""
    first = errors[0]
    same = [item for item in errors if _dotted(item["loc"]).startswith(_dotted(first["loc"]))]
    return max(same, key=lambda item: sum(map(_dotted(item["loc"]).count, ".[")))


def _literals(expected: str) -> list[str]:
    return [part.strip(" '") for part in expected.replace(" or ", ", ").split(",") if part.strip(" '")]


def _dotted(location: Sequence[str | int]) -> str:
    """A dotted location without pydantic's names for a union's branches."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
        elif "." in part or "-" in part:
            name += "" if "[" in part else f".{part}"
    return name


def _show(value: Any) -> str:
    """The value, shortened to fit a line."""
    try:
        shown = dump(value)
    except Exception:  # a Python object that YAML cannot express
        shown = repr(value)
    kind = {str: "the text ", bool: "", type(None): ""}.get(type(value), "")
    return kind + (shown if len(shown) <= 60 else shown[:57] + "…")
