"""Goal: a batch that was sent before its queue was opened again is not stored.

Method: a store on a disk in memory; the queue is closed and opened between the calls.
"""

from __future__ import annotations

import pytest

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.topic_epochs import UNKNOWN_EPOCH
from batonmq.errors import BatonError, InvalidArgument, NotWritable
from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.validation import parse_topic_epochs
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, batch, open_store

OPEN = LocalTopic(TOPIC_ID, 2)
CLOSED = LocalTopic(TOPIC_ID, 2, write_queue_count=1)
OPENED = LocalTopic(TOPIC_ID, 2, opened_epoch=2)
QUEUE, PRODUCER = 1, (17, 3)


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk()).store


def append(
    store: MessageStore, topic: LocalTopic, epoch: int | None, sequence: int = 0
) -> StoreReceipt | BatonError:
    raw = batch(b"a", queue_id=QUEUE, producer=PRODUCER, sequence=sequence)
    (outcome,) = store.append([check(raw, topic_epoch=epoch)], {TOPIC: topic}, NOW)
    return outcome


@pytest.mark.parametrize("epoch", [0, 1])
def test_late_attempt_is_refused(store: MessageStore, epoch: int) -> None:
    assert isinstance(append(store, CLOSED, 0), NotWritable)
    late = append(store, OPENED, epoch)
    assert isinstance(late, NotWritable)
    assert (late.facts["topic_epoch"], late.facts["opened_epoch"]) == (str(epoch), "2")
    assert store.log.next_position == 0


@pytest.mark.parametrize("epoch", [2, 3])
def test_attempt_with_the_newest_route_is_stored(store: MessageStore, epoch: int) -> None:
    assert isinstance(append(store, OPENED, 0), NotWritable)
    assert isinstance(append(store, OPENED, epoch), StoreReceipt)


def test_batch_of_a_sender_that_names_no_epoch_is_stored(store: MessageStore) -> None:
    assert isinstance(append(store, OPENED, None), StoreReceipt)


def test_late_copy_of_a_stored_batch_gets_its_receipt(store: MessageStore) -> None:
    first = append(store, OPEN, 0)
    assert isinstance(first, StoreReceipt)
    for topic in (CLOSED, OPENED):
        copy = append(store, topic, 0)
        assert isinstance(copy, StoreReceipt)
        assert (copy.first_offset, copy.duplicate) == (first.first_offset, True)


def test_message_that_was_accepted_before_is_delivered(store: MessageStore) -> None:
    assert isinstance(append(store, OPENED.for_deliveries(), None), StoreReceipt)


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [((), (None, None)), ((0, 7), (0, 7)), ((UNKNOWN_EPOCH, 0), (None, 0))],
    ids=["none", "one each", "one unknown"],
)
def test_epochs_are_those_of_the_batches(
    epochs: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    request = pb.AppendRequest(batches=[b"1", b"2"], topic_epochs=epochs)
    assert tuple(parse_topic_epochs(request)) == expected


@pytest.mark.parametrize("epochs", [(1,), (1, 2, 3)])
def test_other_number_of_epochs_than_of_batches_is_rejected(epochs: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_topic_epochs(pb.AppendRequest(batches=[b"1", b"2"], topic_epochs=epochs))
    assert refused.value.facts == {"field": "topic_epochs"}
