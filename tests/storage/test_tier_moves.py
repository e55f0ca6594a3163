"""Goal: a message is read back wherever its segment is, also after a crash between any two steps.

Method: a node on a disk in memory and an object store in memory, with few batches per segment. The
mover runs round by round; the test sets the clock, makes the store fail, and restarts the node from
the disk as a crash leaves it.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import pytest

from batonmq._core.records import decode_records, read_header
from batonmq._core.subscription import SqlFilter
from batonmq.errors import BatonError, DataLoss, InvalidArgument, Unreachable
from batonmq_server.storage.core.checkpoint import PATH as CHECKPOINT
from batonmq_server.storage.core.commitlog import segment_path
from batonmq_server.storage.core.delay_queue import DelayedBatch, DelayQueue, DelaySnapshot
from batonmq_server.storage.core.purge import PurgeOrder, encode_order
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.queue_repair import QueueRepair
from batonmq_server.storage.core.scrub import LogScrub
from batonmq_server.storage.core.tier import TierPolicy
from batonmq_server.storage.core.tier_upload import SegmentComparison
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.flusher import in_thread
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.node_role import NodeRole, StandaloneRole
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.scrubber import Scrubber
from batonmq_server.storage.tier_mover import TierMover, TierMoverParts
from batonmq_server.storage.tier_reader import TierReader, in_store_thread
from batonmq_server.storage.tier_store import SegmentStore
from batonmq_server.storage.topic_limits import TopicLimits
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from batonmq_server.testing.memory_objects import MemoryObjects
from tests.storage.batches import ALL, NOW, TOPIC_ID
from tests.storage.test_log_cleaner import HOUR_MS, SEGMENT_BYTES, Scene, at_once, fill
from tests.support.conditions import until

KEY = (TOPIC_ID, 0)
MESSAGES = 15
"""Five segments; the last one is open."""
FOLDER = "baton/broker-a"


class Crash(BaseException):
    """The process ends here."""


class _NoTopics:
    """Topics of a node without compaction."""

    loaded = True

    def known(self, _: str) -> None:
        return None


class _Follower(StandaloneRole):
    is_follower = True


class TierScene(Scene):
    """A node, its cleaner, and its mover."""

    def __init__(
        self,
        node: StorageNode,
        disk: MemoryDisk,
        objects: MemoryObjects,
        reader: TierReader,
        **policy: Any,
    ) -> None:
        super().__init__(node, disk, **policy)
        self.objects, self.reader = objects, reader
        self.mover = self.new_mover(StandaloneRole(node.store))

    def new_mover(self, role: NodeRole, **policy: int) -> TierMover:
        parts = TierMoverParts(
            node=self.node,
            store=self.reader.store,
            role=role,
            limits=TopicLimits(self.store, cast(Any, _NoTopics()), 0),
            retention=self.retention,
            checkpointer=self.checkpointer,
            cleaner=self.cleaner,
            metrics=self.metrics.tier,
            clock=self.clock,
            in_thread=at_once,
            in_store_thread=at_once,
        )
        chosen = TierPolicy(**({"local_age_ms": HOUR_MS} | policy))
        return TierMover(parts, chosen, 1_000)

    async def move(self) -> None:
        """Move all that is due."""
        while await self.mover.move():
            pass

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def local(self) -> list[bool]:
        return [self.store.log.stored(int(name)) is None for name in self.segments()]

    async def read(self, offset: int, **spec: Any) -> list[bytes]:
        """Read the messages from an offset on, as a pull does; fetch what it misses."""
        wanted = ReadSpec(offset, 1 << 20, 1_000, **({"filter": ALL} | spec))
        result = await self.reader.reading(lambda: self.store.pull(KEY, wanted))
        found = []
        for batch in result.batches if result is not None else ():
            header = read_header(batch)
            found += [one.body for one in decode_records(batch, header, range(header.count))]
        return found

    async def offsets(self) -> list[int]:
        """Return the offsets of all messages, which are their bodies."""
        found: list[int] = []
        first = offset = self.store.offsets(KEY).first_offset
        while bodies := await self.read(offset):
            found += [int(one) for one in bodies]
            offset = first + len(found)
        return found


@asynccontextmanager
async def tier_scene(
    objects: MemoryObjects | None = None, disk: MemoryDisk | None = None, **policy: Any
) -> AsyncIterator[TierScene]:
    objects, disk = objects or MemoryObjects(), disk or MemoryDisk()
    reader = TierReader(
        SegmentStore(objects, FOLDER), at_once, cache_bytes=1 << 20, timeout_ms=1_000
    )
    recovering = recover_directory(
        disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0, remote=reader
    )
    with recovering as node:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(reader.run())
            await asyncio.sleep(0)
            try:
                yield TierScene(node, disk, objects, reader, **policy)
            finally:
                running.cancel()


async def filled(scene: TierScene) -> None:
    """Store all messages and take a checkpoint."""
    fill(scene.store, MESSAGES - scene.store.offsets(KEY).next_offset)
    assert await scene.checkpointer.take()


def damaged(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


async def test_closed_segment_is_stored_at_once_and_stays_local_until_it_is_old() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        await scene.move()
        assert len(await asyncio.to_thread(scene.reader.store.stored)) == 4
        assert scene.local() == [True] * 5
        scene.later(2)
        await scene.move()
        assert scene.local() == [False] * 4 + [True]
        assert await scene.offsets() == list(range(MESSAGES))


async def test_segment_moves_out_by_size_oldest_first() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.mover = scene.new_mover(
            StandaloneRole(scene.store), local_bytes=3 * SEGMENT_BYTES, local_age_ms=HOUR_MS
        )
        await scene.move()
        assert scene.local() == [False, False, True, True, True]


async def test_segments_with_scheduled_messages_stay_local_and_are_found_by_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches, original = 0, DelayQueue.snapshot

    def counted(self: DelayQueue) -> DelaySnapshot:
        nonlocal searches
        searches += 1
        return original(self)

    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        waiting = scene.store.schedule.waiting
        for number in (0, 1, 3):
            position = number * SEGMENT_BYTES
            waiting.add(DelayedBatch(NOW + 9 * HOUR_MS, position, position))
        await scene.move()
        assert scene.local() == [True, True, False, True, True]
        monkeypatch.setattr(DelayQueue, "snapshot", counted)
        assert not await scene.mover.move()
        assert searches == 1
        for entry in waiting.by_position(0, 9):
            waiting.remove(entry.key)
        await scene.move()
        assert scene.local() == [False] * 4 + [True]


async def test_local_file_of_a_moved_segment_takes_no_space() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        content = bytes(scene.disk.files[segment_path(0)].content)
        assert len(content) == SEGMENT_BYTES
        assert content.rstrip(b"\0") in scene.objects.files.values()
        assert scene.store.log.stored_bytes_count == 4 * SEGMENT_BYTES


async def test_restart_reads_nothing_from_the_store() -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()

    def refused(operation: str, name: str) -> None:
        raise OSError(f"{operation} {name}")

    objects.before = refused
    async with tier_scene(objects, disk.killed()) as scene:
        assert scene.node.report.rebuilt == ""
        assert scene.local() == [False] * 4 + [True]
        assert scene.store.offsets(KEY).next_offset == MESSAGES


async def test_indexes_are_rebuilt_from_the_store() -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
    disk.remove(CHECKPOINT)
    async with tier_scene(objects, disk) as scene:
        assert scene.node.report.rebuilt
        assert await scene.offsets() == list(range(MESSAGES))


@pytest.mark.parametrize("fault", ["unreachable", "missing", "damaged"])
async def test_rebuild_without_the_store_refuses_to_start_and_cuts_nothing(fault: str) -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
    disk.remove(CHECKPOINT)
    before = {path: bytes(file.content) for path, file in disk.files.items() if "log/" in path}
    part = next(name for name in objects.files if "/parts/" in name)
    content = objects.files[part]
    if fault == "unreachable":
        objects.before = _refusing(lambda operation, name: operation == "read")
    elif fault == "missing":
        del objects.files[part]
    else:
        objects.files[part] = damaged(content)
    for replicated in (False, True):
        reader = TierReader(
            SegmentStore(objects, FOLDER), at_once, cache_bytes=1 << 20, timeout_ms=1_000
        )
        opening = recover_directory(
            disk,
            segment_bytes=SEGMENT_BYTES,
            monotonic_ms=lambda: 0,
            replicated=replicated,
            remote=reader,
        )
        with pytest.raises(Unreachable), opening:
            pass
        after = {path: bytes(file.content) for path, file in disk.files.items() if "log/" in path}
        assert after == before
    objects.files[part] = content
    objects.before = lambda operation, name: None
    async with tier_scene(objects, disk) as scene:
        assert await scene.offsets() == list(range(MESSAGES))


async def test_missing_bucket_is_a_failure_of_the_store_and_the_mover_goes_on() -> None:
    def gone(operation: str, name: str) -> None:
        if operation == "write":
            raise FileNotFoundError("The specified bucket does not exist")

    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        scene.objects.before = gone
        with pytest.raises(Unreachable, match="bucket does not exist"):
            await scene.move()
        assert scene.metric("baton_storage_tier_failures_total", work="write") == 1
        assert all(scene.local())
        scene.objects.before = lambda operation, name: None
        await scene.move()
        assert not any(scene.local()[:-1])


async def test_store_that_hangs_takes_no_thread_of_the_local_disk_and_delays_no_stop() -> None:
    answer = threading.Event()

    def hang(_: object) -> None:
        answer.wait()

    try:
        async with asyncio.TaskGroup() as tasks:
            hanging = [tasks.create_task(in_store_thread(hang, None)) for _ in range(40)]
            async with asyncio.timeout(20):
                await in_thread(lambda _: None, None)
            for task in hanging:
                task.cancel()
            async with asyncio.timeout(20):
                await asyncio.wait(hanging)
    finally:
        answer.set()


def flip(disk: MemoryDisk, path: str, at: int) -> None:
    disk.files[path].content[at] ^= 1


@pytest.mark.parametrize("at", [9, 27, 59, 63])
@pytest.mark.parametrize("replicated", [False, True])
async def test_damaged_manifest_in_a_segment_file_is_written_again_from_the_store(
    at: int, replicated: bool
) -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        path = f"log/{scene.segments()[1]}"
    before = bytes(disk.files[path].content)
    flip(disk, path, at)
    reader = TierReader(
        SegmentStore(objects, FOLDER), at_once, cache_bytes=1 << 20, timeout_ms=1_000
    )
    opening = recover_directory(
        disk,
        segment_bytes=SEGMENT_BYTES,
        monotonic_ms=lambda: 0,
        replicated=replicated,
        remote=reader,
    )
    with opening as node:
        assert not node.history.damaged
        assert node.store.log.first_position == 0
    assert bytes(disk.files[path].content) == before
    async with tier_scene(objects, disk) as scene:
        assert await scene.offsets() == list(range(MESSAGES))


@pytest.mark.parametrize("replicated", [False, True])
async def test_damaged_manifest_without_the_store_refuses_the_start_and_changes_nothing(
    replicated: bool,
) -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        path = f"log/{scene.segments()[1]}"
    flip(disk, path, 27)
    before = {name: bytes(file.content) for name, file in disk.files.items() if "log/" in name}
    objects.before = _refusing(lambda operation, name: operation == "read")
    reader = TierReader(
        SegmentStore(objects, FOLDER), at_once, cache_bytes=1 << 20, timeout_ms=1_000
    )
    opening = recover_directory(
        disk,
        segment_bytes=SEGMENT_BYTES,
        monotonic_ms=lambda: 0,
        replicated=replicated,
        remote=reader,
    )
    with pytest.raises(Unreachable), opening:
        pass
    after = {name: bytes(file.content) for name, file in disk.files.items() if "log/" in name}
    assert after == before
    assert not reader.may_block


def test_node_without_the_store_of_its_log_is_refused() -> None:
    async def prepared() -> MemoryDisk:
        async with tier_scene() as scene:
            await filled(scene)
            scene.later(2)
            await scene.move()
            return scene.disk

    disk = asyncio.run(prepared())
    opening = recover_directory(disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0)
    with (
        pytest.raises(InvalidArgument, match="is in an object store, and no store is set"),
        opening,
    ):
        pass


def _refusing(matches: Callable[[str, str], bool]) -> Callable[[str, str], None]:
    def before(operation: str, name: str) -> None:
        if matches(operation, name):
            raise ConnectionError("connection refused")

    return before


async def test_unreachable_store_keeps_segments_local_and_readable() -> None:
    objects = MemoryObjects()
    objects.before = _refusing(lambda operation, name: True)
    async with tier_scene(objects) as scene:
        await filled(scene)
        scene.later(2)
        with pytest.raises(Unreachable, match="connection refused"):
            await scene.move()
        assert scene.local() == [True] * 5
        assert await scene.offsets() == list(range(MESSAGES))
        assert scene.metric("baton_storage_tier_failures_total", work="list") == 1


def has_waited(scene: TierScene, hours: int) -> bool:
    return scene.metric("baton_storage_tier_waiting_seconds") >= hours * 3_600


async def test_segments_wait_longer_while_the_store_is_unreachable() -> None:
    """Else the alert on the time never fires when it is needed."""
    async with tier_scene() as scene:
        fill(scene.store, MESSAGES // 2)
        await scene.move()
        assert scene.metric("baton_storage_tier_waiting_segments") == 0
        stored = len(scene.segments()) - 1
        await filled(scene)
        scene.objects.before = _refusing(lambda operation, name: True)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scene.mover.run())
            for hours in (1, 2, 3):
                scene.later(hours)
                await until(partial(has_waited, scene, hours), 5)
            running.cancel()
        waiting = scene.metric("baton_storage_tier_waiting_segments")
        assert waiting == len(scene.segments()) - 1 - stored


async def test_reader_gets_a_retryable_error_while_the_store_is_unreachable() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        scene.objects.before = _refusing(lambda operation, name: operation == "read")
        with pytest.raises(Unreachable) as refused:
            await scene.read(0)
        assert refused.value.kind == "UNAVAILABLE"
        assert "parts/00000000000000000000-0000000001.00000" in refused.value.message
        scene.objects.before = lambda operation, name: None
        assert await scene.offsets() == list(range(MESSAGES))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged, "is damaged: block 0 has checksum"),
        (lambda content: content[:-1], "is too short: block 0 has"),
        (lambda content: b"", "is too short: block 0 has 0 bytes"),
        (None, "is missing"),
    ],
)
async def test_damaged_object_is_refused_with_its_name_and_no_message_is_skipped(
    change: Callable[[bytes], bytes] | None, reason: str
) -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        part = f"{FOLDER}/parts/{SEGMENT_BYTES:020d}-0000000001.00000"
        content = scene.objects.files.pop(part)
        if change is not None:
            scene.objects.files[part] = change(content)
        assert [int(one) for one in await scene.read(0)] == [0, 1, 2]
        with pytest.raises(DataLoss, match=reason) as lost:
            await scene.read(3)
        assert f"{SEGMENT_BYTES:020d}-0000000001.00000" in lost.value.message
        scene.objects.files[part] = content
        assert await scene.offsets() == list(range(MESSAGES))


async def test_damaged_segment_is_not_stored_and_stays_local() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        file = scene.disk.files[segment_path(SEGMENT_BYTES)]
        file.content[100] ^= 1
        scene.later(2)
        await scene.move()
        assert scene.local() == [False, True, False, False, True]
        assert not any(f"{SEGMENT_BYTES:020d}-" in name for name in scene.objects.files)


async def test_copy_that_differs_from_the_store_stays_local() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        await scene.move()
        file = scene.disk.files[segment_path(SEGMENT_BYTES)]
        file.content[100] ^= 1
        scene.later(2)
        await scene.move()
        assert scene.local() == [False, True, False, False, True]


async def test_unreadable_segment_stays_local_and_the_others_move() -> None:
    class BadSector(MemoryFile):
        def read(self, at: int, bytes_max: int) -> bytes:
            if at < 110 and at + bytes_max > 100:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(at, bytes_max)

    async with tier_scene() as scene:
        await filled(scene)
        await scene.move()
        scene.disk.files[segment_path(SEGMENT_BYTES)].__class__ = BadSector
        scene.later(2)
        await scene.move()
        assert scene.local() == [False, True, False, False, True]


async def test_broker_made_anew_does_not_trust_the_segments_of_its_predecessor() -> None:
    objects = MemoryObjects()
    async with tier_scene(objects) as scene:
        await filled(scene)
        await scene.move()
    known = dict(objects.files)
    async with tier_scene(objects) as scene:
        fill(scene.store, 3, queue_id=1)
        await filled(scene)
        scene.later(2)
        await scene.move()
        assert scene.local()[:4] == [True] * 4
        assert await scene.offsets() == list(range(MESSAGES))
    assert {name: objects.files[name] for name in known} == known


async def test_follower_stores_nothing_and_moves_out_what_the_leader_has_stored() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        follower = scene.new_mover(_Follower(scene.store))
        scene.later(2)
        await follower.move()
        assert not scene.objects.files
        assert scene.local() == [True] * 5
        scene.mover = scene.new_mover(StandaloneRole(scene.store), local_age_ms=99 * HOUR_MS)
        await scene.move()
        assert scene.local() == [True] * 5
        later = scene.new_mover(_Follower(scene.store))
        while await later.move():
            pass
        assert scene.local() == [False] * 4 + [True]


async def test_retention_removes_segments_from_the_store_manifest_first() -> None:
    removed: list[str] = []
    async with tier_scene(log_bytes_max=3 * SEGMENT_BYTES) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        scene.objects.before = lambda operation, name: (
            removed.append(name.removeprefix(f"{FOLDER}/")) if operation != "read" else None
        )
        await scene.clean()
        await scene.move()
        assert scene.store.offsets(KEY).first_offset == 6
        assert await scene.offsets() == list(range(6, MESSAGES))
    assert removed == [
        "first",
        f"manifests/{0:020d}-0000000001",
        f"parts/{0:020d}-0000000001.00000",
        f"manifests/{SEGMENT_BYTES:020d}-0000000001",
        f"parts/{SEGMENT_BYTES:020d}-0000000001.00000",
    ]


async def test_retention_by_age_counts_from_the_messages_of_moved_segments() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        assert await scene.clean() == 0
        scene.later(49)
        await scene.clean()
        await scene.move()
        assert scene.store.offsets(KEY).first_offset == 12
        assert [name for name in scene.objects.files if "/first" not in name] == []


async def test_short_disk_moves_stored_segments_out_and_removes_none() -> None:
    disk = MemoryDisk()
    async with tier_scene(disk=disk) as scene:
        await filled(scene)
        await scene.move()
        assert scene.local() == [True] * 5
        disk.space = lambda: (87 * SEGMENT_BYTES, 13 * SEGMENT_BYTES)  # type: ignore[method-assign]
        await scene.cleaner.observe()
        await scene.move()
        assert scene.local() == [False] * 4 + [True]
        await scene.clean()
        assert scene.store.offsets(KEY).first_offset == 0


async def test_new_leader_removes_what_its_predecessor_removed_from_the_store() -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk, log_bytes_max=3 * SEGMENT_BYTES) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        lagging = disk.killed()
        await scene.clean()
        await scene.move()
    async with tier_scene(objects, lagging) as scene:
        await scene.move()
        assert scene.mover.gone_before() == 2 * SEGMENT_BYTES
        scene.gone_position = scene.mover.gone_before()
        await scene.clean()
        assert scene.store.offsets(KEY).first_offset == 6
        assert await scene.offsets() == list(range(6, MESSAGES))


@pytest.mark.parametrize("how", ["purged", "local"])
async def test_first_segment_that_is_not_in_the_store_hides_none_that_has_left_it(how: str) -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk, log_bytes_max=3 * SEGMENT_BYTES) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        lagging = disk.killed()
        await scene.clean()
        await scene.move()
    async with tier_scene(objects, lagging) as scene:
        await scene.move()
        # As a purge, or a copy that differs from the store, leaves it.
        first = scene.store.log._segments[0]
        first.purged, first.stored = how == "purged", None
        assert scene.mover.gone_before() == 2 * SEGMENT_BYTES


async def test_empty_store_removes_nothing_from_a_log_that_is_in_it() -> None:
    objects, disk = MemoryObjects(), MemoryDisk()
    async with tier_scene(objects, disk) as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
    async with tier_scene(MemoryObjects(), disk) as scene:
        await scene.move()
        assert scene.mover.gone_before() == 0
        scene.gone_position = scene.mover.gone_before()
        await scene.clean()
        assert scene.store.offsets(KEY).first_offset == 0


async def test_purged_segment_leaves_the_store() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        order = PurgeOrder((), ((0, SEGMENT_BYTES),), trims=())
        (outcome,) = scene.store.append([checked(encode_order(order))], SYSTEM_TOPICS, NOW)
        assert not isinstance(outcome, BatonError)
        await scene.flusher.sync()
        assert await scene.checkpointer.take()
        await scene.move()
        assert scene.store.log.is_purged(0)
        assert not any(f"/{0:020d}-" in name for name in scene.objects.files)


async def test_segment_that_is_purged_while_it_is_compared_with_the_store_is_no_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tier_scene() as scene:
        await filled(scene)
        await scene.move()
        order = PurgeOrder((), ((0, SEGMENT_BYTES),), trims=())
        scene.store.append([checked(encode_order(order))], SYSTEM_TOPICS, NOW)
        await scene.flusher.sync()
        scene.later(2)
        compare_next, steps = SegmentComparison.compare_next, scene.node.checkpointing

        def purge_first(comparison: SegmentComparison) -> bool:
            if not scene.store.log.is_purged(0):
                steps.write(steps.begin())
            return compare_next(comparison)

        monkeypatch.setattr(SegmentComparison, "compare_next", purge_first)
        await scene.move()
        assert scene.metric("baton_storage_tier_failures_total", work="move") == 0
        assert not any(f"/{0:020d}-" in name for name in scene.objects.files)


async def test_condition_on_properties_is_tested_on_messages_in_the_store() -> None:
    async with tier_scene() as scene:
        await filled(scene)
        scene.later(2)
        await scene.move()
        assert len(await scene.read(0, filter=SqlFilter.parse("sql:a IS NULL"))) >= 3


async def crashed(
    step: int, script: Callable[[TierScene], Any]
) -> tuple[MemoryObjects, MemoryDisk] | None:
    """Run a script; end the process before the write or removal with number `step`.

    Returns:
        Store and disk as the crash leaves them; None if there are fewer steps.
    """
    objects, disk = MemoryObjects(), MemoryDisk()
    count = 0

    def before(operation: str, name: str) -> None:
        nonlocal count
        count += operation != "read"
        if count > step:
            raise Crash

    replace_sparse = disk.replace_sparse

    def replaced(path: str, head: bytes, size: int) -> None:
        before("write", path)
        replace_sparse(path, head, size)

    disk.replace_sparse = replaced  # type: ignore[method-assign]
    objects.before = before
    with suppress(BaseExceptionGroup):
        async with tier_scene(objects, disk) as scene:
            await script(scene)
        assert count == step, "the script has more steps, or failed"
        return None
    assert count == step + 1
    objects.before = lambda operation, name: None
    return objects, disk.killed()


async def _all_steps(scene: TierScene) -> None:
    await filled(scene)
    scene.later(2)
    await scene.move()
    scene.later(49)
    await scene.clean()
    await scene.move()


async def test_crash_before_any_step_loses_nothing_and_is_made_good() -> None:
    step, first_offsets = 0, set[int]()
    while (left := await crashed(step, _all_steps)) is not None:
        async with tier_scene(*left) as scene:
            first_offset = scene.store.offsets(KEY).first_offset
            first_offsets.add(first_offset)
            assert await scene.offsets() == list(range(first_offset, MESSAGES)), step
            scene.later(2)
            await filled(scene)
            await scene.move()
            assert await scene.offsets() == list(range(first_offset, MESSAGES)), step
            segments = len(scene.segments())
            assert scene.local() == [False] * (segments - 1) + [True], step
            kept = [name for name in scene.objects.files if "/parts/" in name]
            assert len(kept) == segments - 1, step
        step += 1
    assert step == 4 * 3 + 1 + 4 * 2  # per segment: part, manifest, file; then the removals
    assert first_offsets == {0, 12}


async def test_scrub_passes_over_a_segment_that_has_moved_out_and_can_not_be_read() -> None:
    objects = MemoryObjects()
    async with tier_scene(objects) as scene:
        await filled(scene)
        scrub = LogScrub(scene.node.disk, scene.store.log)
        range_ = scrub.next_range()
        assert range_ is not None
        scene.later(2)
        await scene.move()
        objects.before = _refusing(lambda operation, name: "parts" in name)
        scrubber = Scrubber(
            scene.node, DamageTracker(lambda: None), _no_rebuild, bytes_per_s=1, in_thread=at_once
        )
        await scrubber.check(range_)
        assert not range_.damaged
        assert range_.position == SEGMENT_BYTES


async def _no_rebuild(repair: QueueRepair) -> None:
    raise AssertionError(repair)
