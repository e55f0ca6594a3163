"""Hands a drained queue over: Close at offsets, then Release at the lock manager (section 9)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common import timeouts
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.local_offsets import LocalProgress
from batonmq._consumer.moved_group import GROUP_MOVED
from batonmq._consumer.session import Session, ranges_to_pb
from batonmq._consumer.wakeup import Condition
from batonmq._core.queue_progress import CloseContent
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, Retry

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_MS = 5_000
"""If the lock manager is away for longer, the next owner's fence finds the token closed."""


class QueueReleaser:
    """Drains, closes and releases one queue."""

    def __init__(self, session: Session, calls: BatchedCalls, queue: QueueRef) -> None:
        self._session, self._calls, self._queue = session, calls, queue
        self._key = session.key(queue)

    async def drain(self, drained: Condition) -> None:
        """Wait until `drained` holds, or the drain times out.

        If `Consumer.close` sets another timeout meanwhile, that counts from then on.
        """
        while not drained:
            timeout_ms = self._session.drain_timeout_ms
            due = drained.either(partial(self._has_other_timeout, timeout_ms))
            try:
                async with timeouts.timeout(None if timeout_ms is None else timeout_ms / 1000):
                    await due.wait()
            except TimeoutError:
                log.info("drain timed out queue=%s", self._queue)
                return

    def _has_other_timeout(self, timeout_ms: int | None) -> bool:
        return self._session.drain_timeout_ms != timeout_ms

    async def release(self, content: CloseContent, lease_ms: int) -> None:
        """Close the token and release the lock."""
        if content.unfinished:
            log.warning(
                "queue released with unfinished messages queue=%s %s",
                self._queue,
                content.unfinished,
            )
        await self._close(content, lease_ms)
        await self._release(content.token)

    async def commit(self, content: CloseContent, lease_ms: int) -> None:
        """Commit a queue without owner for the last time (section 15).

        What does not arrive is handled once more. A broadcasting member's progress goes into its
        file, which is saved when the consumer is closed.
        """
        if content.unfinished:
            log.warning(
                "queue released with unfinished messages queue=%s %s",
                self._queue,
                content.unfinished,
            )
        session, acks = self._session, content.acks
        if session.local is not None:
            session.local.put(self._queue, LocalProgress(acks.committed, acks.ranges))
            return
        item = offsets_pb.CommitItem(
            queue=self._key,
            reset_epoch=content.reset_epoch,
            committed_offset=acks.committed,
            acked=ranges_to_pb(acks.ranges),
        )

        async def call() -> None:
            keeper = await session.keeper()
            request = offsets_pb.CommitRequest(
                offsets_epoch=session.epochs.of(keeper.offsets_set), items=[item]
            )
            (outcome,) = (await keeper.stub.Commit(request, timeout=CALL_TIMEOUT_S)).outcomes
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                if isinstance(error, GROUP_MOVED):
                    raise error
                log.warning("last commit refused queue=%s error=%s", self._queue, error)

        await self._repeat(2 * lease_ms, call)

    async def _close(self, content: CloseContent, lease_ms: int) -> None:
        """Repeat one frozen Close until it is answered.

        An outage may last longer than the lease: as long as the token is current, the Close spares
        the next owner a wait for the lease. A consumer that leaves, or is refused for good, gives
        up when the lease must be over.
        """
        item = offsets_pb.CloseItem(
            queue=self._key,
            token=content.token,
            reset_epoch=content.reset_epoch,
            committed_offset=content.acks.committed,
            acked=ranges_to_pb(content.acks.ranges),
            unfinished=ranges_to_pb(content.unfinished),
        )

        async def call() -> None:
            outcome = await self._calls.close(item)
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                if isinstance(error, GROUP_MOVED):
                    raise error
                log.warning("close refused queue=%s error=%s", self._queue, error)

        await self._repeat(2 * lease_ms, call, limited=lambda: self._session.leaving)

    async def _release(self, token: int) -> None:
        hold = lockmgr_pb.Hold(queue=self._key, token=token)
        await self._repeat(RELEASE_TIMEOUT_MS, lambda: self._calls.release(hold))

    async def _repeat(
        self,
        limit_ms: int,
        call: Callable[[], Awaitable[None]],
        limited: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call until an answer arrives; for `limit_ms` at most, while `limited` returns True."""
        session, failures, refused = self._session, 0, False
        deadline_ms = session.clock.monotonic_ms() + limit_ms
        while session.clock.monotonic_ms() < deadline_ms or not (refused or limited()):
            try:
                await call()
                return
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except BatonError as failure:
                error = failure
            refused = error.retry is Retry.NEVER
            await session.directory.pause(error, failures)
            failures += 1
