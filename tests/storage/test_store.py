"""Goal: appended batches get dense offsets and one receipt, and can be read once they are safe.

Method: the store on a disk in memory; after each rejection the end of the log is checked.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq._core.records import Message, check_batch, decode_records
from batonmq.errors import (
    BadChecksum,
    BatonError,
    DataLoss,
    DiskFull,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    ProducerFenced,
    QueueNotFound,
    SequenceGap,
    TopicNotFound,
)
from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.queue_reader import SCANNED_MAX
from batonmq_server.storage.core.store import VisibleRange
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import (
    NOW,
    TOPIC,
    TOPIC_ID,
    append,
    batch,
    bodies,
    open_store,
    read_spec,
    stored,
    sync,
    tagged,
)

KEY = (TOPIC_ID, 0)


def reason(outcome: StoreReceipt | BatonError) -> str:
    return outcome.reason if isinstance(outcome, BatonError) else "stored"


def test_offsets_are_dense_per_queue() -> None:
    store = open_store(MemoryDisk()).store
    receipts = stored(
        store, batch(b"a", b"b"), batch(b"c", queue_id=1), batch(b"d"), batch(b"e", queue_id=1)
    )
    assert [one.first_offset for one in receipts] == [0, 0, 2, 1]
    assert bodies(store, 0) == [b"a", b"b", b"d"]
    assert bodies(store, 1) == [b"c", b"e"]


def test_stored_bytes_are_the_producers_but_for_the_stamp() -> None:
    store = open_store(MemoryDisk()).store
    original = batch(b"a", b"b")
    stored(store, batch(b"first"))
    (receipt,) = stored(store, original)
    reading = store.read(KEY, read_spec(1))
    assert reading is not None
    (raw,) = reading.batches
    header = check_batch(raw, stamped=True)
    assert raw[56:] == original[56:]
    assert (header.position, header.first_offset) == (receipt.position, 1)
    assert (header.store_unix_ms, header.topic_id, header.epoch) == (NOW, TOPIC_ID, 1)


def test_nothing_is_visible_before_the_sync() -> None:
    store = open_store(MemoryDisk()).store
    append(store, batch(b"a"))
    assert store.read(KEY, read_spec()) is None
    assert store.offsets(KEY) == VisibleRange(0, 0)
    assert sync(store) == {KEY}
    assert bodies(store) == [b"a"]
    assert sync(store) == frozenset()


def test_sync_makes_visible_only_what_was_written_before_it_began() -> None:
    store = open_store(MemoryDisk()).store
    append(store, batch(b"a"))
    position = store.log.unsynced().position
    append(store, batch(b"b"))
    store.synced(position)
    assert bodies(store) == [b"a"]


def test_store_time_never_decreases() -> None:
    store = open_store(MemoryDisk()).store
    times = [append(store, batch(b"x"), now=now)[0] for now in (NOW, NOW - 5_000, NOW + 1)]
    assert [t.store_unix_ms for t in times if isinstance(t, StoreReceipt)] == [NOW, NOW, NOW + 1]


def test_bad_batch_does_not_stop_the_other_batches() -> None:
    store = open_store(MemoryDisk()).store
    outcomes = append(store, batch(b"a"), batch(b"b", queue_id=8), batch(b"c" * 9_000), batch(b"d"))
    assert [reason(one) for one in outcomes] == [
        "stored", "QUEUE_NOT_FOUND", "LIMIT_EXCEEDED", "stored",
    ]  # fmt: skip
    sync(store)
    assert bodies(store) == [b"a", b"d"]


def test_missing_queue_is_reported_with_the_queue_count() -> None:
    store = open_store(MemoryDisk()).store
    (refused,) = append(store, batch(b"b", queue_id=8))
    assert isinstance(refused, QueueNotFound)
    assert refused.facts == {"topic": TOPIC, "queue_id": "8", "queue_count": "8"}
    assert store.log.next_position == 0


def test_unknown_topic_writes_nothing() -> None:
    store = open_store(MemoryDisk()).store
    checked = [check(batch(b"a"))]
    (refused,) = store.append(checked, {TOPIC: TopicNotFound("gone")}, NOW)
    assert isinstance(refused, TopicNotFound)
    assert store.log.next_position == 0


def test_changed_byte_is_rejected() -> None:
    raw = bytearray(batch(b"hello"))
    raw[-1] ^= 1
    with pytest.raises(BadChecksum):
        check(bytes(raw))


def test_topic_of_the_same_name_shares_nothing_with_the_old_one() -> None:
    store = open_store(MemoryDisk()).store
    stored(store, batch(b"old"))
    store.append([check(batch(b"new"))], {TOPIC: LocalTopic(TOPIC_ID + 1, 8)}, NOW)
    sync(store)
    assert store.offsets((TOPIC_ID + 1, 0)) == VisibleRange(0, 1)
    assert bodies(store) == [b"old"]


def test_retry_gets_the_first_receipt_and_writes_nothing() -> None:
    store = open_store(MemoryDisk()).store
    raw = batch(b"a", b"b", producer=(5, 1), sequence=0)
    (first,) = stored(store, raw)
    end = store.log.next_position
    (again,) = append(store, raw)
    assert isinstance(again, StoreReceipt)
    assert again.duplicate
    assert (again.first_offset, again.position) == (first.first_offset, first.position)
    assert store.log.next_position == end


def test_retry_in_the_same_request_gets_the_first_receipt() -> None:
    store = open_store(MemoryDisk()).store
    raw = batch(b"a", producer=(5, 1), sequence=0)
    _first, again, following = append(store, raw, raw, batch(b"b", producer=(5, 1), sequence=1))
    assert isinstance(again, StoreReceipt)
    assert again.duplicate
    assert isinstance(following, StoreReceipt)
    assert following.first_offset == 1
    sync(store)
    assert bodies(store) == [b"a", b"b"]


def test_producer_errors_write_nothing() -> None:
    store = open_store(MemoryDisk()).store
    stored(store, batch(b"a", producer=(5, 2), sequence=0))
    end = store.log.next_position
    gap, old = append(
        store,
        batch(b"c", producer=(5, 2), sequence=2),
        batch(b"d", producer=(5, 1), sequence=1, queue_id=1),
    )
    assert isinstance(gap, SequenceGap)
    assert isinstance(old, ProducerFenced)
    assert store.log.next_position == end


def test_old_epoch_is_fenced_within_one_request() -> None:
    store = open_store(MemoryDisk()).store
    outcomes = append(
        store,
        batch(b"a", producer=(5, 2), queue_id=0),
        batch(b"b", producer=(5, 1), queue_id=1),
    )
    assert [reason(one) for one in outcomes] == ["stored", "PRODUCER_FENCED"]


def test_batches_without_space_are_rejected_and_reads_continue() -> None:
    disk = MemoryDisk(room=4_096)
    store = open_store(disk).store
    stored(store, batch(b"a" * 3_000))
    (refused,) = append(store, batch(b"b" * 3_000, producer=(5, 1)))
    assert isinstance(refused, DiskFull)
    assert bodies(store) == [b"a" * 3_000]
    disk.room = 4_096
    (receipt,) = stored(store, batch(b"b" * 3_000, producer=(5, 1)))
    assert receipt.first_offset == 1
    assert not receipt.duplicate


def test_offset_beyond_the_log_is_ahead_of_log() -> None:
    store = open_store(MemoryDisk()).store
    stored(store, batch(b"a"))
    with pytest.raises(OffsetAheadOfLog) as refused:
        store.read(KEY, read_spec(2))
    assert refused.value.facts == {"offset": "2", "next_offset": "1"}
    assert store.read(KEY, read_spec(1)) is None
    with pytest.raises(OffsetAheadOfLog):
        store.read((TOPIC_ID, 3), read_spec(1))


def test_offset_before_the_first_is_out_of_range() -> None:
    disk = MemoryDisk()
    store = open_store(disk, segment_bytes=300).store
    stored(store, batch(b"a" * 150), batch(b"b" * 150), batch(b"c" * 150))
    disk.remove(f"log/{0:020d}")
    disk.remove("checkpoint")
    store = open_store(disk.killed(), segment_bytes=300).store
    with pytest.raises(OffsetOutOfRange) as refused:
        store.read(KEY, read_spec(0))
    assert refused.value.facts == {"offset": "0", "first_offset": "1", "next_offset": "3"}


def test_messages_max_may_end_inside_a_batch() -> None:
    store = open_store(MemoryDisk()).store
    stored(store, batch(b"a", b"b", b"c"))
    reading = store.read(KEY, read_spec(0, messages_max=2))
    assert reading is not None
    assert (reading.next_offset, reading.message_count, len(reading.batches)) == (2, 2, 1)


def test_backlog_is_read_in_few_large_reads() -> None:
    """Bytes of other queues in between are read too, unless they are many."""
    opened = open_store(MemoryDisk(), segment_bytes=1 << 22)
    mine, other = batch(bytes(900)), batch(bytes(900), queue_id=1)
    for _ in range(8):
        append(opened.store, *[mine, other] * 100)
    append(opened.store, *[other] * 100, mine)
    sync(opened.store)
    read, reads = opened.store.log.read, list[int]()

    def counted(position: int, bytes_max: int) -> bytes:
        reads.append(bytes_max)
        return read(position, bytes_max)

    opened.store.log.read = counted  # type: ignore[method-assign]
    result = opened.store.read((TOPIC_ID, 0), read_spec(bytes_max=1 << 20))
    assert result is not None
    assert (result.next_offset, len(result.batches)) == (801, 801)
    assert sum(reads) <= 1_601 * len(mine)
    assert len(reads) == 3
    assert reads[-1] == len(mine)


def test_read_advances_even_if_the_filter_keeps_nothing() -> None:
    store = open_store(MemoryDisk(), segment_bytes=1 << 22).store
    for _ in range(5):
        stored(store, tagged(*["x"] * 5_000))
    none = HashFilter(frozenset({1}))
    first = store.read(KEY, read_spec(0, filter=none, messages_max=10))
    assert first is not None
    assert (first.batches, first.next_offset, first.filtered_count) == (
        [], SCANNED_MAX, SCANNED_MAX,
    )  # fmt: skip
    second = store.read(KEY, read_spec(first.next_offset, filter=none))
    assert second is not None
    assert second.next_offset == 25_000


def test_only_batches_with_a_message_to_deliver_are_sent() -> None:
    store = open_store(MemoryDisk()).store
    stored(store, tagged("a", "b"), tagged("b"), tagged("a"), tagged("b", "b"))
    hash_of_a = HashFilter(frozenset({97}))
    reading = store.read(KEY, read_spec(0, filter=hash_of_a))
    assert reading is not None
    headers = [check_batch(raw, stamped=True) for raw in reading.batches]
    assert [h.first_offset for h in headers] == [0, 3]
    assert (reading.next_offset, reading.message_count, reading.filtered_count) == (6, 2, 4)


def test_damaged_batch_is_never_served() -> None:
    disk = MemoryDisk()
    store = open_store(disk).store
    _good, bad = stored(store, batch(b"good"), batch(b"bad"))
    disk.files[f"log/{0:020d}"].content[bad.next_position - 1] ^= 1
    with pytest.raises(DataLoss) as raised:
        store.read(KEY, read_spec(0))
    assert raised.value.facts == {"position": str(bad.position)}
    reading = store.read(KEY, read_spec(0, messages_max=1))
    assert reading is not None
    assert reading.batches[0].endswith(b"good")


def test_index_entry_that_points_to_a_wrong_batch_is_data_loss() -> None:
    disk = MemoryDisk()
    store = open_store(disk).store
    first, second = stored(store, batch(b"a"), batch(b"b"))
    file = disk.files[f"log/{0:020d}"].content
    file[second.position : second.next_position] = file[first.position : first.next_position]
    with pytest.raises(DataLoss):
        store.read(KEY, read_spec(1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.lists(st.binary(max_size=40), min_size=1, max_size=5)),
            min_size=1,
            max_size=4,
        ),
        max_size=12,
    ),
    st.integers(400, 2_000),
)
def test_each_message_is_read_in_order_with_its_offset(
    appends: list[list[tuple[int, list[bytes]]]], segment_bytes: int
) -> None:
    store = open_store(MemoryDisk(), segment_bytes=segment_bytes).store
    model: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    for group in appends:
        receipts = stored(store, *(batch(*b, queue_id=q) for q, b in group))
        for (queue_id, messages), receipt in zip(group, receipts, strict=True):
            assert receipt.first_offset == len(model[queue_id])
            model[queue_id] += messages
    for queue_id, messages in model.items():
        assert bodies(store, queue_id) == messages
        assert store.offsets((TOPIC_ID, queue_id)).next_offset == len(messages)


def test_records_keep_tag_keys_and_properties() -> None:
    store = open_store(MemoryDisk()).store
    message = Message(b"body", tag="订单", keys=("k1", "k2"), properties={"a": "1"})
    stored(store, batch(message))
    reading = store.read(KEY, read_spec())
    assert reading is not None
    raw = reading.batches[0]
    (record,) = decode_records(raw, check_batch(raw, stamped=True), [0])
    assert (record.body, record.tag, record.keys) == (b"body", "订单", ("k1", "k2"))
    assert record.properties == {"a": "1"}
