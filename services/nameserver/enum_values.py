"""Enum values of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from batonmq.errors import InvalidArgument

Value = TypeVar("Value")


def enum_value(field: str, number: int, values: Mapping[int, Value]) -> Value:
    """Return the value that an enum number of a request stands for.

    Raises:
        InvalidArgument: the number is unknown.
    """
    if number not in values:
        raise InvalidArgument(
            f"{field} {number} is unknown",
            remedy="Use a value of the enum in the contract.",
            facts={"field": field},
        )
    return values[number]
