"""Compacts one queue: reads it twice, writes the kept messages again, and stores the orders.

The first pass finds the newest offset of each key, of the messages that are new since the last run.
The second pass reads all messages of the queue, section by section, and leaves out those with a
newer one. Each section is a step of its own: after a crash the sections that are safe stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from batonmq.errors import BatonError
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.compaction_need import compacted_from
from batonmq_server.storage.core.compaction_order import (
    CompactionOrder,
    Relocation,
    SectionRows,
    encode_order,
)
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.compaction_run import RunRules, SectionDraft, tombstone_times
from batonmq_server.storage.core.compaction_source import (
    ExaminedChunk,
    SourceChunk,
    examine,
    queue_chunk,
    section_chunks,
)
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.key_digests import KeyDigester
from batonmq_server.storage.core.newest_offsets import PEAK_BYTES_PER_KEY, NewestOffsets
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.tier_file import StoreUnreadable
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked

SECTION_ROWS, SECTION_BYTES = 32_768, 8 * 1024 * 1024
"""A section is closed when it has so many messages or bytes."""
WRITE_BYTES = 1024 * 1024
"""Bytes that are written without an await."""


class CompactionAbandoned(Exception):
    """The queue, or its part of the log, was removed while it was being compacted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionLimits:
    """What a compaction may use.

    Attributes:
        memory_bytes: Memory for the newest offsets of the keys of one queue.
        bytes_per_s: Maximum read rate; 0 turns compaction off.
    """

    memory_bytes: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class DueQueue:
    """A queue to compact.

    Attributes:
        compact_to: Offset below which messages are old enough: first offset of a batch, or the end
            of the visible messages.
        moved_before: Messages before this position are written again in any case; 0 for none.
        ratio: Share of the bytes that were stored since the last compaction.
    """

    key: QueueKey
    policy: CompactionPolicy
    compact_to: int
    moved_before: int
    ratio: float


class CompactionRunner:
    """Compacts queues, one at a time.

    Args:
        in_thread: Runs the blocking reads of the log outside the event loop.
        random: Seeds the digests of keys.
    """

    def __init__(
        self,
        appender: Appender,
        disk: Disk,
        limits: CompactionLimits,
        in_thread: InThread,
        random: Random,
    ) -> None:
        self.appender, self.store, self.limits = appender, appender.store, limits
        self._disk, self._in_thread, self._random = disk, in_thread, random

    async def compact(self, due: DueQueue) -> int:
        """Compact a queue; return how many messages were removed.

        Raises:
            CompactionAbandoned: the queue was removed meanwhile.
            DataLoss: a message, or the index, is damaged.
            NotServing, NotLeader, NoQuorum, NotEnoughReplicas, DiskFull, Overloaded: the node can't
                write.
        """
        run = _QueueRun(self, due, KeyDigester(self._random.getrandbits(64)))
        try:
            return await run.run()
        except StoreUnreadable as error:
            raise CompactionAbandoned(f"the object store can't be read: {error}") from error
        except FileNotFoundError as error:
            raise CompactionAbandoned("the segment is no longer there") from error

    async def examine(
        self, key: QueueKey, digester: KeyDigester, chunk: SourceChunk
    ) -> ExaminedChunk:
        """Read and examine a chunk in another thread, at the allowed rate."""
        results: list[ExaminedChunk] = []

        def read(_: object) -> None:
            results.append(examine(self._disk, key, digester, chunk))

        await self._in_thread(read, None)
        await asyncio.sleep(chunk.bytes_count / self.limits.bytes_per_s)
        return results[0]

    async def take(
        self, draft: SectionDraft, chunk: ExaminedChunk, rules: RunRules, rows: SectionRows | None
    ) -> None:
        """Let a draft decide about a chunk, in another thread."""

        def decide(_: object) -> None:
            draft.take(chunk, rules, tombstone_times(chunk, rows))

        await self._in_thread(decide, None)


class _QueueRun:
    """One run over one queue."""

    def __init__(self, runner: CompactionRunner, due: DueQueue, digester: KeyDigester) -> None:
        self._runner, self._due, self._digester = runner, due, digester
        self._store, self._key = runner.store, due.key
        self._compact_to, self._removed = due.compact_to, 0
        self._rows_max = min(SECTION_ROWS, self._store.log.segment_bytes // 128)
        self._first_offset = self._store.queues[due.key].first_offset

    async def run(self) -> int:
        """Compact the queue; return how many messages were removed."""
        part = self._store.compacted.get(self._key)
        old = list(part.sections) if part is not None else []
        newest = NewestOffsets(self._runner.limits.memory_bytes // PEAK_BYTES_PER_KEY)
        await self._collect(newest, old, compacted_from(self._queue(), part))
        unix_ms = self._runner.appender.clock.unix_ms()
        rules = RunRules(
            newest=newest,
            compact_to=self._compact_to,
            tombstones_before_unix_ms=unix_ms - self._due.policy.tombstone_retention_ms,
        )
        await self._write_sections(old, rules)
        return self._removed

    def _queue(self) -> ConsumeQueue:
        """Return the queue.

        Raises:
            CompactionAbandoned: it was removed, or has lost messages, since the run began.
        """
        queue = self._store.queues.get(self._key)
        if queue is None or queue.first_offset != self._first_offset:
            raise CompactionAbandoned("the messages of the queue were removed")
        return queue

    # ---- first pass

    async def _collect(self, newest: NewestOffsets, old: list[Section], begin: int) -> None:
        """Find the newest offset of each key from `begin` on; end the run early without room."""
        for section in old:
            if section.next_offset > begin:
                for source in section_chunks(self._store, section):
                    if not await self._add(newest, source, begin):
                        return
        offset: int | None = max(begin, self._first_offset)
        while offset is not None and offset < self._compact_to:
            self._queue()
            source = queue_chunk(self._store, self._key, offset, self._compact_to)
            offset = await self._add(newest, source, begin)

    async def _add(self, newest: NewestOffsets, source: SourceChunk, begin: int) -> int | None:
        """Add a chunk; return the offset after it, or None if the run ends before it."""
        if source.first_offset >= self._compact_to:
            return None
        chunk = await self._runner.examine(self._key, self._digester, source)
        chosen = chunk.keyed & (chunk.offsets >= begin) & (chunk.offsets < self._compact_to)
        if not newest.has_room(int(chosen.sum())):
            self._compact_to = source.first_offset
            return None
        newest.add(chunk.keys[chosen], chunk.offsets[chosen])
        return chunk.next_offset

    # ---- second pass

    async def _write_sections(self, old: list[Section], rules: RunRules) -> None:
        """Write all sections anew, but those of which nothing is removed or moved."""
        draft: SectionDraft | None = None
        merged: list[Section] = []
        for section in old:
            if draft is not None and self._is_full(
                draft, section.message_count, section.bytes_count
            ):
                await self._finish(draft, merged, rules)
                draft, merged = None, []
            draft = draft or SectionDraft(section.first_offset, section.next_offset)
            merged.append(section)
            rows = self._store.compacted.rows(section)
            for source in section_chunks(self._store, section):
                chunk = await self._runner.examine(self._key, self._digester, source)
                await self._runner.take(draft, chunk, rules, rows)
            draft.next_offset = section.next_offset
        offset, end = self._first_offset, max(self._compact_to, self._moved_to())
        while offset < end:
            self._queue()
            source = queue_chunk(self._store, self._key, offset, end)
            chunk = await self._runner.examine(self._key, self._digester, source)
            if draft is not None and self._is_full(draft, len(chunk.offsets), source.bytes_count):
                await self._finish(draft, merged, rules)
                draft, merged = None, []
            draft = draft or SectionDraft(offset, offset)
            await self._runner.take(draft, chunk, rules, None)
            offset = chunk.next_offset
        if draft is not None:
            await self._finish(draft, merged, rules)

    def _is_full(self, draft: SectionDraft, count: int, bytes_count: int) -> bool:
        """Return whether a section has no room for more messages."""
        if draft.count + count > self._rows_max:
            return True
        return draft.bytes_count + bytes_count > SECTION_BYTES

    def _moved_to(self) -> int:
        """Return the end of the messages that are written again whatever their age."""
        queue = self._queue()
        if queue.first_offset == queue.next_offset:
            return 0
        return min(queue.first_offset_from(self._due.moved_before), queue.visible_offset)

    async def _finish(self, draft: SectionDraft, merged: list[Section], rules: RunRules) -> None:
        """Write a section and its order, and wait until both are safe."""
        queue, appender = self._queue(), self._runner.appender
        with self._writing():
            rows, data = self._unchanged(draft, merged), merged[0][5:7] if merged else (0, 0)
            if rows is None:
                positions = await self._write(draft)
                rows = draft.rows(positions, appender.clock.unix_ms())
                data = (positions[0], self._store.log.next_position) if positions else (0, 0)
            order = CompactionOrder(
                topic=topic_of(queue.folder),
                topic_id=self._key[0],
                queue_id=self._key[1],
                first_offset=draft.first_offset,
                next_offset=draft.next_offset,
                compacted_to=rules.compact_to,
                data_position=data[0],
                data_end=data[1],
                queue_position=self._queue_position(draft.next_offset),
                removed_count=draft.removed_count,
                rows=rows,
            )
            (outcome,) = appender.append([checked(encode_order(order))], SYSTEM_TOPICS)
            if isinstance(outcome, BatonError):
                raise outcome
        self._removed += draft.removed_count
        await appender.flusher.wait_until_safe(outcome.next_position)
        self._first_offset = max(self._first_offset, draft.next_offset)

    def _unchanged(self, draft: SectionDraft, merged: list[Section]) -> SectionRows | None:
        """Return the rows of a section of which nothing is removed or moved; None otherwise."""
        if len(merged) != 1 or draft.removed_count or draft.next_offset != merged[0].next_offset:
            return None
        if merged[0].first_position < self._due.moved_before:
            return None
        offsets, since = draft.tombstones(self._runner.appender.clock.unix_ms())
        rows = self._store.compacted.rows(merged[0])
        return replace(rows, tombstone_offsets=offsets, tombstone_since=since)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Protect what is written in the body: there is no order for it yet."""
        compacted = self._store.compacted
        compacted.writing_from = self._store.log.next_position
        try:
            yield
        finally:
            compacted.writing_from = None

    async def _write(self, draft: SectionDraft) -> list[int]:
        """Write the kept messages; return the positions of the batches."""
        positions: list[int] = []
        part: list[Relocation] = []
        size = 0
        for one in draft.relocations:
            if part and size + one.header.length > WRITE_BYTES:
                positions += self._runner.appender.relocate(part)
                part, size = [], 0
                await asyncio.sleep(0)
            part.append(one)
            size += one.header.length
        if part:
            positions += self._runner.appender.relocate(part)
        self._queue()
        return positions

    def _queue_position(self, offset: int) -> int:
        """Return the position of the batch at `offset`, or one between it and the batch before."""
        queue = self._queue()
        if offset <= queue.first_offset:
            return queue.first_position
        if offset < queue.visible_offset:
            return int(queue.read(offset, offset + 1).positions[0])
        last = queue.read(offset - 1, offset)
        return int(last.positions[0]) + int(last.sizes[0])
