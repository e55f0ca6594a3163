"""The calls of the lock manager: it announces its term and fences queues."""

from __future__ import annotations

import logging

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_group
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError
from batonmq_server.offsets.core.values import FenceAttempt, FenceGrant, Instant
from batonmq_server.offsets.offsets_calls import Context, OffsetsCalls, attempt
from batonmq_server.offsets.request_reader import merge_outcomes, number
from batonmq_server.offsets.responses import fenced_pb, token_pb

log = logging.getLogger(__name__)

ANNOUNCED_MAX = 10_000
"""Approximate number of queues in one answer to Announce. Building it blocks the event loop, so it
must take much less time than the lease of the leader."""


class LockmgrCalls(OffsetsCalls):
    """Answers Announce and Fence."""

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        after = check_group(request.after_group) if request.after_group else ""
        if self._table.announce(number(request.term, "term", 1)):
            self._commits.mark_changed(None)
            log.info("lock manager announced term=%d", request.term)
        entries, more = self._table.groups_after(after, ANNOUNCED_MAX)
        queues = [token_pb(key, progress) for key, progress in entries]
        await self._commits.wait_all_durable()
        return pb.AnnounceResponse(offsets_epoch=self._table.epoch, queues=queues, more=more)

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        term = number(request.term, "term", 1)
        attempts, malformed = await self._reader.shared_batch(request.items, self._reader.fence)
        await self._resolve(key for key, _ in attempts)
        now, outcomes = self._now(), []
        for key, wanted in attempts:
            delivered = self._delivered_range(key)
            grant = attempt(self._fence, key, term, wanted, now)
            self._telemetry.report_fence(key, wanted, grant, delivered)
            if isinstance(grant, BatonError):
                outcomes.append(pb.FenceOutcome(error=error_to_pb(grant)))
                continue
            if grant.changed:
                self._mark_token_changed(key)
            outcomes.append(pb.FenceOutcome(fenced=fenced_pb(grant)))
        await self._commits.wait_durable([None, *(key for key, _ in attempts)])
        return pb.FenceResponse(
            offsets_epoch=self._table.epoch,
            outcomes=merge_outcomes(outcomes, malformed, pb.FenceOutcome),
        )

    def _fence(self, key: GroupQueue, term: int, wanted: FenceAttempt, now: Instant) -> FenceGrant:
        self._resolver.check(key.group)
        return self._table.fence(key, term, wanted, now)

    def _delivered_range(self, key: GroupQueue) -> tuple[int, int]:
        """Return the range from the committed to the delivered offset; empty without progress."""
        if key not in self._table:
            return 0, 0
        progress = self._table.query(key)
        return progress.committed_offset, progress.delivered_offset
