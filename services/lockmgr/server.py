"""The gRPC service of the lock manager: reads requests, calls the leader, makes responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._core.names import check_group, check_topic
from batonmq._core.queues import GroupQueue
from batonmq.errors import InvalidArgument
from batonmq_server.lockmgr import lock_proto
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.core.lock_entry import Requester
from batonmq_server.lockmgr.queue_requests import ForceRequest, QueueRequest
from batonmq_server.lockmgr.validation import (
    BY_MAX,
    HOLDS_MAX,
    ITEMS_MAX,
    REASON_MAX,
    check_at_most,
    check_not_empty,
    check_number,
    check_op_id,
    check_positive,
    check_ranges,
    check_text,
    check_unique,
)
from batonmq_server.runtime.paging import page_of

OUTCOMES_BYTES = 1024 * 1024
"""A response with so many bytes of grants gets no more of them. A grant has some 100 bytes, but
more than 1 MB if its group has acknowledged every second message of a large span."""
NOTICES_MAX = 256
"""Notices in one response."""
Context = grpc.aio.ServicerContext[Any, Any]


class LockmgrServicer(pb_grpc.LockmgrServiceServicer):
    """Answers through the leader at this node; the contract is `lockmgr_service.proto`.

    Args:
        hold_ms_max: Longest time that a request may be held.
    """

    def __init__(self, candidate: Candidate, clock: Clock, hold_ms_max: int) -> None:
        self._candidate, self._clock, self._hold_ms_max = candidate, clock, hold_ms_max

    async def Acquire(
        self, request: pb.AcquireRequest, context: Context
    ) -> AsyncIterator[pb.AcquireResponse]:
        """Stream one outcome per requested queue."""
        queue_requests = self._queue_requests(request)
        together_bytes = OUTCOMES_BYTES if request.reads_others else 0
        decided = self._candidate.leader().acquire(queue_requests, request.hold_ms, together_bytes)
        async with aclosing(decided):
            async for outcomes in decided:
                response, *others = map(lock_proto.outcome_to_pb, outcomes)
                response.others.extend(others)
                yield response

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        """Renew the leases of one incarnation."""
        incarnation = lock_proto.incarnation_from_pb(request.incarnation)
        check_number("acquire_seq", request.acquire_seq)
        check_at_most("holds", len(request.holds), HOLDS_MAX)
        holds = lock_proto.holds_from_pb(request.holds)
        running = lock_proto.running_from_pb(request.holds)
        leader = self._candidate.leader()
        reports = leader.keep_alive(incarnation, request.acquire_seq, holds, running)
        leader.check_leads()
        response = lock_proto.reports_to_pb(reports, request.holds)
        response.lease_ms = leader.lease_ms
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Release closed queues."""
        incarnation = lock_proto.incarnation_from_pb(request.incarnation)
        check_not_empty("holds", len(request.holds))
        check_at_most("holds", len(request.holds), ITEMS_MAX)
        holds = lock_proto.holds_from_pb(request.holds)
        leader = self._candidate.leader()
        released_count = await leader.releaser.release(incarnation, holds)
        leader.check_leads()
        return pb.ReleaseResponse(released_count=released_count)

    async def ReleaseAll(
        self, request: pb.ReleaseAllRequest, context: Context
    ) -> pb.ReleaseAllResponse:
        """Release all closed queues of one incarnation."""
        incarnation = lock_proto.incarnation_from_pb(request.incarnation)
        group = check_group(request.group) if request.group else ""
        leader = self._candidate.leader()
        released_count, kept = await leader.releaser.release_all(
            incarnation, group, drained=request.drained, by_operator=bool(request.by)
        )
        leader.check_leads()
        return pb.ReleaseAllResponse(
            released_count=released_count, kept=[lock_proto.key_to_pb(key) for key in kept]
        )

    async def ForceRelease(
        self, request: pb.ForceReleaseRequest, context: Context
    ) -> pb.ForceReleaseResponse:
        """Take a queue from its owner."""
        force_request = ForceRequest(
            lock_proto.key_from_pb(request.queue),
            check_op_id(request.op_id),
            by=check_text("by", request.by, BY_MAX),
            reason=check_text("reason", request.reason, REASON_MAX),
        )
        leader = self._candidate.leader()
        result = await leader.releaser.force_release(force_request)
        leader.check_leads()
        previous = result.previous
        return pb.ForceReleaseResponse(
            previous_owner=lock_proto.incarnation_to_pb(previous) if previous else None,
            token=result.token,
            maybe_seen_count=result.maybe_seen_count,
        )

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """Stream notices for one client."""
        incarnation = lock_proto.incarnation_from_pb(request.incarnation)
        together_max = NOTICES_MAX if request.reads_others else 1
        async with aclosing(self._candidate.leader().watch(incarnation, together_max)) as watched:
            async for notices in watched:
                response, *others = map(lock_proto.notice_to_pb, notices)
                response.others.extend(others)
                yield response

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Return one entry with all details."""
        key = lock_proto.key_from_pb(request.queue)
        leader, now_ms = self._candidate.leader(), self._clock.monotonic_ms()
        entry, evicted = leader.describe(key)
        shown, pending = lock_proto.entry_to_pb(entry, now_ms, leader.silence_ms), entry.pending
        return pb.DescribeResponse(
            entry=shown,
            term=leader.term,
            lease_left_ms=max(0, leader.silence_ms - shown.lease_age_ms) if entry.lock.owner else 0,
            pending_step=pending.step.value if pending else "",
            pending_attempt=pending.attempt if pending else "",
            offsets_token=entry.offsets_token,
            owner_evicted=evicted,
            denials=[
                lock_proto.denial_to_pb(denial, now_ms)
                for denial in reversed(entry.denials.values())
            ],
        )

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """Return one page of entries."""
        group = check_group(request.group) if request.group else ""
        topic = check_topic(request.topic) if request.topic else ""
        after = lock_proto.key_from_page_token(request.page_token)
        leader, now_ms = self._candidate.leader(), self._clock.monotonic_ms()
        entries = (
            (str(entry.key), lock_proto.entry_to_pb(entry, now_ms, leader.silence_ms))
            for entry in leader.entries(group, topic, after)
        )
        page, next_page_token = page_of(entries, request.page_size)
        return pb.ListResponse(entries=page, term=leader.term, next_page_token=next_page_token)

    def _queue_requests(self, request: pb.AcquireRequest) -> list[QueueRequest]:
        """Return one request per item.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: a field is malformed.
        """
        requester = Requester(
            lock_proto.incarnation_from_pb(request.incarnation),
            request.acquire_seq,
            request.generation,
        )
        check_positive("acquire_seq", request.acquire_seq)
        check_positive("generation", request.generation)
        check_at_most("hold_ms", request.hold_ms, self._hold_ms_max)
        check_not_empty("items", len(request.items))
        check_at_most("items", len(request.items), ITEMS_MAX)
        by_key: dict[GroupQueue, QueueRequest] = {}
        for item in request.items:
            queue_request = _queue_request(requester, item)
            check_unique("items", queue_request.key, by_key)
            by_key[queue_request.key] = queue_request
        if len({key.group for key in by_key}) > 1:
            raise InvalidArgument("items must be of one group", facts={"field": "items"})
        return list(by_key.values())


def _queue_request(requester: Requester, item: pb.AcquireItem) -> QueueRequest:
    check_ranges(item.resume)
    check_number("reset_epoch", item.reset_epoch)
    check_number("initial_offset", item.initial_offset)
    check_number("topic_id", item.topic_id)
    key = lock_proto.key_from_pb(item.queue)
    return QueueRequest(
        key, requester, item.resume, item.reset_epoch, item.initial_offset, item.topic_id
    )
