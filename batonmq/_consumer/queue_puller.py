"""Receives the messages of one queue from storage into its buffer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import unless
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.delivered_run import Delivery
from batonmq._consumer.delivery_streams import DeliveryStreams
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.queue_delivery import QueueDelivery, Statement
from batonmq._consumer.retry_sender import restore_original
from batonmq._consumer.session import Session, ranges_from_pb, ranges_to_pb
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._consumer.wakeup import Condition
from batonmq._core.delivery_credit import DeliveryCredit
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
        outdated: The delivery under way has to end: the application or an operator paused, or the
            group has another subscription now.
    """

    def __init__(self, session: Session, streams: DeliveryStreams, queue: AssignedQueue) -> None:
        self._session, self._streams, self._queue = session, streams, queue
        self._filter: Filter = TagFilter(None)
        self._generation = self._failures = 0
        self._reader = ReaderChoice()
        self._topic_unreadable = False
        self.outdated = Condition(queue.wakeup, self._is_outdated)

    async def run(self) -> None:
        """Receive until no message may be started; fence the queue if its token is refused."""
        session, queue = self._session, self._queue
        self._failures, self._topic_unreadable = 0, False
        while await self._wait_until_due():
            view = session.view
            self._filter = view.filters[queue.ref.topic]
            self._generation = view.subscription_generation
            try:
                await unless(self.outdated, self._deliver())
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
                await session.directory.pause(error, self._failures)
                self._failures = 0 if isinstance(error, Paused) else self._failures + 1

    async def _wait_until_due(self) -> bool:
        """Wait for room, the end of a pause, and the record of the grant's subscription.

        Returns:
            False once no message may be started any more.
        """
        session, queue = self._session, self._queue
        while queue.may_start() and (progress := queue.progress) is not None:
            view = session.view
            queue.flow = self._flow_reason(progress, self._span(progress))
            record_old = view.subscription_generation < queue.bound_generation
            record_old = record_old or queue.ref.topic not in view.filters
            if not (queue.flow or record_old or view.paused):
                return True
            self._ask_for_room()
            if record_old:
                session.heartbeat_soon.set()
            await queue.wakeup.wait()
        return False

    def _flow_reason(self, progress: QueueProgress, span: int) -> FlowReason | None:
        queue = self._queue
        if queue.paused:
            return "paused"
        limits = self._session.limits
        return blocking_limit(
            limits,
            queue.buffer.waiting_bytes,
            waiting_count=len(queue.buffer),
            span=span,
            handled_ahead=span >= limits.span_max and self._is_handled_ahead(progress),
        )

    def _is_handled_ahead(self, progress: QueueProgress) -> bool:
        """Return whether messages in the span are handled."""
        unconfirmed = progress.dirty and not self._queue.acks_travel
        return unconfirmed or bool(progress.acks().ranges)

    def _span(self, progress: QueueProgress) -> int:
        """Return the offsets that count in `span_max`."""
        return progress.stated_span if self._queue.acks_travel else progress.span

    def _is_outdated(self) -> bool:
        queue, view = self._queue, self._session.view
        changed = view.filters.get(queue.ref.topic) != self._filter
        changed = changed or view.subscription_generation != self._generation
        return queue.paused or bool(view.paused) or changed

    async def _deliver(self) -> None:
        """Receive by one delivery, until it ends. What arrives later is dropped.

        Unconfirmed acks travel with the credit (protocol section 6, rule 6); a later frame shows
        whether they were accepted.

        Raises:
            BatonError: storage refused, or a frame is damaged.
        """
        session, queue, progress = self._session, self._queue, self._queue.progress
        assert progress is not None
        node_id, broker = self._reader.node_id, queue.ref.broker
        stream = await self._streams.of(broker, node_id)
        delivery = QueueDelivery(stream, node_id, self._window(), queue.wakeup.notify)
        queue.stated_set = ""
        delivery.credit.offer(*self._room(delivery.credit, self._span(progress)), idle=True)
        credit, statement = self._state(progress, delivery.credit)
        delivery.begin(
            self._request(progress),
            credit,
            statement,
            lambda frame: self._receive_frame(progress, delivery, frame),
        )
        try:
            while not delivery.ended:
                if delivery.silent:
                    delivery.silent = False
                    self._reader.checked(has_leader=await session.directory.has_leader(broker))
                    if self._reader.node_id != node_id:
                        return
                    continue
                self._offer_credit(progress, delivery)
                await queue.wakeup.wait()
            if delivery.error is not None:
                raise delivery.error
        finally:
            queue.acks_travel, queue.blocked_offset, queue.credit_due_at = False, -1, -1
            delivery.stop()

    def _receive_frame(
        self, progress: QueueProgress, delivery: QueueDelivery, frame: pb.DeliveryFrame
    ) -> None:
        session, queue, answer = self._session, self._queue, frame.messages
        if delivery.ended or queue.progress is not progress:
            return
        try:
            batches = delivery.batches(frame)
        except BatonError as error:
            delivery.fail(error)
            return
        self._failures = 0
        self._note_readable(None)
        statement, acks = delivery.receive(frame)
        received = answer.next_offset > progress.next_offset
        now_ms = session.clock.monotonic_ms()
        if self._reader.answered(answer.next_node_id, now_ms, received=received):
            delivery.look()
        if not self._is_recorded(answer):
            delivery.end()
            return
        if received and statement.epoch == (answer.offsets_set, answer.offsets_epoch):
            queue.position_known = statement.epoch
        if acks is not None and answer.progress_taken:
            queue.committed(progress, acks, statement.sent_ms)
        if frame.last or answer.next_node_id != delivery.node_id:
            delivery.end()
        elif not delivery.node_id:
            queue.acks_travel = self._states_acks
        if not received:
            return
        if not queue.may_start():
            delivery.end()  # a frame that is dropped leaves a gap, and makes no room for more
            return
        if answer.lost_count:
            log.warning(
                "messages lost to retention before they were read "
                "queue=%s first_offset=%d count=%d",
                queue.ref,
                progress.next_offset,
                answer.lost_count,
            )
        queue.received(statement.sent_ms)
        try:
            self._receive(progress, answer, batches)
        except BatonError as error:
            delivery.fail(error)
            return
        self._offer_credit(progress, delivery)

    def _is_recorded(self, answer: pb.PullResponse) -> bool:
        """Return whether the record of a frame counts, as far as the consumer knows."""
        queue, recorded_by = self._queue, answer.offsets_set
        if queue.with_ownership and not self._session.epochs.observe(
            recorded_by, answer.offsets_epoch
        ):
            return False  # an older epoch recorded it
        # Else the group has moved since; the new set has no record of it.
        return not recorded_by or queue.stated_set in ("", recorded_by)

    @property
    def _states_acks(self) -> bool:
        """Whether acks are stated with credit."""
        return self._queue.with_ownership and self._session.settings.commit_on_pull

    def _window(self) -> int:
        """Return the window of the next delivery.

        If acks do not travel, messages that wait and acks that are not confirmed share the span.
        """
        limits = self._session.limits
        if self._states_acks and not self._reader.node_id:
            return limits.messages_max
        return min(limits.messages_max, max(1, limits.span_max // 2))

    def _room(self, credit: DeliveryCredit, span: int) -> tuple[int, int]:
        """Return the messages and the bytes that there is room for.

        Args:
            span: The offsets that count in `span_max`.
        """
        session, queue = self._session, self._queue
        waiting_room = credit.window - len(queue.buffer)
        messages = max(0, min(waiting_room, session.limits.span_max - span))
        return messages, 0 if queue.buffer.waiting_bytes.blocked else session.budget.share()

    def _offer_credit(self, progress: QueueProgress, delivery: QueueDelivery) -> None:
        """Give the node more credit if there is room; else see that room is noticed."""
        session, queue, credit = self._session, self._queue, delivery.credit
        if delivery.ended or queue.progress is not progress:
            return
        span = self._span(progress)
        queue.flow = self._flow_reason(progress, span)
        full = queue.acks_travel and span >= session.limits.span_max
        queue.blocked_offset = progress.next_offset - span if full else -1
        self._ask_for_room()
        queues, room = session.budget.waiting_count, self._room(credit, span)
        acks_due = queue.acks_travel and queue.acks_are_due(progress)
        idle = not queue.buffer.ready
        if credit.offer(*room, idle=idle, queues=queues, acks_due=acks_due):
            delivery.raise_credit(*self._state(progress, credit))
        queue.credit_due_at = credit.due_at(queues)

    def _ask_for_room(self) -> None:
        session, queue = self._session, self._queue
        if queue.flow == "span" and not queue.acks_travel:
            queue.commit_soon()
        if queue.flow == "bytes":
            session.waiting_for_room[queue.wakeup] = None

    def _request(self, progress: QueueProgress) -> pb.PullRequest:
        session, queue, settings = self._session, self._queue, self._session.settings
        return pb.PullRequest(
            queue=queue.key,
            offset=progress.next_offset,
            token=queue.token,
            expression=self._filter.canonical(),
            subscription_generation=self._generation,
            bytes_max=min(settings.pull_bytes_max, session.budget.share()),
            messages_max=settings.pull_messages_max,
            hold_ms=self._reader.hold_ms(settings.pull_hold_ms),
            client_id=session.incarnation.client_id,
        )

    def _state(
        self, progress: QueueProgress, credit: DeliveryCredit
    ) -> tuple[pb.DeliveryCredit, Statement]:
        """Return a credit with what this consumer states now: its acks, its position, its epoch."""
        session, queue, epochs = self._session, self._queue, self._session.epochs
        acks = self._acks_to_send(progress)
        progress.unstated_count = 0
        statement = Statement(credit.number, session.clock.monotonic_ms(), acks, epochs.newest)
        return (
            pb.DeliveryCredit(
                number=credit.number,
                messages_limit=credit.messages_limit,
                bytes_limit=credit.bytes_limit,
                progress=None if acks is None else _acks_to_pb(progress, acks),
                offsets_epoch=epochs.of(epochs.newest_set),
                offsets_set=epochs.newest_set,
                received_offset=progress.received_offset if queue.with_ownership else None,
            ),
            statement,
        )

    def _count_received(self, progress: QueueProgress, wanted: Sequence[Range]) -> None:
        if (metrics := self._session.metrics) is None:
            return
        count, flagged = sum(end - first for first, end in wanted), 0
        if progress.has_redelivered:
            offsets = (offset for first, end in wanted for offset in range(first, end))
            flagged = sum(map(progress.is_redelivered, offsets))
        metrics.received(self._queue.ref.topic, count, flagged)

    def _receive(
        self, progress: QueueProgress, answer: pb.PullResponse, batches: Sequence[StoredBatch]
    ) -> None:
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
        runs = list(delivery.runs(batches))
        wanted = list(chain.from_iterable(run.ranges for run in runs))
        progress.receive(answer.next_offset, wanted)
        for run in runs:
            queue.buffer.add(run)
        if runs:
            self._count_received(progress, wanted)
            queue.notify_arrived()
        else:
            queue.note_unconfirmed(progress)

    def _prepare(self, message: ReceivedMessage) -> None:
        restore_original(message, self._session.group)

    def _acks_to_send(self, progress: QueueProgress) -> Acks | None:
        return progress.acks() if self._states_acks and progress.dirty else None

    def _note_readable(self, error: BatonError | None) -> None:
        """Log when the topic stops to give messages, and when it gives messages again."""
        if isinstance(error, NotReadable) and not self._topic_unreadable:
            self._topic_unreadable = True
            log.warning("queue waits, its topic is not readable queue=%s", self._queue.ref)
        elif error is None and self._topic_unreadable:
            self._topic_unreadable = False
            log.info("queue continues, its topic is readable again queue=%s", self._queue.ref)


def _acks_to_pb(progress: QueueProgress, acks: Acks) -> offsets_pb.Acks:
    return offsets_pb.Acks(
        reset_epoch=progress.reset_epoch,
        committed_offset=acks.committed,
        acked=ranges_to_pb(acks.ranges),
    )
