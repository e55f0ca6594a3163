"""Bodies in JSON, checked by Pydantic."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pydantic

from batonmq._consumer.handler_results import BadBody
from batonmq.errors import InvalidArgument

T = TypeVar("T")
_SHOWN_MAX = 3


class PydanticSchema(Generic[T]):
    """A model of Pydantic, or any other type that `pydantic.TypeAdapter` accepts, as JSON.

    Needs the extra `pydantic`.

    Args:
        type_: Type of the values.
    """

    def __init__(self, type_: type[T]) -> None:
        self._adapter: pydantic.TypeAdapter[T] = pydantic.TypeAdapter(type_)
        self._name = getattr(type_, "__name__", str(type_))

    def encode(self, value: T) -> bytes:
        """See `Schema.encode`."""
        try:
            return self._adapter.dump_json(self._adapter.validate_python(value))
        except ValueError as error:
            raise InvalidArgument(
                f"the value is no {self._name}: {_problems(error)}", facts={"field": "value"}
            ) from error

    async def decode(self, body: bytes) -> T:
        """See `Schema.decode`."""
        try:
            return self._adapter.validate_json(body)
        except ValueError as error:
            raise BadBody(f"the body is no {self._name}: {_problems(error)}") from None


def _field(problem: Any) -> list[str]:
    """Return the path of the wrong field; empty if the whole value is wrong."""
    return [".".join(map(str, problem["loc"]))] if problem["loc"] else []


def _message(problem: Any) -> str:
    """Return what is wrong; Pydantic's own text for a tag of a union has the value."""
    if problem["type"] == "union_tag_invalid":
        return f"The tag is none of the expected ones: {problem['ctx']['expected_tags']}"
    return str(problem["msg"])


def _problems(error: ValueError) -> str:
    """Return what is wrong and where, without the values, which may be secret."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    found: list[Any] = list(error.errors(include_url=False, include_input=False))
    lines = [": ".join([*_field(one), _message(one)]) for one in found]
    more = len(lines) - _SHOWN_MAX
    return "; ".join(lines[:_SHOWN_MAX] + ([f"and {more} more"] if more > 0 else []))
