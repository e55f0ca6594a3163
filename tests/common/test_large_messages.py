"""Goal: large messages are encoded as protobuf describes.

Method: the protobuf runtime decodes them.
"""

from __future__ import annotations

from random import Random
from typing import Any, cast

from baton.common.v1 import error_pb2, queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.large_messages import LARGE_BYTES, append_request, encode_frames, is_large
from batonmq._common.topic_epochs import UNKNOWN_EPOCH

RANDOM = Random(16)

BATCHES = [RANDOM.randbytes(size) for size in (0, 1, 127, 128, 20_000, LARGE_BYTES)]


def frame(number: int, **fields: Any) -> pb.DeliveryFrame:
    """Return a frame of messages; each field has a value."""
    messages = pb.PullResponse(
        next_offset=1 << 40,
        queue_next_offset=-1,
        redelivered=[queue_pb2.OffsetRange(first_offset=n, next_offset=n + 2) for n in (3, 900)],
        progress_taken=True,
        next_node_id="störage-1",
        **fields,
    )
    return pb.DeliveryFrame(
        delivery_id=number, messages=messages, credit_number=7, bytes_sent=1 << 63, last=True
    )


def error(number: int) -> pb.DeliveryFrame:
    return pb.DeliveryFrame(delivery_id=number, error=error_pb2.Error(message="fenced"))


def test_encoded_frames_are_the_response_of_the_contract() -> None:
    frames = [
        (frame(1), BATCHES),
        (error(2), ()),
        (frame(3), ()),
        (pb.DeliveryFrame(), ()),
        (frame(1 << 60), BATCHES[2:4]),
    ]
    expected = [
        frame(1, batches=BATCHES),
        error(2),
        frame(3),
        pb.DeliveryFrame(),
        frame(1 << 60, batches=BATCHES[2:4]),
    ]
    encoded = encode_frames(frames)
    assert pb.DeliverResponse.FromString(encoded) == pb.DeliverResponse(frames=expected)


def test_messages_of_small_batches_are_left_to_the_runtime() -> None:
    assert is_large(LARGE_BYTES, 16)
    assert not is_large(LARGE_BYTES, 17)
    assert not is_large(LARGE_BYTES - 1, 1)
    many = [bytes(1_024)] * 300
    request = append_request(many, pb.DURABILITY_MEMORY, [0] * 300)
    expected = pb.AppendRequest(
        batches=many, durability=pb.DURABILITY_MEMORY, topic_epochs=[0] * 300
    )
    assert request == expected


def test_epoch_that_is_not_known_is_marked() -> None:
    request = append_request([b"1", b"2"], pb.DURABILITY_MEMORY, [None, 3])
    assert list(request.topic_epochs) == [UNKNOWN_EPOCH, 3]


def test_append_request_is_that_of_the_contract() -> None:
    epochs = range(len(BATCHES))
    small = append_request(BATCHES[:5], pb.DURABILITY_FSYNCED, epochs[:5])
    assert small == pb.AppendRequest(
        batches=BATCHES[:5], durability=pb.DURABILITY_FSYNCED, topic_epochs=epochs[:5]
    )
    large = cast("object", append_request(BATCHES, pb.DURABILITY_FSYNCED, epochs))
    assert isinstance(large, bytes)
    expected = pb.AppendRequest(
        batches=BATCHES, durability=pb.DURABILITY_FSYNCED, topic_epochs=epochs
    )
    assert pb.AppendRequest.FromString(large) == expected
