"""Encodes requests of Append and responses of Deliver with many bytes of batches.

The protobuf runtime copies the bytes of a field when it is set, and more than once when it is
encoded, because its buffer grows; beyond a few MiB the kernel gives it new pages for each copy. So
the encoders here append the batches to the encoded rest of the message. The fields of an encoded
message may come in any order (https://protobuf.dev/programming-guides/encoding/#order).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.topic_epochs import UNKNOWN_EPOCH

LARGE_BYTES, BATCH_BYTES = 256 * 1024, 16 * 1024
"""Bytes of batches, and mean size of one, from which a message is encoded here. With less, the
runtime is as fast or faster."""

_FRAMES = pb.DeliverResponse.FRAMES_FIELD_NUMBER
_MESSAGES = pb.DeliveryFrame.MESSAGES_FIELD_NUMBER
_DELIVERED = pb.PullResponse.BATCHES_FIELD_NUMBER
_APPENDED = pb.AppendRequest.BATCHES_FIELD_NUMBER
_BYTES = 2
"""The type of fields of bytes, strings and messages."""


def storage_stub(channel: grpc.aio.Channel) -> pb_grpc.StorageServiceAsyncStub:
    """Return a stub that takes what `append_request` returns."""
    stub = pb_grpc.StorageServiceStub(channel)
    append: Any = channel.unary_unary(
        "/baton.storage.v1.StorageService/Append",
        request_serializer=_encode_append,
        response_deserializer=pb.AppendResponse.FromString,
    )
    stub.Append = append
    return stub


def is_large(byte_count: int, batch_count: int) -> bool:
    """Return whether a message with these batches is encoded here."""
    return byte_count >= LARGE_BYTES and byte_count >= BATCH_BYTES * batch_count


def append_request(
    batches: Sequence[bytes],
    durability: pb.Durability.ValueType,
    topic_epochs: Sequence[int | None],
) -> pb.AppendRequest:
    """Return a request for a stub of `storage_stub`; a large one is encoded already.

    Args:
        topic_epochs: One per batch; None for one that is not known.
    """
    epochs = [UNKNOWN_EPOCH if epoch is None else epoch for epoch in topic_epochs]
    if not is_large(sum(map(len, batches)), len(batches)):
        return pb.AppendRequest(batches=batches, durability=durability, topic_epochs=epochs)
    rest = pb.AppendRequest(durability=durability, topic_epochs=epochs).SerializeToString()
    encoded: object = b"".join((rest, *_fields(_APPENDED, batches)))
    return cast("pb.AppendRequest", encoded)


def encode_frames(frames: Iterable[tuple[pb.DeliveryFrame, Sequence[bytes]]]) -> bytes:
    """Return the encoded response with frames; the batches of each are given beside it.

    The frames are used up: those with batches lose their messages.
    """
    parts: list[bytes] = []
    for frame, batches in frames:
        messages: list[bytes] = []
        if batches:
            messages = [frame.messages.SerializeToString(), *_fields(_DELIVERED, batches)]
            messages.insert(0, _head(_MESSAGES, sum(map(len, messages))))
            frame.ClearField("messages")
        rest = frame.SerializeToString()
        parts += (_head(_FRAMES, len(rest) + sum(map(len, messages))), rest, *messages)
    return b"".join(parts)


def _encode_append(request: pb.AppendRequest | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def _fields(number: int, values: Iterable[bytes]) -> list[bytes]:
    """Return a repeated field of bytes, in parts."""
    return [part for value in values for part in (_head(number, len(value)), value)]


def _head(number: int, size: int) -> bytes:
    """Return key and size of a field of bytes; the number is below 16."""
    head = bytearray((number << 3 | _BYTES,))
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)
