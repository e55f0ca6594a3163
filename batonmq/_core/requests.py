"""Requests: messages with a reply address, and their replies. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from batonmq._core.delays import check_integer
from batonmq.errors import InvalidArgument, LimitExceeded

REPLY_TO: Final = "baton.reply_to"
CORRELATION_ID: Final = "baton.correlation_id"
REPLY_TIMEOUT_MS: Final = "baton.reply_timeout_ms"
REQUEST_PROPERTIES = frozenset({REPLY_TO, CORRELATION_ID, REPLY_TIMEOUT_MS})

REPLY_BYTES_MAX = 1024 * 1024
REPLY_ERROR_CHARACTERS_MAX = 1_000
REPLY_REQUEST_INBOXES_MAX = 1_024
REPLY_REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_TIMEOUT_MS_MAX = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request.

    Attributes:
        body: At most 1 MiB.
        error: Why the request failed, at most 1,000 characters; the requester gets it as
            `RequestFailed`. Empty if the request succeeded.

    Raises:
        LimitExceeded: The body or the error is too long.
        TypeError: The body is not of type bytes.
    """

    body: bytes = b""
    error: str = ""

    def __post_init__(self) -> None:
        """Raise in the handler, where the application sees the error."""
        if not isinstance(self.body, bytes):
            raise TypeError(f"body must be bytes, got {type(self.body).__name__}")
        if len(self.body) > REPLY_BYTES_MAX:
            raise _too_long("body", len(self.body), REPLY_BYTES_MAX, "bytes")
        if len(self.error) > REPLY_ERROR_CHARACTERS_MAX:
            raise _too_long("error", len(self.error), REPLY_ERROR_CHARACTERS_MAX, "characters")


class ReplyAddress(NamedTuple):
    """Where replies of one requester go: an inbox at a storage node."""

    node_id: str
    inbox_id: bytes


class RequestHeader(NamedTuple):
    """What the properties of a message say about its request."""

    address: ReplyAddress
    correlation_id: int
    timeout_ms: int


def request_properties(header: RequestHeader) -> dict[str, str]:
    """Return the properties of a request."""
    return {
        REPLY_TO: f"{header.address.node_id}/{header.address.inbox_id.hex()}",
        CORRELATION_ID: f"{header.correlation_id:016x}",
        REPLY_TIMEOUT_MS: str(header.timeout_ms),
    }


def request_header(properties: Mapping[str, str]) -> RequestHeader | None:
    """Return the header of a request; None if the message is no request, or its header is bad."""
    reply_to = properties.get(REPLY_TO)
    if reply_to is None:
        return None
    node_id, _, inbox = reply_to.rpartition("/")
    try:
        address = ReplyAddress(node_id, bytes.fromhex(inbox))
        correlation_id = int(properties.get(CORRELATION_ID, ""), 16)
        timeout_ms = int(properties.get(REPLY_TIMEOUT_MS, ""))
    except ValueError:
        return None
    valid = 0 <= correlation_id < 1 << 64 and 0 < timeout_ms <= REQUEST_TIMEOUT_MS_MAX
    return RequestHeader(address, correlation_id, timeout_ms) if node_id and valid else None


def check_request(timeout_ms: int, properties: Mapping[str, str]) -> None:
    """Raise InvalidArgument unless the arguments of a request are valid."""
    check_integer("timeout_ms", timeout_ms)
    if not 0 < timeout_ms <= REQUEST_TIMEOUT_MS_MAX:
        raise InvalidArgument(
            f"timeout_ms must be from 1 to {REQUEST_TIMEOUT_MS_MAX} (24 h), got {timeout_ms}",
            facts={"field": "timeout_ms"},
        )
    if reserved := sorted(REQUEST_PROPERTIES & properties.keys()):
        raise InvalidArgument(
            f"the property {reserved[0]} is reserved for requests", facts={"field": "properties"}
        )


def _too_long(field: str, size: int, size_max: int, unit: str) -> LimitExceeded:
    return LimitExceeded(
        f"the {field} of a reply has {size} {unit}; the limit is {size_max}",
        remedy="Send the data to a topic, and reply with its message id.",
        facts={"field": field, "limit": size_max},
    )
