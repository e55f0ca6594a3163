"""The servicer of offsets: every call of the contract, from one class for each kind of caller."""

from __future__ import annotations

from batonmq_server.offsets.admin_calls import AdminCalls
from batonmq_server.offsets.lockmgr_calls import LockmgrCalls
from batonmq_server.offsets.move_calls import MoveCalls
from batonmq_server.offsets.owner_calls import OwnerCalls
from batonmq_server.offsets.query_calls import QueryCalls


class OffsetsServicer(LockmgrCalls, OwnerCalls, QueryCalls, AdminCalls, MoveCalls):
    """Answers every call of offsets_service.proto for one epoch."""
