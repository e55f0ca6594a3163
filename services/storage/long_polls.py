"""Pulls that found nothing and wait: woken by their queue, kept alive at offsets.

A parked pull holds no right; when it wakes, reading and recording run again, and the record is
the check of its token (protocol, section 6.5). It costs no thread and is never polled.
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
    """Who pulls: a queue as a group sees it, and the token under which it is owned; 0 for none."""

    group: str
    topic: str
    broker: str
    queue_id: int
    token: int

    def queue(self) -> queue_pb2.GroupQueue:
        """The queue as messages name it."""
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
    """The pulls that wait, by queue.

    Args:
        touch: Tells offsets of owners that are alive; None or the refusal for each.
        parked: Shows how many there are.
        polls_max: More are refused.
        interval_ms: Time between two touches.
    """

    def __init__(self, touch: Touch, *, polls_max: int, interval_ms: int) -> None:
        self._touch, self._polls_max, self._interval_ms = touch, polls_max, interval_ms
        self._by_queue: dict[QueueKey, dict[_LongPoll, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, key: QueueKey, owner: QueueOwner, hold_ms: int) -> None:
        """Until the queue has grown, its topic or group has changed, or `hold_ms` are over.

        Raises:
            Fenced, UnknownQueue: offsets says that the token is not current.
            Overloaded: too many pulls are parked.
        """
        if self._count >= self._polls_max:
            raise Overloaded(
                f"{self._count} pulls are held already",
                retry_after_ms=1_000,
                facts={"limit": self._polls_max},
            )
        parked = _LongPoll(owner)
        others = self._by_queue.setdefault(key, {})
        others[parked] = None
        self._count += 1
        try:
            async with asyncio.timeout(hold_ms / 1000):
                refusal = await parked.woken
        except TimeoutError:
            return
        finally:
            self._count -= 1
            del others[parked]
            if not others and self._by_queue.get(key) is others:
                del self._by_queue[key]
        if refusal is not None:
            raise refusal

    def wake(self, keys: Iterable[QueueKey]) -> None:
        """Wake the pulls of queues that have grown."""
        for key in keys:
            for parked in self._by_queue.get(key, ()):
                _wake(parked)

    def end(self, error: BatonError) -> None:
        """Answer all pulls with `error`."""
        for parked in self._all():
            if not parked.woken.done():
                parked.woken.set_result(error)

    def wake_topics(self, names: frozenset[str]) -> None:
        """Wake the pulls of topics that have changed, or are gone."""
        for parked in self._all():
            if parked.owner.topic in names:
                _wake(parked)

    def wake_groups(self, names: frozenset[str]) -> None:
        """Wake the pulls of groups that have changed."""
        for parked in self._all():
            if parked.owner.group in names:
                _wake(parked)

    async def run(self) -> None:
        """Touch every owner at intervals; to be run as one task."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.touch()

    async def touch(self) -> None:
        """Tell offsets of all owners; pulls whose token is refused are answered so."""
        owners = list(dict.fromkeys(p.owner for p in self._all() if p.owner.token))
        if not owners:
            return
        try:
            verdicts = await self._touch(owners)
        except BatonError as error:
            log.info("parked pulls not touched count=%d error=%s", len(owners), error)
            return
        refused = {
            owner: verdict
            for owner, verdict in zip(owners, verdicts, strict=True)
            if verdict is not None
        }
        for parked in self._all() if refused else ():
            if (verdict := refused.get(parked.owner)) and not parked.woken.done():
                parked.woken.set_result(verdict)

    def _all(self) -> list[_LongPoll]:
        return [parked for queue in self._by_queue.values() for parked in queue]


def _wake(parked: _LongPoll) -> None:
    if not parked.woken.done():
        parked.woken.set_result(None)
