"""How a queue becomes ours: granted by lockmgr, or just read where nobody owns it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.aio import unless
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.batched_calls import ACQUIRE_HOLD_MS
from batonmq._consumer.local_offsets import LocalOffsets, LocalProgress
from batonmq._consumer.session import queue_to_pb, ranges_from_pb, ranges_to_pb
from batonmq._core.queue_progress import GrantedProgress
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

if TYPE_CHECKING:
    from batonmq._consumer.assigned_queue import AssignedQueue

log = logging.getLogger(__name__)

RESUME_RANGES_MAX = 4_096
"""More are not claimed: what is left out comes again, flagged."""

_HELD = (Held, Unacked, Draining, HandoverPending, SubscriptionDraining)
_OLD_VIEW = (NotAssigned, NotMember, NotSubscribed, ModeChanged)


async def acquire(runner: AssignedQueue) -> GrantedProgress | None:
    """Ask until the queue is granted; None once it is not assigned any more."""
    session, failures = runner.session, 0
    while runner.assigned:
        asked_ms = session.clock.monotonic_ms()
        runner.freed.clear()
        try:
            return await unless(runner.unassigned, _ask(runner))
        except BatonError as error:
            log.debug("acquire refused queue=%s error=%s", runner.queue, error)
            if isinstance(error, _OLD_VIEW):
                session.heartbeat_soon.set()
            held_ms = session.clock.monotonic_ms() - asked_ms
            if isinstance(error, _HELD) and held_ms >= ACQUIRE_HOLD_MS // 2:
                continue  # nothing has failed; a pause would miss the release
            if error.retry is Retry.NEVER and not isinstance(error, OldRequest):
                log.warning("queue not granted queue=%s error=%s", runner.queue, error)
            await unless(runner.freed, session.directory.pause(error, failures))
            failures += 1
    return None


async def look_up(runner: AssignedQueue) -> GrantedProgress | None:
    """Read where the group is on a queue that nobody owns; None once it is not assigned any more.

    A group without progress gets some: where it starts is decided once.
    """
    session, failures = runner.session, 0
    while runner.assigned:
        try:
            return await unless(runner.unassigned, _progress(runner))
        except BatonError as error:
            log.debug("progress not read queue=%s error=%s", runner.queue, error)
            if isinstance(error, _OLD_VIEW):
                session.heartbeat_soon.set()
            await unless(runner.unassigned, session.directory.pause(error, failures))
            failures += 1
    return None


async def _ask(runner: AssignedQueue) -> GrantedProgress:
    progress, extent = runner.progress, await runner.calls.extent(runner.queue)
    item = lockmgr_pb.AcquireItem(
        queue=runner.key,
        resume=ranges_to_pb(progress.claim(RESUME_RANGES_MAX) if progress else ()),
        reset_epoch=progress.reset_epoch if progress else 0,
        initial_offset=await _first_offset(runner, extent),
        topic_id=extent.topic_id,
    )
    granted = await runner.calls.acquire(runner.queue, item)
    grant = granted.grant
    runner.granted(granted.sent_ms, grant.lease_ms, grant.subscription_generation)
    return GrantedProgress(
        grant.token,
        grant.reset_epoch,
        grant.committed_offset,
        ranges_from_pb(grant.acked),
        ranges_from_pb(grant.maybe_seen),
    )


async def _progress(runner: AssignedQueue) -> GrantedProgress:
    if runner.session.local is not None:
        return await _local_progress(runner, runner.session.local)
    try:
        return await _query(runner)
    except UnknownQueue:
        extent = await runner.calls.extent(runner.queue)
        await _begin_progress(runner, await _first_offset(runner, extent))
        return await _query(runner)


async def _local_progress(runner: AssignedQueue, local: LocalOffsets) -> GrantedProgress:
    found = local.get(runner.queue)
    if found is None:
        extent = await runner.calls.extent(runner.queue)
        found = LocalProgress(await _first_offset(runner, extent))
        local.put(runner.queue, found)
    return GrantedProgress(0, 0, found.committed, found.acked)


async def _query(runner: AssignedQueue) -> GrantedProgress:
    session = runner.session
    keeper = await session.keeper()
    request = offsets_pb.QueryRequest(
        offsets_epoch=session.epochs.of(keeper.offsets_set), queues=[runner.key]
    )
    answer = await answered(keeper.stub.Query(request, timeout=CALL_TIMEOUT_S))
    if not session.epochs.saw(keeper.offsets_set, answer.offsets_epoch):
        raise Unreachable("an offsets node of an older epoch has answered")
    outcome = answer.outcomes[0]
    if outcome.HasField("error"):
        raise error_from_pb(outcome.error)
    progress = outcome.progress
    acked = ranges_from_pb(progress.acked)
    return GrantedProgress(0, progress.reset_epoch, progress.committed_offset, acked)


async def _begin_progress(runner: AssignedQueue, offset: int) -> None:
    """Commit where the group starts; an earlier topic of the name may have left a reset epoch."""
    session, reset_epoch = runner.session, 0
    name, stub = await session.keeper()
    for _ in range(2):
        item = offsets_pb.CommitItem(
            queue=runner.key, reset_epoch=reset_epoch, committed_offset=offset
        )
        request = offsets_pb.CommitRequest(offsets_epoch=session.epochs.of(name), items=[item])
        answer = await answered(stub.Commit(request, timeout=CALL_TIMEOUT_S))
        if not answer.outcomes[0].HasField("error"):
            return
        error = error_from_pb(answer.outcomes[0].error)
        if not isinstance(error, Fenced) or not error.detail.reset_epoch:
            raise error
        reset_epoch = error.detail.reset_epoch


async def _first_offset(runner: AssignedQueue, extent: storage_pb.QueueOffsets) -> int:
    """Where to start if the group has no progress on the queue."""
    session, queue, found = runner.session, runner.queue, 0
    place = effective_start(
        session.settings.consume_from,
        retry=queue.topic == retry_topic(session.group),
        added=(session.local or session.view).added(queue),
    )
    if place == "timestamp":
        request = query_pb.SearchOffsetRequest(
            queue=queue_to_pb(queue), unix_ms=session.begin_unix_ms
        )
        stub = await session.directory.query(queue.broker)
        answer = await answered(stub.SearchOffset(request, timeout=CALL_TIMEOUT_S))
        found = answer.offset
    return start_offset(place, extent.first_offset, extent.next_offset, found)
