"""What lockmgr tells a client by itself: queues that others want, and queues that are free."""

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
    """Listens for the queues in `runners`. What is lost comes again with the keep-alives."""

    def __init__(self, session: Session, runners: Mapping[QueueRef, AssignedQueue]) -> None:
        self._session, self._runners = session, runners

    async def run(self) -> None:
        """Follow the stream for ever; a lost one is reopened."""
        session, failures = self._session, 0
        request = pb.WatchRequest(incarnation=session.incarnation)
        while True:
            error: BatonError = Unreachable("the watch ended")
            try:
                stub = await session.directory.lockmgr()
                async for answer in stub.Watch(request):
                    failures = 0
                    self._hear(answer)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except BatonError as failure:
                error = failure
            log.debug("lock watch reopens error=%s", error)
            await session.directory.pause(error, failures)
            failures += 1

    def wanted(self, queue: QueueRef, token: int, reason: pb.WantedReason.ValueType) -> None:
        """A queue that we own, or owned, is to be given back, or may have to be.

        A waiter does not say that the queue is not ours any more: the group's record does, and
        ours may be old.
        """
        runner = self._runners.get(queue)
        if runner is None or runner.token != token:
            return
        if reason == pb.WANTED_REASON_SUBSCRIPTION:
            for each in self._runners.values():
                each.unassign()
        if reason != pb.WANTED_REASON_WAITER or runner.assigned:
            self._session.heartbeat_soon.set()

    def _hear(self, answer: pb.WatchResponse) -> None:
        if answer.HasField("wanted"):
            wanted = answer.wanted
            log.debug("queue is wanted queue=%s reason=%d", wanted.queue, wanted.reason)
            self.wanted(queue_of(wanted.queue), wanted.token, wanted.reason)
        elif answer.HasField("freed"):
            runner = self._runners.get(queue_of(answer.freed.queue))
            if runner is not None:
                runner.freed.set()
