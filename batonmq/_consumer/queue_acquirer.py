"""Acquires a queue: from the lock manager, or by reading progress in a group without ownership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.aio import unless
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.batched_calls import ACQUIRE_HOLD_MS, BatchedCalls
from batonmq._consumer.local_offsets import LocalOffsets, LocalProgress
from batonmq._consumer.session import Session, queue_to_pb, ranges_from_pb, ranges_to_pb
from batonmq._consumer.wakeup import Condition
from batonmq._core.queue_progress import GrantedProgress, QueueProgress
from batonmq._core.queues import QueueRef
from batonmq._core.retries import retry_topic
from batonmq._core.start_offset import effective_start, start_offset
from batonmq.errors import (
    BatonError,
    Draining,
    Fenced,
    HandoverPending,
    Held,
    ModeChanged,
    NotAssigned,
    NotMember,
    NotSubscribed,
    OldRequest,
    Retry,
    SubscriptionDraining,
    Unacked,
    UnknownQueue,
    Unreachable,
)

log = logging.getLogger(__name__)

RESUME_RANGES_MAX = 4_096
"""Ranges of offsets that one request claims; what is left out is delivered again, flagged."""

_WAITED = (Held, Unacked, Draining, HandoverPending, SubscriptionDraining)
"""Refusals that the lock manager holds back while it waits for the queue."""
_OLD_VIEW = (NotAssigned, NotMember, NotSubscribed, ModeChanged)
"""Refusals that say that the consumer's copy of the group's record is old."""


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """The lease of a grant.

    Attributes:
        sent_ms: When the request was sent, by the monotonic clock.
        bound_generation: Generation of the subscription that the grant is for; 0 for any.
    """

    sent_ms: int
    lease_ms: int
    bound_generation: int


@dataclass(frozen=True, slots=True)
class AcquiredQueue:
    """A queue that may be pulled, and from which offset; without a lease if it is not owned."""

    start: GrantedProgress
    lease: GrantedLease | None = None


class QueueAcquirer:
    """Requests one queue until it is granted or revoked.

    Args:
        revoked: True once the group's record does not assign the queue any more.
        freed: Set when a new request may succeed at once.
        progress: Returns the consumer's present progress on the queue; its work in flight is
            claimed in the request (protocol section 11).
    """

    def __init__(
        self,
        session: Session,
        calls: BatchedCalls,
        queue: QueueRef,
        *,
        revoked: Condition,
        freed: asyncio.Event,
        progress: Callable[[], QueueProgress | None],
    ) -> None:
        self._session, self._calls, self._queue = session, calls, queue
        self._revoked, self._freed, self._progress = revoked, freed, progress
        self._key = session.key(queue)

    async def acquire(self) -> AcquiredQueue | None:
        """Request the queue until it is granted; return None if it was revoked before that."""
        session, failures = self._session, 0
        while not self._revoked:
            sent_ms = session.clock.monotonic_ms()
            self._freed.clear()
            try:
                return await unless(self._revoked, self._request())
            except BatonError as error:
                log.debug("acquire refused queue=%s error=%s", self._queue, error)
                if isinstance(error, _OLD_VIEW):
                    session.heartbeat_soon.set()
                waited_ms = session.clock.monotonic_ms() - sent_ms
                if isinstance(error, _WAITED) and waited_ms >= ACQUIRE_HOLD_MS // 2:
                    continue  # nothing has failed; a pause would miss the release
                if error.retry is Retry.NEVER and not isinstance(error, OldRequest):
                    log.warning("queue not granted queue=%s error=%s", self._queue, error)
                await unless(self._freed, session.directory.pause(error, failures))
                failures += 1
        return None

    async def look_up(self) -> AcquiredQueue | None:
        """Read the group's progress on a queue without owner; None if it was revoked before that.

        A group without progress gets some, so that its start offset is decided once.
        """
        session, failures = self._session, 0
        while not self._revoked:
            try:
                return await unless(self._revoked, self._read_progress())
            except BatonError as error:
                log.debug("progress not read queue=%s error=%s", self._queue, error)
                if isinstance(error, _OLD_VIEW):
                    session.heartbeat_soon.set()
                await unless(self._revoked, session.directory.pause(error, failures))
                failures += 1
        return None

    async def _request(self) -> AcquiredQueue:
        extent = await self._calls.extent(self._queue)
        initial_offset = await self._initial_offset(extent)
        progress = self._progress()
        item = lockmgr_pb.AcquireItem(
            queue=self._key,
            resume=ranges_to_pb(progress.claim(RESUME_RANGES_MAX) if progress else ()),
            reset_epoch=progress.reset_epoch if progress else 0,
            initial_offset=initial_offset,
            topic_id=extent.topic_id,
        )
        granted = await self._calls.acquire(self._queue, item)
        grant = granted.grant
        start = GrantedProgress(
            grant.token,
            grant.reset_epoch,
            grant.committed_offset,
            ranges_from_pb(grant.acked),
            ranges_from_pb(grant.maybe_seen),
        )
        lease = GrantedLease(granted.sent_ms, grant.lease_ms, grant.subscription_generation)
        return AcquiredQueue(start, lease)

    async def _read_progress(self) -> AcquiredQueue:
        if self._session.local is not None:
            return AcquiredQueue(await self._local_progress(self._session.local))
        try:
            return AcquiredQueue(await self._query())
        except UnknownQueue:
            await self._create_progress(
                await self._initial_offset(await self._calls.extent(self._queue))
            )
            return AcquiredQueue(await self._query())

    async def _local_progress(self, local: LocalOffsets) -> GrantedProgress:
        progress = local.get(self._queue)
        if progress is None:
            extent = await self._calls.extent(self._queue)
            progress = LocalProgress(await self._initial_offset(extent))
            local.put(self._queue, progress)
            # Saved before the first delivery: after a crash, "last" would be another offset.
            await local.save()
        return GrantedProgress(0, 0, progress.committed, progress.acked)

    async def _query(self) -> GrantedProgress:
        session = self._session
        keeper = await session.keeper()
        request = offsets_pb.QueryRequest(
            offsets_epoch=session.epochs.of(keeper.offsets_set), queues=[self._key]
        )
        answer = await answered(keeper.stub.Query(request, timeout=CALL_TIMEOUT_S))
        if not session.epochs.observe(keeper.offsets_set, answer.offsets_epoch):
            raise Unreachable("an offsets node of an older epoch answered")
        outcome = answer.outcomes[0]
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        progress = outcome.progress
        acked = ranges_from_pb(progress.acked)
        return GrantedProgress(0, progress.reset_epoch, progress.committed_offset, acked)

    async def _create_progress(self, offset: int) -> None:
        """Commit where the group starts.

        The first try may be FENCED with the reset epoch that a deleted topic of this name left.
        """
        session, reset_epoch = self._session, 0
        name, stub = await session.keeper()
        for _ in range(2):
            item = offsets_pb.CommitItem(
                queue=self._key, reset_epoch=reset_epoch, committed_offset=offset
            )
            request = offsets_pb.CommitRequest(offsets_epoch=session.epochs.of(name), items=[item])
            answer = await answered(stub.Commit(request, timeout=CALL_TIMEOUT_S))
            if not answer.outcomes[0].HasField("error"):
                return
            error = error_from_pb(answer.outcomes[0].error)
            if not isinstance(error, Fenced) or not error.detail.reset_epoch:
                raise error
            reset_epoch = error.detail.reset_epoch

    async def _initial_offset(self, extent: storage_pb.QueueOffsets) -> int:
        """Return where to start if the group has no progress on the queue."""
        session, queue, searched_offset = self._session, self._queue, 0
        start = effective_start(
            session.settings.consume_from,
            retry=queue.topic == retry_topic(session.group),
            added=(session.local or session.view).added(queue),
        )
        if start == "timestamp":
            request = query_pb.SearchOffsetRequest(
                queue=queue_to_pb(queue), unix_ms=session.start_at_unix_ms
            )
            stub = await session.directory.query(queue.broker)
            answer = await answered(stub.SearchOffset(request, timeout=CALL_TIMEOUT_S))
            searched_offset = answer.offset
        return start_offset(start, extent.first_offset, extent.next_offset, searched_offset)
