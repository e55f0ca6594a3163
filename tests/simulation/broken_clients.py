"""Consumers that break one rule each; names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import grpc.aio
import pytest

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer import retry_sender
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.key_schedule import KeySchedule
from batonmq._consumer.keyed_buffer import KeyedBuffer
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_dispatcher import MessageDispatcher
from batonmq._consumer.queue_delivery import QueueDelivery
from batonmq._consumer.queue_puller import QueuePuller
from batonmq._consumer.queue_releaser import QueueReleaser
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.session import ranges_to_pb
from batonmq._consumer.wakeup import Condition
from batonmq._core.epochs import SeenEpochs
from batonmq._core.queue_progress import Acks, CloseContent, QueueProgress
from batonmq.errors import BatonError


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """[no_deadline] A client ignores its own deadline and starts messages until it is fenced."""

    def may_start(self: AssignedQueue) -> bool:
        return self.progress is not None and not self.stopped

    patch.setattr(AssignedQueue, "may_start", may_start)


def close_without_draining(patch: pytest.MonkeyPatch) -> None:
    """[release_no_drain] A client closes a revoked queue while its handlers run."""
    close_content = QueueProgress.close_content

    async def drain(self: QueueReleaser, drained: Condition) -> None:
        return

    def all_finished(self: QueueProgress) -> CloseContent:
        return replace(close_content(self), unfinished=())

    patch.setattr(QueueReleaser, "drain", drain)
    patch.setattr(QueueProgress, "close_content", all_finished)


def close_not_frozen(patch: pytest.MonkeyPatch) -> None:
    """[close_retry_forgets] A repeated Close names no unfinished messages."""

    async def close(self: QueueReleaser, content: CloseContent, lease_ms: int) -> None:
        item = offsets_pb.CloseItem(
            queue=self._key,
            token=content.token,
            reset_epoch=content.reset_epoch,
            committed_offset=content.acks.committed,
            acked=ranges_to_pb(content.acks.ranges),
            unfinished=ranges_to_pb(content.unfinished),
        )
        directory = self._session.directory
        while True:
            try:
                stub = await directory.offsets(self._key.group)
                await stub.Close(offsets_pb.CloseRequest(items=[item]), timeout=CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as failure:
                await directory.pause(from_rpc_error(failure), 0)
            except BatonError as failure:
                await directory.pause(failure, 0)
            del item.unfinished[:]

    patch.setattr(QueueReleaser, "_close", close)


def token_dropped_at_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """A client drops its token at its own deadline, and releases a revoked queue without a call."""

    def stop(self: AssignedQueue) -> None:
        real_stop(self)
        self.token = 0

    real_stop = AssignedQueue.stop
    patch.setattr(AssignedQueue, "stop", stop)


def late_close_without_unfinished(patch: pytest.MonkeyPatch) -> None:
    """A client whose deadline has passed closes its queue as if every handler had ended."""
    close = AssignedQueue.close

    def closed(self: AssignedQueue) -> CloseContent:
        late, content = not self._grant_reported, close(self)
        return replace(content, unfinished=()) if late else content

    patch.setattr(AssignedQueue, "close", closed)


def commit_all_received(patch: pytest.MonkeyPatch) -> None:
    """A client commits all received messages, handled or not."""

    def acks(self: QueueProgress) -> Acks:
        return Acks(self.next_offset, (), self._version)

    patch.setattr(QueueProgress, "acks", acks)


def ack_without_sending_back(patch: pytest.MonkeyPatch) -> None:
    """A client acks a failed message without sending it back."""

    async def send(self: RetrySender, one: RetryRequest) -> bool:
        return one.still_owned()

    patch.setattr(RetrySender, "send", send)


def ids_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """A client sends a message back under a new id each time, so storage finds no duplicate."""
    numbers = count(1)
    patch.setattr(retry_sender, "retry_producer_id", lambda *_: next(numbers))


def handlers_outlive_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A client starts messages after a reset while handlers from before it run."""

    def begin_anew(self: MessageDispatcher, queue: AssignedQueue) -> None:
        self._by_queue.pop(queue.ref, None)
        if queue.assigned:
            self._create_tasks(queue)

    patch.setattr(MessageDispatcher, "_begin_anew", begin_anew)


def gap_after_a_dropped_frame(patch: pytest.MonkeyPatch) -> None:
    """A client drops a frame that an older epoch has recorded, and uses those that follow."""
    receive_frame = QueuePuller._receive_frame

    def receive(
        self: QueuePuller, progress: QueueProgress, delivery: QueueDelivery, frame: pb.DeliveryFrame
    ) -> None:
        answer, epochs = frame.messages, self._session.epochs
        if answer.offsets_epoch < epochs.of(answer.offsets_set):
            return
        receive_frame(self, progress, delivery, frame)

    patch.setattr(QueuePuller, "_receive_frame", receive)


def credit_for_acks_that_do_not_travel(patch: pytest.MonkeyPatch) -> None:
    """A consumer gives credit for acks that it commits by calls of their own, later."""

    def span(_: QueuePuller, progress: QueueProgress) -> int:
        return progress.stated_span

    patch.setattr(QueuePuller, "_span", span)


def answer_of_an_older_epoch(patch: pytest.MonkeyPatch) -> None:
    """[answer_of_older_epoch] A client uses answers of an older epoch than it has seen."""
    observe = SeenEpochs.observe

    def observed(self: SeenEpochs, offsets_set: str, epoch: int) -> bool:
        observe(self, offsets_set, epoch)
        return True

    patch.setattr(SeenEpochs, "observe", observed)


def key_freed_at_a_new_grant(patch: pytest.MonkeyPatch) -> None:
    """A client forgets at a new grant which ordering keys its running handlers occupy."""
    drop_waiting = KeySchedule.drop_waiting

    def drop(self: KeySchedule[Any]) -> None:
        drop_waiting(self)
        self._occupied.clear()

    patch.setattr(KeySchedule, "drop_waiting", drop)


def key_freed_by_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A client handles the next message of a key while one that has failed waits for its retry."""
    fail = KeySchedule.fail

    def failed(self: KeySchedule[Any], offset: int, item: object, now_ms: int) -> None:
        fail(self, offset, item, now_ms)
        if (key := self._taken[offset]) is not None:
            self._free(key)

    patch.setattr(KeySchedule, "fail", failed)


def key_kept_at_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A client waits after a reset for handlers from before it, whose results do not count."""
    patch.setattr(KeyedBuffer, "forget", lambda _: None)


def retry_after_a_revocation(patch: pytest.MonkeyPatch) -> None:
    """A client closes a queue as if a message that waits for its retry had been handled."""

    def give_up_failed(self: KeyedBuffer) -> list[ReceivedMessage]:
        self._cancel_timers()
        self._schedule.give_up_failed()
        return []

    close_content = QueueProgress.close_content

    def all_finished(self: QueueProgress) -> CloseContent:
        for first, end in self.running:
            self.finish(first, end)
        return close_content(self)

    patch.setattr(KeyedBuffer, "give_up_failed", give_up_failed)
    patch.setattr(QueueProgress, "close_content", all_finished)
