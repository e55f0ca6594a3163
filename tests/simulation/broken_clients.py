"""Clients that leave out a rule; the names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import grpc.aio
import pytest

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer import assigned_queue as runner
from batonmq._consumer import queue_releaser as giving_back
from batonmq._consumer import retry_sender as retrying
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.session import ranges_to_pb
from batonmq._core.queue_progress import Acks, CloseContent, QueueProgress
from batonmq.errors import BatonError


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """[no_deadline] A client starts what it has as long as nobody tells it not to."""

    def may_start(self: AssignedQueue) -> bool:
        return self.progress is not None and not self.stopping.is_set()

    patch.setattr(AssignedQueue, "may_start", may_start)


def close_without_draining(patch: pytest.MonkeyPatch) -> None:
    """[release_no_drain] A client that loses a queue says "done" with handlers running."""

    async def give_back(queue: AssignedQueue) -> None:
        closing = replace(queue.end(), unfinished=())
        await giving_back.close(queue, closing)
        await giving_back.release(queue, closing.token)
        queue.given_back(closing.token)

    patch.setattr(runner, "give_back", give_back)


def close_not_frozen(patch: pytest.MonkeyPatch) -> None:
    """[close_retry_forgets] A repeated Close says what is true by then: nothing is unfinished."""

    async def close(queue: AssignedQueue, closing: CloseContent) -> None:
        item = offsets_pb.CloseItem(
            queue=queue.key,
            token=closing.token,
            reset_epoch=closing.reset_epoch,
            committed_offset=closing.acks.committed,
            acked=ranges_to_pb(closing.acks.ranges),
            unfinished=ranges_to_pb(closing.unfinished),
        )
        directory = queue.session.directory
        while True:
            try:
                stub = await directory.offsets(queue.key.group)
                await stub.Close(offsets_pb.CloseRequest(items=[item]), timeout=CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as failure:
                await directory.pause(from_rpc_error(failure), 0)
            except BatonError as failure:
                await directory.pause(failure, 0)
            del item.unfinished[:]

    patch.setattr(giving_back, "close", close)


def commit_all_received(patch: pytest.MonkeyPatch) -> None:
    """A client commits what it has received, handled or not."""

    def acks(self: QueueProgress) -> Acks:
        return Acks(self.next_offset, (), self._version)

    patch.setattr(QueueProgress, "acks", acks)


def ack_without_sending_back(patch: pytest.MonkeyPatch) -> None:
    """A client acks what its handler did not take, and keeps no copy."""

    async def send(self: RetrySender, one: RetryRequest) -> bool:
        return one.counts()

    patch.setattr(RetrySender, "send", send)


def ids_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """What is sent back has another id each time, so that storage can't know it again."""
    numbers = count(1)
    patch.setattr(retrying, "once_id", lambda *_: next(numbers))
