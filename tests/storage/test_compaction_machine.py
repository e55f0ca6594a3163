"""Goal: a compacted topic keeps the newest message of each key, whatever happens in between.

Method: a Hypothesis state machine. The node, the compactor, the trimmer, the cleaner and the
checkpoints are real, on a disk in memory that may crash at each change. The model is the list of
all messages, and a dict for each table. A reader that goes on within the retention time of
tombstones must always end with the table of the model; every message that is read must be one that
was sent, at its offset; and a compaction must leave one message per key.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.records import Message, decode_records, read_header
from batonmq.errors import BatonError
from batonmq_server.storage import compaction_runner
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.compaction_runner import CompactionLimits, CompactionRunner
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check
from batonmq_server.storage.core.compaction_order import is_relocated
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.core.log_transfer import check_received, read_whole_batches
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.query import MessageQueries, TimeWindow
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.recovery import Recovery
from batonmq_server.storage.core.retention import Retention, RetentionPolicy
from batonmq_server.storage.core.scrub import LogScrub
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.log_cleaner import CleaningBounds, LogCleaner
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.segment_examiner import SegmentExaminer
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_compactor import BrokerRetention, TopicCompactor
from batonmq_server.storage.topic_limits import TopicLimits
from batonmq_server.storage.topic_trimmer import TopicTrimmer
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, batch, open_store
from tests.storage.test_purge_machine import Crash, CrashingDisk, at_once

EXAMPLES = int(os.environ.get("BATON_TEST_COMPACTIONS", "15"))  # noqa: TID251  a test's own setting
SEGMENT_BYTES = 2_048
QUEUES = 2
TABLE, TABLE_ID = "prices", 11
PLAIN, PLAIN_ID = "plain", 12
KEYS = ("a", "b", "c", "d", "a key that is much longer than the others")
TOMBSTONE_RETENTION_MS = 10_000

pytestmark = pytest.mark.timeout(600)


class FakeClock(Clock):
    """A wall clock that the machine advances."""

    def __init__(self) -> None:
        self.now_unix_ms = NOW

    def unix_ms(self) -> int:
        return self.now_unix_ms


class TwoTopics:
    """The part of TopicCache with a compacted and an ordinary topic."""

    loaded = True

    def __init__(self, policy: CompactionPolicy, plain_bytes: int = 0) -> None:
        self.topics = {
            TABLE: LocalTopic(TABLE_ID, QUEUES, compaction=policy),
            PLAIN: LocalTopic(PLAIN_ID, QUEUES, retention_bytes=plain_bytes),
        }

    def known(self, name: str) -> LocalTopic | None:
        return self.topics.get(name)

    def is_gone(self, name: str, topic_id: int) -> bool:
        return name not in self.topics


class NodeAppender:
    """The part of Appender that the compactor and the trimmer call."""

    def __init__(self, store: MessageStore, flusher: Flusher, clock: Clock) -> None:
        self.store, self.flusher, self.clock = store, flusher, clock
        self.retention = Retention(
            RetentionPolicy(age_ms_max=0, hours=frozenset(), log_bytes_max=0), SEGMENT_BYTES
        )
        self.metrics = StorageMetrics(CollectorRegistry())

    def append(
        self, batches: Sequence[CheckedBatch], topics: Any, *, frees_space: bool = False
    ) -> list[Any]:
        outcomes = self.store.append(batches, topics, self.clock.unix_ms())
        self.flusher.notify_written()
        return outcomes

    def relocate(self, relocated: Any) -> list[int]:
        positions = self.store.relocate(relocated, self.clock.unix_ms())
        self.flusher.notify_written()
        return positions


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of the model; the body is empty for a tombstone."""

    key: str
    body: bytes
    receipt: StoreReceipt
    sent_unix_ms: int


@dataclass(slots=True)
class TableReader:
    """A reader that builds a table, a few messages at a time."""

    queue: int
    begin_unix_ms: int
    offset: int = 0
    table: dict[str, bytes] = field(default_factory=dict)


class CompactionMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashingDisk()
        self.clock = FakeClock()
        self.sent: list[list[Sent]] = [[] for _ in range(QUEUES)]
        self.synced_counts = [0] * QUEUES
        self.reader: TableReader | None = None
        self.random = Random(7)
        self.number = 0
        self.opening: AbstractContextManager[StorageNode] | None = None

    @initialize()
    def start(self) -> None:
        self.opening = recover_directory(
            self.disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0
        )
        self.node = self.opening.__enter__()
        self.store = self.node.store

    @rule(seed=st.integers(0, 1 << 16), count=st.integers(1, 8))
    def put(self, seed: int, count: int) -> None:
        """Send batches of random messages; a third of them are tombstones."""
        topics: dict[str, LocalTopic | BatonError] = dict(TwoTopics(CompactionPolicy()).topics)
        random, now = Random(seed), self.clock.unix_ms()
        for _ in range(count):
            queue = random.randrange(QUEUES)
            messages = []
            for _ in range(random.randint(1, 4)):
                self.number += 1
                key, empty = random.choice(KEYS), random.random() < 0.3
                messages.append((key, b"" if empty else b"%d" % self.number))
            raw = batch(
                *(
                    with_ordering_key(
                        Message(body, f"tag-{key[0]}", (key[0],), random.choice(({}, {"a": "b"}))),
                        key,
                    )
                    for key, body in messages
                ),
                topic=TABLE,
                queue_id=queue,
            )
            (receipt,) = self.store.append([check(raw)], topics, now)
            assert isinstance(receipt, StoreReceipt), receipt
            assert receipt.first_offset == len(self.sent[queue]), "offsets go on without a gap"
            self.sent[queue] += [Sent(key, body, receipt, now) for key, body in messages]

    @rule(
        seed=st.integers(0, 1 << 16),
        count=st.integers(1, 12),
        old=st.booleans(),
        pause_ms=st.sampled_from((0, TOMBSTONE_RETENTION_MS // 2)),
    )
    def compact_while_readers_are_on_their_way(
        self, seed: int, count: int, old: bool, pause_ms: int
    ) -> None:
        """With `old`, the messages are older than the retention time of tombstones."""
        self.put(seed, 6)
        if old:
            self.clock.now_unix_ms += 2 * TOMBSTONE_RETENTION_MS
        self._sync()
        readers = [TableReader(queue, self.clock.unix_ms()) for queue in range(QUEUES)]
        for reader in readers:
            self._go_on(reader, count)
        self.compact(0, 32_768, 1 << 20, None)
        self.clock.now_unix_ms += pause_ms
        self.put(seed + 1, 1)
        self.compact(0, 5, 1 << 20, None)
        for reader in readers:
            while not self._go_on(reader, count):
                pass

    @rule(count=st.integers(1, 6))
    def send_to_another_topic(self, count: int) -> None:
        topics: dict[str, LocalTopic | BatonError] = dict(TwoTopics(CompactionPolicy()).topics)
        for _ in range(count):
            raw = batch(b"x" * 200, topic=PLAIN)
            (outcome,) = self.store.append([check(raw)], topics, self.clock.unix_ms())
            assert isinstance(outcome, StoreReceipt)

    @rule(ms=st.sampled_from((1, 1_000, TOMBSTONE_RETENTION_MS // 2, 3 * TOMBSTONE_RETENTION_MS)))
    def wait(self, ms: int) -> None:
        self.clock.now_unix_ms += ms

    @precondition(lambda self: any(self.sent))
    @rule(
        min_lag_ms=st.sampled_from((0, 0, 0, 5_000)),
        rows=st.sampled_from((2, 5, 32_768)),
        keys=st.sampled_from((3, 1 << 20)),
        changes=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    )
    def compact(self, min_lag_ms: int, rows: int, keys: int, changes: int | None) -> None:
        """Let the leader compact; with `changes`, it crashes after so many changes of the disk."""
        self._sync()
        policy = CompactionPolicy(TOMBSTONE_RETENTION_MS, min_lag_ms, 1)

        async def work(flusher: Flusher, _: Checkpointer) -> int:
            return await self._compactor(flusher, policy, keys).compact()

        before = compaction_runner.SECTION_ROWS
        compaction_runner.SECTION_ROWS = rows
        try:
            done = self._work(work, changes)
        finally:
            compaction_runner.SECTION_ROWS = before
        if done is not None and not min_lag_ms and keys > len(KEYS):
            self._check_compacted()

    @rule(changes=st.one_of(st.none(), st.integers(0, 12)))
    def trim_and_purge(self, changes: int | None) -> None:
        """Purge segments of which no message is kept, and trim the ordinary topic."""
        self._sync()

        async def work(flusher: Flusher, checkpointer: Checkpointer) -> bool:
            topics = cast(TopicCache, TwoTopics(CompactionPolicy(), plain_bytes=1))
            await checkpointer.take()
            trimmer = TopicTrimmer(
                cast(Appender, NodeAppender(self.store, flusher, self.clock)),
                TopicLimits(self.store, topics, 0),
                SegmentExaminer(self.disk, self.store, topics, checkpointer.position, at_once),
            )
            for _ in range(4):  # each round examines one segment
                if await trimmer.trim():
                    await flusher.wait_until_safe(self.store.log.next_position)
                await checkpointer.take()
            return True

        self._work(work, changes)

    @precondition(lambda self: len(self.store.log.sealed()) > 0)
    @rule(changes=st.one_of(st.none(), st.integers(0, 12)))
    def drop(self, changes: int | None) -> None:
        """Run the retention of the broker with a small maximum; compacted messages must stay."""
        retention = RetentionPolicy(age_ms_max=0, hours=frozenset(), log_bytes_max=1)

        async def work(flusher: Flusher, checkpointer: Checkpointer) -> bool:
            topics = cast(TopicCache, TwoTopics(CompactionPolicy()))
            limits = TopicLimits(self.store, topics, 0)
            bounds = CleaningBounds(
                needed_from=(lambda: self.store.readable_position, limits.compacted_from),
                checkpointed=checkpointer.position,
                checkpoint=checkpointer.take,
                wait_until_safe=flusher.wait_until_safe,
                is_gone=topics.is_gone,
                remove_later=self.node.checkpointing.remove_later,
                no_checkpoint=checkpointer.one_at_a_time,
            )
            cleaner = LogCleaner(
                self.store, self.disk, Retention(retention, SEGMENT_BYTES), bounds,
                StorageMetrics(CollectorRegistry()), clock=self.clock, interval_ms=0,
                in_thread=at_once,
            )  # fmt: skip
            return await cleaner.clean()

        self._work(work, changes)

    @precondition(lambda self: any(self.sent))
    @rule()
    def move_out_of_old_segments(self) -> None:
        """Compact because retention would remove the oldest segment."""
        self._sync()
        self.clock.now_unix_ms += 601_000
        self.reader = None

        async def work(flusher: Flusher, _: Checkpointer) -> int:
            policy = CompactionPolicy(10 * 601_000, 10**12, 1)
            return await self._compactor(flusher, policy, 1 << 20, log_bytes_max=1).compact()

        sealed = self.store.log.sealed()
        self._work(work, None)
        topics = cast(TopicCache, TwoTopics(CompactionPolicy()))
        needed = TopicLimits(self.store, topics, 0).compacted_from()
        assert not sealed or needed is None or needed >= sealed[0][1]

    @rule()
    def checkpoint(self) -> None:
        self._sync()
        self.node.checkpointing.run()

    @rule(spoil=st.sampled_from(("", "", "checkpoint", "consumequeue", "keyindex")))
    def kill(self, spoil: str) -> None:
        self._restart(self.disk.killed(), spoil)

    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        self._restart(self.disk.power_cut(lambda size: data.draw(st.integers(0, size))), "")

    @precondition(lambda self: any(self.sent))
    @rule(queue=st.integers(0, QUEUES - 1), count=st.integers(1, 6))
    def read_a_little(self, queue: int, count: int) -> None:
        """A reader of a table goes on; a slow one begins again."""
        now = self.clock.unix_ms()
        if self.reader is None or now - self.reader.begin_unix_ms >= TOMBSTONE_RETENTION_MS:
            self.reader = TableReader(queue, now)
        self._go_on(self.reader, count)

    def _go_on(self, reader: TableReader, count: int) -> bool:
        """Read a few messages; return whether the reader is at the end, with the right table."""
        messages, reader.offset = self._read(self.store, reader.queue, reader.offset, count)
        for _, key, body in messages:
            reader.table[key] = body
            if not body:
                del reader.table[key]
        if reader.offset < self.store.offsets((TABLE_ID, reader.queue)).next_offset:
            return False
        assert reader.table == self._table(reader.queue, reader.offset)
        return True

    @precondition(lambda self: any(self.sent))
    @rule()
    def every_table_is_that_of_the_model(self) -> None:
        self._sync()
        self._check_read(self.store)
        self._check_queries()

    @precondition(lambda self: any(self.sent))
    @rule()
    def fsck_finds_no_problem(self) -> None:
        self._sync()
        report = Fsck(self.disk.killed(), self.store.log.synced_position).run()
        assert report.problem_count == 0, report.problems

    @precondition(lambda self: any(self.sent))
    @rule()
    def scrub_finds_no_damage(self) -> None:
        self._sync()
        scrub = LogScrub(self.disk, self.store.log)
        while (range_ := scrub.next_range()) is not None:
            scrub.check(range_)
            assert not range_.damaged
            scrub.checked(range_)

    @precondition(lambda self: any(self.sent))
    @rule(bytes_max=st.integers(1, 4_000))
    def a_new_follower_has_the_same_messages(self, bytes_max: int) -> None:
        self._sync()
        log = self.store.log
        if log.first_position:
            return  # the follower would start with the floors; tested with real replicas
        disk = MemoryDisk()
        recovery = Recovery(disk, open_store(disk, segment_bytes=256).store, synced_position=0)
        history = EpochHistory(((1, 0),))
        while (position := recovery.store.log.next_position) < log.synced_position:
            data = read_whole_batches(log, history, position, bytes_max)
            segment = log.segment_of(position)[1:]
            batches, end = check_received(recovery, position, data, segment)
            recovery.store.log.copy(data, segment, end)
            for header, one in batches:
                recovery.take(header, one)
            recovery.store.synced(recovery.store.log.next_position)
        for queue in range(QUEUES):
            assert self._all(recovery.store, queue) == self._all(self.store, queue)

    def teardown(self) -> None:
        if self.opening is not None:
            self.kill("")
            self.every_table_is_that_of_the_model()
            self.kill("checkpoint")
            self.every_table_is_that_of_the_model()

    # ---- the node

    def _compactor(
        self, flusher: Flusher, policy: CompactionPolicy, keys: int, log_bytes_max: int = 0
    ) -> TopicCompactor:
        appender = cast(Appender, NodeAppender(self.store, flusher, self.clock))
        memory_bytes = 96 * keys
        return TopicCompactor(
            appender,
            TopicLimits(self.store, cast(TopicCache, TwoTopics(policy)), 0),
            BrokerRetention(newest_unix_ms=lambda _: NOW, log_bytes_max=log_bytes_max),
            CompactionRunner(
                appender,
                self.disk,
                CompactionLimits(memory_bytes=memory_bytes, bytes_per_s=1 << 40),
                at_once,
                self.random,
            ),
        )

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

    def _sync(self) -> None:
        unsynced = self.store.log.unsynced()
        self.node.sync(unsynced)
        self.store.synced(unsynced.position)
        self.synced_counts = [len(messages) for messages in self.sent]

    def _restart(self, disk: MemoryDisk, spoil: str) -> None:
        paths = sorted(path for path in disk.files if path.startswith(spoil)) if spoil else []
        if paths:
            disk.remove(paths[0])
        self.disk = CrashingDisk()
        self.disk.files = disk.files
        self.start()
        end = self.node.report.next_position
        for queue, messages in enumerate(self.sent):
            messages[:] = [one for one in messages if one.receipt.next_position <= end]
            assert len(messages) >= self.synced_counts[queue]
        if self.reader is not None and self.reader.offset > len(self.sent[self.reader.queue]):
            raise AssertionError("a reader has seen messages that were lost")
        self.synced_counts = [len(messages) for messages in self.sent]

    # ---- the model

    def _table(self, queue: int, end: int) -> dict[str, bytes]:
        table: dict[str, bytes] = {}
        for one in self.sent[queue][:end]:
            table[one.key] = one.body
        return {key: body for key, body in table.items() if body}

    def _read(
        self, store: MessageStore, queue: int, offset: int, count: int
    ) -> tuple[list[tuple[int, str, bytes]], int]:
        """Read as a consumer does; check each message against the model."""
        reading = store.pull((TABLE_ID, queue), ReadSpec(offset, 1 << 30, count, HashFilter(None)))
        if reading is None:
            return [], offset
        assert not reading.lost_count
        assert offset < reading.next_offset
        messages = []
        for raw in reading.batches:
            header = read_header(raw)
            for one in decode_records(raw, header, range(header.count)):
                if offset <= one.offset < reading.next_offset:
                    sent = self.sent[queue][one.offset]
                    key = one.properties["baton.ordering_key"]
                    assert (key, one.body) == (sent.key, sent.body), one.offset
                    assert (one.tag, one.keys) == (f"tag-{key[0]}", (key[0],))
                    assert header.store_unix_ms == sent.sent_unix_ms
                    messages.append((one.offset, key, one.body))
        assert len(messages) == reading.message_count
        assert [offset for offset, _, _ in messages] == sorted({one[0] for one in messages})
        return messages, reading.next_offset

    def _all(self, store: MessageStore, queue: int) -> list[tuple[int, str, bytes]]:
        end = store.offsets((TABLE_ID, queue)).next_offset
        messages, offset = [], 0
        while offset < end:
            more, offset = self._read(store, queue, offset, 3)
            messages += more
        return messages

    def _check_read(self, store: MessageStore) -> None:
        for queue in range(QUEUES):
            messages = self._all(store, queue)
            table = {key: body for _, key, body in messages}
            wanted = self._table(queue, len(self.sent[queue]))
            assert {key: body for key, body in table.items() if body} == wanted
            for offset in (0, len(self.sent[queue]) // 2):
                count = store.count_from((TABLE_ID, queue), offset)
                assert count == sum(1 for at, _, _ in messages if at >= offset)

    def _check_compacted(self) -> None:
        """Check that nothing is left of what the last compaction had to remove."""
        for queue in range(QUEUES):
            messages = self._all(self.store, queue)
            assert len({key for _, key, _ in messages}) == len(messages), messages

    def _check_queries(self) -> None:
        """Check the searches by time and by key."""
        queries = MessageQueries(self.store)
        for queue in range(QUEUES):
            messages = self._all(self.store, queue)
            if not messages:
                continue
            unix_ms = self.sent[queue][messages[len(messages) // 2][0]].sent_unix_ms
            found = queries.search_offset((TABLE_ID, queue), unix_ms)
            assert found == next(
                at for at, _, _ in messages if self.sent[queue][at].sent_unix_ms >= unix_ms
            )
        offsets = {
            (queue, at)
            for queue in range(QUEUES)
            for at, key, _ in self._all(self.store, queue)
            if key[0] == "b"
        }
        window = TimeWindow(0, 1 << 62)
        matches = queries.find(TABLE_ID, "b", window, messages_max=1_000, bytes_max=1 << 30)
        headers = [(read_header(one.batch), one.index) for one in matches.messages]
        found_offsets = [(h.queue_id, h.first_offset + index) for h, index in headers]
        assert len(found_offsets) == len(set(found_offsets))
        assert set(found_offsets) == offsets
        for header, index in headers:
            assert queries.header(header.position, index) == header
            assert is_relocated(header) or header.producer_id == 0


CompactionMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
)
TestCompaction = CompactionMachine.TestCase


def test_time_of_a_tombstone_begins_when_its_section_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of a long queue takes hours: until then readers get what the tombstone deletes."""
    machine = CompactionMachine()
    machine.start()
    machine.put(1, 8)
    begin_unix_ms, take = machine.clock.unix_ms(), CompactionRunner.take

    async def slow(runner: CompactionRunner, *of: Any) -> None:
        await take(runner, *of)
        machine.clock.now_unix_ms += 2 * TOMBSTONE_RETENTION_MS

    monkeypatch.setattr(CompactionRunner, "take", slow)
    machine.compact(0, 32_768, 1 << 20, None)
    parts = machine.store.compacted.parts.values()
    times = [one.tombstone_unix_ms for part in parts for one in part.sections]
    assert any(times)
    assert all(one - begin_unix_ms >= 2 * TOMBSTONE_RETENTION_MS for one in times if one)
    machine.teardown()
