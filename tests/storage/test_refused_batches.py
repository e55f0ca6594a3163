"""Goal: a batch that a closed queue has refused is not stored when a late copy of it arrives.

Method: a store on a disk in memory, whose queue is closed and opened between the calls.
"""

from __future__ import annotations

import pytest

from batonmq._core.mirror_marks import MIRROR_EPOCH
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.records import read_header
from batonmq.errors import BatonError, NotWritable, SequenceGap
from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.refused_batches import RefusedBatches
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, batch, open_store

OPEN, CLOSED = LocalTopic(TOPIC_ID, 2), LocalTopic(TOPIC_ID, 2, write_queue_count=1)
READ_ONLY = LocalTopic(TOPIC_ID, 2, writable=False)
QUEUE, PRODUCER = 1, (17, 3)


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk()).store


def sent(body: bytes = b"a", producer: tuple[int, int] = PRODUCER, sequence: int = 5) -> bytes:
    return batch(body, queue_id=QUEUE, producer=producer, sequence=sequence)


def append(
    store: MessageStore, raw: bytes, topic: LocalTopic = OPEN, owner: int = 0
) -> StoreReceipt | BatonError:
    (outcome,) = store.append([check(raw, owner)], {TOPIC: topic}, NOW)
    return outcome


@pytest.mark.parametrize("closed", [CLOSED, READ_ONLY])
def test_late_copy_is_refused_after_the_queue_is_open_again(
    store: MessageStore, closed: LocalTopic
) -> None:
    for _ in range(2):
        assert isinstance(append(store, sent(), closed), NotWritable)
    end = store.log.next_position
    for _ in range(2):
        assert isinstance(append(store, sent()), SequenceGap)
    assert store.log.next_position == end


def test_copy_of_a_stored_batch_gets_its_receipt(store: MessageStore) -> None:
    first = append(store, sent())
    assert isinstance(first, StoreReceipt)
    copy = append(store, sent(), CLOSED)
    assert isinstance(copy, StoreReceipt)
    assert (copy.first_offset, copy.duplicate) == (first.first_offset, True)


@pytest.mark.parametrize(
    "other",
    [
        sent(b"b"),
        sent(producer=(PRODUCER[0], PRODUCER[1] + 1), sequence=0),
        sent(producer=(PRODUCER[0] + 1, PRODUCER[1])),
    ],
    ids=["other messages", "next epoch", "other producer"],
)
def test_other_batch_is_stored_when_the_queue_is_open_again(
    store: MessageStore, other: bytes
) -> None:
    append(store, sent(), CLOSED)
    assert isinstance(append(store, other), StoreReceipt)


def test_late_copy_is_fenced_once_its_producer_has_a_newer_epoch(store: MessageStore) -> None:
    append(store, sent(), CLOSED)
    append(store, sent(producer=(PRODUCER[0], PRODUCER[1] + 1), sequence=0))
    late = append(store, sent())
    assert isinstance(late, BatonError)
    assert late.reason == "PRODUCER_FENCED"


def test_batch_of_another_owner_is_another_batch(store: MessageStore) -> None:
    append(store, sent(), CLOSED, owner=1)
    assert isinstance(append(store, sent(), owner=2), StoreReceipt)


@pytest.mark.parametrize(
    "producer",
    [(0, 0), (17, ONE_BATCH_EPOCH), (17, MIRROR_EPOCH)],
    ids=["not idempotent", "of one batch", "mirror"],
)
def test_producer_that_repeats_the_same_bytes_is_served(
    store: MessageStore, producer: tuple[int, int]
) -> None:
    raw = sent(producer=producer, sequence=0)
    assert isinstance(append(store, raw, CLOSED), NotWritable)
    assert isinstance(append(store, raw), StoreReceipt)


def test_oldest_is_forgotten_first() -> None:
    refused, key = RefusedBatches(2), (TOPIC_ID, QUEUE)
    first, oldest, newest = (read_header(sent(sequence=number)) for number in range(3))
    for header in (first, oldest, first, newest):
        refused.add(header, key)
    refused.check(oldest, key)
    for header in (first, newest):
        with pytest.raises(SequenceGap):
            refused.check(header, key)
