"""The ordering key of a message: a property that the producer adds. Pure."""

from __future__ import annotations

from typing import Final

from batonmq._core.records import Message
from batonmq.errors import BadBatch, InvalidArgument, LimitExceeded

ORDERING_KEY: Final = "baton.ordering_key"
ORDERING_KEY_BYTES_MAX = 1_024
_BEGIN, _END = f"{ORDERING_KEY}\x01".encode(), b"\x02"


def check_ordering_key(key: str) -> str:
    """Return the key.

    Raises:
        LimitExceeded: It is longer than 1,024 bytes of UTF-8.
        BadBatch: It contains 0x01, 0x02 or a surrogate.
    """
    if not isinstance(key, str):
        raise InvalidArgument(
            f"ordering_key must be str, got {type(key).__name__}",
            remedy="Make a text of it: str(...).",
            facts={"field": "ordering_key"},
        )
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise BadBatch(
            f"ordering_key can't be encoded in UTF-8: {key!a:.100}",
            facts={"field": "ordering_key"},
        ) from error
    if size > ORDERING_KEY_BYTES_MAX:
        raise LimitExceeded(
            f"ordering_key has {size} bytes; the limit is {ORDERING_KEY_BYTES_MAX}",
            remedy="Use a shorter key, such as a hash of it.",
            facts={"field": "ordering_key", "limit": ORDERING_KEY_BYTES_MAX, "actual": size},
        )
    if "\x01" in key or "\x02" in key:
        raise BadBatch(
            f"ordering_key {key!r:.100} contains 0x01 or 0x02",
            remedy="Use a key without 0x01 and 0x02.",
            facts={"field": "ordering_key"},
        )
    return key


def with_ordering_key(message: Message, key: str | None) -> Message:
    """Return the message as it is stored: with its ordering key, unless `key` is None.

    Raises:
        LimitExceeded, BadBatch: See `check_ordering_key`.
    """
    if key is None:
        return message
    properties = {**message.properties, ORDERING_KEY: check_ordering_key(key)}
    return Message(message.body, message.tag, message.keys, properties)


def find_ordering_key(properties: bytes) -> str | None:
    """Return the ordering key in encoded properties, without decoding the others; None if absent.

    The result is that of `decode_properties`; of repeated properties the last one counts.
    """
    at = properties.rfind(_BEGIN)
    while at > 0 and properties[at - 1 : at] != _END:  # a part of another name or value
        at = properties.rfind(_BEGIN, 0, at + len(_BEGIN) - 1)
    if at < 0:
        return None
    begin = at + len(_BEGIN)
    end = properties.find(_END, begin)
    value = properties[begin:] if end < 0 else properties[begin:end]
    return value.decode("utf-8", "replace")
