"""Messages that are started one by one, and ended in any order by their holder.

A handler ends its message when it returns. Here the holder, a remote client for instance, decides
later; and it learns when offsets has its acknowledgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.running_calls import RunningCall
from batonmq._consumer.session import Session
from batonmq._core.queues import QueueRef
from batonmq._core.retries import HandlingFailure
from batonmq.errors import Fenced

AWAITED_GATHER_MS = 2
"""How long a commit waits for more acks: each caller waits for it."""


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that was started, and is in flight until its holder ends it."""

    message: ReceivedMessage
    queue: AssignedQueue
    call: RunningCall


class HeldMessages:
    """Starts the messages of a consumer for holders outside of it.

    Args:
        retry_sender: Stores dead letters.
        on_dropped: Called when a queue is released or its messages do not count any more: none
            that is held may be ended.

    Attributes:
        available: Set when a message may wait; clear it before a `take`.
    """

    def __init__(
        self,
        session: Session,
        retry_sender: RetrySender,
        on_dropped: Callable[[QueueRef], None],
    ) -> None:
        self._session, self._retry_sender, self._on_dropped = session, retry_sender, on_dropped
        self._queues: dict[QueueRef, AssignedQueue] = {}
        self._held: dict[QueueRef, dict[HeldMessage, None]] = {}
        self._ended = False
        self.available = session.available
        session.commit_gather_ms = AWAITED_GATHER_MS

    @property
    def queues(self) -> Mapping[QueueRef, AssignedQueue]:
        """The queues that are assigned now, also while they are released."""
        return self._queues

    def begin(self, queue: AssignedQueue) -> None:
        """Start messages of a queue from now on, when they are taken."""
        self._queues[queue.ref] = queue
        queue.on_work_dropped = partial(self._drop, queue.ref)
        self.available.set()

    def cancel(self, ref: QueueRef) -> None:
        """Forget a queue that is released."""
        if self._queues.pop(ref, None) is not None:
            self._drop(ref)

    def end(self) -> None:
        """Start no more messages."""
        self._ended = True

    def close(self) -> None:
        """Do nothing: there is no thread and no timer."""

    def take(self, ref: QueueRef) -> HeldMessage | None:
        """Start the next message of a queue; None if none waits, or none may be started."""
        queue = self._queues.get(ref)
        message = None if queue is None or self._ended else queue.take_one()
        if queue is None or message is None:
            return None
        now_ms = self._session.clock.monotonic_ms()
        held = HeldMessage(message, queue, self._session.running.begin(ref, message.offset, now_ms))
        self._held.setdefault(ref, {})[held] = None
        return held

    def finish(self, held: HeldMessage) -> asyncio.Future[None]:
        """Acknowledge a message; call it once.

        Returns:
            A future that is done when offsets has the acknowledgement. It fails with `Fenced` if
            the queue is lost before that.
        """
        queue, message = held.queue, held.message
        self._end(held)
        if not queue.counts(message):
            lost = asyncio.get_running_loop().create_future()
            lost.set_exception(Fenced(f"{message!r} is not held under the current ownership"))
            lost.exception()  # a caller that has gone leaves no warning
            return lost
        future = queue.commit_waiters.add(message.offset)
        queue.finish([message])
        if queue.progress is not None and queue.is_acknowledged(message):
            queue.commit_waiters.settle(queue.progress)  # no commit follows
        queue.commit_soon()
        return future

    def give_up(self, held: HeldMessage) -> None:
        """End a message that is not handled: it is redelivered to the next owner of its queue."""
        self._end(held)
        held.queue.give_up(held.message)

    async def dead_letter(self, held: HeldMessage, failure: HandlingFailure) -> bool:
        """Store a message among the dead letters of the group; `finish` it then.

        Returns:
            False if the queue was lost before the message was stored.
        """
        return await self._store(held, failure, None)

    async def send_back(self, held: HeldMessage, failure: HandlingFailure, delay_ms: int) -> bool:
        """Store a message in the retry topic of the group; `finish` it then.

        Only for a consumer that sends messages back: others do not subscribe to the retry topic.

        Returns:
            False if the queue was lost before the message was stored.
        """
        return await self._store(held, failure, delay_ms)

    async def _store(
        self, held: HeldMessage, failure: HandlingFailure, delay_ms: int | None
    ) -> bool:
        queue, message = held.queue, held.message
        progress = queue.progress

        def still_owned() -> bool:
            return queue.counts(message) and queue.held and not queue.is_acknowledged(message)

        reset_epoch = progress.reset_epoch if progress is not None else 0
        return await self._retry_sender.send(
            RetryRequest(message, reset_epoch, failure, delay_ms, still_owned)
        )

    def _end(self, held: HeldMessage) -> None:
        of_queue = self._held.get(held.message.queue, {})
        if held in of_queue:
            del of_queue[held]
            self._session.running.end(held.call)

    def _drop(self, ref: QueueRef) -> None:
        for held in self._held.pop(ref, {}):
            self._session.running.end(held.call)
        self._on_dropped(ref)
