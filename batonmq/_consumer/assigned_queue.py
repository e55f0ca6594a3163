"""One queue that is assigned to a consumer: its state, its buffer, and its progress.

The queue's task (`queue_runner`) acquires, pulls and releases; handlers take messages; keep-alives,
commits and the group's record report what happens. They meet here, and only here. Which input is
possible in which state, and what follows, is in `batonmq._core.ownership`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from baton.common.v1 import queue_pb2
from batonmq._consumer.commit_waiters import CommitWaiters
from batonmq._consumer.keyed_buffer import KeyedBuffer
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._consumer.message_buffer import MessageBuffer
from batonmq._consumer.queue_acquirer import AcquiredQueue
from batonmq._consumer.session import OwnershipEvent, Session
from batonmq._consumer.wakeup import Condition, Wakeup
from batonmq._core.flow_control import FlowReason
from batonmq._core.owner_lease import OwnerLease
from batonmq._core.ownership import (
    OwnershipEffect,
    OwnershipInput,
    OwnershipState,
    QueueOwnership,
)
from batonmq._core.queue_progress import Acks, CloseContent, QueueProgress
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, of_sorted
from batonmq.errors import BatonError, FenceCause, Fenced, ModeChanged

log = logging.getLogger(__name__)

LONG_CALL_MS = 2_000
"""A handler that has run for so long may hang."""

_REPORTS: dict[OwnershipEffect, Literal["granted", "draining", "released", "fenced"]] = {
    OwnershipEffect.REPORT_GRANTED: "granted",
    OwnershipEffect.REPORT_DRAINING: "draining",
    OwnershipEffect.REPORT_FENCED: "fenced",
    OwnershipEffect.REPORT_RELEASED: "released",
}


class AssignedQueue:
    """A queue that the group's record assigns, or has assigned, to the consumer.

    Handlers get messages by `take` and report with `finish` or `give_up`; reports about messages of
    an earlier ownership are ignored. In a group without ownership (protocol section 15) the token
    is 0 and there is no deadline.

    Attributes:
        with_ownership: Whether the group's queues are owned. It is fixed: a group that switches
            reports MODE_CHANGED to all its queues.
        progress: Received, started and finished offsets; None if nothing is known or counts.
        token: Fencing token of the grant; 0 without one. It stays after the own deadline, until a
            service refuses it.
        lease: The own deadline.
        bound_generation: Generation of the subscription that the grant is for; 0 for any.
        lineage: Number of the ownership with valid messages; rises when work is dropped.
        useful: Whether a pull or a commit under this grant succeeded.
        position_known: Offsets set and epoch that know under this token how far messages were
            received (protocol section 6.8).
        stated_set: Offsets set to which a commit has stated the position since the delivery under
            way began; empty for none. A frame that another set has recorded is not used then.
        acks_travel: Whether acks travel with the credit of the delivery under way, and are recorded
            before anything beyond the span is sent.
        blocked_offset: The lowest offset that is not handled, if the span is full and acks travel:
            there is room as soon as it is handled. Otherwise -1.
        credit_due_at: The storage node gets more credit once only so many messages wait; -1: other
            events decide.
        buffer: Messages that wait for a handler.
        keyed: The buffer, if messages are handled in the order of their keys; else None.
        acked: Whether acks may wait to be committed.
        flow: The flow limit that delays the next pull; None without one.
        paused: Whether the application has paused the queue.
        commit_waiters: Callers that wait for their acks to be committed; the queue is not drained
            before that.
        on_granted: Called when an ownership begins.
        on_arrived: Called when a message may wait.
        on_work_dropped: Called when the results of running handlers do not count any more.
        wakeup: Notified when the state, the group's record, `paused` or room in the buffer changes.
        freed: Set when another request for the queue may succeed at once.
        revoked: The group's record does not assign the queue any more.
        stopped: No message may be started: the state is not OWNED.
        drained: The queue is not draining, or no handler runs any more.
        resumed: The application has not paused the queue.
    """

    def __init__(self, session: Session, ref: QueueRef) -> None:
        self.ref, self._session = ref, session
        self.with_ownership = session.view.owned
        self.progress: QueueProgress | None = None
        self.token = self.bound_generation = self.lineage = 0
        self.lease = OwnerLease()
        self.useful = False
        self.position_known = ("", 0)
        self.stated_set = ""
        self.buffer: MessageBuffer | KeyedBuffer = MessageBuffer(session.budget)
        self.keyed: KeyedBuffer | None = None
        if session.settings.order == "key":
            self.buffer = self.keyed = KeyedBuffer(session.budget)
        self.flow: FlowReason | None = None
        self.acks_travel, self.blocked_offset, self.credit_due_at = False, -1, -1
        self.acked = False
        self.paused = ref in session.paused
        self.commit_waiters = CommitWaiters()
        self.on_work_dropped: Callable[[], None] = lambda: None
        self.on_granted: Callable[[], None] = lambda: None
        self.on_arrived: Callable[[], object] = lambda: None
        self.wakeup, self.freed = Wakeup(), asyncio.Event()
        self.revoked = Condition(self.wakeup, lambda: not self._ownership.assigned)
        self.stopped = Condition(self.wakeup, lambda: self.state is not OwnershipState.OWNED)
        self.drained = Condition(self.wakeup, self._is_drained)
        self.resumed = Condition(self.wakeup, lambda: not self.paused)
        self._ownership = QueueOwnership()
        self._grant_reported = False

    @property
    def key(self) -> queue_pb2.GroupQueue:
        """Key of the queue at offsets and at the lock manager."""
        return self._session.key(self.ref)

    @property
    def state(self) -> OwnershipState:
        """Where the queue is between assignment and release."""
        return self._ownership.state

    @property
    def assigned(self) -> bool:
        """Whether the group's newest record assigns the queue to the consumer."""
        return self._ownership.assigned

    @property
    def held(self) -> bool:
        """Whether the consumer has the queue under a valid token, also while it drains."""
        return self._ownership.held

    # ---- what the group's record and the servers say

    def revoke(self) -> None:
        """Hand the queue over: the group's record does not assign it to this consumer any more."""
        self._receive(OwnershipInput.REVOKED)
        self.freed.set()

    def fence(self) -> None:
        """Start nothing under the token, which is not valid any more; keep work in flight."""
        self._receive(OwnershipInput.FENCED)

    def reset(self) -> None:
        """Start nothing under the token, and drop work in flight: the progress was replaced."""
        self._receive(OwnershipInput.RESET)

    def change_mode(self) -> None:
        """Drop everything without a call: the group switched ownership on or off."""
        self._receive(OwnershipInput.MODE_CHANGED)
        self.freed.set()

    def refuse(self, error: BatonError) -> None:
        """Fence or reset the queue: a call was refused for good (protocol sections 11, 13, 15)."""
        log.info("fenced queue=%s token=%d error=%s", self.ref, self.token, error)
        if isinstance(error, ModeChanged):
            self._session.heartbeat_soon.set()
            self.reset()
        elif isinstance(error, Fenced) and error.detail.why is FenceCause.RESET:
            self.reset()
        else:
            self.fence()

    def received(self, sent_ms: int) -> None:
        """Note that messages were delivered or skipped after a call that was sent at `sent_ms`."""
        self.useful = True
        if self.with_ownership:
            self.lease.renew(sent_ms)

    # ---- what the application wants

    def pause(self) -> None:
        """Pull nothing and start nothing until `resume`."""
        self.paused, self.flow = True, "paused"
        self.wakeup.notify()

    def resume(self) -> None:
        """Pull and start messages again."""
        self.paused, self.flow = False, None
        self.wakeup.notify()
        if self.buffer.ready:
            self.notify_arrived()

    # ---- handlers

    def notify_arrived(self) -> None:
        """Wake the handlers: a message may wait."""
        self.buffer.arrived.set()
        self.on_arrived()
        self._session.available.set()

    def may_start(self) -> bool:
        """Whether a message may be started now; fences the queue if its own deadline has passed."""
        if self.progress is None or self.stopped:
            return False
        if self.with_ownership and self.lease.has_passed(self._session.clock.monotonic_ms()):
            log.warning(
                "lease not renewed in time; the queue must be acquired again queue=%s token=%d",
                self.ref,
                self.token,
            )
            self._receive(OwnershipInput.DEADLINE_PASSED)
            return False
        return True

    def take(self, count_max: int) -> MessageBatch | None:
        """Start the next messages, in order; None if none wait, or none may be started."""
        progress = self._startable()
        if progress is None:
            return None
        assert isinstance(self.buffer, MessageBuffer)  # batches have no order by key
        batch, room_freed = self.buffer.take(count_max, progress.start)
        self._taken(room_freed=room_freed)
        return batch

    def take_one(self) -> ReceivedMessage | None:
        """Start the next message; None if none waits, or none may be started."""
        progress = self._startable()
        if progress is None:
            return None
        message, room_freed = self.buffer.take_one(progress.start)
        self._taken(room_freed=room_freed)
        if message is not None and self.keyed is not None:
            message.token = self.token  # a message that failed may be from an earlier grant
        return message

    def peek(self, count_max: int) -> Iterator[ReceivedMessage] | None:
        """Return messages that may be started now, in order; None if there is none.

        They count as waiting until `note_run`, which must follow before any other task runs.
        """
        progress = self._startable()
        return None if progress is None else self.buffer.peek(count_max, progress.waits)

    def note_run(
        self, handled_count: int, *, started: bool, finished: bool = True
    ) -> Sequence[Range]:
        """Note that of the messages that `peek` has returned, the first ones were handled.

        Args:
            started: Whether the message behind these was started, and is not handled yet.
            finished: Whether those that were handled are finished; else `finish_ranges` follows.

        Returns:
            The offsets of those that were handled.
        """
        progress, remove = self.progress, self.buffer.remove
        assert progress is not None
        ranges, room_freed = remove(handled_count) if handled_count else ((), False)
        last: Sequence[Range] = ()
        if started:
            # Before the others are finished: that may make an earlier message ready.
            last, last_freed = remove(1)
            room_freed |= last_freed
        for first, end in (*ranges, *last):
            progress.start(first, end)
        if ranges:
            for first, end in ranges if finished else ():
                self._finish(progress, first, end)
            self.note_unconfirmed(progress)
        if ranges or last:
            self._taken(room_freed=room_freed)
        return ranges

    def note_unconfirmed(self, progress: QueueProgress) -> None:
        """See that acks go to offsets, soon if many of them wait."""
        self.acked = True
        if not self.acks_travel:
            self._session.note_unconfirmed(progress.unconfirmed_count)
        elif self.acks_are_due(progress):
            self.wakeup.notify()

    def commit_soon(self) -> None:
        """Ask for a commit of the queue's acks."""
        self.acked = True
        self._session.commit_soon.set()

    def acks_are_due(self, progress: QueueProgress) -> bool:
        """Whether so many acks wait that they are worth a credit."""
        return 8 * progress.unstated_count >= 7 * self._session.limits.span_max

    def _finish(self, progress: QueueProgress, first: int, end: int) -> None:
        progress.finish(first, end)
        if first <= self.blocked_offset < end:
            self.blocked_offset = -1
            self.wakeup.notify()
        if self.keyed is not None and self.keyed.finish_range(first, end):
            self.notify_arrived()

    def _startable(self) -> QueueProgress | None:
        if not self.buffer.ready or self.paused or not self.may_start():
            self.buffer.arrived.clear()
            return None
        return self.progress

    def _taken(self, *, room_freed: bool) -> None:
        if room_freed:
            self._session.notify_room()
        # Messages that wait for their keys do not keep handlers busy: fetch more for these.
        waiting_count = len(self.buffer)
        starving = self.keyed is not None and waiting_count > 0 and not self.keyed.ready
        if waiting_count <= self.credit_due_at or starving:
            self.credit_due_at = -1
            self.wakeup.notify()

    def counts(self, messages: ReceivedMessage | MessageBatch) -> bool:
        """Whether the result of handling messages still matters."""
        return self.progress is not None and messages.lineage == self.lineage

    def is_acknowledged(self, message: ReceivedMessage) -> bool:
        """Whether offsets has the acknowledgement of a message that was started here.

        Another owner has handled it then, while this consumer was cut off.
        """
        progress = self.progress
        return (
            progress is not None and self.counts(message) and progress.is_confirmed(message.offset)
        )

    def finish(self, messages: MessageBatch | Sequence[ReceivedMessage]) -> None:
        """Note that messages that were taken together are handled."""
        if isinstance(messages, MessageBatch):
            self.finish_ranges(messages, messages.ranges)
        elif messages:
            self.finish_ranges(messages[0], of_sorted(message.offset for message in messages))

    def finish_ranges(
        self, messages: MessageBatch | ReceivedMessage, ranges: Sequence[Range]
    ) -> None:
        """As `finish`, of the offsets of messages of one lineage.

        Args:
            messages: They, or one of them.
        """
        progress = self.progress
        if progress is not None and self.counts(messages):
            for first, end in ranges:
                self._finish(progress, first, end)
            self.note_unconfirmed(progress)
            self._handlers_ended()

    def give_up(self, message: ReceivedMessage) -> None:
        """Note that a started message is not handled under this ownership: it is redelivered."""
        if self.progress is not None and self.counts(message):
            comes_again = self.progress.give_up(message.offset)
            if self.keyed is not None:
                self.keyed.give_up(message.offset, comes_again=comes_again)
            self._handlers_ended()

    def retry_later(self, message: ReceivedMessage, delay_ms: int) -> None:
        """Have a message that failed taken again after a delay; its key waits, others go on.

        Only for queues in the order of keys. If no message may be started, it is given up.
        """
        assert self.keyed is not None
        if self.progress is None or self.stopped or not self.counts(message):
            self.give_up(message)
            return
        now_ms = self._session.clock.monotonic_ms()
        self.keyed.retry(message, delay_ms, now_ms, self.notify_arrived)

    # ---- commits

    def acks_due(self, now_ms: int) -> Acks | None:
        """Return the acks to commit now; None if there is no reason for a commit.

        Reasons are new acks, and three in which a commit has none: a deadline that is near, as it
        renews the lease; a handler that runs long, as the refusal tells of a reset; and an epoch of
        offsets that does not know the position yet.
        """
        progress = self.progress
        if progress is None or not self.held:
            return None
        due = progress.dirty or self.lease.is_near(now_ms) or self.handles_long(now_ms)
        return progress.acks() if due or self._position_due() else None

    def _position_due(self) -> bool:
        newest = self._session.epochs.newest
        return self.with_ownership and newest[1] > 0 and newest != self.position_known

    def handles_long(self, now_ms: int) -> bool:
        """Whether a handler of the queue has run for so long that it may hang.

        Never for a broadcasting member: no operator resets its progress.
        """
        session = self._session
        call = session.running.of_queue(self.ref) if session.local is None else None
        return call is not None and now_ms - call.begin_ms >= LONG_CALL_MS

    def committed(self, progress: QueueProgress, acks: Acks, sent_ms: int) -> None:
        """Note that offsets has accepted `acks`, which were those of `progress`."""
        if self.progress is progress:
            progress.confirm(acks)
            self.acked = progress.dirty
            self.commit_waiters.settle(progress)
            self.lease.renew(sent_ms)
            self.useful = True
            self.wakeup.notify()

    # ---- the queue's task

    def begin(self, acquired: AcquiredQueue) -> None:
        """Begin a granted ownership; keep work in flight unless the progress was reset."""
        start, lease = acquired.start, acquired.lease
        if lease is not None:
            self.bound_generation = lease.bound_generation
            self.lease.begin(lease.sent_ms, lease.lease_ms)
        if self.progress is not None and self.progress.reset_epoch != start.reset_epoch:
            self._forget_work()
        kept = self.progress
        self.progress = QueueProgress(start) if kept is None else kept.renewed(start)
        self.commit_waiters.settle(self.progress)
        if self.keyed is not None:
            self.keyed.begin_grant()
        self.token = start.token
        self.useful = False
        self.position_known = ("", 0)
        self._receive(OwnershipInput.GRANTED)
        self.on_granted()

    def withdraw(self) -> None:
        """End without a grant; drain first if the token from before may still be valid."""
        late = bool(self.token) and self.progress is not None
        self._receive(OwnershipInput.WITHDRAWN_LATE if late else OwnershipInput.WITHDRAWN)

    def clear_buffer(self) -> None:
        """Drop the messages that wait; they are delivered again if the queue stays assigned."""
        self.buffer.clear()
        self._session.notify_room()
        self.flow = None

    def close(self) -> CloseContent:
        """Freeze the content of the Close; nothing that still runs counts from now on."""
        assert self.progress is not None
        content = self.progress.close_content()
        self._receive(OwnershipInput.DRAINED)
        return content

    def release(self) -> None:
        """End the ownership: the token is closed, and the next owner may have the queue."""
        self._receive(OwnershipInput.RELEASED)

    def stop(self) -> None:
        """Note that no pull is under way any more."""
        self._receive(OwnershipInput.STOPPED)

    def _receive(self, happened: OwnershipInput) -> None:
        effects = self._ownership.receive(happened)
        self.wakeup.notify()
        for effect in effects:
            if effect is OwnershipEffect.FORGET_WORK:
                self._forget_work()
            elif effect is OwnershipEffect.CLEAR_TOKEN:
                self.token = 0
            else:
                self._report(_REPORTS[effect])
        if self.keyed is not None and self.progress is not None and self.stopped:
            for message in self.keyed.give_up_failed():
                self.progress.give_up(message.offset)

    def _is_drained(self) -> bool:
        draining = self.state is OwnershipState.DRAINING
        if not draining or self.progress is None:
            return True
        return not self.progress.running_count and not self.commit_waiters

    def _handlers_ended(self) -> None:
        if self.state is OwnershipState.DRAINING and self._is_drained():
            self.wakeup.notify()

    def _forget_work(self) -> None:
        self.progress = None
        self.lineage += 1
        self.commit_waiters.fail()
        if self.keyed is not None:
            self.keyed.forget()
        self.on_work_dropped()

    def _report(self, kind: Literal["granted", "draining", "released", "fenced"]) -> None:
        """Report a change, but the end of a grant only once: it may be handed over after that."""
        if not (self._grant_reported or kind == "granted"):
            return
        self._grant_reported = kind in ("granted", "draining")
        session = self._session
        if session.metrics is not None:
            session.metrics.queue_changed(kind)
        now_ms = session.clock.monotonic_ms()
        session.on_ownership(OwnershipEvent(kind, self.ref, self.token, now_ms))
