"""The types that options are made of: strict about what a person may have meant, lenient about how YAML says it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as a string: the text of a number is a number; a boolean is none."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) else value


Int = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
Float = Annotated[float, BeforeValidator(as_number), Field(allow_inf_nan=False)]
Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)]
NotNegative = Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, BeforeValidator(as_number), Field(gt=0, allow_inf_nan=False)]


class Options(BaseModel):
    """A section of the configuration: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the part that the section names, without what the section itself declares."""
        return dict(self.model_extra or {})


class PluginOptions(Options):
    """A part named by string, with that part's own parameters beside its name."""

    model_config = ConfigDict(extra="allow")
