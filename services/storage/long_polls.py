"""Long polls: pulls that found no message and wait for one.

A long poll reserves nothing. When it wakes, the pull reads and records again, and the record
checks its token (protocol, section 6.5). A waiting pull needs no thread and no timer of its queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.common.v1 import queue_pb2
from batonmq.errors import BatonError, Overloaded
from batonmq_server.storage.core.producers import QueueKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueOwner:
    """The queue of a group that a consumer pulls, and its fencing token.

    Attributes:
        token: Token under which the consumer owns the queue; 0 if queues of the group have no
            owners.
        caller: Owner number of the consumer's identity; 0 without access control.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    token: int
    caller: int = 0

    def queue(self) -> queue_pb2.GroupQueue:
        """Return the queue as a protobuf message."""
        return queue_pb2.GroupQueue(
            group=self.group,
            queue=queue_pb2.QueueRef(topic=self.topic, broker=self.broker, queue_id=self.queue_id),
        )


Touch = Callable[[Sequence[QueueOwner]], Awaitable[Sequence[BatonError | None]]]


@dataclass(eq=False, slots=True)
class _LongPoll:
    owner: QueueOwner
    woken: asyncio.Future[BatonError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LongPolls:
    """The waiting pulls, by queue.

    Args:
        touch: Tells offsets that owners are alive; returns None or the error of each.
        polls_max: Maximum number of long polls; more are rejected.
        interval_ms: Time between two calls of `touch`.
    """

    def __init__(self, touch: Touch, *, polls_max: int, interval_ms: int) -> None:
        self._touch, self._polls_max, self._interval_ms = touch, polls_max, interval_ms
        self._by_queue: dict[QueueKey, dict[_LongPoll, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, key: QueueKey, owner: QueueOwner, hold_ms: int) -> None:
        """Wait until the queue grows, its topic or group changes, or `hold_ms` have passed.

        Raises:
            Fenced, UnknownQueue: offsets says that the token is not current.
            Overloaded: too many pulls wait already.
        """
        if self._count >= self._polls_max:
            raise Overloaded(
                f"{self._count} long polls are waiting already; the limit is {self._polls_max}",
                remedy="Run fewer consumers, or raise long_polls_max of the storage service.",
                retry_after_ms=1_000,
                facts={"limit": self._polls_max},
            )
        poll = _LongPoll(owner)
        others = self._by_queue.setdefault(key, {})
        others[poll] = None
        self._count += 1
        end = asyncio.get_running_loop().call_later(hold_ms / 1000, _wake, poll)
        try:
            rejection = await poll.woken
        finally:
            end.cancel()
            self._count -= 1
            del others[poll]
            if not others and self._by_queue.get(key) is others:
                del self._by_queue[key]
        if rejection is not None:
            raise rejection

    def wake(self, keys: Iterable[QueueKey]) -> None:
        """Wake the long polls of queues that have grown."""
        for key in keys:
            for poll in self._by_queue.get(key, ()):
                _wake(poll)

    def end(self, error: BatonError) -> None:
        """Answer all long polls with `error`."""
        for poll in self._all():
            if not poll.woken.done():
                poll.woken.set_result(error)

    def wake_topics(self, names: frozenset[str]) -> None:
        """Wake the long polls of topics that have changed or were deleted."""
        for poll in self._all():
            if poll.owner.topic in names:
                _wake(poll)

    def wake_groups(self, names: frozenset[str]) -> None:
        """Wake the long polls of groups that have changed."""
        for poll in self._all():
            if poll.owner.group in names:
                _wake(poll)

    async def run(self) -> None:
        """Call `touch` at intervals until cancelled; run it as one task."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.touch()

    async def touch(self) -> None:
        """Tell offsets that all owners are alive; answer pulls with a rejected token."""
        owners = list(dict.fromkeys(p.owner for p in self._all() if p.owner.token))
        if not owners:
            return
        try:
            results = await self._touch(owners)
        except BatonError as error:
            log.info("long polls not touched count=%d error=%s", len(owners), error)
            return
        rejected = {
            owner: error for owner, error in zip(owners, results, strict=True) if error is not None
        }
        for poll in self._all() if rejected else ():
            if (rejection := rejected.get(poll.owner)) and not poll.woken.done():
                poll.woken.set_result(rejection)

    def _all(self) -> list[_LongPoll]:
        return [poll for queue in self._by_queue.values() for poll in queue]


def _wake(poll: _LongPoll) -> None:
    if not poll.woken.done():
        poll.woken.set_result(None)
