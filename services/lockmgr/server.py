"""gRPC surface of the lock manager: translate, ask the leader's desk, translate back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_group, check_topic
from batonmq._core.queues import GroupQueue
from batonmq.errors import InvalidArgument
from batonmq_server.lockmgr import translate
from batonmq_server.lockmgr.core.locks import Asker
from batonmq_server.lockmgr.handover import Force, Wish
from batonmq_server.lockmgr.leader import Leader
from batonmq_server.runtime.paging import page_of

Context = grpc.aio.ServicerContext[Any, Any]


class LockmgrServicer(pb_grpc.LockmgrServiceServicer):
    """Holds no rules of its own."""

    def __init__(self, leader: Leader, clock: Clock, hold_ms_max: int) -> None:
        self._leader, self._clock, self._hold_ms_max = leader, clock, hold_ms_max

    async def Acquire(
        self, request: pb.AcquireRequest, context: Context
    ) -> AsyncIterator[pb.AcquireResponse]:
        """See the proto."""
        wishes = self._wishes(request)
        outcomes = self._leader.desk().acquire(wishes, request.hold_ms)
        async with aclosing(outcomes):
            async for key, outcome in outcomes:
                queue = translate.key_to_pb(key)
                if isinstance(outcome, pb.Grant):
                    yield pb.AcquireResponse(queue=queue, grant=outcome)
                else:
                    yield pb.AcquireResponse(queue=queue, error=error_to_pb(outcome))

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        """See the proto."""
        incarnation = translate.incarnation_from_pb(request.incarnation)
        translate.check_number("acquire_seq", request.acquire_seq)
        translate.check_at_most("holds", len(request.holds), translate.HOLDS_MAX)
        holds = translate.holds_from_pb(request.holds)
        desk = self._leader.desk()
        reports = desk.keep_alive(incarnation, request.acquire_seq, holds)
        desk.check_leads()
        response = translate.reports_to_pb(reports, request.holds)
        response.lease_ms = desk.lease_ms
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """See the proto."""
        incarnation = translate.incarnation_from_pb(request.incarnation)
        translate.check_any("holds", len(request.holds))
        translate.check_at_most("holds", len(request.holds), translate.ITEMS_MAX)
        holds = translate.holds_from_pb(request.holds)
        desk = self._leader.desk()
        released_count = await desk.freeing.release(incarnation, holds)
        desk.check_leads()
        return pb.ReleaseResponse(released_count=released_count)

    async def ReleaseAll(
        self, request: pb.ReleaseAllRequest, context: Context
    ) -> pb.ReleaseAllResponse:
        """See the proto."""
        incarnation = translate.incarnation_from_pb(request.incarnation)
        group = check_group(request.group) if request.group else ""
        desk = self._leader.desk()
        released_count, kept = await desk.freeing.release_all(
            incarnation, group, drained=request.drained
        )
        desk.check_leads()
        return pb.ReleaseAllResponse(
            released_count=released_count, kept=[translate.key_to_pb(key) for key in kept]
        )

    async def ForceRelease(
        self, request: pb.ForceReleaseRequest, context: Context
    ) -> pb.ForceReleaseResponse:
        """See the proto."""
        force = Force(
            translate.key_from_pb(request.queue),
            translate.check_op_id(request.op_id),
            by=translate.check_text("by", request.by, translate.BY_MAX),
            reason=translate.check_text("reason", request.reason, translate.REASON_MAX),
        )
        desk = self._leader.desk()
        forced = await desk.freeing.force(force)
        desk.check_leads()
        previous = forced.previous
        return pb.ForceReleaseResponse(
            previous_owner=translate.incarnation_to_pb(previous) if previous else None,
            token=forced.token,
            maybe_seen_count=forced.maybe_seen_count,
        )

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """See the proto."""
        incarnation = translate.incarnation_from_pb(request.incarnation)
        async with aclosing(self._leader.desk().watch(incarnation)) as notices:
            async for notice in notices:
                yield translate.notice_to_pb(notice)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """See the proto."""
        key = translate.key_from_pb(request.queue)
        desk, now_ms = self._leader.desk(), self._clock.monotonic_ms()
        entry, evicted = desk.describe(key)
        shown, pending = translate.entry_to_pb(entry, now_ms), entry.pending
        return pb.DescribeResponse(
            entry=shown,
            term=desk.term,
            lease_left_ms=max(0, desk.silence_ms - shown.lease_age_ms) if entry.lock.owner else 0,
            pending_step=pending.step.value if pending else "",
            pending_attempt=pending.attempt if pending else "",
            offsets_token=entry.offsets_token,
            owner_evicted=evicted,
            denials=[
                translate.denial_to_pb(denial, now_ms)
                for denial in reversed(entry.denials.values())
            ],
        )

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """See the proto."""
        group = check_group(request.group) if request.group else ""
        topic = check_topic(request.topic) if request.topic else ""
        after = translate.key_from_page_token(request.page_token)
        desk, now_ms = self._leader.desk(), self._clock.monotonic_ms()
        entries = (
            (str(entry.key), translate.entry_to_pb(entry, now_ms))
            for entry in desk.entries(group, topic, after)
        )
        page, next_page_token = page_of(entries, request.page_size)
        return pb.ListResponse(entries=page, term=desk.term, next_page_token=next_page_token)

    def _wishes(self, request: pb.AcquireRequest) -> list[Wish]:
        """What the request asks for.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: a field is malformed.
        """
        asker = Asker(
            translate.incarnation_from_pb(request.incarnation),
            request.acquire_seq,
            request.generation,
        )
        translate.check_positive("acquire_seq", request.acquire_seq)
        translate.check_positive("generation", request.generation)
        translate.check_at_most("hold_ms", request.hold_ms, self._hold_ms_max)
        translate.check_any("items", len(request.items))
        translate.check_at_most("items", len(request.items), translate.ITEMS_MAX)
        wishes: dict[GroupQueue, Wish] = {}
        for item in request.items:
            wish = _wish(asker, item)
            translate.check_new("items", wish.key, wishes)
            wishes[wish.key] = wish
        if len({key.group for key in wishes}) > 1:
            raise InvalidArgument("items are of several groups", facts={"field": "items"})
        return list(wishes.values())


def _wish(asker: Asker, item: pb.AcquireItem) -> Wish:
    translate.check_ranges(item.resume)
    translate.check_number("reset_epoch", item.reset_epoch)
    translate.check_number("initial_offset", item.initial_offset)
    translate.check_number("topic_id", item.topic_id)
    key = translate.key_from_pb(item.queue)
    return Wish(key, asker, item.resume, item.reset_epoch, item.initial_offset, item.topic_id)
