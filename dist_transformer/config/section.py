"""Base class of the sections of the configuration, and the types of a setting.

The types are strict: only a value written as a number is a number, only true and false are true and false.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from dist_transformer.config.yaml12 import as_written


def _refuse_look_alikes(value: Any) -> Any:
    """Refuses true and 1.0, which equal 1 in Python, but not to a reader of the YAML."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("literal_error", "Input should be 0, 1, 2 or 3")
    return value


def _refuse_other_than_auto(value: Any) -> Any:
    """Checks for a positive number or auto, with one message for both; true is no number."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31):
        return value
    raise PydanticCustomError(
        "number_or_auto", "Input should be a whole number greater than 0 and less than 2147483648, or auto"
    )


Str = Annotated[str, BeforeValidator(as_written)]
PathStr = Annotated[Str, AfterValidator(os.path.expanduser)]
Bool = Annotated[bool, Field(strict=True)]
Int = Annotated[int, Field(lt=2**63, strict=True)]
Number = Annotated[float, Field(strict=True)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31, strict=True)]
IntOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_refuse_other_than_auto)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_refuse_look_alikes)]


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())
