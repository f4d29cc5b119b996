"""Reading the fields of a model's metadata, with errors that name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muxk.models.errors import ModelError


def positive_int(values: Mapping[str, Any], key: str, place: str) -> int:
    """A whole number of at least 1, which must be there."""
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{place}: field {key!r} is {value!r}, wanted a positive integer")
    return value


def positive_number(values: Mapping[str, Any], key: str, place: str) -> float:
    """A finite number above 0, which must be there."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{place}: field {key!r} is {value!r}, wanted a positive number")
    return float(value)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null: a null one means the same as none."""
    return {key: value for key, value in values.items() if value is not None}
