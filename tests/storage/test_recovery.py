"""Goal: after any crash recovery restores all acknowledged messages and nothing torn.

Method: a disk in memory that tears unsynced writes at every byte; the stores before and after the
crash are compared by what they serve. T2, T3, T5, T20, T21, T22, T23 of the standing test list.
"""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.errors import DataLoss
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.recovery import decode_synced, encode_synced
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from tests.storage.batches import TOPIC_ID, append, batch, bodies, open_store, stored

FIRST = f"log/{0:020d}"


def test_empty_folder_is_an_empty_log() -> None:
    report = open_store(MemoryDisk()).report
    assert (report.batches, report.next_position, report.truncated_bytes) == (0, 0, 0)
    assert report.end_reason == "end of log"


def test_everything_written_is_there_after_a_kill() -> None:
    opened = open_store(MemoryDisk())
    append(opened.store, batch(b"a"), batch(b"b", queue_id=1))
    again = open_store(opened.disk.killed())
    assert (bodies(again.store, 0), bodies(again.store, 1)) == ([b"a"], [b"b"])
    assert (again.report.batches, again.report.messages, again.report.queues) == (2, 2, 2)


def test_recovered_batches_are_synced_before_they_are_visible() -> None:
    opened = open_store(MemoryDisk())
    append(opened.store, batch(b"a"))
    again = open_store(opened.disk.killed())
    assert bodies(again.store) == [b"a"]
    assert again.store.log.synced_position == again.store.log.next_position
    cut = again.disk.power_cut(lambda length: 0)
    assert bodies(open_store(cut).store) == [b"a"]


def test_batch_torn_at_any_byte_is_cut_off_and_the_rest_is_served() -> None:
    opened = open_store(MemoryDisk())
    stored(opened.store, batch(b"first"), batch(b"second"))
    end = opened.store.log.next_position
    append(opened.store, last := batch(b"last", producer=(5, 1)))
    for kept_bytes in range(len(last)):
        again = open_store(opened.disk.power_cut(lambda _, kept_bytes=kept_bytes: kept_bytes))  # type: ignore[misc]
        assert bodies(again.store) == [b"first", b"second"], kept_bytes
        assert again.report.next_position == end
        assert (again.report.truncated_bytes > 0) == (kept_bytes > 0)
        assert again.disk.files[FIRST].content[end:] == bytes(4_096 - end)
        (receipt,) = stored(again.store, last)
        assert (receipt.first_offset, receipt.position, receipt.duplicate) == (2, end, False)


@pytest.mark.parametrize("survives", [0, 5, 8, 50, 1_000])
def test_crash_around_a_segment_roll_keeps_what_was_synced(survives: int) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=300)
    stored(opened.store, batch(b"a" * 150))
    append(opened.store, batch(b"b" * 150))
    assert len(opened.disk.names("log")) == 2
    cut = opened.disk.power_cut(lambda length: min(length, survives))
    again = open_store(cut, segment_bytes=300)
    expected = [b"a" * 150] + [b"b" * 150] * (survives == 1_000)
    assert bodies(again.store) == expected
    (receipt,) = stored(again.store, batch(b"c" * 150))
    assert receipt.first_offset == len(expected)
    once_more = open_store(again.disk.killed(), segment_bytes=300)
    assert bodies(once_more.store) == [*expected, b"c" * 150]


def test_later_segment_without_its_predecessor_is_dropped() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=300)
    stored(opened.store, batch(b"a" * 100))
    end = opened.store.log.next_position
    append(opened.store, batch(b"lost" * 10), batch(b"b" * 150))
    cut = opened.disk.killed()
    cut.files[FIRST].content[end:] = bytes(300 - end)
    again = open_store(cut, segment_bytes=300)
    assert bodies(again.store) == [b"a" * 100]
    assert again.disk.names("log") == [f"{0:020d}"]
    assert again.report.truncated_bytes > 150


def test_empty_segment_that_is_too_short_for_the_next_batch_is_passed_over() -> None:
    """A crash came before its first batch, and the next start has a larger segment size."""
    full = 300 - len(batch(b""))
    opened = open_store(MemoryDisk(), segment_bytes=300)
    stored(opened.store, batch(b"a" * full))
    disk = opened.disk.killed()
    disk.create(f"log/{300:020d}", 50)
    again = open_store(disk, segment_bytes=600)
    assert disk.names("log") == [f"{0:020d}", f"{300:020d}"]
    (receipt,) = stored(again.store, batch(b"b" * full))
    assert (receipt.position, receipt.first_offset) == (350, 1)
    once_more = open_store(disk.killed(), segment_bytes=600, synced_position=650)
    assert bodies(once_more.store) == [b"a" * full, b"b" * full]
    assert once_more.report.truncated_bytes == 0


def test_any_flipped_bit_is_found() -> None:
    opened = open_store(MemoryDisk())
    _first, second = stored(opened.store, batch(b"first"), batch(b"second"))
    for at in range(second.position, second.next_position):
        for bit in (0, 7):
            rotten = opened.disk.killed()
            rotten.files[FIRST].content[at] ^= 1 << bit
            again = open_store(rotten)
            assert bodies(again.store) == [b"first"], (at, bit)
            assert again.report.next_position == second.position
            assert again.report.end_reason != ""


def test_damage_below_the_synced_position_fails_recovery_and_cuts_nothing() -> None:
    opened = open_store(MemoryDisk())
    first, second = stored(opened.store, batch(b"first"), batch(b"second"))
    rotten = opened.disk.killed()
    rotten.files[FIRST].content[first.next_position - 1] ^= 1
    before = bytes(rotten.files[FIRST].content)
    with pytest.raises(DataLoss) as refused:
        open_store(rotten, synced_position=second.next_position)
    assert refused.value.facts == {"position": "0"}
    assert "ACCEPT_LOSS" in refused.value.remedy
    assert rotten.files[FIRST].content == before


def test_missing_acknowledged_batches_fail_recovery() -> None:
    opened = open_store(MemoryDisk())
    _first, second = stored(opened.store, batch(b"first"), batch(b"second"))
    emptied = opened.disk.killed()
    emptied.files[FIRST].content[second.position :] = bytes(4_096 - second.position)
    with pytest.raises(DataLoss):
        open_store(emptied, synced_position=second.next_position)


def test_loss_can_be_accepted() -> None:
    opened = open_store(MemoryDisk())
    _, second = stored(opened.store, batch(b"first"), batch(b"second"))
    rotten = opened.disk.killed()
    rotten.files[FIRST].content[second.position] ^= 1
    again = open_store(rotten, synced_position=second.next_position, accept_loss=True)
    assert bodies(again.store) == [b"first"]


def test_torn_tail_above_the_synced_position_is_cut() -> None:
    opened = open_store(MemoryDisk())
    (first,) = stored(opened.store, batch(b"first"))
    append(opened.store, batch(b"torn"))
    cut = opened.disk.power_cut(lambda length: 60)
    again = open_store(cut, synced_position=first.next_position)
    assert bodies(again.store) == [b"first"]


def test_garbage_after_the_log_is_cut() -> None:
    opened = open_store(MemoryDisk())
    (receipt,) = stored(opened.store, batch(b"first"))
    opened.disk.files[FIRST].content[receipt.next_position + 3] = 9
    again = open_store(opened.disk.killed())
    assert again.report.truncated_bytes == 4
    assert bodies(again.store) == [b"first"]


def test_old_copy_of_a_batch_is_not_a_new_batch() -> None:
    opened = open_store(MemoryDisk())
    (first,) = stored(opened.store, batch(b"first"))
    content = opened.disk.files[FIRST].content
    content[first.next_position : 2 * first.next_position] = content[: first.next_position]
    again = open_store(opened.disk.killed())
    assert bodies(again.store) == [b"first"]
    assert "header has position 0" in again.report.end_reason


def test_consume_queues_are_rebuilt_byte_for_byte() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=1 << 20)
    for number in range(30):
        stored(opened.store, batch(*[b"x"] * (number * 37 % 400 + 1), queue_id=number % 3))
    opened.store.flush()
    original = {p: f.content for p, f in opened.disk.files.items() if p.startswith("consumequeue/")}
    assert len(original) == 3
    for spoil in ("remove", "corrupt", "leave"):
        disk = opened.disk.killed()
        for path in original:
            if spoil == "remove":
                disk.remove(path)
            elif spoil == "corrupt":
                disk.files[path].content[:] = b"?" * 1_000
        again = open_store(disk, segment_bytes=1 << 20)
        again.store.flush()
        assert {p: disk.files[p].content for p in original} == original, spoil


def test_retry_after_recovery_gets_the_first_receipt() -> None:
    opened = open_store(MemoryDisk())
    batches = [batch(b"a", b"b", producer=(5, 1), sequence=n * 2) for n in range(5)]
    receipts = stored(opened.store, *batches)
    again = open_store(opened.disk.killed())
    assert append(again.store, *batches) == [replace(one, duplicate=True) for one in receipts]
    assert again.store.log.next_position == opened.store.log.next_position


def test_second_recovery_changes_nothing() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=500)
    stored(opened.store, *(batch(b"x" * 100, queue_id=n % 3) for n in range(20)))
    once = open_store(opened.disk.killed(), segment_bytes=500)
    twice = open_store(once.disk.killed(), segment_bytes=500)
    assert once.report == twice.report
    assert once.report.truncated_bytes == 0


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_log_after_a_power_cut_is_a_prefix_with_everything_synced(
    data: st.DataObject,
) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=600)
    written: dict[int, list[bytes]] = {0: [], 1: []}
    synced: dict[int, int] = {0: 0, 1: 0}
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        group = []
        for _ in range(data.draw(st.integers(1, 3))):
            queue_id = data.draw(st.integers(0, 1))
            body = f"{number}".encode() * data.draw(st.integers(1, 60))
            number += 1
            group.append(batch(body, queue_id=queue_id))
            written[queue_id].append(body)
        if data.draw(st.booleans()):
            stored(opened.store, *group)
            synced = {queue_id: len(expected) for queue_id, expected in written.items()}
        else:
            append(opened.store, *group)
    cut = opened.disk.power_cut(lambda length: data.draw(st.integers(0, length)))
    again = open_store(cut, segment_bytes=600)
    for queue_id, expected in written.items():
        served = bodies(again.store, queue_id)
        assert served == expected[: len(served)]
        assert len(served) >= synced[queue_id]
        (receipt,) = stored(again.store, batch(b"next", queue_id=queue_id))
        assert receipt.first_offset == len(served)
    once_more = open_store(again.disk.killed(), segment_bytes=600)
    for queue_id in written:
        assert bodies(once_more.store, queue_id) == bodies(again.store, queue_id)


def test_synced_position_is_decoded_as_encoded_and_damage_is_found() -> None:
    raw = encode_synced(123_456_789_012)
    assert decode_synced(raw) == 123_456_789_012
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        assert decode_synced(bytes(damaged)) == 0
    assert decode_synced(raw[:5]) == decode_synced(b"") == 0


def test_first_batch_of_a_queue_may_have_a_higher_offset_once_old_segments_are_removed() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=300)
    receipts = stored(opened.store, *(batch(b"x" * 150) for _ in range(3)))
    assert all(isinstance(one, StoreReceipt) for one in receipts)
    opened.disk.remove(FIRST)
    again = open_store(opened.disk.killed(), segment_bytes=300)
    offsets = again.store.offsets((TOPIC_ID, 0))
    assert (offsets.first_offset, offsets.next_offset) == (1, 3)


@pytest.mark.parametrize("bad_batch", [0, 3, 9])
def test_unreadable_sector_ends_the_log_like_a_damaged_batch(bad_batch: int) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=65_536)
    receipts = stored(opened.store, *(batch(b"%d" % n + bytes(4_000)) for n in range(10)))
    bad = receipts[bad_batch].position + 100
    disk = opened.disk.killed()

    class BadSector(MemoryFile):
        def read(self, at: int, bytes_max: int) -> bytes:
            if at < bad + 512 and at + bytes_max > bad:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(at, bytes_max)

    disk.files[FIRST].__class__ = BadSector
    with pytest.raises(DataLoss) as lost:
        open_store(disk, synced_position=receipts[-1].next_position)
    assert "Input/output error" in lost.value.message
    assert "BATON_STORAGE_ACCEPT_LOSS" in lost.value.remedy
    again = open_store(disk, synced_position=receipts[-1].next_position, accept_loss=True)
    assert again.store.log.next_position == receipts[bad_batch].position
    assert again.store.offsets((TOPIC_ID, 0)).next_offset == bad_batch
