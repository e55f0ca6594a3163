"""One queue of one consumer, from asking for it to giving it back (protocol sections 6-11)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Literal

from batonmq._common.aio import unless
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.queue_acquirer import acquire, look_up
from batonmq._consumer.queue_puller import pull_forever
from batonmq._consumer.queue_releaser import give_back
from batonmq._consumer.session import OwnershipEvent, Session
from batonmq._core.flow_control import FlowReason, QueueBytes
from batonmq._core.queue_progress import Acks, CloseContent, GrantedProgress, QueueProgress
from batonmq._core.queues import QueueRef
from batonmq._core.subscription import Filter, TagFilter
from batonmq.errors import BatonError, FenceCause, Fenced, ModeChanged

log = logging.getLogger(__name__)

DEADLINE_MARGIN_MS = 3_000
"""The owner stops so long before its lease ends at the lock manager (protocol section 8)."""


class AssignedQueue:
    """Reads one queue while it is assigned to the consumer.

    `run` acquires, pulls, and on `unassign` drains, closes and releases. Handlers get messages by
    `take` and report with `finish` or `give_up`; both do nothing for messages of an ownership
    that is over. What `pause` holds up is neither pulled nor handed out; the queue stays ours. In a
    group whose queues nobody owns (protocol section 15) the token is 0, there is no deadline, and
    nothing is acquired or given back: progress is read, and committed.

    Attributes:
        owned: Whether the group's queues are owned; fixed, as a group that changes drops it all.
        progress: What is known of the queue's messages; None unless it is ours.
        token: Of the grant; 0 without one.
        bound_generation: Generation of the subscription that the grant is for; 0 for any.
        filter: By which the last pull was made.
        fenced: Whether the token is not valid any more.
        flow: What the next pull waits for; None if for nothing.
        going: Set unless the user wants the queue to wait.
        waiting_bytes: Bytes of the bodies in `buffer`.
        unassigned: Set when the queue is not ours any more by the group's record.
        stopping: Set while no message may be started.
        arrived: Set when a message may wait in `buffer`.
        freed: Set when asking for the queue again may help.
        ended: Set when a handler has ended, or what runs has lost its meaning.
        changed: Set when a pull that was not due may be.
        interrupted: Set when the pull under way is not one to be made any more.
    """

    def __init__(self, session: Session, calls: BatchedCalls, queue: QueueRef) -> None:
        self.session, self.calls, self.queue = session, calls, queue
        self.key = session.key(queue)
        self.owned = session.view.owned
        self.progress: QueueProgress | None = None
        self.token = self.bound_generation = self.lineage = 0
        self.filter: Filter = TagFilter(None)
        self.buffer: deque[ReceivedMessage] = deque()
        self.waiting_bytes = QueueBytes(session.budget)
        self.fenced = False
        self.reads_from = ""
        self.flow: FlowReason | None = None
        self.unassigned, self.stopping, self.going = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.arrived, self.freed, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.changed, self.interrupted = asyncio.Event(), asyncio.Event()
        self.lease_ms = 30_000
        if queue not in session.paused:
            self.going.set()
        self._deadline_ms = 0
        self._useful = False

    @property
    def assigned(self) -> bool:
        """Whether the queue is ours by the newest generation."""
        return not self.unassigned.is_set()

    @property
    def draining(self) -> bool:
        """Whether no message is started any more; `stopping` is the event for it."""
        return self.stopping.is_set()

    @property
    def paused(self) -> bool:
        """Whether the user wants the queue to wait; `going` is the event for its end."""
        return not self.going.is_set()

    @property
    def holding(self) -> bool:
        """Whether the queue is ours, also while it is given back."""
        return self.progress is not None and not self.fenced

    # ---- what the group and the servers say

    def unassign(self) -> None:
        """The queue is somebody else's now: start nothing, finish what runs, give it back."""
        if self.assigned:
            self.unassigned.set()
            self.freed.set()
            self.stopping.set()
            if self.holding:
                self._tell("draining")

    def drop(self) -> None:
        """The group has changed its mode: nothing of what we have counts, nobody is told."""
        self.fence(forget=True)
        self.unassign()

    def look(self) -> None:
        """The group's record has changed and the queue is still ours: go on by it."""
        view = self.session.view
        self.changed.set()
        if view.paused or view.filters.get(self.queue.topic) != self.filter:
            self.interrupted.set()

    def fence(self, *, forget: bool = False) -> None:
        """The token is not valid any more, or may not be: start nothing under it.

        Args:
            forget: What is in hand counts no more either: its results are discarded.
        """
        if self.holding:
            self.fenced = True
            self.stopping.set()
            self._tell("fenced")
        if forget:
            self._forget()
        self.ended.set()

    def refused(self, error: BatonError) -> None:
        """A call under our token was refused: it is over (protocol sections 11, 13 and 15)."""
        log.info("fenced queue=%s token=%d error=%s", self.queue, self.token, error)
        if isinstance(error, ModeChanged):
            self.session.heartbeat_soon.set()
        reset = isinstance(error, Fenced) and error.detail.why is FenceCause.RESET
        self.fence(forget=reset or isinstance(error, ModeChanged))

    def granted(self, sent_ms: int, lease_ms: int, bound_generation: int) -> None:
        """An Acquire that was sent at `sent_ms` was granted."""
        self._deadline_ms = 0
        self.bound_generation = bound_generation
        self.renew(sent_ms, lease_ms)

    def renew(self, sent_ms: int, lease_ms: int) -> None:
        """An access that was sent at `sent_ms` was accepted under our token."""
        self._deadline_ms = max(self._deadline_ms, sent_ms + lease_ms - DEADLINE_MARGIN_MS)
        self.lease_ms = lease_ms

    def pulled(self, sent_ms: int) -> None:
        """A pull that was sent at `sent_ms` has brought something."""
        self._useful = True
        if self.owned:
            self.renew(sent_ms, self.lease_ms)

    # ---- what the user wants

    def pause(self) -> None:
        """Pull nothing and hand nothing out until `resume`."""
        self.going.clear()
        self.flow = "paused"
        self.interrupted.set()

    def resume(self) -> None:
        """Go on."""
        self.going.set()
        self.flow = None
        self.changed.set()
        if self.buffer:
            self.tell_arrived()

    # ---- handlers

    def tell_arrived(self) -> None:
        """There may be something to take."""
        self.arrived.set()
        self.session.available.set()

    def may_start(self) -> bool:
        """Whether a message may be started now: ours, not draining, deadline not passed."""
        if self.progress is None or self.stopping.is_set():
            return False
        if self.owned and self.session.clock.monotonic_ms() >= self._deadline_ms:
            log.warning("own deadline passed queue=%s token=%d", self.queue, self.token)
            self.fence()
            return False
        return True

    def take(self, count_max: int = 1) -> list[ReceivedMessage]:
        """Start the next messages, in order; none if none wait, or none may be started.

        One that has failed before comes alone: if it fails again it takes no other with it.
        """
        if not self.buffer or self.paused or not self.may_start():
            self.arrived.clear()
            return []
        assert self.progress is not None
        buffer, start, body_bytes = self.buffer, self.progress.start, 0
        taken: list[ReceivedMessage] = []
        while buffer and len(taken) < count_max:
            message = buffer[0]
            if message.attempts and taken:
                break
            body_bytes += len(buffer.popleft().body)
            if start(message.offset):
                taken.append(message)
                if message.attempts:
                    break
        for message in taken:
            message.attempts += 1
        if self.waiting_bytes.remove(body_bytes):
            self.session.room_again()
        if 2 * len(buffer) <= self.session.settings.buffer_messages_max:
            self.changed.set()
        return taken

    def counts(self, message: ReceivedMessage) -> bool:
        """Whether it still matters how the handling of `message` ends."""
        return self.progress is not None and message.lineage == self.lineage

    def finish(self, messages: Sequence[ReceivedMessage]) -> None:
        """These, which were taken together, are handled."""
        progress = self.progress
        if messages and progress is not None and self.counts(messages[0]):
            for message in messages:
                progress.finish(message.offset)
            self.session.note_unconfirmed(progress.unconfirmed_count)
            self.ended.set()

    def give_up(self, message: ReceivedMessage) -> None:
        """The message was started and will not be handled by this ownership."""
        if self.progress is not None and self.counts(message):
            self.progress.give_up(message.offset)
            self.ended.set()

    # ---- commits

    def to_commit(self, now_ms: int) -> Acks | None:
        """Acks worth a commit now: new ones, or any when the deadline is near.

        A commit without news renews the lease; without ownership it finds out about a reset.
        """
        progress = self.progress
        if progress is None or self.fenced:
            return None
        near = now_ms + self.lease_ms // 2 >= self._deadline_ms
        return progress.acks() if progress.dirty or near else None

    def committed(self, progress: QueueProgress, acks: Acks, sent_ms: int) -> None:
        """offsets has accepted `acks`, which were those of `progress`."""
        if self.progress is progress:
            progress.confirm(acks)
            self.renew(sent_ms, self.lease_ms)
            self._useful = True
            self.changed.set()

    # ---- the life of the queue

    async def run(self) -> None:
        """Have the queue, again and again, as long as it is assigned."""
        failures = 0
        while self.assigned:
            if failures > 1:
                again = Fenced("fenced again and again")
                await unless(self.unassigned, self.session.directory.pause(again, failures))
            start = await (acquire(self) if self.owned else look_up(self))
            if start is None:
                self.session.keep_alive_soon.set()
                break
            self._begin(start)
            self.waiting_bytes.join()
            try:
                await unless(self.stopping, pull_forever(self))
            finally:
                self._empty()
            if not self.fenced:
                await give_back(self)
            if not self.fenced:
                return
            failures = 0 if self._useful else failures + 1
            self.token = 0
        self.progress = None

    def end(self) -> CloseContent:
        """Nothing that still runs counts from now on; what there is to say about it."""
        assert self.progress is not None
        closing = self.progress.closing()
        self._forget()
        return closing

    def given_back(self, token: int) -> None:
        """The next owner may have the queue."""
        self.token = 0
        self._tell("released", token)

    def _begin(self, start: GrantedProgress) -> None:
        carried = self.progress
        if carried is not None and carried.reset_epoch != start.reset_epoch:
            self._forget()
        kept = self.progress
        self.progress = kept.renewed(start) if kept is not None else QueueProgress(start)
        self.token = start.token
        self.fenced = self._useful = False
        self.stopping.clear()
        self.ended.clear()
        if not self.assigned:
            self.stopping.set()
        self._tell("granted")

    def _empty(self) -> None:
        """Nothing waits any more; it comes again if the queue is still ours."""
        self.buffer.clear()
        self.arrived.clear()
        self.waiting_bytes.leave()
        self.session.room_again()
        self.flow = None

    def _forget(self) -> None:
        self.progress = None
        self.lineage += 1

    def _tell(
        self, kind: Literal["granted", "draining", "released", "fenced"], token: int = 0
    ) -> None:
        session = self.session
        if session.metrics is not None:
            session.metrics.queue_changed(kind)
        session.on_ownership(
            OwnershipEvent(kind, self.queue, token or self.token, session.clock.monotonic_ms())
        )
