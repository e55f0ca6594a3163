"""Receipt handles: which delivery of which message a client speaks of, signed.

A handle is base64url of 16 bytes of HMAC-SHA256 and of the fields, joined by 0x1f. Gateways that
share a key understand each other's handles; a handle says which gateway holds its message.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import astuple, dataclass

from batonmq._core.queues import QueueRef

KEY_BYTES_MIN = 32
HANDLE_CHARACTERS_MAX = 2_048
_MAC_BYTES = 16
SEPARATOR = "\x1f"
"""No field of a handle may contain it."""


@dataclass(frozen=True, slots=True)
class ReceiptHandle:
    """One delivery.

    Attributes:
        gateway: Node id of the gateway that holds the message.
        group: The consumer group.
        topic: Topic of the queue in which the message is stored: for a message that was sent back,
            the group's retry topic.
        token: Fencing token of the queue when the message was delivered.
        serial: Number of the delivery, or of the last change of its lease.
        attempt: Deliveries of the message, this one included.
        expires_unix_ms: When the lease expires, by the clock of the gateway; 0 if it is renewed.
    """

    gateway: str
    group: str
    topic: str
    broker: str
    queue_id: int
    offset: int
    token: int
    serial: int
    attempt: int
    expires_unix_ms: int

    @property
    def queue(self) -> QueueRef:
        """The queue in which the message is stored."""
        return QueueRef(self.topic, self.broker, self.queue_id)


class BadHandle(Exception):
    """A text is not a handle that was signed with the key."""


class ForeignHandle(BadHandle):
    """A text looks like a handle, and was signed with another key or changed."""


class ReceiptSigner:
    """Writes and reads handles.

    Args:
        key: At least 32 bytes, the same in all gateways.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) >= KEY_BYTES_MIN, f"the key has {len(key)} bytes"
        self._key = key

    def write(self, handle: ReceiptHandle) -> str:
        """Return the handle as text."""
        fields = SEPARATOR.join(map(str, astuple(handle))).encode()
        return urlsafe_b64encode(self._mac(fields) + fields).decode()

    def read(self, text: str) -> ReceiptHandle:
        """Return the handle of a text.

        Raises:
            BadHandle: It was not written with this key, or was changed.
        """
        if len(text) > HANDLE_CHARACTERS_MAX:
            raise BadHandle(f"the handle has {len(text)} characters")
        try:
            raw = urlsafe_b64decode(text.encode("ascii"))
        except (ValueError, binascii.Error) as error:
            raise BadHandle("the handle is not base64") from error
        # The standard decoder skips what is not base64; then two texts would mean one handle.
        if urlsafe_b64encode(raw).decode() != text or len(raw) <= _MAC_BYTES:
            raise BadHandle("the text is not a receipt handle")
        mac, fields = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(fields)):
            raise ForeignHandle("the handle was not signed by this cluster, or was changed")
        gateway, group, topic, broker, *numbers = fields.decode().split(SEPARATOR)
        return ReceiptHandle(gateway, group, topic, broker, *map(int, numbers))

    def _mac(self, fields: bytes) -> bytes:
        return hmac.digest(self._key, fields, "sha256")[:_MAC_BYTES]
