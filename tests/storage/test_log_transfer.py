"""The transfer of the log from one node to another.

Goal: the sender sends whole batches of one segment, whatever the limit; the receiver checks them as
recovery does, and its copy becomes the same log with the same queues.
Method: two stores in memory. Hypothesis writes one log, transfers it to the other in pieces, and
damages pieces.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.errors import DataLoss
from batonmq_server.storage.core import floors, log_transfer
from batonmq_server.storage.core.commitlog import FILLER, FILLER_MAGIC
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.log_transfer import (
    check_received,
    count_whole_bytes,
    read_whole_batches,
    split,
)
from batonmq_server.storage.core.recovery import Recovery
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.node import LogStart, recover_directory, reset_disk
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import TOPIC, TOPIC_ID, batch, bodies, open_store, stored, sync

SEGMENT_BYTES = 4_096
HISTORY = EpochHistory(((1, 0),))


class Pair:
    """The stores of a leader and a follower."""

    def __init__(self) -> None:
        self.disks = MemoryDisk(), MemoryDisk()
        self.leader = open_store(self.disks[0], segment_bytes=SEGMENT_BYTES).store
        follower = open_store(self.disks[1], segment_bytes=1_024).store
        self.recovery = Recovery(self.disks[1], follower, synced_position=0)

    @property
    def follower(self) -> MessageStore:
        return self.recovery.store

    def next_piece(self, bytes_max: int, history: EpochHistory = HISTORY) -> bytes:
        return read_whole_batches(
            self.leader.log, history, self.follower.log.next_position, bytes_max
        )

    def take(self, data: bytes) -> None:
        position = self.follower.log.next_position
        segment = self.leader.log.segment_of(position)[1:]
        batches, end = check_received(self.recovery, position, data, segment)
        self.follower.log.copy(data, segment, end)
        for header, one in batches:
            self.recovery.take(header, one)
        sync(self.follower)

    def log(self, which: int) -> dict[str, bytes]:
        files = self.disks[which].files
        return {path: bytes(files[path].content) for path in files if path.startswith("log/")}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1_500)), min_size=1, max_size=20),
    st.integers(1, 6_000),
)
def test_transferred_log_is_the_same_log(batches: list[tuple[int, int]], bytes_max: int) -> None:
    pair = Pair()
    for queue_id, size in batches:
        stored(pair.leader, batch(bytes(size), queue_id=queue_id))
    while data := pair.next_piece(bytes_max):
        pair.take(data)
    assert pair.follower.log.next_position == pair.leader.log.next_position
    assert pair.log(0) == pair.log(1)
    for queue_id in range(4):
        assert bodies(pair.follower, queue_id) == bodies(pair.leader, queue_id)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 1_500), min_size=1, max_size=20),
    st.integers(1, 6_000),
    st.integers(1, 3_000),
)
def test_bytes_are_taken_in_pieces_of_whole_batches(
    sizes: list[int], bytes_max: int, piece_bytes: int
) -> None:
    pair = Pair()
    ends = [stored(pair.leader, batch(bytes(size)))[0].next_position for size in sizes]
    while data := pair.next_piece(bytes_max):
        position = pair.follower.log.next_position
        segment_end = pair.leader.log.segment_end(position)
        for piece in split(data, position, segment_end, piece_bytes):
            first = next(end for end in ends if end > pair.follower.log.next_position)
            longest = max(piece_bytes, first - pair.follower.log.next_position)
            assert 0 < len(piece) <= longest
            pair.take(piece)
    assert pair.follower.log.next_position == pair.leader.log.next_position
    assert pair.log(0) == pair.log(1)


def test_leader_sends_a_bounded_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_transfer, "BATCHES_MAX", 3)
    pair = Pair()
    receipts = stored(pair.leader, *(batch(b"%d" % number) for number in range(7)))
    for last in (2, 5, 6):
        pair.take(pair.next_piece(10_000))
        assert pair.follower.log.next_position == receipts[last].next_position


def test_pieces_of_bytes_that_can_not_be_right_end() -> None:
    pair = Pair()
    stored(pair.leader, batch(b"one"), batch(b"two"))
    data = pair.next_piece(10_000)
    assert b"".join(split(data[:-1], 0, SEGMENT_BYTES, 10)) == data[:-1]
    assert list(split(data, SEGMENT_BYTES - 9, SEGMENT_BYTES, 10)) == [data]
    with pytest.raises(DataLoss):
        list(split(data[1:], 0, SEGMENT_BYTES, 10))


@pytest.mark.parametrize("rest", range(20))
def test_log_that_ends_shortly_before_its_segment_end_is_transferred_and_continues(
    rest: int,
) -> None:
    pair = Pair()
    least = stored(pair.leader, batch(b""))[0].next_position
    stored(pair.leader, batch(bytes(SEGMENT_BYTES - 3 * least - rest)))
    last = stored(pair.leader, batch(b""))[0]
    assert last.next_position == SEGMENT_BYTES - rest
    for _ in range(2):
        while data := pair.next_piece(1_000):
            pair.take(data)
        assert pair.follower.log.next_position == pair.leader.log.next_position
        stored(pair.leader, batch(b"more"))


def test_transfer_ends_where_an_epoch_ends() -> None:
    pair = Pair()
    first, second = stored(pair.leader, batch(b"a"), batch(b"b"))
    history = EpochHistory(((1, 0), (2, second.position)))
    assert len(pair.next_piece(10_000, history)) == first.next_position
    assert len(pair.next_piece(10_000)) == second.next_position


@settings(max_examples=50)
@given(st.data())
def test_damaged_transfer_is_rejected_and_changes_nothing(data: st.DataObject) -> None:
    pair = Pair()
    stored(pair.leader, batch(b"one", b"two"), batch(b"three", queue_id=1))
    piece = bytearray(pair.next_piece(10_000))
    bit = data.draw(st.integers(0, 8 * len(piece) - 1))
    piece[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataLoss):
        pair.take(bytes(piece))
    assert pair.follower.log.next_position == 0
    pair.take(pair.next_piece(10_000))
    assert bodies(pair.follower) == [b"one", b"two"]


def test_truncated_transfer_is_rejected() -> None:
    pair = Pair()
    stored(pair.leader, batch(b"one"), batch(b"two"))
    piece = pair.next_piece(10_000)
    for length in range(1, len(piece)):
        if length != len(batch(b"one")):
            with pytest.raises(DataLoss):
                pair.take(piece[:length])


def test_batch_that_does_not_follow_its_queue_is_rejected() -> None:
    pair = Pair()
    (receipt, _) = stored(pair.leader, batch(b"one"), batch(b"two"))
    pair.take(pair.next_piece(10_000)[: receipt.next_position])
    pair.follower.queues[7, 0].next_offset = 5
    with pytest.raises(DataLoss):
        pair.take(pair.next_piece(10_000))


def test_nothing_is_sent_from_a_damaged_position() -> None:
    pair = Pair()
    (receipt, _) = stored(pair.leader, batch(b"one"), batch(b"two"))
    pair.disks[0].files["log/00000000000000000000"].content[receipt.next_position] ^= 1
    with pytest.raises(DataLoss):
        pair.next_piece(10_000)


@pytest.mark.parametrize("room", range(24))
def test_rest_of_a_segment_is_whole_whatever_its_length(room: int) -> None:
    filler = FILLER.pack(FILLER_MAGIC, room) if room >= FILLER.size else b""
    raw = filler.ljust(room, b"\0")
    size = FILLER.size if filler else room
    assert count_whole_bytes(raw, 100, 100 + room) == (size, 0)
    for length in range(1, size):
        whole, needed = count_whole_bytes(raw[:length], 100, 100 + room)
        assert whole == 0
        assert needed > length


def test_new_copy_may_begin_with_batches_that_their_queue_has_dropped() -> None:
    """A compaction dropped them; the log of the leader still has them at its begin."""
    pair = Pair()
    while pair.leader.log.next_position < SEGMENT_BYTES:
        stored(pair.leader, batch(bytes(500)))
    receipts = stored(pair.leader, batch(b"one"), batch(b"two"), batch(b"three"))
    begin, segment = SEGMENT_BYTES, (SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    floor = QueueFloor(TOPIC, TOPIC_ID, 0, receipts[2].first_offset)
    disk = MemoryDisk()
    reset_disk(disk, LogStart(floors.encode([floor]), segment, HISTORY))
    with recover_directory(
        disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0, replicated=True
    ) as node:
        data = read_whole_batches(pair.leader.log, HISTORY, begin, 10_000)
        batches, end = check_received(node.recovery, begin, data, segment)
        node.store.log.copy(data, segment, end)
        for header, one in batches:
            node.recovery.take(header, one)
        node.store.confirmed(end)
        sync(node.store)
        assert node.store.offsets((TOPIC_ID, 0)).first_offset == floor.next_offset
        assert bodies(node.store) == [b"three"]
