"""Pulls one queue from storage into its buffer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import unless
from batonmq._common.rpc import answered
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.delivered_run import Delivery
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import restore_original
from batonmq._consumer.session import Session, ranges_from_pb, ranges_to_pb
from batonmq._consumer.wakeup import Condition
from batonmq._core.flow_control import FlowReason, blocking_limit
from batonmq._core.queue_progress import Acks, QueueProgress
from batonmq._core.ranges import Range
from batonmq._core.reader_choice import ReaderChoice
from batonmq._core.retries import retry_topic
from batonmq._core.subscription import Filter, TagFilter
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupNotFound,
    ModeChanged,
    NotLeader,
    NotReadable,
    NotServing,
    Paused,
    Retry,
    UnknownQueue,
    Unreachable,
)

log = logging.getLogger(__name__)

OWNERSHIP_LOST = (Fenced, UnknownQueue, ModeChanged)
"""Refusals after which no call under the same token succeeds."""
NODE_UNAVAILABLE = (NotLeader, NotServing, Unreachable)
"""Errors after which another node of the broker is called."""


class QueuePuller:
    """Fills the buffer of one queue while the queue is owned.

    Attributes:
        outdated: The pull under way has to be given up: the application or an operator paused, or
            the group filters the topic in another way now.
    """

    def __init__(self, session: Session, queue: AssignedQueue) -> None:
        self._session, self._queue = session, queue
        self._filter: Filter = TagFilter(None)
        self._reader = ReaderChoice()
        self._topic_unreadable = False
        self.outdated = Condition(queue.wakeup, self._is_outdated)

    async def run(self) -> None:
        """Pull until no message may be started; fence the queue if its token is refused."""
        session, queue, failures = self._session, self._queue, 0
        self._topic_unreadable = False
        while await self._wait_until_due():
            view = session.view
            self._filter = view.filters[queue.ref.topic]
            try:
                await unless(self.outdated, self._pull(view))
                failures = 0
                self._note_readable(None)
            except OWNERSHIP_LOST as error:
                queue.refuse(error)
            except BatonError as error:
                if isinstance(error, GroupNotFound):
                    session.heartbeat_soon.set()  # the group is new, and storage will learn of it
                elif error.retry is Retry.NEVER:
                    log.error("queue can't be read queue=%s error=%s", queue.ref, error)
                self._note_readable(error)
                if isinstance(error, NODE_UNAVAILABLE):
                    broker = queue.ref.broker
                    next_node_id = session.directory.next_reader(broker, self._reader.node_id)
                    self._reader.failed(next_node_id)
                await session.directory.pause(error, failures)
                failures = 0 if isinstance(error, Paused) else failures + 1

    async def _wait_until_due(self) -> bool:
        """Wait for room, the end of a pause, and the record of the grant's subscription.

        Returns:
            False once no message may be started any more.
        """
        session, queue = self._session, self._queue
        while queue.may_start() and (progress := queue.progress) is not None:
            view = session.view
            queue.flow = self._flow_reason(progress)
            record_old = view.subscription_generation < queue.bound_generation
            record_old = record_old or queue.ref.topic not in view.filters
            if not (queue.flow or record_old or view.paused):
                return True
            if queue.flow == "span":
                session.commit_soon.set()
            if record_old:
                session.heartbeat_soon.set()
            if queue.flow == "bytes":
                session.waiting_for_room[queue.wakeup] = None
            await queue.wakeup.wait()
        return False

    def _flow_reason(self, progress: QueueProgress) -> FlowReason | None:
        queue = self._queue
        if queue.paused:
            return "paused"
        return blocking_limit(
            self._session.limits,
            queue.buffer.waiting_bytes,
            waiting_count=len(queue.buffer),
            span=progress.span,
        )

    def _is_outdated(self) -> bool:
        queue, view = self._queue, self._session.view
        changed = view.filters.get(queue.ref.topic) != self._filter
        return queue.paused or bool(view.paused) or changed

    async def _pull(self, view: GroupView) -> None:
        """Pull once by `view`. An answer that arrives after the ownership ended is dropped.

        Unconfirmed acks travel in the request (protocol section 6, rule 6); the answer says whether
        they were accepted.

        Raises:
            BatonError: storage refused, or the answer is damaged.
        """
        session, queue, progress = self._session, self._queue, self._queue.progress
        assert progress is not None
        acks = self._acks_to_send(progress)
        request = self._request(progress, acks, view)
        queue.stated_set = ""
        stub = await session.directory.reader(queue.ref.broker, self._reader.node_id)
        sent_ms = session.clock.monotonic_ms()
        timeout_s = request.hold_ms / 1000 + CALL_TIMEOUT_S
        answer = await answered(stub.Pull(request, timeout=timeout_s))
        received = answer.next_offset > request.offset
        now_ms = session.clock.monotonic_ms()
        if self._reader.answered(answer.next_node_id, now_ms, received=received):
            has_leader = await session.directory.has_leader(queue.ref.broker)
            self._reader.checked(has_leader=has_leader)
        if queue.progress is not progress or answer.pull_id != request.pull_id:
            return
        if queue.with_ownership and not session.epochs.observe(
            answer.offsets_set, answer.offsets_epoch
        ):
            return  # an older epoch recorded the delivery
        if answer.offsets_set and queue.stated_set not in ("", answer.offsets_set):
            return  # the group has moved since, and the new set does not know of the delivery
        named = request.offsets_set, request.offsets_epoch
        if received and named == (answer.offsets_set, answer.offsets_epoch):
            queue.position_known = named
        if acks is not None and answer.progress_taken:
            queue.committed(progress, acks, sent_ms)
        if answer.next_offset <= progress.next_offset or not queue.may_start():
            return
        if answer.lost_count:
            log.warning(
                "messages lost to retention before they were read "
                "queue=%s first_offset=%d count=%d",
                queue.ref,
                progress.next_offset,
                answer.lost_count,
            )
        queue.pulled(sent_ms)
        self._receive(progress, answer)

    def _request(
        self, progress: QueueProgress, acks: Acks | None, view: GroupView
    ) -> pb.PullRequest:
        session, queue, settings = self._session, self._queue, self._session.settings
        return pb.PullRequest(
            queue=queue.key,
            offset=progress.next_offset,
            token=queue.token,
            pull_id=session.random.getrandbits(63),
            expression=self._filter.canonical(),
            subscription_generation=view.subscription_generation,
            bytes_max=min(settings.pull_bytes_max, session.budget.share()),
            messages_max=min(settings.pull_messages_max, settings.span_max - progress.span),
            hold_ms=self._reader.hold_ms(settings.pull_hold_ms),
            offsets_epoch=session.epochs.of(session.epochs.newest_set),
            offsets_set=session.epochs.newest_set,
            progress=None if acks is None else _acks_to_pb(progress, acks),
            client_id=session.incarnation.client_id,
            received_offset=progress.received_offset if queue.with_ownership else None,
        )

    def _count_received(self, progress: QueueProgress, wanted: Sequence[Range]) -> None:
        if (metrics := self._session.metrics) is None:
            return
        count, flagged = sum(end - first for first, end in wanted), 0
        if progress.has_redelivered:
            offsets = (offset for first, end in wanted for offset in range(first, end))
            flagged = sum(map(progress.is_redelivered, offsets))
        metrics.received(self._queue.ref.topic, count, flagged)

    def _receive(self, progress: QueueProgress, answer: pb.PullResponse) -> None:
        session, queue = self._session, self._queue
        progress.note_maybe_seen(ranges_from_pb(answer.redelivered))
        delivery = Delivery(
            queue.ref,
            queue.token,
            queue.lineage,
            progress.not_done(progress.next_offset, answer.next_offset),
            self._filter,
            progress.is_redelivered if progress.has_redelivered else None,
            self._prepare if queue.ref.topic == retry_topic(session.group) else None,
        )
        runs = list(delivery.runs(answer.batches))
        wanted = list(chain.from_iterable(run.ranges for run in runs))
        progress.receive(answer.next_offset, wanted)
        for run in runs:
            queue.buffer.add(run)
        if runs:
            self._count_received(progress, wanted)
            queue.notify_arrived()
        else:
            session.note_unconfirmed(progress.unconfirmed_count)

    def _prepare(self, message: ReceivedMessage) -> None:
        restore_original(message, self._session.group)

    def _acks_to_send(self, progress: QueueProgress) -> Acks | None:
        wanted = self._queue.with_ownership and self._session.settings.commit_on_pull
        return progress.acks() if wanted and progress.dirty else None

    def _note_readable(self, error: BatonError | None) -> None:
        """Log when the topic stops to give messages, and when it gives messages again."""
        if isinstance(error, NotReadable) and not self._topic_unreadable:
            self._topic_unreadable = True
            log.warning("queue waits, its topic is not readable queue=%s", self._queue.ref)
        elif error is None and self._topic_unreadable:
            self._topic_unreadable = False
            log.info("queue goes on, its topic is readable again queue=%s", self._queue.ref)


def _acks_to_pb(progress: QueueProgress, acks: Acks) -> offsets_pb.Acks:
    return offsets_pb.Acks(
        reset_epoch=progress.reset_epoch,
        committed_offset=acks.committed,
        acked=ranges_to_pb(acks.ranges),
    )
