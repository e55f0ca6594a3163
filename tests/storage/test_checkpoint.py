"""Goal: recovery with a checkpoint has the same result, byte for byte, as a scan of the whole log;
an invalid checkpoint is not used.

Method: a disk in memory. Stores recovered with and without the checkpoint, or with a damaged index,
are compared by what they serve and by the bytes of their indexes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq._core.records import Message
from batonmq.errors import DataLoss, DuplicateSequence
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.storage.core import checkpoint, floors
from batonmq_server.storage.core.checkpoint import Checkpoint, QueueState
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.consumequeue import ENTRIES_PER_FILE, ENTRY, folder_of
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.keyindex import OpenRun, RunExtent
from batonmq_server.storage.core.producers import ProducerState, StoreReceipt
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import (
    NOW,
    TOPIC,
    TOPIC_ID,
    TOPICS,
    Opened,
    append,
    batch,
    bodies,
    open_store,
    stored,
    sync,
)

SEGMENT_BYTES = 1_200
INDEXES = ("consumequeue/", "keyindex/", "checkpoint")


def take(opened: Opened) -> None:
    """Take a checkpoint at the end of the log."""
    CheckpointWriter(opened.disk, opened.store, 0).run()


def reopened(disk: MemoryDisk) -> Opened:
    return open_store(disk.killed(), segment_bytes=SEGMENT_BYTES, run_entries=4)


def fresh() -> Opened:
    return open_store(MemoryDisk(), segment_bytes=SEGMENT_BYTES, run_entries=4)


def fill(opened: Opened, begin: int = 0, count: int = 20) -> None:
    """Return messages with keys for three queues, each of an idempotent producer."""
    for number in range(begin, begin + count):
        queue_id = number % 3
        message = Message(b"%d" % number * 30, tag=f"t{number % 4}", keys=(f"k{number % 5}", "all"))
        raw = batch(message, queue_id=queue_id, producer=(queue_id + 1, 1), sequence=number // 3)
        stored(opened.store, raw)


def indexes(disk: MemoryDisk) -> dict[str, bytes]:
    """Return the index files by path."""
    return {
        path: bytes(file.content) for path, file in disk.files.items() if path.startswith(INDEXES)
    }


def served(store: MessageStore) -> list[object]:
    """Return everything that can be read from the store."""
    return [
        [bodies(store, queue_id) for queue_id in range(3)],
        [store.offsets((TOPIC_ID, queue_id)) for queue_id in range(3)],
        store.producers.snapshot(),
        store.store_unix_ms,
        store.log.next_position,
        [
            [sorted(zip(part.positions.tolist(), part.indexes.tolist(), strict=True))
             for part in store.keys.find(TOPIC_ID, key_hash)]
            for key_hash in range(3)
        ],
    ]  # fmt: skip


def test_nothing_of_the_log_is_scanned_after_a_clean_stop() -> None:
    opened = fresh()
    fill(opened)
    take(opened)
    again = reopened(opened.disk)
    assert (again.report.batches, again.report.scanned_bytes, again.report.rebuilt) == (0, 0, "")
    assert again.report.checkpoint_position == opened.store.log.next_position
    assert served(again.store) == served(opened.store)


def test_only_the_log_after_the_checkpoint_is_scanned_after_a_crash() -> None:
    opened = fresh()
    fill(opened)
    take(opened)
    fill(opened, 20, 10)
    again = reopened(opened.disk)
    assert (again.report.batches, again.report.rebuilt) == (10, "")
    assert served(again.store) == served(opened.store)


def test_retry_of_a_batch_below_the_checkpoint_gets_its_receipt() -> None:
    opened = fresh()
    raw = batch(b"once", producer=(5, 1))
    (receipt,) = stored(opened.store, raw)
    take(opened)
    assert append(reopened(opened.disk).store, raw) == [replace(receipt, duplicate=True)]


def test_owners_and_contents_of_producers_are_the_same_after_recovery() -> None:
    """With a checkpoint, with a part of the log behind it, and from the log alone."""
    opened = fresh()
    owners = [0, owner_of("shop"), owner_of("stranger")]

    def send(sequence: int) -> None:
        for owner in owners:
            producer_id = 5 if owner else 6
            raw = batch(b"%d" % owner, producer=(producer_id, 1), sequence=sequence)
            (receipt,) = opened.store.append([check(raw, owner)], TOPICS, NOW)
            assert isinstance(receipt, StoreReceipt)
        sync(opened.store)

    send(0)
    take(opened)
    send(1)
    expected = sorted(opened.store.producers.snapshot().states(), key=lambda one: one.owner)
    assert [one.owner for one in expected] == sorted(owners)
    again = reopened(opened.disk)
    assert again.report.batches == 3
    opened.disk.remove("checkpoint")
    rebuilt = reopened(opened.disk)
    assert rebuilt.report.rebuilt
    for store in (again.store, rebuilt.store):
        producers = store.producers.snapshot().states()
        assert sorted(producers, key=lambda one: one.owner) == expected
        other = check(batch(b"other", producer=(5, 1), sequence=1), owners[1])
        (refused,) = store.append([other], TOPICS, NOW)
        assert isinstance(refused, DuplicateSequence)


def test_owner_that_a_producer_writes_into_its_batch_is_ignored() -> None:
    raw = bytearray(batch(b"a", producer=(5, 1)))
    raw[40:44] = owner_of("shop").to_bytes(4, "big")
    assert check(bytes(raw), owner_of("stranger")).header.owner == owner_of("stranger")
    assert check(bytes(raw)).header.owner == 0


def test_store_times_never_decrease_after_a_restart() -> None:
    opened = fresh()
    append(opened.store, batch(b"a"), now=NOW + 5_000)
    sync(opened.store)
    take(opened)
    (receipt,) = append(reopened(opened.disk).store, batch(b"b"), now=NOW)
    assert isinstance(receipt, StoreReceipt)
    assert receipt.store_unix_ms == NOW + 5_000


def test_indexes_without_a_checkpoint_are_rebuilt_byte_for_byte() -> None:
    opened = fresh()
    fill(opened, count=40)
    take(opened)
    before = indexes(opened.disk)
    opened.disk.remove("checkpoint")
    again = reopened(opened.disk)
    assert again.report.rebuilt == "there is no checkpoint"
    take(again)
    assert indexes(again.disk) == before
    assert len(before) > 10


def test_checkpoint_does_not_depend_on_the_previous_checkpoint() -> None:
    opened, twin = fresh(), fresh()
    for begin in (0, 10, 20, 30):
        fill(opened, begin, 10)
        take(opened)
        fill(twin, begin, 10)
    take(twin)
    assert indexes(opened.disk) == indexes(twin.disk)


def _remove(disk: MemoryDisk, path: str) -> None:
    disk.remove(path)


def _cut(disk: MemoryDisk, path: str) -> None:
    del disk.files[path].content[-1:]


def _flip_last(disk: MemoryDisk, path: str) -> None:
    disk.files[path].content[-ENTRY.itemsize] ^= 1


QUEUE_FILE = f"{folder_of(TOPIC, TOPIC_ID, 1)}/{0:020d}"


@pytest.mark.parametrize(
    ("spoil", "path"),
    [
        (_remove, "consumequeue"),
        (_remove, QUEUE_FILE),
        (_cut, QUEUE_FILE),
        (_flip_last, QUEUE_FILE),
        (_remove, "keyindex"),
        (_remove, f"keyindex/{0:020d}"),
        (_cut, f"keyindex/{0:020d}"),
        (_cut, "checkpoint"),
        (_flip_last, "checkpoint"),
    ],
)
def test_damaged_index_is_rebuilt_byte_for_byte(
    spoil: Callable[[MemoryDisk, str], None], path: str
) -> None:
    opened = fresh()
    fill(opened, count=40)
    take(opened)
    before, shown = indexes(opened.disk), served(opened.store)
    spoil(opened.disk, path)
    again = reopened(opened.disk)
    assert again.report.rebuilt != ""
    assert again.report.batches == 40
    assert served(again.store) == shown
    take(again)
    assert indexes(again.disk) == before


def test_index_entry_that_points_to_another_queue_is_not_served() -> None:
    opened = fresh()
    fill(opened, count=12)
    take(opened)
    other = opened.disk.files[f"{folder_of(TOPIC, TOPIC_ID, 2)}/{0:020d}"].content
    opened.disk.files[QUEUE_FILE].content[: ENTRY.itemsize] = other[: ENTRY.itemsize]
    with pytest.raises(DataLoss, match="another queue"):
        bodies(reopened(opened.disk).store, 1)


def test_crash_after_any_step_of_a_checkpoint_loses_nothing() -> None:
    opened = fresh()
    fill(opened)
    take(opened)
    fill(opened, 20, 15)
    shown, steps = served(opened.store), CheckpointWriter(opened.disk, opened.store, 0)
    states = [opened.disk.killed()]
    capture = steps.begin()
    states.extend(opened.disk.killed() for _ in steps.collect(capture))
    states.append(opened.disk.killed())
    steps.write(capture)
    states.append(opened.disk.killed())
    for state in states:
        again = reopened(state)
        assert again.report.rebuilt == ""
        assert served(again.store) == shown


def test_index_files_that_a_crash_has_left_are_removed_at_the_next_start() -> None:
    """The checkpoint does not need them: it was written before their removal began."""
    opened = fresh()
    fill(opened)
    opened.store.add_queue((TOPIC_ID, 7), TOPIC, 2 * ENTRIES_PER_FILE)
    stored(opened.store, batch(b"last", queue_id=7))
    take(opened)
    before = indexes(opened.disk)
    folder = folder_of(TOPIC, TOPIC_ID, 7)
    for path in (
        f"{folder}/{0:020d}",
        f"{folder}/{ENTRIES_PER_FILE * ENTRY.itemsize:020d}",
        f"{folder_of(TOPIC, TOPIC_ID, 6)}/{0:020d}",
        f"{folder_of('gone', 3, 0)}/{0:020d}",
    ):
        opened.disk.open(path, create=True)
    again = reopened(opened.disk)
    assert again.report.rebuilt == ""
    assert indexes(again.disk) == before
    assert served(again.store) == served(opened.store)
    assert bodies(again.store, 7) == [b"last"]


def test_batches_appended_during_a_checkpoint_belong_to_the_next_one() -> None:
    opened = fresh()
    fill(opened)
    steps = CheckpointWriter(opened.disk, opened.store, 0)
    capture = steps.begin()
    fill(opened, 20, 15)
    for _ in steps.collect(capture):
        pass
    steps.write(capture)
    assert list(steps.done(capture)) == []
    again = reopened(opened.disk)
    assert again.report.batches == 15
    assert served(again.store) == served(opened.store)
    fill(opened, 35, 5)
    take(opened)
    assert served(reopened(opened.disk).store) == served(opened.store)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_recovery_with_and_without_checkpoint_agree_after_a_power_cut(
    data: st.DataObject,
) -> None:
    opened = fresh()
    number = 0
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, 8))
        fill(opened, number, count)
        number += count
        if data.draw(st.booleans()):
            take(opened)
    count = data.draw(st.integers(0, 4))
    append(
        opened.store,
        *(batch(b"unsynced" * 20, queue_id=queue_id % 3) for queue_id in range(count)),
    )
    cut = opened.disk.power_cut(lambda length: data.draw(st.integers(0, length)))
    with_checkpoint = reopened(cut)
    cut.remove("checkpoint")
    without = reopened(cut)
    assert with_checkpoint.report.next_position == without.report.next_position
    assert served(with_checkpoint.store) == served(without.store)
    take(with_checkpoint)
    take(without)
    key_files = {path: raw for path, raw in indexes(without.disk).items() if "keyindex" in path}
    assert {p: r for p, r in indexes(with_checkpoint.disk).items() if "keyindex" in p} == key_files


@pytest.mark.parametrize("lost", [(), ("checkpoint",), ("checkpoint", "consumequeue", "keyindex")])
def test_offsets_continue_after_the_first_segment_is_removed(lost: tuple[str, ...]) -> None:
    opened = fresh()
    stored(opened.store, batch(b"only one", queue_id=4))
    fill(opened, count=40)
    take(opened)
    dropped = opened.store.log.sealed()[0][1]
    for queue in opened.store.queues.values():
        queue.trim_before(dropped)
    left = opened.store.queues[TOPIC_ID, 4]
    assert left.first_offset == left.next_offset == 1
    opened.disk.replace(floors.PATH, floors.encode([QueueFloor(TOPIC, TOPIC_ID, 4, 1)]))
    shown = served(opened.store)
    for path in opened.store.log.drop_before(dropped):
        opened.disk.remove(path)
    for path in lost:
        opened.disk.remove(path)
    again = reopened(opened.disk)
    assert (again.report.rebuilt == "") == (not lost)
    assert served(again.store)[:2] == shown[:2]
    (receipt,) = stored(again.store, batch(b"next", queue_id=4))
    assert receipt.first_offset == 1


def test_damaged_floors_fail_a_recovery_that_needs_them_unless_loss_is_accepted() -> None:
    opened = fresh()
    fill(opened)
    take(opened)
    opened.disk.replace(floors.PATH, b"rubbish")
    assert reopened(opened.disk).report.rebuilt == ""
    opened.disk.remove("checkpoint")
    with pytest.raises(DataLoss, match="floors"):
        reopened(opened.disk)
    lossy = open_store(opened.disk.killed(), segment_bytes=SEGMENT_BYTES, accept_loss=True)
    assert len(bodies(lossy.store)) == 7


def test_checkpoint_ahead_of_the_log_is_not_trusted() -> None:
    opened = fresh()
    fill(opened, count=40)
    take(opened)
    assert len(opened.disk.names("log")) > 2
    for name in opened.disk.names("log")[1:]:
        opened.disk.remove(f"log/{name}")
    again = reopened(opened.disk)
    assert "outside the log" in again.report.rebuilt
    assert again.report.next_position <= SEGMENT_BYTES


receipts = st.builds(
    StoreReceipt,
    *[st.integers(0, 2**63 - 1)] * 4,
)
states = st.builds(
    ProducerState,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63 - 1),
    st.dictionaries(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 65_535)),
        st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 65_535), receipts,
                           st.integers(0, 2**32 - 1)),
                 min_size=1, max_size=5).map(tuple),
        max_size=4,
    ),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
queues = st.builds(
    QueueState,
    st.text("abcXYZ_%-0", min_size=1, max_size=127),
    st.integers(0, 2**63 - 1),
    st.integers(0, 65_535),
    *[st.integers(0, 2**63 - 1)] * 2,
    st.integers(-1, 2**63 - 1),
)


@given(
    queues=st.lists(queues, max_size=6),
    producers=st.lists(states, max_size=4),
    waiting=st.integers(0, 3).map(lambda count: bytes(range(24)) * count),
    numbers=st.tuples(*[st.integers(0, 2**62)] * 5),
)
def test_checkpoint_is_decoded_as_it_was_encoded(
    queues: list[QueueState],
    producers: list[ProducerState],
    waiting: bytes,
    numbers: tuple[int, ...],
) -> None:
    position, now, begin, first_ms, last_ms = numbers
    run = OpenRun(RunExtent(begin, position, first_ms, last_ms), 5, 77)
    original = Checkpoint(position, now, run, queues, producers, waiting)
    raw = checkpoint.encode(original)
    assert checkpoint.decode(raw) == original
    for at in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        assert checkpoint.decode(bytes(damaged)) is None
    assert checkpoint.decode(raw[:-1]) is checkpoint.decode(b"") is None


def test_large_checkpoint_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs during a call of numpy, so each call gets few rows."""
    counts: list[int] = []
    array = np.array

    def counted(rows: list[tuple[int, ...]], dtype: np.dtype[np.void]) -> np.ndarray:
        counts.append(len(rows))
        return array(rows, dtype)

    monkeypatch.setattr(np, "array", counted)
    receipt = StoreReceipt(0, 1, 2, 3)
    producers = [
        ProducerState(number, 1, NOW, {(TOPIC_ID, 0): ((0, 1, receipt, 5),) * 5})
        for number in range(3_000)
    ]
    decoded = checkpoint.decode(checkpoint.of_producers(9, producers))
    assert decoded is not None
    assert decoded.producers == producers
    assert sum(counts) == len(producers) * (1 + 1 + 5)
    assert max(counts) <= checkpoint.ROWS_AT_ONCE
