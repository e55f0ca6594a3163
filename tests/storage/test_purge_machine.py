"""Goal: purges and trims remove what they should, and nothing else, whatever happens in between.

Method: a Hypothesis state machine. The node, the purger, the trimmer, the cleaner and the
checkpoints are real, on a disk in memory that may crash at each change. The model is a list of
batches and trims in log order. Every batch of a living topic must stay readable until it is
trimmed, a trimmed one never comes back once no order waits, offsets go on without a gap, and a
purged segment must take no space.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._core.records import decode_records, read_header
from batonmq.errors import BatonError, DiskFull
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check
from batonmq_server.storage.core.commitlog import purged_head
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.files import File
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.core.log_transfer import check_received, read_whole_batches
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.recovery import Recovery
from batonmq_server.storage.core.retention import Retention, RetentionPolicy
from batonmq_server.storage.core.scan import LogScan
from batonmq_server.storage.core.scrub import LogScrub
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.log_cleaner import CleaningBounds, LogCleaner
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.segment_examiner import SegmentExaminer
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_limits import TopicLimits
from batonmq_server.storage.topic_purger import PurgeResult, TopicPurger
from batonmq_server.storage.topic_trimmer import TopicTrimmer
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, batch, open_store

SEGMENT_BYTES = 600
QUEUES = 2
NAMES = ("a", "b", "c")


class Crash(Exception):
    """The node crashed at a change of the disk."""


class CrashingDisk(MemoryDisk):
    """A disk that crashes once `changes_left` changes were made; None for never."""

    changes_left: int | None = None

    def _change(self) -> None:
        if self.changes_left is not None:
            if not self.changes_left:
                raise Crash
            self.changes_left -= 1

    def create(self, path: str, size: int) -> File:
        self._change()
        return super().create(path, size)

    def remove(self, path: str) -> None:
        self._change()
        super().remove(path)

    def replace(self, path: str, content: bytes) -> None:
        self._change()
        super().replace(path, content)

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        self._change()
        super().replace_sparse(path, head, size)

    def sync(self, paths: Sequence[str]) -> None:
        self._change()
        super().sync(paths)


class DeletedTopics:
    """The part of TopicCache with the deleted topics."""

    def __init__(self, living: dict[str, int]) -> None:
        self._living = living

    def is_gone(self, name: str, topic_id: int) -> bool:
        return self._living.get(name) != topic_id

    async def wait_until_gone(self, name: str, topic_ids: Collection[int]) -> None:
        assert self._living.get(name) not in topic_ids


class LimitedTopics(DeletedTopics):
    """The part of TopicCache with a retention per topic."""

    def __init__(self, living: dict[str, int], limits: dict[str, int]) -> None:
        super().__init__(living)
        self._limits = limits

    def known(self, name: str) -> LocalTopic | None:
        if name not in self._living:
            return None
        return LocalTopic(self._living[name], QUEUES, retention_bytes=self._limits.get(name, 0))


class PlainAppender:
    """The part of Appender that the purger and the trimmer call."""

    def __init__(self, store: MessageStore, flusher: Flusher) -> None:
        self.store, self.flusher, self.clock = store, flusher, Clock()
        self.retention = Retention(
            RetentionPolicy(age_ms_max=0, hours=frozenset(), log_bytes_max=0), SEGMENT_BYTES
        )
        self.metrics = StorageMetrics(CollectorRegistry())

    def append(
        self, batches: Sequence[CheckedBatch], topics: Any, *, frees_space: bool = False
    ) -> list[Any]:
        outcomes = self.store.append(batches, topics, NOW)
        self.flusher.notify_written()
        return outcomes

    def disk_rejection(self) -> DiskFull | None:
        return None

    def roll(self) -> None:
        self.store.log.roll()
        self.flusher.notify_written()


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch of the model."""

    topic: str
    topic_id: int
    queue_id: int
    bodies: tuple[bytes, ...]
    receipt: StoreReceipt


@dataclass(frozen=True, slots=True)
class Trimmed:
    """An order of the model: the first offset of each queue that it trims."""

    next_position: int
    first_offsets: dict[tuple[int, int], int]


async def at_once(call: Callable[[Any], None], argument: Any) -> None:
    call(argument)


class PurgeMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashingDisk()
        self.living: dict[str, int] = {}
        self.last_id = 10
        self.log: list[Stored] = []
        self.trims: list[Trimmed] = []
        self.limits: dict[str, int] = {}
        self.message_count = self.synced_count = 0
        self.opening: AbstractContextManager[StorageNode] | None = None

    @initialize()
    def start(self) -> None:
        self.opening = recover_directory(
            self.disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0
        )
        self.node = self.opening.__enter__()
        self.store = self.node.store

    @rule(
        batches=st.lists(
            st.tuples(st.sampled_from(NAMES), st.integers(0, QUEUES - 1), st.integers(1, 3)),
            min_size=1,
            max_size=6,
        )
    )
    def send(self, batches: list[tuple[str, int, int]]) -> None:
        """Append batches; a topic that does not exist is created."""
        for name, queue_id, count in batches:
            if name not in self.living:
                self.last_id += 1
                self.living[name] = self.last_id
            bodies = tuple(b"%d" % (self.message_count + n) for n in range(count))
            self.message_count += count
            topics: dict[str, LocalTopic | BatonError] = {
                name: LocalTopic(self.living[name], QUEUES)
            }
            raw = batch(*bodies, topic=name, queue_id=queue_id)
            (receipt,) = self.store.append([check(raw)], topics, NOW)
            assert isinstance(receipt, StoreReceipt)
            key = self.living[name], queue_id
            before = [one for one in self.log if (one.topic_id, one.queue_id) == key]
            expected = before[-1].receipt.first_offset + len(before[-1].bodies) if before else 0
            assert receipt.first_offset == expected, "offsets go on without a gap"
            self.log.append(Stored(name, self.living[name], queue_id, bodies, receipt))

    @rule(name=st.sampled_from(NAMES), count=st.integers(5, 12))
    def send_many(self, name: str, count: int) -> None:
        """Append to one topic only, more than one segment."""
        self.send([(name, 0, 3)] * count)

    @rule()
    def checkpoint(self) -> None:
        self._sync()
        self.node.checkpointing.run()

    @rule()
    def carry_out(self) -> None:
        """Carry out the orders in memory, as a follower does between two checkpoints."""
        self._sync()
        self.node.checkpointing.carry_out(self.store.readable_position)
        self._check_read(self.store, are_carried_out=True)

    @rule(name=st.sampled_from(NAMES), changes=st.one_of(st.none(), st.integers(0, 12)))
    def delete_and_purge(self, name: str, changes: int | None) -> None:
        """With `changes`, the node crashes after so many changes of the disk."""
        deleted_id = self.living.pop(name, 0)

        async def purge(flusher: Flusher, checkpointer: Checkpointer) -> PurgeResult:
            purger = TopicPurger(
                self.disk,
                cast(Appender, PlainAppender(self.store, flusher)),
                cast(TopicCache, DeletedTopics(self.living)),
                checkpointer,
                lambda _: NOW,
                age_ms_max=0,
                in_thread=at_once,
            )
            return await purger.purge(name)

        result = self._work(purge, changes)
        if result is None:
            return
        for path in self.disk.files:
            if path.startswith("consumequeue/") and result != PurgeResult():
                topic, _, topic_id = path.split("/")[1].rpartition("-")
                assert topic != name or int(topic_id) == self.living.get(name), path
        self._check_purged()
        for segment in self.store.log.sealed():
            scan = LogScan(self.store.log, segment[0])
            topics = set()
            for header, _ in scan:
                if header.position >= segment[1]:
                    break
                topics.add((header.topic, header.topic_id))
            living = {topic for topic in topics if topic[1] in (0, self.living.get(topic[0]))}
            if any(key[0] == deleted_id for one in self.trims for key in one.first_offsets):
                continue  # what was trimmed before is not counted
            assert living or (name, deleted_id) not in topics, "the segment could be purged"

    @rule(
        name=st.sampled_from(NAMES),
        bytes_max=st.sampled_from((0, 1, 150, 400, 1_000)),
        checkpoints=st.booleans(),
        changes=st.one_of(st.none(), st.integers(0, 12)),
    )
    def trim(self, name: str, bytes_max: int, checkpoints: bool, changes: int | None) -> None:
        """Change the retention of a topic, and let the leader trim."""
        self.limits[name] = bytes_max
        self._sync()

        async def work(flusher: Flusher, checkpointer: Checkpointer) -> bool:
            topics = cast(TopicCache, LimitedTopics(self.living, self.limits))
            trimmer = TopicTrimmer(
                cast(Appender, PlainAppender(self.store, flusher)),
                TopicLimits(self.store, topics, 0),
                SegmentExaminer(self.disk, self.store, topics, checkpointer.position, at_once),
            )
            if await trimmer.trim():
                order = self.store.purge_orders[-1]
                first_offsets = {one[:2]: one.first_offset for one in order.trims}
                for key, first_offset in first_offsets.items():
                    if first_offset > self.store.offsets(key).first_offset:
                        self._check_trim(key, first_offset)
                self.trims.append(Trimmed(order.next_position, first_offsets))
                await flusher.wait_until_safe(order.next_position)
            return await checkpointer.take() if checkpoints else True

        self._work(work, changes)

    def _check_trim(self, key: tuple[int, int], first_offset: int) -> None:
        """Check that a trim removes as few of the oldest batches as the limit allows."""
        (name,) = (name for name, topic_id in self.living.items() if topic_id == key[0])
        batches = [one for one in self.log if (one.topic_id, one.queue_id) == key]
        kept = [one for one in batches if one.receipt.first_offset >= first_offset]
        sizes = [one.receipt.next_position - one.receipt.position for one in kept]
        assert len(kept) == 1 or sum(sizes) <= self.limits[name]
        last = next(one for one in batches[::-1] if one.receipt.first_offset < first_offset)
        more = last.receipt.next_position - last.receipt.position
        assert sum(sizes) + more > self.limits[name]

    @precondition(lambda self: len(self.store.log.sealed()) > 0)
    @rule(kept_segments=st.integers(0, 2), changes=st.one_of(st.none(), st.integers(0, 8)))
    def drop(self, kept_segments: int, changes: int | None) -> None:
        """Run retention by size."""
        policy = RetentionPolicy(
            age_ms_max=0, hours=frozenset(), log_bytes_max=max(kept_segments * SEGMENT_BYTES, 1)
        )

        async def clean(flusher: Flusher, checkpointer: Checkpointer) -> bool:
            bounds = CleaningBounds(
                needed_from=(lambda: self.store.readable_position,),
                checkpointed=checkpointer.position,
                checkpoint=checkpointer.take,
                wait_until_safe=flusher.wait_until_safe,
                is_gone=DeletedTopics(self.living).is_gone,
                remove_later=self.node.checkpointing.remove_later,
                no_checkpoint=checkpointer.one_at_a_time,
            )
            cleaner = LogCleaner(
                self.store, self.disk, Retention(policy, SEGMENT_BYTES), bounds,
                StorageMetrics(CollectorRegistry()), clock=Clock(), interval_ms=0,
                in_thread=at_once,
            )  # fmt: skip
            return await cleaner.clean()

        self._work(clean, changes)

    @rule(spoil=st.sampled_from(("", "checkpoint", "consumequeue", "keyindex")))
    def kill(self, spoil: str) -> None:
        self._restart(self.disk.killed(), spoil)

    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        self._restart(self.disk.power_cut(lambda size: data.draw(st.integers(0, size))), "")

    @rule()
    def every_message_of_a_living_topic_is_readable(self) -> None:
        self._sync()
        self._check_read(self.store)

    @rule()
    def fsck_finds_no_problem(self) -> None:
        self._sync()
        report = Fsck(self.disk.killed(), self.store.log.synced_position).run()
        assert report.problem_count == 0, report.problems

    @rule()
    def scrub_finds_no_damage(self) -> None:
        self._sync()
        scrub = LogScrub(self.disk, self.store.log)
        while (range_ := scrub.next_range()) is not None:
            scrub.check(range_)
            assert not range_.damaged
            scrub.checked(range_)

    @rule(bytes_max=st.integers(1, 2_000))
    def a_new_follower_gets_the_same_log(self, bytes_max: int) -> None:
        self._sync()
        log = self.store.log
        disk = MemoryDisk()
        if log.first_position:
            return  # the follower would start with the floors; tested with real replicas
        recovery = Recovery(disk, open_store(disk, segment_bytes=256).store, synced_position=0)
        history = EpochHistory(((1, 0),))
        while (position := recovery.store.log.next_position) < log.synced_position:
            assert log.cut_position(position) == position
            data = read_whole_batches(log, history, position, bytes_max)
            segment = log.segment_of(position)[1:]
            batches, end = check_received(recovery, position, data, segment)
            recovery.store.log.copy(data, segment, end)
            for header, one in batches:
                recovery.take(header, one)
        written = [f"log/{one:020d}" for one in self._segments() if one < log.next_position]
        log_files = [
            {path: bytes(files[path].content) for path in written}
            for files in (self.disk.files, disk.files)
        ]
        assert log_files[0] == log_files[1]
        recovery.store.synced(recovery.store.log.next_position)
        self._check_read(recovery.store)

    def teardown(self) -> None:
        if self.opening is not None:
            self.kill("")
            self.every_message_of_a_living_topic_is_readable()
            self.checkpoint()
            assert not self.store.purge_orders
            self._check_purged()
            self.kill("checkpoint")
            self.every_message_of_a_living_topic_is_readable()

    def _work(
        self, work: Callable[[Flusher, Checkpointer], Awaitable[Any]], changes: int | None
    ) -> Any:
        """Run `work` with a running flusher; None if the node has crashed meanwhile."""

        async def run() -> Any:
            flusher = Flusher(self.node, lambda _: None, lambda _: None, in_thread=at_once)
            checkpointer = Checkpointer(self.node, flusher, at_once)
            async with asyncio.TaskGroup() as tasks:
                flushing = tasks.create_task(flusher.run())
                result = await work(flusher, checkpointer)
                flushing.cancel()
            return result

        self.disk.changes_left = changes
        crashed, result = False, None
        try:
            result = asyncio.run(run())
        except* Crash:
            crashed = True
        if crashed:
            self._restart(self.disk.killed(), "")
            return None
        self.disk.changes_left = None
        self._sync()
        return result

    def _check_purged(self) -> None:
        """Check that purged segments take no space and had no message of a living topic."""
        for begin, end in self.store.log.sealed():
            content = bytes(self.disk.files[f"log/{begin:020d}"].content)
            has_living = any(
                one.topic_id == self.living.get(one.topic)
                and one.receipt.first_offset
                >= self.store.offsets((one.topic_id, one.queue_id)).first_offset
                for one in self.log
                if begin <= one.receipt.position < end
            )
            if self.store.log.is_purged(begin):
                assert not has_living
                assert content == purged_head(end - begin).ljust(end - begin, b"\0")

    def _check_read(self, store: MessageStore, *, are_carried_out: bool = False) -> None:
        for name, topic_id in self.living.items():
            for queue_id in range(QUEUES):
                key = topic_id, queue_id
                batches = [one for one in self.log if (one.topic_id, one.queue_id) == key]
                first_offset = store.offsets(key).first_offset
                trimmed = max((one.first_offsets.get(key, 0) for one in self.trims), default=0)
                removed = [
                    one.receipt.first_offset + len(one.bodies)
                    for one in batches
                    if one.receipt.position < self.store.log.first_position
                ]
                limits = max(removed, default=0), max([trimmed, *removed])
                assert limits[0] <= first_offset <= limits[1], (key, first_offset, limits, trimmed)
                are_carried_out = are_carried_out or not store.purge_orders
                assert not are_carried_out or first_offset == limits[1], name
                expected = [
                    body
                    for one in batches
                    if one.receipt.first_offset >= first_offset
                    for body in one.bodies
                ]
                assert _bodies(store, key) == expected, name

    def _segments(self) -> list[int]:
        return [int(name) for name in self.disk.names("log")]

    def _sync(self) -> None:
        unsynced = self.store.log.unsynced()
        self.node.sync(unsynced)
        self.store.synced(unsynced.position)
        self.synced_count = len(self.log)

    def _restart(self, disk: MemoryDisk, spoil: str) -> None:
        paths = sorted(path for path in disk.files if path.startswith(spoil)) if spoil else []
        if paths:
            disk.remove(paths[0])
        self.disk = CrashingDisk()
        self.disk.files = disk.files
        self.start()
        end = self.node.report.next_position
        survived = [one for one in self.log if one.receipt.next_position <= end]
        assert len(survived) >= self.synced_count
        self.log, self.synced_count = survived, len(survived)
        self.trims = [one for one in self.trims if one.next_position <= end]
        known = {one.next_position for one in self.trims}
        for order in self.store.purge_orders:  # the node may have crashed while it stored one
            if order.trims and order.next_position not in known:
                first_offsets = {one[:2]: one.first_offset for one in order.trims}
                self.trims.append(Trimmed(order.next_position, first_offsets))


def _bodies(store: MessageStore, key: tuple[int, int]) -> list[bytes]:
    offset, bodies = store.offsets(key).first_offset, []
    while (
        reading := store.read(key, ReadSpec(offset, 1 << 30, 1 << 20, HashFilter(None)))
    ) is not None:
        for raw in reading.batches:
            header = read_header(raw)
            bodies += [one.body for one in decode_records(raw, header, range(header.count))]
        offset = reading.next_offset
    return bodies


PurgeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPurge = PurgeMachine.TestCase
