"""The recorded tokens of a queue: which client owned it when, and what was delivered to it."""

from __future__ import annotations

from collections.abc import Awaitable

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.message_trace import Hold
from batonmq._core.queues import QueueRef
from batonmq.admin._pagination import iter_pages
from batonmq.admin.admin import Admin
from batonmq.admin.reports import enum_name, queue_to_pb

ACKED_RANGES_TOLD = 64
"""Most acknowledged ranges that offsets returns for one hold."""


async def queue_holds(admin: Admin, group: str, queue: QueueRef) -> list[Hold]:
    """Return the recorded tokens of a queue, newest first; offsets keeps the last 32.

    Raises:
        BatonError: Offsets does not answer, or has no progress of the group on the queue.
    """
    key = queue_pb2.GroupQueue(group=group, queue=queue_to_pb(queue))

    def page(page_token: str) -> Awaitable[pb.ListHoldsResponse]:
        request = pb.ListHoldsRequest(queue=key, page_token=page_token)

        async def ask(limit_s: float) -> pb.ListHoldsResponse:
            stub = await admin.directory.offsets(group)
            return await stub.ListHolds(request, timeout=limit_s)

        return admin.ask(ask)

    return [_hold(hold) async for answer in iter_pages(page) for hold in answer.holds]


def _hold(hold: pb.Hold) -> Hold:
    acked = [(each.first_offset, each.next_offset) for each in hold.acked]
    end = enum_name(pb.HoldEnd.Name, hold.end, "HOLD_END_").lower() if hold.end else ""
    return Hold(
        token=hold.token,
        client_id=hold.holder.client_id if hold.HasField("holder") else None,
        begin_unix_ms=hold.begin_unix_ms,
        end_unix_ms=hold.end_unix_ms,
        end=end,
        committed_offset=hold.committed_offset,
        acked=acked,
        acked_complete=len(acked) < ACKED_RANGES_TOLD,
        delivered_offset=hold.delivered_offset,
        delivered_offset_max=hold.delivered_offset_max,
    )
