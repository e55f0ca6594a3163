"""Removes old log segments as retention decides, and watches the disk usage.

The order of steps keeps every state valid that a crash, or a concurrent reader, can see:

1. the queues drop their oldest messages,
2. the floors of queues without a safe message are made durable,
3. the log forgets its oldest segments,
4. the segment files are removed, oldest first.

Index files are removed later, once no checkpoint refers to them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from batonmq._common.clock import Clock
from batonmq._core.records import HEADER_BYTES, check_stamp, read_header
from batonmq.errors import BatonError, DataLoss, DiskFull, NotServing
from batonmq_server.storage.core import floors
from batonmq_server.storage.core.commitlog import NO_SPACE
from batonmq_server.storage.core.compaction_order import written_unix_ms
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_repair import check_first_from
from batonmq_server.storage.core.retention import (
    CleaningTime,
    DiskState,
    DiskUsage,
    Retention,
    SealedSegment,
)
from batonmq_server.storage.core.schedule import TOPIC_ID as SYSTEM_TOPIC_ID
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.metrics import StorageMetrics

log = logging.getLogger(__name__)

QUEUES_AT_ONCE = 64
RESERVE = "reserve"
RESERVE_BYTES = 256 * 1024
"""Size of a reserve file. On a full disk it is removed, so that a checkpoint and the floors can be
written and segments can be removed."""


Repair = Callable[[QueueKey, int, DataLoss], Awaitable[None]]
"""Rebuilds the entries of a queue at an offset; raises if none was changed."""


async def _no_repair(key: QueueKey, offset: int, error: DataLoss) -> None:
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningBounds:
    """Which part of the log must be kept, whatever retention decides.

    Attributes:
        needed_from: Return positions from which the log is still needed, or None. A segment that
            contains or follows one of them is kept.
        checkpointed: Return the position of the last checkpoint; a start reads the log from there.
        checkpoint: Takes a checkpoint; returns False if there was no space for it.
        wait_until_safe: Waits until everything below a position is safe.
        is_gone: Whether the topic with this name and id no longer exists.
        remove_later: Removes index files once no checkpoint refers to them.
        leader_first_position: First position of the leader's log, which a follower follows; None
            for a node that decides by itself.
        no_checkpoint: Lock that is held while a checkpoint is taken.
        gone_before: Returns the end of the segments at the start of the log that an earlier leader
            has removed from the object store.
        held_from: Returns the position from which topics with a longer retention need the log.
            Limits of size and of the disk are stronger.
        repair: Rebuilds an index that can't be read; see `QueueRepairer`.
    """

    needed_from: Sequence[Callable[[], int | None]]
    checkpointed: Callable[[], int]
    checkpoint: Callable[[], Awaitable[bool]]
    wait_until_safe: Callable[[int], Awaitable[None]]
    is_gone: Callable[[str, int], bool]
    remove_later: Callable[[Iterable[str]], None]
    leader_first_position: Callable[[], int | None] = lambda: None
    no_checkpoint: asyncio.Lock = field(default_factory=asyncio.Lock)
    held_from: Callable[[], float] = lambda: math.inf
    gone_before: Callable[[], int] = lambda: 0
    repair: Repair = _no_repair


class LogCleaner:
    """Keeps the log within the limits of retention.

    Args:
        interval_ms: Time between two checks of the disk.
        in_thread: Runs blocking calls outside the event loop.
    """

    def __init__(  # noqa: PLR0913  the parts of a node
        self,
        store: MessageStore,
        disk: Disk,
        retention: Retention,
        bounds: CleaningBounds,
        metrics: StorageMetrics,
        *,
        clock: Clock,
        interval_ms: int,
        in_thread: InThread,
    ) -> None:
        self._store, self._disk, self._retention, self._bounds = store, disk, retention, bounds
        self._metrics, self._clock, self._in_thread = metrics, clock, in_thread
        self._interval_ms = interval_ms
        self._space = (0, 0)
        self._newest: dict[int, int] = {}
        self._floors: bytes | None = None
        self._reserved = False
        self.one_at_a_time = asyncio.Lock()
        metrics.disk_used_ratio.set_function(lambda: retention.usage.used_percent / 100)
        metrics.disk_free_bytes.set_function(lambda: retention.usage.free_bytes)
        metrics.disk_seconds_until_full.set_function(lambda: retention.seconds_until_full)
        metrics.disk_state.set_function(lambda: retention.state)

    async def run(self) -> None:
        """Clean until cancelled; run it as one task.

        Raises:
            OSError: the disk has failed.
        """
        while True:
            try:
                while await self.clean():
                    pass
            except NotServing as error:  # the node changes its role, or its process ends
                log.warning("log not cleaned error=%s", error)
            await asyncio.sleep(self._interval_ms / 1000)

    async def clean(self) -> bool:
        """Run one round; return whether segments were removed, so that another may follow.

        Raises:
            NotServing: the log can't be written any more, or the wait for it was abandoned.
        """
        async with self.one_at_a_time:
            return await self._clean()

    async def _clean(self) -> bool:
        await self.observe()
        position, written = self._keep_from(), self._store.log.next_position
        if position > self._bounds.checkpointed() and not await self._bounds.checkpoint():
            await self.free_reserve()
            await self._bounds.checkpoint()
        position = min(position, self._bounds.checkpointed())
        ends = [end for _, end in self._store.log.sealed() if end <= position]
        if not ends:
            return False
        # The log says why these segments are not needed: a delivery of a scheduled batch, or a
        # copy of it at a later position. That record must be safe before they are removed.
        await self._bounds.wait_until_safe(written)
        async with self._bounds.no_checkpoint:  # it may purge one of these segments
            removed = await self._remove(ends[-1])
        await self.observe()
        return removed

    async def free_reserve(self) -> None:
        """Remove the reserve file: what is written next frees more space."""
        await self._in_thread(self._free_reserve, None)

    async def observe(self) -> None:
        """Measure the disk usage and update the disk state."""
        before = self._retention.state
        await self._in_thread(self._measure, None)
        unwritten = self._store.log.end_position - self._store.log.next_position
        state = self._retention.observe(
            DiskUsage(*self._space), unwritten, self._clock.monotonic_ms()
        )
        if state is not before:
            usage = self._retention.usage
            log.log(
                logging.WARNING if state > max(before, DiskState.OK) else logging.INFO,
                "disk state state=%s was=%s used_percent=%.1f free_bytes=%d",
                state.name,
                before.name,
                usage.used_percent,
                usage.free_bytes,
            )

    def _measure(self, _: None) -> None:
        if not self._reserved and self._retention.state is not DiskState.FULL:
            with suppress(DiskFull):
                if not self._disk.load(RESERVE):
                    self._disk.remove(RESERVE)  # empty if a crash interrupted its creation
                    self._disk.create(RESERVE, RESERVE_BYTES).close()
                self._reserved = True
        self._space = self._disk.space()

    def _cleaning_time(self) -> CleaningTime:
        unix_ms = self._clock.unix_ms()
        return CleaningTime(unix_ms, datetime.fromtimestamp(unix_ms / 1000).astimezone().hour)

    def _keep_from(self) -> int:
        """Return the position from which the log must be kept."""
        log = self._store.log
        sealed = [
            SealedSegment(*segment, log.is_purged(segment[0]), log.stored(segment[0]) is not None)
            for segment in log.sealed()
        ]
        wanted = self._expired_before(sealed) if sealed else log.first_position
        if wanted <= log.first_position:
            return log.first_position
        # Only now: to find out what is needed costs more, with many compacted queues.
        positions = [position() for position in self._bounds.needed_from]
        wanted = min([wanted, *(position for position in positions if position is not None)])
        ends = (segment.next_position for segment in sealed)
        return max((end for end in ends if end <= wanted), default=log.first_position)

    def _expired_before(self, sealed: Sequence[SealedSegment]) -> int:
        """Return the position before which the log is to be removed, if it is not needed."""
        log = self._store.log
        first_position = self._bounds.leader_first_position()
        if first_position is not None:
            return first_position
        log_bytes = log.end_position - log.first_position - log.purged_bytes_count
        keep_from = self._retention.keep_from(
            sealed,
            log_bytes,
            self._cleaning_time(),
            self.newest_unix_ms,
            self._bounds.held_from,
        )
        return max(keep_from, self._bounds.gone_before())

    def newest_unix_ms(self, segment: SealedSegment) -> int:
        """Return the store time of the next batch after the segment: none in it is younger."""
        position = self._store.log.next_kept(segment.next_position)
        if position >= self._store.log.next_position:
            return self._store.store_unix_ms
        if (manifest := self._store.log.stored(position)) is not None:
            return manifest.first_unix_ms
        if position not in self._newest:
            try:
                head = self._store.log.read(position, HEADER_BYTES)
                header = read_header(head)
                check_stamp(head)
                self._newest[position] = written_unix_ms(header)
            except BatonError as error:
                log.error("first batch of a segment is damaged position=%d %s", position, error)
                self._newest[position] = self._store.store_unix_ms
        return self._newest[position]

    async def _remove(self, position: int) -> bool:
        """Remove the segments before `position`; return False if they must stay."""
        store = self._store
        if not await self._trim_queues(position):
            return False
        await self._write_floors()
        self._bounds.remove_later(store.keys.drop_before(position))
        segments = store.log.drop_before(position)
        self._newest = {at: time for at, time in self._newest.items() if at > position}
        for path in segments:
            await self._in_thread(self._disk.remove, path)
        self._metrics.removed_segments.inc(len(segments))
        log.info(
            "log cleaned first_position=%d segments=%d state=%s",
            position,
            len(segments),
            self._retention.state.name,
        )
        return True

    async def _trim_queues(self, position: int) -> bool:
        """Drop the messages before `position` from all queues; return whether that was possible."""
        all_trimmed = True
        for number, (key, queue) in enumerate(list(self._store.queues.items()), start=1):
            try:
                self._bounds.remove_later(await self._trim(key, queue, position))
            except BatonError as error:
                log.error("log not cleaned queue=%s error=%s", queue.folder, error)
                all_trimmed = False
                continue
            empty = queue.first_offset == queue.next_offset and queue.last_position < position
            topic = topic_of(queue.folder), key[0]
            if empty and key[0] != SYSTEM_TOPIC_ID and self._bounds.is_gone(*topic):
                self._store.forget_queue(key)
                self._bounds.remove_later([queue.folder])
            if number % QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return all_trimmed

    async def _trim(self, key: QueueKey, queue: ConsumeQueue, position: int) -> list[str]:
        """Drop the messages of a queue before `position`; return the files not needed now.

        Damaged entries that decide where it begins are rebuilt first, if the log has their batches.

        Raises:
            DataLoss: its index can't be read, and it can't be rebuilt now.
        """
        while True:
            try:
                check_first_from(self._store, key, position)
                break
            except DataLoss as error:
                try:
                    await self._bounds.repair(key, int(error.facts["offset"]), error)
                except BatonError as failure:
                    log.warning("index not rebuilt queue=%s error=%s", queue.folder, failure)
                    break  # if it is the batch that is damaged, the entry is good
        return queue.trim_before(position)

    async def _write_floors(self) -> None:
        """Make durable the next offset of each queue that has no safe message in the log."""
        content = floors.encode(
            [
                QueueFloor(topic_of(queue.folder), *key, queue.first_offset)
                for key, queue in self._store.queues.items()
                if queue.first_offset >= max(queue.visible_offset, 1)
            ]
        )
        if content == self._floors:
            return
        await self._in_thread(self._replace_floors, content)
        self._floors = content

    def _replace_floors(self, content: bytes) -> None:
        try:
            self._disk.replace(floors.PATH, content)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._free_reserve(None)
            self._disk.replace(floors.PATH, content)

    def _free_reserve(self, _: None) -> None:
        self._disk.remove(RESERVE)
        self._reserved = False
