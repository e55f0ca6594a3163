"""The task of one assigned queue: acquire, pull, drain, close, release (protocol sections 6-11)."""

from __future__ import annotations

from batonmq._common.aio import unless
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.delivery_streams import DeliveryStreams
from batonmq._consumer.queue_acquirer import QueueAcquirer
from batonmq._consumer.queue_puller import QueuePuller
from batonmq._consumer.queue_releaser import QueueReleaser
from batonmq._consumer.session import Session
from batonmq._core.ownership import OwnershipState
from batonmq.errors import Fenced


class QueueRunner:
    """Takes one queue from its assignment to its release."""

    def __init__(
        self,
        session: Session,
        calls: BatchedCalls,
        streams: DeliveryStreams,
        queue: AssignedQueue,
    ) -> None:
        self._session, self._queue = session, queue
        self._acquirer = QueueAcquirer(
            session,
            calls,
            queue.ref,
            revoked=queue.revoked,
            freed=queue.freed,
            progress=lambda: queue.progress,
        )
        self._puller = QueuePuller(session, streams, queue)
        self._releaser = QueueReleaser(session, calls, queue.ref)

    async def run(self) -> None:
        """Own the queue, again after each fence, until it is released."""
        queue, failures = self._queue, 0
        while queue.state is not OwnershipState.RELEASED:
            if failures > 1:
                again = Fenced("fenced repeatedly without progress")
                await unless(queue.revoked, self._session.directory.pause(again, failures))
            if await self._acquire():
                await self._pull()
            elif not queue.held:
                return
            if queue.state is OwnershipState.DRAINING:
                await self._releaser.drain(queue.drained)
            if queue.state is OwnershipState.DRAINING:
                await self._release()
            else:
                failures = 0 if queue.useful else failures + 1
                queue.stop()

    async def _acquire(self) -> bool:
        queue = self._queue
        acquirer = self._acquirer
        acquired = await (acquirer.acquire() if queue.with_ownership else acquirer.look_up())
        if acquired is None:
            self._session.keep_alive_soon.set()  # a grant may have been lost on its way
            queue.withdraw()
            return False
        queue.begin(acquired)
        return True

    async def _pull(self) -> None:
        queue = self._queue
        queue.buffer.waiting_bytes.join()
        try:
            await unless(queue.stopped, self._puller.run())
        finally:
            queue.clear_buffer()

    async def _release(self) -> None:
        queue = self._queue
        content = queue.close()
        if queue.with_ownership:
            await self._releaser.release(content, queue.lease.lease_ms)
        else:
            await self._releaser.commit(content, queue.lease.lease_ms)
        queue.release()
