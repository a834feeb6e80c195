"""The types that options are made of: strict about what a person may have meant, lenient about how YAML says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

COLDEST = 1e-6  # temperature above 0
LARGEST = 1e38  # tensors of 32 bits hold little more
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as a string: the text of a number is a number; a boolean is none."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) else value


def _in_32_bits(value: float) -> float:
    """Options meet tensors of 32 bits, where a larger number is none."""
    if abs(value) > LARGEST:
        raise PydanticCustomError("too_large", "{message}", {"message": f"a number between ±{LARGEST:g}"})
    return value


Float = Annotated[float, BeforeValidator(as_number), Field(allow_inf_nan=False), AfterValidator(_in_32_bits)]
Int = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)]
NotNegative = Annotated[Float, Field(ge=0)]
Above0 = Annotated[Float, Field(gt=0)]


def _temperature(value: float) -> float:
    """0 is greedy; logits that are divided by next to nothing overflow."""
    if 0 < value < COLDEST:
        message = f"0, which is greedy, or at least {COLDEST:g}: logits divided by less overflow"
        raise PydanticCustomError("too_cold", "{message}", {"message": message})
    return value


Temperature = Annotated[NotNegative, AfterValidator(_temperature)]


@dataclass(frozen=True)
class ReadWith:
    """In an option's type: it is read only where the option `other` of its section has one of `values`."""

    other: str
    values: tuple[Any, ...]


class Options(BaseModel):
    """A section of the configuration: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    named_by: ClassVar[str] = ""  # the option that names the part whose parameters stand in this section
    of_parts: ClassVar[frozenset[str]] = frozenset()  # options of this section that only some of those parts have

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the part that the section names, without what the section itself declares."""
        return dict(self.model_extra or {})


class PluginOptions(Options):
    """A part named by string, with that part's own parameters beside its name."""

    model_config = ConfigDict(extra="allow")
    named_by = "name"
