"""Follows the lock manager's Watch stream: queues that are wanted, and queues that became free."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.session import Session, queue_of
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, Unreachable

log = logging.getLogger(__name__)


class LockWatch:
    """Passes the lock manager's notices on to the queues of one consumer.

    The next keep-alive repeats a notice that was lost.
    """

    def __init__(self, session: Session, queues: Mapping[QueueRef, AssignedQueue]) -> None:
        self._session, self._queues = session, queues

    async def run(self) -> None:
        """Follow the stream until cancelled; reopen it when it ends."""
        session, failures = self._session, 0
        request = pb.WatchRequest(incarnation=session.incarnation, reads_others=True)
        while True:
            error: BatonError = Unreachable("the lock manager ended the Watch stream")
            try:
                stub = await session.directory.lockmgr()
                async for answer in stub.Watch(request):
                    failures = 0
                    for one in (answer, *answer.others):
                        self._dispatch(one)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except BatonError as failure:
                error = failure
            log.debug("lock watch reopens error=%s", error)
            await session.directory.pause(error, failures)
            failures += 1

    def wanted(self, ref: QueueRef, token: int, reason: pb.WantedReason.ValueType) -> None:
        """React to the notice that a queue of this consumer is wanted, or has to be released.

        A waiter alone does not mean that the queue is revoked: the group's record decides that,
        and the copy that this consumer has may be old. So a heartbeat fetches the record.
        """
        queue = self._queues.get(ref)
        if queue is None or not (queue.token or queue.assigned):
            self._session.keep_alive_soon.set()  # it reports the grant, which was lost
            return
        if queue.token != token:
            return
        if reason == pb.WANTED_REASON_SUBSCRIPTION:
            for each in self._queues.values():
                each.revoke()
        if reason != pb.WANTED_REASON_WAITER or queue.assigned:
            self._session.heartbeat_soon.set()

    def _dispatch(self, answer: pb.WatchResponse) -> None:
        if answer.HasField("wanted"):
            wanted = answer.wanted
            log.debug("queue is wanted queue=%s reason=%d", wanted.queue, wanted.reason)
            self.wanted(queue_of(wanted.queue), wanted.token, wanted.reason)
        elif answer.HasField("freed"):
            queue = self._queues.get(queue_of(answer.freed.queue))
            if queue is not None:
                queue.freed.set()
