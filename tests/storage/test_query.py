"""Goal: searches by time, key and id find exactly the stored messages.

Method: a store in memory; a plain list of the stored messages is the model.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.records import Message, decode_records, key_hash, read_header
from batonmq.errors import DataLoss, MessageNotFound
from batonmq_server.storage.core import query
from batonmq_server.storage.core.keyindex import DamagedRun
from batonmq_server.storage.core.purge import QueueTrim
from batonmq_server.storage.core.query import (
    CANDIDATES_MAX,
    MessageMatch,
    MessageQueries,
    TimeWindow,
)
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import (
    NOW,
    TOPIC_ID,
    Opened,
    append,
    batch,
    message_at,
    open_store,
    stored,
    sync,
)

EVER = TimeWindow(0, 1 << 62)


class Stored(NamedTuple):
    """A stored message of the model."""

    queue_id: int
    offset: int
    position: int
    at: int
    store_unix_ms: int
    keys: tuple[str, ...]


def fresh() -> Opened:
    return open_store(MemoryDisk(), segment_bytes=1_500, run_entries=3)


def store_at(store: MessageStore, now: int, queue_id: int, *keys: tuple[str, ...]) -> list[Stored]:
    """Store one batch; return its messages."""
    raw = batch(*(Message(b"x" * 20, keys=each) for each in keys), queue_id=queue_id)
    (receipt,) = append(store, raw, now=now)
    sync(store)
    assert not isinstance(receipt, Exception)
    return [
        Stored(queue_id, receipt.first_offset + n, receipt.position, n, receipt.store_unix_ms, each)
        for n, each in enumerate(keys)
    ]


def place(match: MessageMatch) -> tuple[int, int]:
    return read_header(match.batch).position, match.index


keys = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(tuple)
histories = st.lists(
    st.tuples(
        st.integers(-3, 3),  # the clock may step back
        st.integers(0, 1),
        st.lists(keys, min_size=1, max_size=4),
    ),
    max_size=30,
)


def play(history: list[tuple[int, int, list[tuple[str, ...]]]]) -> tuple[Opened, list[Stored]]:
    opened, model, now = fresh(), list[Stored](), NOW
    for step, queue_id, messages in history:
        now += step
        model += store_at(opened.store, now, queue_id, *messages)
    return opened, model


def trim(opened: Opened, segments: int) -> int:
    """Drop sealed segments as retention does; return the new first position."""
    sealed = opened.store.log.sealed()[:segments]
    if sealed:
        position = sealed[-1][1]
        for queue in opened.store.queues.values():
            queue.trim_before(position)
        opened.store.keys.drop_before(position)
        opened.store.log.drop_before(position)
    return opened.store.log.first_position


@given(history=histories, dropped=st.integers(0, 2))
def test_first_message_at_or_after_a_time_is_found(
    history: list[tuple[int, int, list[tuple[str, ...]]]], dropped: int
) -> None:
    opened, model = play(history)
    kept_from = trim(opened, dropped)
    queries = MessageQueries(opened.store)
    for queue_id in (0, 1):
        of_queue = [m for m in model if m.queue_id == queue_id and m.position >= kept_from]
        end = opened.store.offsets((TOPIC_ID, queue_id)).next_offset
        for unix_ms in {
            0,
            NOW + 1_000,
            *(m.store_unix_ms + d for m in of_queue for d in (-1, 0, 1)),
        }:
            later = [m.offset for m in of_queue if m.store_unix_ms >= unix_ms]
            expected = min(later, default=end)
            assert queries.search_offset((TOPIC_ID, queue_id), unix_ms) == expected


def test_queue_without_messages_begins_at_0_for_any_time() -> None:
    assert MessageQueries(fresh().store).search_offset((TOPIC_ID, 5), NOW) == 0


def test_message_that_is_not_synced_is_not_found_by_time_key_or_id() -> None:
    store = fresh().store
    store_at(store, NOW, 0, ("a",))
    (receipt,) = append(store, batch(Message(b"b", keys=("a",))), now=NOW + 5)
    assert not isinstance(receipt, Exception)
    queries = MessageQueries(store)
    assert queries.search_offset((TOPIC_ID, 0), NOW + 5) == 1
    assert len(find(queries, "a")) == 1
    with pytest.raises(MessageNotFound):
        message_at(queries, receipt.position, 0)
    sync(store)
    assert len(find(queries, "a")) == 2
    assert message_at(queries, receipt.position, 0).index == 0


def find(
    queries: MessageQueries, key: str, window: TimeWindow = EVER, **limits: int
) -> list[MessageMatch]:
    limits = {"messages_max": 1_000, "bytes_max": 1 << 30} | limits
    return queries.find(TOPIC_ID, key, window, **limits).messages


@given(history=histories, dropped=st.integers(0, 2), data=st.data())
def test_messages_with_a_key_are_found_newest_first(
    history: list[tuple[int, int, list[tuple[str, ...]]]], dropped: int, data: st.DataObject
) -> None:
    opened, model = play(history)
    kept_from = trim(opened, dropped)
    queries = MessageQueries(opened.store)
    begin = NOW + data.draw(st.integers(-20, 20))
    window = data.draw(st.sampled_from([EVER, TimeWindow(begin, begin + 10)]))
    for key in ("a", "b", "c", "d"):
        expected = [
            (m.position, m.at)
            for m in model
            if key in m.keys
            and m.position >= kept_from
            and window.from_unix_ms <= m.store_unix_ms < window.to_unix_ms
        ]
        assert [place(m) for m in find(queries, key, window)] == sorted(expected, reverse=True)


def test_bounded_search_reports_that_there_may_be_more() -> None:
    opened, _ = play([(1, 0, [("a",), ("a",)])] * 5)
    queries = MessageQueries(opened.store)
    every = [place(match) for match in find(queries, "a")]
    assert len(every) == 10
    for count in range(1, 12):
        matches = queries.find(TOPIC_ID, "a", EVER, messages_max=count, bytes_max=1 << 30)
        assert [place(match) for match in matches.messages] == every[:count]
        assert matches.more == (count < 10)
    one = queries.find(TOPIC_ID, "a", EVER, messages_max=10, bytes_max=1)
    assert (len(one.messages), one.more) == (1, True)


def test_key_with_the_same_hash_is_not_a_match() -> None:
    # CRC-32 of both is 0x4ddb0c25.
    assert key_hash("plumless") == key_hash("buckeroo")
    store = fresh().store
    store_at(store, NOW, 0, ("plumless",), ("buckeroo",))
    assert [match.index for match in find(MessageQueries(store), "buckeroo")] == [1]


def test_search_among_many_keys_with_one_hash_is_bounded() -> None:
    """A producer may choose keys with the hash of another key."""
    opened = open_store(MemoryDisk(), segment_bytes=1 << 24, run_entries=1 << 19)
    store_at(opened.store, NOW, 0, ("buckeroo",))
    others = batch(*(Message(b"", keys=("plumless",)) for _ in range(CANDIDATES_MAX // 4)))
    for number in range(1, 20):
        append(opened.store, others, now=NOW + number)
    sync(opened.store)
    queries = MessageQueries(opened.store)
    read = opened.store.log.read
    positions: set[int] = set()

    def counted(position: int, bytes_max: int) -> bytes:
        positions.add(position)
        return read(position, bytes_max)

    opened.store.log.read = counted  # type: ignore[method-assign]
    matches = queries.find(TOPIC_ID, "buckeroo", EVER, messages_max=9, bytes_max=1 << 30)
    assert (matches.messages, matches.more) == ([], True)
    assert len(positions) == 4 + 1
    small = queries.find(TOPIC_ID, "buckeroo", EVER, messages_max=9, bytes_max=len(others))
    assert (small.messages, small.more) == ([], True)
    narrow = queries.find(
        TOPIC_ID, "buckeroo", TimeWindow(0, NOW + 1), messages_max=9, bytes_max=1 << 30
    )
    assert (len(narrow.messages), narrow.more) == (1, False)
    last = queries.find(
        TOPIC_ID, "plumless", TimeWindow(NOW + 19, 1 << 62), messages_max=9_999, bytes_max=1 << 30
    )
    assert (len(last.messages), last.more) == (CANDIDATES_MAX // 4, False)


def test_search_among_removed_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=1 << 20)
    one = batch(Message(b"x" * 1_000, keys=("a",)))
    receipts = stored(opened.store, *[one] * 50)
    kept = stored(opened.store, one)
    opened.store.trim([QueueTrim(TOPIC_ID, 0, 50, kept[0].position)])
    monkeypatch.setattr(query, "REMOVED_BYTES_MAX", 5 * len(one))
    read, bytes_read = opened.store.log.read, 0

    def counted(position: int, bytes_max: int) -> bytes:
        nonlocal bytes_read
        found = read(position, bytes_max)
        bytes_read += len(found)
        return found

    monkeypatch.setattr(opened.store.log, "read", counted)
    queries = MessageQueries(opened.store)
    matches = queries.find(TOPIC_ID, "a", EVER, messages_max=9, bytes_max=1 << 30)
    assert [match.batch[56:] for match in matches.messages] == [one[56:]]
    assert matches.more
    assert bytes_read < 10 * len(one) < len(receipts) * len(one)


def test_search_in_a_very_large_batch_returns_its_newest_messages() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=1 << 24, run_entries=1 << 19)
    count = CANDIDATES_MAX + 10
    stored(opened.store, batch(*(Message(b"", keys=("a",)) for _ in range(count))))
    matches = MessageQueries(opened.store).find(
        TOPIC_ID, "a", EVER, messages_max=9_999, bytes_max=1 << 40
    )
    assert [one.index for one in matches.messages] == list(range(count - 1, 9, -1))
    assert matches.more


def test_index_entry_beyond_the_batch_is_data_loss() -> None:
    opened = fresh()
    store_at(opened.store, NOW, 0, ("a",))
    opened.store.keys._open.rows["index"] = 3
    with pytest.raises(DataLoss) as lost:
        find(MessageQueries(opened.store), "a")
    assert "fsck" in lost.value.remedy


@pytest.mark.parametrize("kept_bytes", [None, 60])
def test_missing_or_short_run_file_is_damaged(kept_bytes: int | None) -> None:
    opened = fresh()
    for number in range(3):
        store_at(opened.store, NOW + number, 0, ("a",), ("b",))
    opened.store.keys.write_ended_runs()
    path = f"keyindex/{0:020d}"
    if kept_bytes is None:
        opened.disk.remove(path)
    else:
        del opened.disk.files[path].content[kept_bytes:]
    with pytest.raises(DamagedRun, match=path) as damaged:
        find(MessageQueries(opened.store), "a")
    assert damaged.value.extent.first_position == 0


def test_key_that_is_not_utf8_does_not_fail_a_search() -> None:
    opened = fresh()
    raw = batch(Message(b"", keys=("key1",)), Message(b"", keys=("key2", "other")))
    broken = bytearray(raw.replace(b"key1", b"\xff\xff\xff\xff"))
    broken[52:56] = crc32c(bytes(broken[56:])).to_bytes(4, "big")
    stored(opened.store, bytes(broken))
    queries = MessageQueries(opened.store)
    assert find(queries, "key1") == []
    assert [match.index for match in find(queries, "other")] == [1]


def test_key_of_another_topic_is_not_found() -> None:
    store = fresh().store
    store_at(store, NOW, 0, ("a",))
    other = TOPIC_ID + (1 << 32)
    matches = MessageQueries(store).find(other, "a", EVER, messages_max=9, bytes_max=1 << 20)
    assert matches.messages == []


def test_message_that_repeats_a_key_is_found_once() -> None:
    store = fresh().store
    store_at(store, NOW, 0, ("a", "b", "a"))
    assert len(find(MessageQueries(store), "a")) == 1


@given(history=histories.filter(bool), dropped=st.integers(0, 2))
def test_message_is_found_by_its_position_only(
    history: list[tuple[int, int, list[tuple[str, ...]]]], dropped: int
) -> None:
    opened, model = play(history)
    kept_from = trim(opened, dropped)
    queries = MessageQueries(opened.store)
    for message in model:
        if message.position < kept_from:
            with pytest.raises(MessageNotFound):
                message_at(queries, message.position, message.at)
            continue
        match = message_at(queries, message.position, message.at)
        (record,) = decode_records(match.batch, read_header(match.batch), [match.index])
        assert (record.offset, record.keys) == (message.offset, message.keys)
    places = {message.position for message in model}
    end = opened.store.log.next_position
    for position in set(range(kept_from, min(end + 200, kept_from + 400))) - places:
        with pytest.raises(MessageNotFound):
            message_at(queries, position, 0)
    with pytest.raises(MessageNotFound):
        message_at(queries, model[-1].position, model[-1].at + 1)


def test_bytes_in_a_body_that_look_like_a_batch_are_not_a_message() -> None:
    opened = fresh()
    (first,) = stored(opened.store, batch(b"first"))
    inner = bytes(opened.disk.files[f"log/{0:020d}"].content[: first.next_position])
    outer_at = first.next_position
    inner_at = outer_at + len(batch(b""))
    moved = inner[:16] + inner_at.to_bytes(8, "big") + inner[24:]
    stored(opened.store, batch(moved))
    content = opened.disk.files[f"log/{0:020d}"].content
    assert read_header(bytes(content[inner_at:])).position == inner_at
    with pytest.raises(MessageNotFound):
        message_at(MessageQueries(opened.store), inner_at, 0)


def test_damaged_batches_are_not_served() -> None:
    opened = fresh()
    (stored_,) = store_at(opened.store, NOW, 0, ("a",))
    opened.disk.files[f"log/{0:020d}"].content[opened.store.log.next_position - 1] ^= 1
    queries = MessageQueries(opened.store)
    with pytest.raises(DataLoss):
        message_at(queries, stored_.position, 0)
    with pytest.raises(DataLoss):
        find(queries, "a")
    opened.disk.files[f"log/{0:020d}"].content[stored_.position + 34] ^= 1
    with pytest.raises(DataLoss):
        queries.search_offset((TOPIC_ID, 0), NOW)
