"""Goal: the batches of a frame are complete, whether or not the node repeats one.

Method: frames are given to the delivery directly.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._consumer.queue_delivery import QueueDelivery
from batonmq._core.records import read_header, stamped_head
from batonmq.errors import BadBatch, BadChecksum
from tests.storage.batches import batch


def delivery() -> QueueDelivery:
    stream: Any = None
    return QueueDelivery(stream, "", 1_000, lambda: None)


def frame(next_offset: int, *batches: bytes, continues: bool = False) -> pb.DeliveryFrame:
    messages = pb.PullResponse(next_offset=next_offset, batches=batches)
    return pb.DeliveryFrame(messages=messages, continues_batch=continues)


def stored(first_offset: int) -> bytes:
    """Return a batch of ten messages as storage has stored it."""
    raw = batch(*[b"x"] * 10)
    head = stamped_head(
        raw,
        position=1_000 + first_offset,
        first_offset=first_offset,
        store_unix_ms=1,
        topic_id=1,
        epoch=1,
    )
    return head + raw[len(head) :]


FIRST, SECOND = stored(0), stored(10)


def first_offsets(one: QueueDelivery, next_frame: pb.DeliveryFrame) -> list[int]:
    """Return the first offset of each batch of a frame."""
    return [each.header.first_offset for each in one.batches(next_frame)]


def test_batch_that_goes_on_is_kept_until_its_end() -> None:
    one = delivery()
    assert [first_offsets(one, each) for each in (
        frame(4, FIRST),
        frame(4),  # without messages
        frame(8, continues=True),
        frame(13, SECOND, continues=True),
        frame(20, continues=True),
    )] == [[0], [], [0], [0, 10], [10]]  # fmt: skip


def test_frame_may_repeat_the_batch() -> None:
    one = delivery()
    assert [first_offsets(one, each) for each in (frame(4, FIRST), frame(8, FIRST))] == [[0], [0]]


def test_kept_batch_is_checked_once() -> None:
    one = delivery()
    (sent,) = one.batches(frame(4, FIRST))
    (kept,) = one.batches(frame(8, continues=True))
    assert kept is sent


@pytest.mark.parametrize("before", [[], [frame(10, FIRST)]])
def test_frame_that_continues_no_batch_is_an_error(before: list[pb.DeliveryFrame]) -> None:
    one = delivery()
    for each in before:
        one.batches(each)
    with pytest.raises(BadBatch, match="was not sent"):
        one.batches(frame(14, SECOND, continues=True))


@pytest.mark.parametrize("damaged", [b"no batch", FIRST[:-1] + b"y"])
def test_damaged_batch_is_an_error(damaged: bytes) -> None:
    with pytest.raises((BadBatch, BadChecksum)):
        delivery().batches(frame(20, damaged, SECOND))


def test_stored_batches_are_at_their_offsets() -> None:
    assert [read_header(each).next_offset for each in (FIRST, SECOND)] == [10, 20]
