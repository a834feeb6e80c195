"""Types of options: strict about values, lenient about YAML's spelling of numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

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
        message = f"0, which is greedy, or at least {MIN_TEMPERATURE:g}: logits divided by less overflow"
        raise PydanticCustomError("too_cold", "{message}", {"message": message})
    return value


Temperature = Annotated[NonNegativeFloat, AfterValidator(_temperature)]


@dataclass(frozen=True)
class RequiresOption:
    """In an option's type: the option is read only if the option `other` of its section has one of `values`."""

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
