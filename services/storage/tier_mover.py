"""Moves closed segments to the object store, and removes what retention has removed.

The leader of a replica set stores a segment once no failover can lose it: all parts, then the
manifest. Every node removes its own local copy, later, after a comparison with the manifest. The
leader removes segments from the store that retention has removed from the log: the position first,
then the manifests, then the parts. A crash between two steps leaves work that is done again.

What is not certain stays on the local disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from batonmq._common.aio import in_steps
from batonmq._common.clock import Clock
from batonmq.errors import BatonError, DataLoss
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core.commitlog import NO_SPACE, segment_path
from batonmq_server.storage.core.consumequeue import Int64Array
from batonmq_server.storage.core.retention import DiskState, Retention, SealedSegment
from batonmq_server.storage.core.tier import (
    LocalSegment,
    LocalState,
    SegmentName,
    TierManifest,
    TierPolicy,
    due_removals,
    due_store_removals,
    due_uploads,
)
from batonmq_server.storage.core.tier_upload import SegmentComparison, SegmentUpload
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.log_cleaner import LogCleaner
from batonmq_server.storage.metrics import TierMetrics
from batonmq_server.storage.node import StorageNode
from batonmq_server.storage.node_role import NodeRole
from batonmq_server.storage.tier_store import SegmentStore
from batonmq_server.storage.topic_limits import TopicLimits

log = logging.getLogger(__name__)

Value = TypeVar("Value")
REMOVALS_MAX = 4
"""Local copies that one round removes."""
LIST_ROUNDS = 6
"""A follower that waits for the leader to store a segment lists the store in each 6th round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMoverParts:
    """What a mover works with.

    Attributes:
        in_thread: Runs calls of the local disk outside the event loop.
        in_store_thread: The same, of the store.
    """

    node: StorageNode
    store: SegmentStore
    role: NodeRole
    limits: TopicLimits
    retention: Retention
    checkpointer: Checkpointer
    cleaner: LogCleaner
    metrics: TierMetrics
    clock: Clock
    in_thread: InThread
    in_store_thread: InThread


class TierMover:
    """Keeps the store and the local disk as the policy says; run `run` as one task."""

    def __init__(self, parts: TierMoverParts, policy: TierPolicy, interval_ms: int) -> None:
        self._parts, self._policy, self._interval_ms = parts, policy, interval_ms
        self._log = parts.node.store.log
        self._stored: set[SegmentName] | None = None
        self._seen: set[SegmentName] = set()
        self._first_position = self._listed_ms = 0
        self._led = False
        self._refused: set[SegmentName] = set()

    async def run(self) -> None:
        """Move segments until cancelled.

        Raises:
            OSError: the local disk has failed.
        """
        while True:
            try:
                while await self.move():
                    pass
            except BatonError as error:
                self._stored = None  # what a failed call has done is unknown
                log.warning("segments not moved error=%s", error)
            await asyncio.sleep(self._interval_ms / 1000)

    def gone_before(self) -> int:
        """Return the end of the segments that an earlier leader has removed from the store.

        They are below the position that the earlier leader has recorded, and only in the store by
        the files of this log. Purged and local segments between them are removed with them.
        """
        gone = position = self._log.first_position
        while self._stored is not None and position < self._log.end_position:
            end = self._log.segment_of(position)[2]
            if end > self._first_position:
                break
            if (manifest := self._log.stored(position)) is not None:
                if manifest.name in self._stored:
                    break
                gone = end
            position = end
        return gone

    async def move(self) -> bool:
        """Do what is due; return whether more may be due at once.

        Raises:
            BatonError: the store failed.
            OSError: the local disk has failed.
        """
        leads = not self._parts.role.is_follower
        local = self._local()
        if self._stored is None or (leads and not self._led) or self._waits_for_leader(local):
            try:
                await self._list()
            except BatonError:
                self._show_waiting(self._due_uploads(local) if leads else [])
                raise
        if leads and not self._led:
            await self._remove_lost_parts()
        self._led = leads
        uploaded = False
        if leads:
            due = self._due_uploads(local)
            self._show_waiting(due)
            if due:
                uploaded = await self._upload(due[0])
            await self._remove_from_store()
        else:
            self._show_waiting([])
        moved = await self._move_out(self._local())
        self._parts.metrics.remote_bytes.set(self._log.stored_bytes_count)
        return uploaded or moved

    @property
    def _known(self) -> set[SegmentName]:
        """What the store has; while it does not answer, what it had."""
        return self._stored if self._stored is not None else self._seen

    def _is_purged(self, position: int) -> bool:
        """Return whether a segment is purged for good: a start does not need it either."""
        return self._parts.node.checkpointing.is_purged(position)

    def _local(self) -> list[LocalSegment]:
        log_, history = self._log, self._parts.node.history
        return [
            LocalSegment(begin, end, SegmentName(begin, history.epoch_at(end - 1)))
            for begin, end in log_.sealed()
            if not log_.is_purged(begin) and log_.stored(begin) is None
        ]

    def _due_uploads(self, local: Sequence[LocalSegment]) -> list[LocalSegment]:
        position = self._parts.node.store.readable_position
        return [
            one
            for one in due_uploads(local, self._known, position)
            if one.name not in self._refused
        ]

    def _due_removals(
        self, local: Sequence[LocalSegment], stored: set[SegmentName]
    ) -> list[LocalSegment]:
        parts, log_ = self._parts, self._log
        state = LocalState(
            log_bytes=log_.end_position
            - log_.first_position
            - log_.purged_bytes_count
            - log_.stored_bytes_count,
            bound=parts.node.store.readable_position,
            unix_ms=parts.clock.unix_ms(),
            disk_is_short=parts.retention.state >= DiskState.CLEAN,
        )
        found = due_removals(self._policy, local, stored, state, self._newest_unix_ms)
        return [one for one in found if one.name not in self._refused]

    def _newest_unix_ms(self, segment: LocalSegment) -> int:
        sealed = SealedSegment(segment.first_position, segment.next_position)
        return self._parts.cleaner.newest_unix_ms(sealed)

    def _waits_for_leader(self, local: Sequence[LocalSegment]) -> bool:
        """Return whether a local copy is due that the store did not have at the last listing."""
        if not self._parts.role.is_follower or self._stored is None:
            return False
        if self._parts.clock.monotonic_ms() - self._listed_ms < LIST_ROUNDS * self._interval_ms:
            return False
        due = self._due_removals(local, {one.name for one in local})
        return any(one.name not in self._stored for one in due)

    def _show_waiting(self, due: Sequence[LocalSegment]) -> None:
        metrics = self._parts.metrics
        metrics.waiting_segments.set(len(due))
        age_ms = 0
        if due:
            age_ms = self._parts.clock.unix_ms() - self._newest_unix_ms(due[0])
        metrics.waiting_seconds.set(max(0, age_ms) / 1000)

    async def _list(self) -> None:
        store = self._parts.store

        def listed() -> tuple[set[SegmentName], int]:
            return store.stored(), store.first_position()

        self._seen, self._first_position = await self._call("list", listed)
        self._stored = self._seen
        self._listed_ms = self._parts.clock.monotonic_ms()

    async def _upload(self, segment: LocalSegment) -> bool:
        """Store a segment; return whether another one may be next."""
        parts, store = self._parts, self._parts.store
        upload = SegmentUpload(parts.node.disk, segment)
        number = 0
        try:
            while part := await self._read(upload.next_part):
                content, at = part, number
                await self._call("write", lambda: store.write_part(segment.name, at, content))  # noqa: B023
                parts.metrics.stored_bytes.inc(len(part))
                number += 1
        except FileNotFoundError:  # retention has removed it meanwhile
            return False
        except DataLoss as error:
            self._refuse(segment, error)
            return True
        finally:
            upload.close()
        manifest = upload.manifest
        if manifest is None:  # it has no batch
            self._refused.add(segment.name)
            return True
        await self._call("write", lambda: store.write_manifest(manifest))
        self._known.add(segment.name)
        log.info("segment stored name=%s bytes=%d", segment.name, manifest.stored_bytes)
        return True

    async def _remove_from_store(self) -> None:
        gone = due_store_removals(self._known, self._log.first_position, self._is_purged)
        if not gone:
            return
        store, first_position = self._parts.store, self._log.first_position
        if first_position > self._first_position:
            await self._call("remove", lambda: store.write_first_position(first_position))
            self._first_position = first_position
        for name in gone:
            if self._parts.role.is_follower:
                return  # it is another node's task now
            await self._remove_segment(name)

    async def _remove_segment(self, name: SegmentName) -> None:
        store = self._parts.store

        def remove() -> None:
            manifest = store.manifest(name)
            store.remove(name.manifest)
            for number in range(manifest.part_count if manifest is not None else 0):
                store.remove(name.part(number))

        try:
            await self._call("remove", remove)
        except DataLoss as error:  # the manifest is damaged: the next leader removes the parts
            log.error("manifest is damaged name=%s error=%s", name, error)
            await self._call("remove", lambda: store.remove(name.manifest))
        self._known.discard(name)
        self._parts.metrics.removed_segments.inc()
        log.info("segment removed from the store name=%s", name)

    async def _remove_lost_parts(self) -> None:
        """Remove parts without a manifest of segments that retention has removed.

        A crash between the removals of manifest and parts leaves them.
        """
        store = self._parts.store
        found = await self._call("list", store.parts)
        lost = set(
            due_store_removals(
                {segment for segment, _ in found} - self._known,
                self._log.first_position,
                self._is_purged,
            )
        )
        for segment, name in found:
            if segment in lost:
                await self._call("remove", lambda: store.remove(name))  # noqa: B023

    async def _move_out(self, local: Sequence[LocalSegment]) -> bool:
        """Remove local copies that are due; return whether there was one."""
        moved, checkpointer = False, self._parts.checkpointer
        due: list[LocalSegment] = []
        if not (found := self._due_removals(local, self._known)):
            return False
        scheduled = self._parts.node.store.schedule.waiting.positions()
        async for one in in_steps(found):
            if len(due) == REMOVALS_MAX:
                break
            if not self._is_held(one, scheduled):
                due.append(one)
        # A start reads the log from the last checkpoint on, and does not need the store.
        if due and due[-1].next_position > checkpointer.position():
            await checkpointer.take()
        for one in due:
            if one.next_position > checkpointer.position():
                break
            try:
                moved |= await self._move_one(one)
            except FileNotFoundError:  # retention has removed it meanwhile
                continue
            except DataLoss as error:
                self._refuse(one, error)
        return moved

    def _is_held(self, segment: LocalSegment, scheduled: Int64Array) -> bool:
        """Return whether something else than readers of messages reads the segment.

        Scheduled messages, open transactions and compacted topics are read from the local disk.

        Args:
            scheduled: Positions of the scheduled messages, ascending.
        """
        store, limits = self._parts.node.store, self._parts.limits
        begin, end = segment.first_position, segment.next_position
        if np.searchsorted(scheduled, begin) < np.searchsorted(scheduled, end):
            return True
        oldest = store.transactions.open.oldest_position()
        if oldest is not None and oldest < end:
            return True
        if not limits.loaded or store.compacted.is_writing(end):
            return True
        for key, queue in store.queues.items():
            if limits.compaction_of(key, queue) is None and store.compacted.get(key) is None:
                continue
            try:
                if store.needs(key, begin, end):
                    return True
            except BatonError:  # a damaged index tells nothing
                return True
        return False

    async def _move_one(self, segment: LocalSegment) -> bool:
        parts, name = self._parts, segment.name
        manifest = await self._call("list", lambda: parts.store.manifest(name))
        if manifest is None:  # another node has removed it: the store is listed again
            self._stored = None
            return False
        if (manifest.name, manifest.next_position) != (name, segment.next_position):
            raise DataLoss(f"manifest {name} is that of segment {manifest.name}")
        comparison = SegmentComparison(parts.node.disk, manifest)
        while await self._read(comparison.compare_next):
            pass
        async with parts.cleaner.one_at_a_time, parts.checkpointer.one_at_a_time:
            scheduled = parts.node.store.schedule.waiting.positions()
            if segment not in self._local() or self._is_held(segment, scheduled):
                return False
            await self._replace(manifest)
        parts.metrics.moved_segments.inc()
        log.info("local copy removed name=%s bytes=%d", name, manifest.size)
        return True

    async def _replace(self, manifest: TierManifest) -> None:
        """Replace a segment file by the manifest. Readers use the store before that."""
        disk, path = self._parts.node.disk, segment_path(manifest.first_position)
        self._log.move_out(manifest)
        try:
            await self._parts.in_thread(
                lambda _: disk.replace_sparse(path, manifest.encode(), manifest.size), None
            )
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._log.move_back(manifest)
            log.warning("local copy not removed path=%s error=%s", path, error)

    def _refuse(self, segment: LocalSegment, error: DataLoss) -> None:
        if segment not in self._local():
            return  # its file was replaced while it was read: it is purged
        name = segment.name
        self._refused.add(name)
        self._parts.metrics.failures.labels("move").inc()
        log.error("segment not moved, it stays on the local disk name=%s error=%s", name, error)

    async def _call(self, work: str, call: Callable[[], Value]) -> Value:
        """Return the result of a call of the store."""
        try:
            return await _result(self._parts.in_store_thread, call)
        except BatonError:
            self._parts.metrics.failures.labels(work).inc()
            raise

    async def _read(self, call: Callable[[], Value]) -> Value:
        """Return the result of a call of the local disk."""
        return await _result(self._parts.in_thread, call)


async def _result(in_thread: InThread, call: Callable[[], Value]) -> Value:
    found: list[Value] = []
    await in_thread(lambda _: found.append(call()), None)
    return found[0]
