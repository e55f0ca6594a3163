"""Messages of the RocketMQ 5 contract, and how they are stored.

A message group is the ordering key. What the contract knows and BatonMQ does not is stored as
properties `rocketmq.*` of the message.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import md5, sha1

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.delays import AHEAD_MS_MAX
from batonmq._core.records import BODY_BYTES_MAX, KEYS_BYTES_MAX, Message, check_tag
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.core.receipt_handles import SEPARATOR
from batonmq_server.gateway.statuses import Refused

PREFIX = "rocketmq."
OWN_PREFIX = "baton."
"""What BatonMQ itself adds to messages; clients neither set nor get it."""
MESSAGE_ID = f"{PREFIX}message_id"
_BORN = f"{PREFIX}born_unix_ms"
_BORN_HOST = f"{PREFIX}born_host"
_ENCODING = f"{PREFIX}encoding"
_DELIVER_AT = f"{PREFIX}deliver_at_unix_ms"
_TRACE = f"{PREFIX}trace_context"
_TRANSACTION = f"{PREFIX}transaction"

PROPERTIES_MAX = 128
PROPERTIES_BYTES_MAX = 16 * 1024
MESSAGE_ID_BYTES_MAX = 255
MESSAGE_GROUP_BYTES_MAX = 63
UNIX_MS_MAX = 999_999_999_999_999
"""Greatest time of a message: 15 digits."""
_TYPES = (pb.MESSAGE_TYPE_UNSPECIFIED, pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message as it is to be stored.

    Attributes:
        message_group: Its order; empty for none.
        deliver_at_unix_ms: Its delivery time; None for now.
        transactional: Whether it begins a transaction.
    """

    message_id: str
    message: Message
    message_group: str
    deliver_at_unix_ms: int | None
    transactional: bool = False

    @property
    def kind(self) -> pb.MessageType.ValueType:
        """Its type in the contract."""
        if self.transactional:
            return pb.TRANSACTION
        if self.message_group:
            return pb.FIFO
        return pb.NORMAL if self.deliver_at_unix_ms is None else pb.DELAY


def outgoing(sent: pb.Message, now_unix_ms: int) -> OutgoingMessage:
    """Return a message as it is to be stored.

    Raises:
        Refused: A part of it is not valid.
    """
    system = sent.system_properties
    _check_body(sent)
    _check_type(system)
    properties = dict(sent.user_properties)
    _check_properties(properties)
    if not 0 < len(system.message_id.encode()) <= MESSAGE_ID_BYTES_MAX or (
        SEPARATOR in system.message_id
    ):
        raise Refused(
            pb.ILLEGAL_MESSAGE_ID,
            f"message_id must have 1 to {MESSAGE_ID_BYTES_MAX} bytes, without 0x1f",
        )
    if system.tag and (problem := check_tag(system.tag)):
        raise Refused(pb.ILLEGAL_MESSAGE_TAG, problem)
    keys = tuple(system.keys)
    if any(not key or key.split() != [key] for key in keys) or (
        len(" ".join(keys).encode()) > KEYS_BYTES_MAX
    ):
        raise Refused(
            pb.ILLEGAL_MESSAGE_KEY,
            f"keys must not be empty or contain white space, and have {KEYS_BYTES_MAX} bytes "
            "together at most",
        )
    properties[MESSAGE_ID] = system.message_id
    properties[_BORN] = str(_born_unix_ms(system, now_unix_ms))
    optional = {
        _BORN_HOST: system.born_host,
        _TRACE: system.trace_context,
        _ENCODING: str(int(pb.GZIP)) if system.body_encoding == pb.GZIP else "",
        _TRANSACTION: "1" if system.message_type == pb.TRANSACTION else "",
    }
    properties |= {name: value for name, value in optional.items() if value}
    deliver_at = None
    if system.HasField("delivery_timestamp"):
        deliver_at = _deliver_at(system, now_unix_ms)
        properties[_DELIVER_AT] = str(deliver_at)
    message = Message(sent.body, system.tag, keys, properties)
    return OutgoingMessage(
        system.message_id,
        message,
        system.message_group,
        deliver_at,
        system.message_type == pb.TRANSACTION,
    )


def _check_body(sent: pb.Message) -> None:
    body, digest = sent.body, sent.system_properties.body_digest
    if not body:
        raise Refused(pb.MESSAGE_BODY_EMPTY, "the body of a message must not be empty")
    if len(body) > BODY_BYTES_MAX:
        raise Refused(
            pb.MESSAGE_BODY_TOO_LARGE,
            f"the body has {len(body)} bytes; the limit is {BODY_BYTES_MAX}",
        )
    if not digest.checksum:
        return
    crc = zlib.crc32(body)
    known = {
        pb.MD5: {md5(body, usedforsecurity=False).hexdigest().upper()},
        pb.SHA1: {sha1(body, usedforsecurity=False).hexdigest().upper()},
        # The clients differ: decimal, or hexadecimal with or without leading zeros.
        pb.CRC32: {str(crc), f"{crc:X}", f"{crc:08X}"},
    }
    if digest.checksum.upper() not in known.get(digest.type, ()):
        raise Refused(
            pb.MESSAGE_CORRUPTED, "body_digest does not match the body; send the message again"
        )


def _check_type(system: pb.SystemProperties) -> None:
    grouped, timed = bool(system.message_group), system.HasField("delivery_timestamp")
    if system.message_type not in _TYPES:
        name = pb.MessageType.Name(system.message_type) if _is_type(system.message_type) else ""
        raise Refused(
            pb.NOT_IMPLEMENTED,
            f"messages of type {name or system.message_type} are not supported by the gateway",
        )
    wanted = {
        pb.NORMAL: (False, False),
        pb.FIFO: (True, False),
        pb.DELAY: (False, True),
        pb.TRANSACTION: (False, False),
    }
    if wanted.get(system.message_type, (grouped, timed)) != (grouped, timed) or (grouped and timed):
        raise Refused(
            pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            "a message of type FIFO has a message group, one of type DELAY a delivery time, no "
            "message both, and one of type TRANSACTION none",
        )
    group = system.message_group
    if len(group.encode()) > MESSAGE_GROUP_BYTES_MAX or {"\x01", "\x02"} & {*group}:
        raise Refused(
            pb.ILLEGAL_MESSAGE_GROUP,
            f"a message group has {MESSAGE_GROUP_BYTES_MAX} bytes at most, without 0x01 and 0x02",
        )


def _is_type(number: int) -> bool:
    return number in pb.MessageType.values()


def _check_properties(properties: dict[str, str]) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if len(properties) > PROPERTIES_MAX or size > PROPERTIES_BYTES_MAX:
        raise Refused(
            pb.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the message has {len(properties)} properties of {size} bytes; the limits are "
            f"{PROPERTIES_MAX} properties and {PROPERTIES_BYTES_MAX} bytes",
        )
    for name, value in properties.items():
        if not name or name.startswith((PREFIX, OWN_PREFIX)) or {"\x01", "\x02"} & {*name, *value}:
            raise Refused(
                pb.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {name[:140]!r} is empty, reserved (rocketmq.*, baton.*), or it or its "
                "value contains 0x01 or 0x02",
            )


def _born_unix_ms(system: pb.SystemProperties, now_unix_ms: int) -> int:
    if not system.HasField("born_timestamp"):
        return now_unix_ms
    unix_ms = timestamp_ms(system.born_timestamp)
    if not 0 <= unix_ms <= UNIX_MS_MAX:
        raise Refused(
            pb.BAD_REQUEST, f"born_timestamp must be from 0 to {UNIX_MS_MAX} ms, got {unix_ms}"
        )
    return unix_ms


def _deliver_at(system: pb.SystemProperties, now_unix_ms: int) -> int:
    deliver_at = timestamp_ms(system.delivery_timestamp)
    if not 0 < deliver_at <= now_unix_ms + AHEAD_MS_MAX:
        raise Refused(
            pb.ILLEGAL_DELIVERY_TIME,
            f"delivery_timestamp is {deliver_at} ms; it must be positive and at most "
            f"{AHEAD_MS_MAX} ms (40 days) from now",
        )
    return deliver_at


@dataclass(frozen=True, slots=True)
class DeliveryFields:
    """What differs between the deliveries of one message."""

    receipt_handle: str
    attempt: int
    invisible_ms: int


def received(message: ReceivedMessage, topic: pb.Resource, delivery: DeliveryFields) -> pb.Message:
    """Return a stored message as a client receives it.

    Args:
        topic: The topic as the client names it.
    """
    own = {name: value for name, value in message.properties.items() if name.startswith(PREFIX)}
    group, deliver_at = message.ordering_key or "", own.get(_DELIVER_AT)
    plain = pb.TRANSACTION if _TRANSACTION in own else pb.NORMAL
    kind = pb.FIFO if group else pb.DELAY if deliver_at else plain
    system = pb.SystemProperties(
        keys=message.keys,
        message_id=own.get(MESSAGE_ID) or message.message_id,
        # Upper case: the clients compare texts.
        body_digest=pb.Digest(
            type=pb.MD5, checksum=md5(message.body, usedforsecurity=False).hexdigest().upper()
        ),
        body_encoding=pb.GZIP if _ENCODING in own else pb.IDENTITY,
        message_type=kind,
        born_timestamp=timestamp(_number(own.get(_BORN)) or message.born_unix_ms),
        born_host=own.get(_BORN_HOST, ""),
        store_timestamp=timestamp(message.store_unix_ms),
        store_host=message.broker,
        receipt_handle=delivery.receipt_handle,
        queue_id=message.queue_id,
        queue_offset=message.offset,
        invisible_duration=duration(delivery.invisible_ms),
        delivery_attempt=delivery.attempt,
    )
    if message.tag:
        system.tag = message.tag
    if group:
        system.message_group = group
    if deliver_at:
        system.delivery_timestamp.CopyFrom(timestamp(_number(deliver_at)))
    if trace := own.get(_TRACE):
        system.trace_context = trace
    users = user_properties(message.properties)
    return pb.Message(
        topic=topic, user_properties=users, system_properties=system, body=message.body
    )


def user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that a client set, or gets."""
    return {
        name: value
        for name, value in properties.items()
        if not name.startswith((PREFIX, OWN_PREFIX))
    }


def echoed(topic: pb.Resource, caller: Caller) -> pb.Resource:
    """Return a topic with the namespace that the caller means."""
    return pb.Resource(
        resource_namespace=topic.resource_namespace or caller.namespace, name=topic.name
    )


def timestamp(unix_ms: int) -> Timestamp:
    """Return a time in the form of the contract."""
    return Timestamp(seconds=unix_ms // 1_000, nanos=unix_ms % 1_000 * 1_000_000)


def timestamp_ms(sent: Timestamp) -> int:
    """Return a time in Unix milliseconds, of whatever a client sent."""
    return sent.seconds * 1_000 + sent.nanos // 1_000_000


def duration(ms: int) -> Duration:
    """Return a duration in the form of the contract."""
    return Duration(seconds=ms // 1_000, nanos=ms % 1_000 * 1_000_000)


def duration_ms(sent: Duration) -> int:
    """Return a duration in milliseconds; it may be negative."""
    return sent.seconds * 1_000 + sent.nanos // 1_000_000


def _number(text: str | None) -> int:
    """Return a number of up to 15 digits; 0 for anything else."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 15 else 0
