"""Settings as pydantic models, of which recipes and heads are made. This file does not import torch."""

import json
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heads.core.errors import UserError, shown
from heads.core.files import expanded

MAX_NUMBER = 2**31
"""Bound of whole numbers: the product of two smaller ones does not overflow."""
Count = Annotated[int, Field(ge=1, lt=MAX_NUMBER)]
Number = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Positive = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Place = Annotated[str, Field(min_length=1), AfterValidator(expanded)]
"""A path, or a name of something on the Hub."""
SAVED = "draftsmith.config"
"""Section of a saved head's config.json with all settings of the head."""


class Settings(BaseModel):
    """Settings that do not change. Unknown keys are errors, and no value is converted to another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def from_plain(cls, values: Mapping[str, object], section: str = "head") -> Self:
        """Return the settings with these values, as YAML and JSON give them. UserError names the first wrong one, as
        a key of a recipe's `head`, or of the `section` of another file."""
        try:  # as JSON, whose lists are tuples where a setting has a tuple
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as failure:
            raise UserError(f"{section}.{first_fault(failure)}") from None


def first_fault(failure: ValidationError) -> str:
    """Return a line about the first wrong setting, which begins with its key."""
    error = failure.errors(include_url=False)[0]
    if not error["loc"]:  # by a validator of the whole, whose message begins with a key
        return error_text(error["msg"])
    return f"{'.'.join(map(str, error['loc']))}: {error_text(error['msg'])}, got {shown(error['input'])}"


def error_text(message: str) -> str:
    """Return a message of pydantic as a part of a sentence that begins with the key."""
    return message.replace("Extra inputs are not", "is not").removeprefix("Value error, ").removeprefix("Input ")
