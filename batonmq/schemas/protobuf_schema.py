"""Bodies in the format of Protocol Buffers."""

from __future__ import annotations

from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message

from batonmq._consumer.handler_results import BadBody
from batonmq.errors import InvalidArgument

T = TypeVar("T", bound=Message)


class ProtobufSchema(Generic[T]):
    """A message type of Protocol Buffers.

    The format says little about itself: a body of another type is refused only if it can't be read
    as this one. Give each type a topic or a tag of its own.

    Args:
        type_: A generated class.
    """

    def __init__(self, type_: type[T]) -> None:
        self._type = type_

    def encode(self, value: T) -> bytes:
        """See `Schema.encode`."""
        name = self._type.DESCRIPTOR.full_name
        if not isinstance(value, self._type):
            raise InvalidArgument(
                f"the value is a {type(value).__name__}, and not a {name}",
                facts={"field": "value"},
            )
        try:
            return value.SerializeToString()
        except EncodeError as error:
            raise InvalidArgument(
                f"the value is no {name}: {error}", facts={"field": "value"}
            ) from error

    async def decode(self, body: bytes) -> T:
        """See `Schema.decode`."""
        try:
            return self._type.FromString(body)
        except DecodeError as error:
            name = self._type.DESCRIPTOR.full_name
            raise BadBody(f"the body is no {name}: {error}") from None
