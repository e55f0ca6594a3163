"""Goal: many queues, or many ranges, block neither a new lock manager nor a leader's lease renewal.

Method: small parts behind a real channel; and a task that counts how often it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._core.queues import GroupQueue
from batonmq_server.offsets import lockmgr_calls, persistence
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.values import Acks, Instant, QueueLimits
from batonmq_server.offsets.persistence import recover_in_steps, recover_standalone
from batonmq_server.offsets.request_reader import STEP_RANGES, RequestReader
from batonmq_server.testing.memory_disks import MemoryOffsetsDisk
from tests.offsets.service_calls import (
    TERM,
    Service,
    call,
    delete_topic_request,
    fence_item,
    queue,
    run,
)

GROUPS = [f"group-{number}" for number in range(7)]
NOW = Instant(0, 0)


async def fenced(service: Service) -> dict[tuple[str, int], int]:
    """Give three queues of each group an owner; return the tokens by group and queue id."""
    await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    queues = [(group, queue_id) for group in GROUPS for queue_id in range(3)]
    items = [fence_item(queue=queue(*one)) for one in queues]
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=items))
    return dict.fromkeys(queues, 1)


async def parts(service: Service) -> list[pb.AnnounceResponse]:
    """Return the queues of all parts of Announce."""
    answers = []
    request = pb.AnnounceRequest(term=TERM)
    while True:
        answers.append(await call(service, "Announce", request))
        if not answers[-1].more:
            return answers
        request.after_group = answers[-1].queues[-1].queue.group


def tokens_of(answers: list[pb.AnnounceResponse]) -> list[tuple[tuple[str, int], int]]:
    tokens = [one for part in answers for one in part.queues]
    return [((one.queue.group, one.queue.queue.queue_id), one.token) for one in tokens]


@pytest.mark.parametrize("count", [1, 3, 4, 6, 21, 100])
async def test_parts_of_an_announce_have_every_queue_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    tokens = await fenced(service)
    monkeypatch.setattr(lockmgr_calls, "ANNOUNCED_MAX", count)
    answers = await parts(service)
    assert sorted(tokens_of(answers)) == sorted(tokens.items())
    groups_at_once = -(-count // 3)
    assert len(answers) == -(-len(GROUPS) // groups_at_once)


async def test_queue_deleted_between_two_parts_hides_no_other_queue(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await fenced(service)
    monkeypatch.setattr(lockmgr_calls, "ANNOUNCED_MAX", 4)
    first = await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    assert first.more
    await call(service, "DeleteTopic", delete_topic_request())
    request = pb.AnnounceRequest(term=TERM, after_group=first.queues[-1].queue.group)
    answers = [first]
    while answers[-1].more:
        answers.append(await call(service, "Announce", request))
        request.after_group = answers[-1].queues[-1].queue.group
    seen = tokens_of(answers)
    assert sorted(key for key, _ in seen) == sorted(tokens)
    assert {token for _, token in seen[len(first.queues) :]} == {2}


@dataclass
class Turns:
    """How often a task has run."""

    count: int = 0


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Turns]:
    """Run a task that counts its turns until the block ends."""
    turns = Turns()

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turns.count += 1

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        await asyncio.sleep(0)
        yield turns
        counting.cancel()


def disk_with_queues(count: int) -> tuple[MemoryOffsetsDisk, list[GroupQueue]]:
    """Return a disk with progress of a group on so many queues, and the queues."""
    disk = MemoryOffsetsDisk(Random(1), lambda _: 0.0)
    _, table, records = recover_standalone(disk, QueueLimits(), NOW)
    entries_of = persistence.entries_of(table, records)
    keys = [GroupQueue("readers", "news", "broker-a", number) for number in range(count)]
    for key in keys:
        table.commit_unowned(key, Acks(0, 5, EMPTY), NOW)
    disk.write_blocking([entry for key in keys for entry in entries_of(key)])
    return disk, keys


async def test_recovery_in_steps_does_not_block_other_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persistence, "RECOVERY_STEP", 10)
    disk, keys = disk_with_queues(200)
    async with counting_turns() as turns:
        recovered, _ = await recover_in_steps(disk, QueueLimits(), 3, NOW)
    assert sorted(key for key, _ in recovered.items()) == keys
    assert {recovered.query(key).committed_offset for key in keys} == {5}
    assert turns.count >= len(keys) // 10


async def test_state_of_a_moved_group_is_read_without_blocking_other_tasks() -> None:
    disk, keys = disk_with_queues(640)
    async with counting_turns() as turns:
        queues, _ = await persistence.state_of_group(disk, "readers")
    assert sorted(queues) == keys
    assert turns.count >= len(keys) // STEP_ITEMS


async def test_call_with_many_ranges_does_not_block_other_tasks() -> None:
    acked = [run(2 * number, 2 * number + 1) for number in range(1_000)]
    items = [pb.CommitItem(queue=queue(queue_id=number), acked=acked) for number in range(60)]
    request = pb.CommitRequest(items=items)
    reader = RequestReader((), ranges_max=1_000)
    async with counting_turns() as turns:
        read = await reader.batch(request.items, lambda one: reader.commit(one, request))
    assert [acks.acked.count for _, _, acks in read] == [1_000] * 60
    assert turns.count >= 60_000 // STEP_RANGES
