"""Goal: fsck finds every compacted section that does not fit its order, or the batches it lists.

Method: a directory that the real compactor has written, on a disk in memory; then orders with one
wrong row each, other checkpoints, and purged segments. Every batch is undamaged by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batonmq._core.records import read_header
from batonmq_server.storage.compaction_runner import CompactionRunner
from batonmq_server.storage.core import checkpoint, store
from batonmq_server.storage.core.commitlog import purged_head
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.compaction_order import (
    COMPACTED,
    CompactionOrder,
    SectionRows,
    decode_order,
    encode_order,
)
from batonmq_server.storage.core.fsck import Fsck, FsckReport
from batonmq_server.storage.core.purge import PurgeOrder
from batonmq_server.storage.core.purge import encode_order as encode_purge
from batonmq_server.storage.core.schedule import encode_system
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.test_compaction_machine import TABLE, TABLE_ID, CompactionMachine

KEY = TABLE_ID, 0


@pytest.fixture
def machine() -> CompactionMachine:
    """A node with sections of both queues of a compacted topic, and a checkpoint."""
    machine = CompactionMachine()
    machine.start()
    machine.put(1, 30)
    machine.compact(0, 5, 1 << 20, None)
    machine.put(2, 2)
    machine.checkpoint()
    return machine


def sections(machine: CompactionMachine) -> list[Section]:
    return machine.store.compacted.parts[KEY].sections


def longest(found: list[Section]) -> Section:
    return max(found, key=lambda one: one.message_count)


def order_of(machine: CompactionMachine, section: Section) -> CompactionOrder:
    raw = machine.store.log.read(section.order_position, section.order_bytes)
    return decode_order(read_header(raw), raw)


def write(machine: CompactionMachine, order: CompactionOrder | PurgeOrder) -> None:
    raw = encode_order(order) if isinstance(order, CompactionOrder) else encode_purge(order)
    write_raw(machine, raw)


def write_raw(machine: CompactionMachine, raw: bytes) -> None:
    machine.store.append([checked(raw)], SYSTEM_TOPICS, machine.clock.unix_ms())
    unsynced = machine.store.log.unsynced()
    machine.node.sync(unsynced)
    machine.store.log.synced(unsynced.position)  # the store itself does not follow the order


def examined(machine: CompactionMachine, disk: MemoryDisk | None = None) -> FsckReport:
    disk = disk or machine.disk.killed()
    return Fsck(disk, machine.store.log.synced_position).run()


def test_sections_of_an_undamaged_directory_are_counted_and_fit(machine: CompactionMachine) -> None:
    report = examined(machine)
    assert (report.problems, report.notes) == ([], [])
    parts = machine.store.compacted.parts
    assert report.sections == sum(len(part.sections) for part in parts.values()) > 2
    disk = machine.disk.killed()
    disk.remove("checkpoint")
    report = examined(machine, disk)
    assert (report.problems, report.sections > 2) == ([], True), "also without a checkpoint"


def shifted(rows: SectionRows) -> SectionRows:
    return replace(rows, offsets=rows.offsets - np.append(np.zeros(len(rows) - 1, int), 1))


def other_tag(rows: SectionRows) -> SectionRows:
    return replace(rows, tags=rows.tags + 1)


def shorter(rows: SectionRows) -> SectionRows:
    return replace(rows, sizes=rows.sizes - 1)


def next_position(rows: SectionRows) -> SectionRows:
    return replace(rows, positions=rows.positions + 8)


def fewer(rows: SectionRows) -> SectionRows:
    """Leave a message out that shares its batch with another one."""
    at = int(np.flatnonzero(np.diff(rows.positions) == 0)[0])
    kept = np.arange(len(rows)) != at
    columns = rows.offsets[kept], rows.positions[kept], rows.sizes[kept], rows.tags[kept]
    return SectionRows(*columns, rows.tombstone_offsets, rows.tombstone_since)


def outside(rows: SectionRows) -> SectionRows:
    return replace(rows, offsets=rows.offsets + 10_000)


WRONG_ROWS = [shifted, other_tag, shorter, next_position, fewer, outside]


@pytest.mark.parametrize("spoil", WRONG_ROWS)
def test_order_that_lists_other_messages_than_its_batches_have_is_found(
    machine: CompactionMachine, spoil: Callable[[SectionRows], SectionRows]
) -> None:
    section = longest(sections(machine))
    order = order_of(machine, section)
    write(machine, order)
    assert examined(machine).problems == [], "the same order again is right"
    write(machine, replace(order, rows=spoil(order.rows)))
    report = examined(machine)
    (problem,) = report.problems
    assert problem.part == "log"
    assert 0 <= problem.position < report.next_position
    where = f"queue 0 of {TABLE}, offsets [{section.first_offset}, {section.next_offset})"
    assert problem.detail.startswith(where)
    assert not report.log_is_good, "only another copy can help"


def test_batch_of_another_queue_in_an_order_is_found(machine: CompactionMachine) -> None:
    section = longest(sections(machine))
    order = order_of(machine, section)
    other = longest(machine.store.compacted.parts[TABLE_ID, 1].sections)
    position = machine.store.compacted.rows(other).positions[0]
    first = order.rows.positions == order.rows.positions[0]
    positions = np.where(first, position, order.rows.positions)
    write(machine, replace(order, rows=replace(order.rows, positions=positions)))
    (problem,) = examined(machine).problems
    assert "another queue" in problem.detail


def test_order_that_can_not_be_decoded_is_found(
    machine: CompactionMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right. This version does not write such an order."""
    order = order_of(machine, longest(sections(machine)))
    with monkeypatch.context() as patch:
        patch.setattr(store, "decode_compaction", lambda *_: order)
        write_raw(machine, encode_system([b"?"], COMPACTED))
    report = examined(machine)
    assert [problem.part for problem in report.problems] == ["log"]
    assert "not a compaction order" in report.problems[0].detail


def spoiled_checkpoint(
    machine: CompactionMachine, change: Callable[[list[Section]], list[Section]]
) -> MemoryDisk:
    disk = machine.disk.killed()
    saved = checkpoint.decode(disk.load(checkpoint.PATH))
    assert saved is not None
    others = [(key, one) for key, one in saved.sections if key != KEY]
    changed = change([one for key, one in saved.sections if key == KEY])
    kept = replace(saved, sections=[*((KEY, one) for one in changed), *others])
    disk.replace(checkpoint.PATH, checkpoint.encode(kept))
    return disk


def test_checkpoint_with_other_sections_than_the_orders_is_found_and_repaired(
    machine: CompactionMachine,
) -> None:
    for change, text in (
        (lambda found: found[1:], "the checkpoint lacks section [0, "),
        (
            lambda found: [*found[:-1], found[-1]._replace(tombstone_unix_ms=7)],
            "does not say so",
        ),
    ):
        disk = spoiled_checkpoint(machine, change)
        fsck = Fsck(disk, machine.store.log.synced_position)
        report = fsck.run()
        assert {problem.part for problem in report.problems} == {"checkpoint"}
        assert any(text in problem.detail for problem in report.problems)
        assert fsck.repair()
        assert examined(machine, disk).problems == []


def test_purged_segment_that_a_section_needs_is_damage_once_its_order_is_in_the_log(
    machine: CompactionMachine,
) -> None:
    """Before that it is a copy that waits for newer orders: only noted."""
    path, begin, end = machine.store.log.segment_of(longest(sections(machine)).data_position)
    disk = machine.disk.killed()
    disk.replace_sparse(path, purged_head(end - begin), end - begin)
    report = examined(machine, disk)
    assert report.problems == []
    assert any("a removed part of the log" in note for note in report.notes)
    write(machine, PurgeOrder((), ((begin, end),), names={}))
    disk = machine.disk.killed()
    disk.replace_sparse(path, purged_head(end - begin), end - begin)
    report = examined(machine, disk)
    assert {problem.part for problem in report.problems} == {"log"}
    assert all("although it is needed" in problem.detail for problem in report.problems)


def test_queue_that_grew_during_a_compaction_is_rebuilt(
    machine: CompactionMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message behind the compacted ones is before their order in the log; an older order is
    before both, and ends at a lower offset than the checkpoint has.
    """
    take, sent = CompactionRunner.take, False

    async def take_while_messages_come(runner: CompactionRunner, *given: Any) -> None:
        nonlocal sent
        if not sent:
            sent = True
            machine.put(3, 8)
        await take(runner, *given)

    monkeypatch.setattr(CompactionRunner, "take", take_while_messages_come)
    machine.clock.now_unix_ms += 10
    machine.compact(1, 32_768, 1 << 20, None)
    assert sent
    machine.checkpoint()
    assert examined(machine).problems == []
    before = [machine._all(machine.store, queue) for queue in range(2)]
    machine.kill("consumequeue")
    assert machine.node.report.rebuilt
    assert [machine._all(machine.store, queue) for queue in range(2)] == before
