"""Goal: the log alone decides which scheduled batches wait, wherever a crash has cut it.

Method: stores on a disk in memory that tears unsynced writes at any byte; after each recovery each
scheduled batch is in its queue once, or waits, or was cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batonmq._core.records import (
    BATCH_BYTES_MAX,
    BODY_BYTES_MAX,
    Message,
    Record,
    check_batch,
    decode_records,
    read_header,
)
from batonmq.errors import BadBatch, DataLoss, LimitExceeded, SequenceGap
from batonmq_server.storage.core import schedule
from batonmq_server.storage.core.checks import CheckedBatch, check
from batonmq_server.storage.core.delay_queue import DelayKey
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.schedule import (
    FIRST,
    SCHEDULED_BYTES_MAX,
    ScheduledBatch,
    decode_scheduled,
    delivered_key,
    delivery,
    encode_scheduled,
    encode_withdrawn,
    read_scheduled,
)
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC_ID, TOPICS, batch, bodies, open_store, sync

FIRST_SEGMENT = f"log/{0:020d}"
GOLDEN_SCHEDULED = (
    "42544e31000100000000011d00000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000003060b437000000000000000000000000000000000000000000000000"
    "000000000000000100000000001200004241544f4e5f5359535f5343484544554c450000009f0000"
    "00000000000000000000000000000000018bcfe568000000000000000007ffffffffffffffff4254"
    "4e31000100000000007f000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000007d7007ed0000000000000005000000010000000700000000000000000000"
    "00030000000100000000000600006f72646572730000000d00000074000000000000000100000000"
    "74626f6479"
)
GOLDEN_WITHDRAWN = (
    "42544e31000100000000009600000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000026169741000000000000000000000000000000000000000000000000"
    "000000010000000100000000001200004241544f4e5f5359535f5343484544554c45000000180000"
    "00000000000000000000000000000000018bcfe568000000000000003039"
)
GOLDEN_DELIVERY = (
    "42544e31000100000000007f00000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000025e8721afffffe74301a9800000000090000000c0000000000000000"
    "000000040000000100000000000600006f72646572730000000d0000007400000000000000010000"
    "000074626f6479"
)


def write(store: MessageStore, *batches: bytes) -> list[int]:
    """Append batches of any topic with one write, without a sync; return their positions."""
    outcomes = store.append(
        [CheckedBatch(read_header(one), one) for one in batches], {**SYSTEM_TOPICS, **TOPICS}, NOW
    )
    assert all(isinstance(one, StoreReceipt) for one in outcomes), outcomes
    return [one.position for one in outcomes if isinstance(one, StoreReceipt)]


def put(store: MessageStore, *batches: bytes, deliver_unix_ms: int = NOW) -> list[DelayKey]:
    """Schedule batches without a sync; return their keys."""
    wrapped = [
        encode_scheduled(ScheduledBatch(deliver_unix_ms, TOPIC_ID, FIRST, one)) for one in batches
    ]
    return [(deliver_unix_ms, position) for position in write(store, *wrapped)]


def deliver(store: MessageStore, now: int = NOW) -> None:
    """Deliver due batches with one write, without a sync."""
    due = store.schedule.waiting.due(now, 1_000)
    scheduled = read_scheduled(store.log, [entry.position for entry in due])
    write(
        store,
        *(
            delivery(entry.key, one.batch, read_header(one.batch).queue_id)
            for entry, one in zip(due, scheduled, strict=True)
            if isinstance(one, ScheduledBatch)
        ),
    )


def waiting(store: MessageStore) -> list[DelayKey]:
    return sorted(entry.key for entry in store.schedule.waiting.before(1 << 60, 1_000))


def waiting_bodies(store: MessageStore) -> list[bytes]:
    positions = [entry.position for entry in store.schedule.waiting.before(1 << 60, 1_000)]
    scheduled = [
        one for one in read_scheduled(store.log, positions) if isinstance(one, ScheduledBatch)
    ]
    assert len(scheduled) == len(positions)
    return [record.body for one in scheduled for record in records(one.batch)]


def records(raw: bytes) -> list[Record]:
    header = read_header(raw)
    return list(decode_records(raw, header, range(header.count)))


def test_scheduled_batch_is_stored_unchanged() -> None:
    message = Message(b"body", tag="paid", keys=("a", "b"), properties={"x": "y"})
    inner = batch(message, b"second", queue_id=3, producer=(5, 1), sequence=7)
    outer = encode_scheduled(ScheduledBatch(NOW, TOPIC_ID, FIRST, inner))
    header = check_batch(outer, stamped=False)
    assert (header.topic, header.queue_id, header.count) == (schedule.TOPIC, 0, 1)
    assert decode_scheduled(header, outer) == ScheduledBatch(NOW, TOPIC_ID, FIRST, inner)


@pytest.mark.parametrize("length", [1, BODY_BYTES_MAX - 300, BODY_BYTES_MAX])
def test_each_message_that_can_be_sent_can_be_scheduled(length: int) -> None:
    inner = batch(b"x" * length)
    outer = encode_scheduled(ScheduledBatch(NOW, TOPIC_ID, FIRST, inner))
    assert decode_scheduled(check_batch(outer, stamped=False), outer).batch == inner


def test_longest_scheduled_batch_fits_and_a_longer_one_is_rejected_with_limit_and_size() -> None:
    inner = bytes(SCHEDULED_BYTES_MAX)
    assert len(encode_scheduled(ScheduledBatch(NOW, TOPIC_ID, FIRST, inner))) <= BATCH_BYTES_MAX
    with pytest.raises(LimitExceeded) as refused:
        encode_scheduled(ScheduledBatch(NOW, TOPIC_ID, FIRST, inner + b"x"))
    assert refused.value.facts["limit"] == str(SCHEDULED_BYTES_MAX)
    assert refused.value.facts["actual"] == str(SCHEDULED_BYTES_MAX + 1)


def test_delivery_differs_only_in_its_key_queue_and_checksum() -> None:
    inner = batch(Message(b"body", tag="t", keys=("k",)), queue_id=3, producer=(5, 1), sequence=7)
    position = (9 << 32) + 12
    delivered = delivery((NOW, position), inner, 3)
    header = check_batch(delivered, stamped=False)
    assert delivered_key(header) == (NOW, position)
    assert delivered_key(read_header(inner)) is None
    assert (delivered[:52], delivered[72:]) == (inner[:52], inner[72:])


def test_producer_cannot_send_a_batch_that_looks_like_a_delivery() -> None:
    with pytest.raises(BadBatch):
        check(delivery((NOW, 5), batch(b"forged"), 0))


def test_deliveries_to_one_queue_are_one_write() -> None:
    opened = open_store(MemoryDisk())
    put(opened.store, *(batch(b"%d" % n) for n in range(5)))
    sync(opened.store)
    deliver(opened.store)
    assert len(opened.disk.files[FIRST_SEGMENT].unsynced) == 1
    sync(opened.store)
    assert bodies(opened.store) == [b"%d" % n for n in range(5)]
    assert waiting(opened.store) == []


def test_waiting_batch_is_not_in_its_queue_and_survives_a_kill() -> None:
    opened = open_store(MemoryDisk())
    keys = put(opened.store, batch(b"a"), batch(b"b", queue_id=1), deliver_unix_ms=NOW + 5)
    for store in (opened.store, open_store(opened.disk.killed()).store):
        sync(store)
        assert waiting(store) == sorted(keys)
        assert waiting_bodies(store) == [b"a", b"b"]
        assert bodies(store, 0) == bodies(store, 1) == []


def test_batch_that_is_not_due_stays() -> None:
    opened = open_store(MemoryDisk())
    put(opened.store, batch(b"later"), deliver_unix_ms=NOW + 1)
    put(opened.store, batch(b"now"))
    deliver(opened.store)
    sync(opened.store)
    assert (bodies(opened.store), waiting_bodies(opened.store)) == ([b"now"], [b"later"])


def test_write_of_scheduled_batches_torn_at_any_byte_leaves_whole_batches() -> None:
    opened = open_store(MemoryDisk())
    put(opened.store, *(batch(b"%d" % n, queue_id=n) for n in range(3)))
    length = len(opened.disk.files[FIRST_SEGMENT].unsynced[0][1])
    counts = set()
    for kept_bytes in range(length + 1):
        again = open_store(opened.disk.power_cut(lambda _, kept_bytes=kept_bytes: kept_bytes))  # type: ignore[misc]
        survivors = waiting_bodies(again.store)
        assert survivors == [b"0", b"1", b"2"][: len(survivors)]
        counts.add(len(survivors))
    assert counts == {0, 1, 2, 3}


def test_delivery_torn_at_any_byte_is_repeated_for_the_torn_batches_only() -> None:
    expected = [b"%d" % n for n in range(4)]
    opened = open_store(MemoryDisk())
    put(opened.store, *(batch(body, queue_id=n % 2) for n, body in enumerate(expected)))
    sync(opened.store)
    deliver(opened.store)
    length = len(opened.disk.files[FIRST_SEGMENT].unsynced[0][1])
    delivered_before = set()
    for kept_bytes in range(length + 1):
        again = open_store(opened.disk.power_cut(lambda _, kept_bytes=kept_bytes: kept_bytes))  # type: ignore[misc]
        delivered = bodies(again.store, 0) + bodies(again.store, 1)
        assert sorted(delivered + waiting_bodies(again.store)) == expected, kept_bytes
        delivered_before.add(len(delivered))
        deliver(again.store)
        sync(again.store)
        assert sorted(bodies(again.store, 0) + bodies(again.store, 1)) == expected, kept_bytes
        assert waiting(again.store) == []
        once_more = open_store(again.disk.killed())
        assert waiting(once_more.store) == []
    assert delivered_before == {0, 1, 2, 3, 4}


def test_cancellation_torn_at_any_byte_cancels_or_does_not() -> None:
    opened = open_store(MemoryDisk())
    keys = put(opened.store, batch(b"a"), batch(b"b"))
    sync(opened.store)
    write(opened.store, encode_withdrawn(keys[:1]))
    assert waiting(opened.store) == keys[1:]
    length = len(opened.disk.files[FIRST_SEGMENT].unsynced[0][1])
    outcomes = []
    for kept_bytes in range(length + 1):
        again = open_store(opened.disk.power_cut(lambda _, kept_bytes=kept_bytes: kept_bytes))  # type: ignore[misc]
        outcomes.append(waiting(again.store))
    assert outcomes[0] == keys
    assert outcomes[-1] == keys[1:]
    assert all(one in (keys, keys[1:]) for one in outcomes)


def test_rewritten_batch_keeps_its_id_and_frees_its_old_position() -> None:
    opened = open_store(MemoryDisk())
    (key,) = put(opened.store, batch(b"a", producer=(5, 1)), deliver_unix_ms=NOW + 9)
    inner = batch(b"a", producer=(5, 1))
    (position,) = write(
        opened.store, encode_scheduled(ScheduledBatch(key[0], TOPIC_ID, key[1], inner))
    )
    for store in (opened.store, open_store(opened.disk.killed()).store):
        assert waiting(store) == [key]
        assert store.schedule.waiting.oldest_position() == position
        deliver(store, NOW + 9)
        sync(store)
        assert bodies(store) == [b"a"]
        assert waiting(store) == []


def test_sequences_of_scheduled_and_direct_batches_are_separate() -> None:
    opened = open_store(MemoryDisk())
    queue = (TOPIC_ID, 0)
    later = [batch(b"%d" % n, producer=(5, 1), sequence=n) for n in range(3)]
    keys = put(opened.store, *later[:2], deliver_unix_ms=NOW + 5)
    write(opened.store, batch(b"at once", producer=(5, 1), sequence=0))
    for store in (opened.store, open_store(opened.disk.killed()).store):
        for raw, key in zip(later, keys, strict=False):
            receipt = store.schedule.earlier(read_header(raw), queue)
            assert receipt is not None
            assert (receipt.position, receipt.duplicate) == (key[1], True)
        assert store.schedule.earlier(read_header(later[2]), queue) is None
        with pytest.raises(SequenceGap):
            store.schedule.earlier(read_header(batch(b"x", producer=(5, 1), sequence=3)), queue)
        (repeated,) = store.append(
            [check(batch(b"at once", producer=(5, 1), sequence=0))], TOPICS, NOW
        )
        assert isinstance(repeated, StoreReceipt)
        assert repeated.duplicate


def test_delivery_leaves_the_producers_sequences_alone() -> None:
    opened = open_store(MemoryDisk())
    put(opened.store, batch(b"later", producer=(5, 1), sequence=9))
    write(opened.store, batch(b"a", producer=(5, 1), sequence=0))
    deliver(opened.store)
    for store in (opened.store, open_store(opened.disk.killed()).store):
        (outcome,) = store.append([check(batch(b"b", producer=(5, 1), sequence=1))], TOPICS, NOW)
        assert isinstance(outcome, StoreReceipt)
        assert outcome.first_offset == 2


@pytest.mark.parametrize("sizes", [[10] * 50, [70_000, 10, 200_000, 10], [10, 65_300, 65_300]])
def test_batches_are_read_whole_whatever_their_sizes(sizes: Sequence[int]) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=256 * 1024)
    for size in sizes:
        put(opened.store, batch(bytes(size)))
    assert [len(body) for body in waiting_bodies(opened.store)] == list(sizes)


def test_damaged_batch_is_reported_and_its_neighbours_are_read() -> None:
    opened = open_store(MemoryDisk())
    keys = put(opened.store, batch(b"a"), batch(b"b"), batch(b"c"))
    opened.disk.files[FIRST_SEGMENT].content[keys[2][1] - 1] ^= 1
    results = list(read_scheduled(opened.store.log, [key[1] for key in keys]))
    assert [isinstance(one, DataLoss) for one in results] == [False, True, False]


def test_bytes_are_those_of_the_documented_format() -> None:
    inner = batch(Message(b"body", tag="t"), queue_id=3, producer=(5, 1), sequence=7)
    assert encode_scheduled(ScheduledBatch(NOW, 7, FIRST, inner)).hex() == GOLDEN_SCHEDULED
    assert encode_withdrawn([(NOW, 12_345)]).hex() == GOLDEN_WITHDRAWN
    assert delivery((NOW, (9 << 32) + 12), inner, 4).hex() == GOLDEN_DELIVERY
