"""Enum values of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from batonmq.errors import InvalidArgument

Value = TypeVar("Value")


def enum_value(field: str, number: int, values: Mapping[int, Value]) -> Value:
    """What `number` stands for.

    Raises:
        InvalidArgument: nothing.
    """
    if number not in values:
        raise InvalidArgument(
            f"{field} {number} is not known",
            remedy="Use a value of the contract.",
            facts={"field": field},
        )
    return values[number]
