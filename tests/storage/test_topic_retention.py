"""Goal: the retention of a topic removes the oldest whole batches of a queue, and only these.

Method: queues in memory; a list of batches is the model, which is summed from its newest end.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.records import Message, read_header
from batonmq.errors import OffsetOutOfRange
from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.purge import PurgeOrder, QueueTrim, decode_order, encode_order
from batonmq_server.storage.core.query import MessageQueries, TimeWindow
from batonmq_server.storage.core.queue_reader import ReadResult
from batonmq_server.storage.core.topic_retention import KeptAge, KeptBytes
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
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
)

BATCHES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 100)), max_size=8)
ROUNDS = st.lists(
    st.tuples(BATCHES, st.integers(0, 400), st.integers(0, 12), st.booleans()), max_size=6
)
INT64 = st.integers(0, 2**63 - 1)


@given(ROUNDS, st.integers(7, 20))
def test_kept_batches_are_the_newest_that_fit(
    rounds: list[tuple[list[tuple[int, int]], int, int, bool]], step: int
) -> None:
    """Each round adds batches, sets the limit, and may carry the decision out."""
    queue = ConsumeQueue(FileCache(MemoryDisk()), "consumequeue/t-1/0", entries_per_file=7)
    model: list[tuple[int, int, int]] = []
    position, bytes_ = 0, KeptBytes()
    for batches, bytes_max, removed_count, carried_out in rounds:
        for count, size in batches:
            model.append((queue.next_offset, position, size))
            queue.append(position, size, np.zeros(count, np.int32))
            position += size
        queue.make_visible(queue.next_offset)
        kept = [one for one in model if one[0] >= queue.first_offset]
        older = kept[:removed_count]
        keep_from = kept[removed_count][0] if removed_count < len(kept) else queue.next_offset
        kept = kept[len(older) :]
        while len(kept) > 1 and sum(size for _, _, size in kept) > bytes_max:
            kept.pop(0)
        for _ in bytes_.steps(queue, keep_from, bytes_max, step):
            pass
        assert bytes_.first_offset == (kept[0][0] if kept else queue.next_offset)
        if carried_out:
            queue.trim_to(bytes_.first_offset, kept[0][1] if kept else position)
            assert queue.first_offset == bytes_.first_offset


def test_age_keeps_what_was_stored_at_that_time_or_later() -> None:
    store = open_store(MemoryDisk()).store
    for at in (0, 10, 10, 25):
        append(store, batch(b"one", b"two"), now=NOW + at)
    sync(store)
    queries, key = MessageQueries(store), (TOPIC_ID, 0)
    age, queue = KeptAge(), store.queues[key]
    found = [age.keep_from(queries, key, queue, NOW + at) for at in (0, 1, 10, 11, 25, 26)]
    assert found == [0, 2, 2, 6, 6, 8]
    queue.trim_to(6, queue.last_position)
    assert [age.keep_from(queries, key, queue, NOW + at) for at in (25, 26)] == [6, 8]
    queue.trim_to(8, queue.last_position)
    assert age.keep_from(queries, key, queue, NOW + 99) == 8


@given(
    st.lists(st.builds(QueueTrim, INT64, st.integers(0, 2**32 - 1), INT64, INT64), min_size=1),
    st.lists(st.tuples(INT64, INT64)),
)
def test_order_with_trims_reads_as_written(
    trims: list[QueueTrim], segments: list[tuple[int, int]]
) -> None:
    order = PurgeOrder((), tuple(segments), 7, tuple(trims), {one.topic_id: "t" for one in trims})
    raw = encode_order(order)
    assert decode_order(read_header(raw), raw, 7) == order


def test_pull_from_a_trimmed_offset_skips_to_the_first_one_and_counts_the_loss() -> None:
    store = open_store(MemoryDisk()).store
    append(store, batch(b"1", b"2"), batch(b"3"))
    sync(store)
    queue = store.queues[TOPIC_ID, 0]
    store.trim([QueueTrim(TOPIC_ID, 0, 2, queue.last_position)])
    pulled = store.pull((TOPIC_ID, 0), read_spec(0))
    assert pulled is not None
    assert (pulled.lost_count, pulled.message_count, pulled.next_offset) == (2, 1, 3)
    with pytest.raises(OffsetOutOfRange):
        store.read((TOPIC_ID, 0), read_spec(1))
    store.trim([QueueTrim(TOPIC_ID, 0, 3, queue.last_position + 1)])
    pulled = store.pull((TOPIC_ID, 0), read_spec(0))
    assert pulled == ReadResult([], 3, 0, 0, lost_count=3)
    append(store, batch(b"4"))
    sync(store)
    assert bodies(store) == [b"4"]


def test_copy_that_never_had_the_trimmed_messages_gives_no_offset_twice() -> None:
    """The segment with them is purged in the log that it copies; only the order names the queue."""
    leader, copy = (open_store(MemoryDisk()).store for _ in range(2))
    trims = (QueueTrim(TOPIC_ID, 0, 2, 0), QueueTrim(TOPIC_ID, 1, 5, 0))
    order = PurgeOrder((), (), -1, trims, {TOPIC_ID: TOPIC})
    (receipt,) = leader.append([checked(encode_order(order))], SYSTEM_TOPICS, NOW)
    assert isinstance(receipt, StoreReceipt)
    append(copy, batch(b"first", queue_id=1))
    raw = leader.log.read(receipt.position, receipt.next_position - receipt.position)
    copy.restore(read_header(raw), raw)
    assert [one.first_offset for one in stored(copy, batch(b"a"), batch(b"b", queue_id=1))] == [
        2,
        5,
    ]
    assert bodies(copy) == [b"a"]
    assert bodies(copy, 1) == [b"b"]


def test_search_by_key_finds_no_trimmed_message() -> None:
    store = open_store(MemoryDisk()).store
    append(store, *(batch(Message(body, keys=("k",))) for body in (b"old", b"new")))
    sync(store)
    queue = store.queues[TOPIC_ID, 0]
    store.trim([QueueTrim(TOPIC_ID, 0, 1, queue.last_position)])
    found = MessageQueries(store)
    windows = found.find(
        TOPIC_ID, "k", TimeWindow(0, 2**62), messages_max=9, bytes_max=1 << 20
    ).messages
    assert [read_header(one.batch).first_offset for one in windows] == [1]
