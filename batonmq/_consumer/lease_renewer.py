"""Renews the leases of all queues of a consumer with one KeepAlive call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from batonmq._common.aio import wait_until
from batonmq._common.rpc import answered
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.key_schedule import FailedMessage
from batonmq._consumer.lock_watch import LockWatch
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.running_calls import FailedCall
from batonmq._consumer.session import Session, queue_of, queue_to_pb
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

HOLDS_MAX = 10_000
"""Queues that one call renews, at most."""
KEY_CHARACTERS_MAX = 255
"""Characters of an ordering key that operators see."""


class LeaseRenewer:
    """Renews the leases of `queues`, which change as the group's record does."""

    def __init__(
        self,
        session: Session,
        calls: BatchedCalls,
        queues: Mapping[QueueRef, AssignedQueue],
        lock_watch: LockWatch,
    ) -> None:
        self._session, self._calls = session, calls
        self._queues, self._lock_watch = queues, lock_watch

    async def run(self) -> None:
        """Renew until cancelled, while the group has ownership (protocol section 5, KeepAlive)."""
        session = self._session
        while True:
            await wait_until(session.keep_alive_soon, session.settings.keep_alive_ms)
            session.keep_alive_soon.clear()
            if not session.view.owned:
                continue
            try:
                await self._renew_all()
            except BatonError as error:
                log.debug("keep-alive failed error=%s", error)
                await session.directory.pause(error, 0)

    async def _renew_all(self) -> None:
        """Renew every lease; more than `HOLDS_MAX` take several calls.

        A call with an `acquire_seq` is also answered with the grants that it does not list, as
        orphans. Only the first call asks for them. Those that the other calls list have a token
        here, and are left alone.
        """
        tokens = [(ref, queue.token) for ref, queue in self._queues.items() if queue.token]
        seen_seq = self._calls.seen_seq
        for begin in range(0, max(len(tokens), 1), HOLDS_MAX):
            await self._renew(dict(tokens[begin : begin + HOLDS_MAX]), 0 if begin else seen_seq)

    async def _renew(self, tokens: Mapping[QueueRef, int], seen_seq: int) -> None:
        session = self._session
        sent_ms = session.clock.monotonic_ms()
        request = lockmgr_pb.KeepAliveRequest(
            incarnation=session.incarnation,
            acquire_seq=seen_seq,
            holds=[
                lockmgr_pb.Hold(
                    queue=session.key(ref), token=token, running=self._running(ref, sent_ms)
                )
                for ref, token in tokens.items()
            ],
        )
        stub = await session.directory.lockmgr()
        answer = await answered(stub.KeepAlive(request, timeout=CALL_TIMEOUT_S))
        orphans = []
        for report in answer.reports:
            ref = queue_of(report.queue)
            queue = self._queues.get(ref)
            if report.state == lockmgr_pb.HOLD_STATE_ORPHAN:
                unused = queue is None or not (queue.token or queue.assigned)
                if unused and not self._calls.busy(ref):
                    orphans.append(lockmgr_pb.Hold(queue=report.queue, token=report.token))
            elif queue is None or queue.token != tokens.get(ref):
                continue
            elif report.state in (lockmgr_pb.HOLD_STATE_OK, lockmgr_pb.HOLD_STATE_WANTED):
                queue.lease.renew(sent_ms, answer.lease_ms)
                if report.state == lockmgr_pb.HOLD_STATE_WANTED:
                    self._lock_watch.wanted(ref, report.token, report.wanted_reason)
            elif report.state == lockmgr_pb.HOLD_STATE_NOT_OWNER:
                log.info("not owner queue=%s token=%d", ref, report.token)
                queue.fence()
        if orphans:
            log.info("releasing %d orphaned grants", len(orphans))
            await self._calls.release_orphans(orphans)

    def _running(self, ref: QueueRef, now_ms: int) -> lockmgr_pb.RunningHandler | None:
        running = self._session.running
        call = running.delaying(ref)
        queue = self._queues.get(ref)
        if queue is not None and queue.keyed is not None:
            own, failed = running.lowest_of_queue(ref), queue.keyed.lowest_failed
            if failed is not None and (own is None or failed[0].offset < own.offset):
                return _failed_of_key(*failed, now_ms, running.failed_at(ref, failed[0].offset))
            call = own or call
        elif (waits := running.lowest_failed(ref)) is not None:
            own = running.lowest_of_queue(ref)
            if own is None or waits.offset < own.offset:
                return _failed(ref, waits, now_ms)
        if call is None:
            return None
        return lockmgr_pb.RunningHandler(
            queue=queue_to_pb(call.queue),
            offset=call.offset,
            running_ms=now_ms - call.begin_ms,
            abandoned=call.abandoned,
            ordering_key=(call.ordering_key or "")[:KEY_CHARACTERS_MAX],
        )


def _failed(ref: QueueRef, failed: FailedCall, now_ms: int) -> lockmgr_pb.RunningHandler:
    """Describe a message that waits to be handled again, and delays its queue."""
    return lockmgr_pb.RunningHandler(
        queue=queue_to_pb(ref),
        offset=failed.offset,
        running_ms=now_ms - failed.failed_ms,
        failed_count=failed.count,
        failed_reason=failed.refused,
    )


def _failed_of_key(
    message: ReceivedMessage, failed: FailedMessage[Any], now_ms: int, call: FailedCall | None
) -> lockmgr_pb.RunningHandler:
    """Describe a message that waits to be handled again, and delays its key."""
    return lockmgr_pb.RunningHandler(
        queue=queue_to_pb(message.queue),
        offset=message.offset,
        running_ms=now_ms - failed.failed_ms,
        ordering_key=(failed.key or "")[:KEY_CHARACTERS_MAX],
        failed_count=message.attempts,
        failed_reason="" if call is None else call.refused,
    )
