"""Those who wait for something to happen to a queue: held requests, and clients that watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError
from batonmq_server.lockmgr.handover import Term
from batonmq_server.lockmgr.lock_proto import WatchNotice
from batonmq_server.lockmgr.membership import Membership
from batonmq_server.lockmgr.watch_streams import WatchStreams

log = logging.getLogger(__name__)

_LOOK_AGAIN_MS = 50


class QueueNotifier:
    """Wakes held requests and tells watching clients.

    Args:
        look: Observes a queue at offsets; raises a BatonError if it can't be seen.
        watchers_max: More streams than this are refused.
    """

    def __init__(
        self,
        term: Term,
        members: Membership,
        look: Callable[[GroupQueue], Awaitable[object]],
        watchers_max: int,
    ) -> None:
        self._term, self._table, self._clock = term, term.table, term.clock
        self._members, self._look = members, look
        self.watchers = WatchStreams(watchers_max)
        self._parked: dict[GroupQueue, dict[asyncio.Event, None]] = {}
        self._looked_at: set[GroupQueue] = set()
        self._anybody_parked = asyncio.Event()

    # What happens

    def settled(self, key: GroupQueue) -> None:
        """A change of `key` has ended: whoever waits for it looks again."""
        self._wake(key)
        entry = self._table.get(key)
        if entry is None:
            return
        for waiter in entry.waiters:
            self.watchers.tell(waiter, key)
        self._tell_owner(key)

    async def follow_groups(self) -> None:
        """Tell owners that are no members any more, for ever; to be run as one task."""
        async for groups in self._members.changed_groups():
            for group in groups:
                members = self._members.group(group).members
                for key in self._table.owned_in(group):
                    entry = self._table.get(key)
                    if entry is not None and entry.lock.owner not in members:
                        self._tell_owner(key)

    async def follow_gates(self) -> None:
        """Tell everybody of a group whose subscription begins or ends to change, for ever."""
        async for groups in self._members.changed_gates():
            for group in groups:
                if self._members.is_draining(group):
                    for key in self._table.owned_in(group):
                        self._tell_owner(key)
                else:
                    for key in self._table.waited_for_in(group):
                        self.settled(key)

    # Held requests

    async def park(self, key: GroupQueue, asker: Incarnation, until_ms: int) -> bool:
        """Hold a request until something has changed; False once its time is over."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= until_ms:
            self._wait(key, asker)
            return False
        woken = asyncio.Event()
        self._parked.setdefault(key, {})[woken] = None
        self._anybody_parked.set()
        self._wait(key, asker, parked=1)
        try:
            async with asyncio.timeout((until_ms - now_ms) / 1000):
                await woken.wait()
        except TimeoutError:
            return False
        finally:
            self._wait(key, asker, parked=-1)
            del self._parked[key][woken]
            if not self._parked[key]:
                del self._parked[key]
            if not self._parked:
                self._anybody_parked.clear()
        return True

    async def watch_parked(self) -> None:
        """Observe the queues that somebody waits for, one by one when its slot has passed.

        None waits for another one, whose set of offsets may not answer.
        """
        async with asyncio.TaskGroup() as looks:
            while True:
                await self._anybody_parked.wait()
                now_ms = self._clock.monotonic_ms()
                due = {
                    key: self._table.due_ms(key, now_ms)
                    for key in self._parked.keys() - self._looked_at
                }
                for key in sorted(key for key, ms in due.items() if ms <= 0):
                    self._looked_at.add(key)
                    looks.create_task(self._look_and_wake(key))
                later = [ms for ms in due.values() if ms > 0]
                await asyncio.sleep(min(later, default=_LOOK_AGAIN_MS) / 1000)

    # Streams

    async def watch(self, incarnation: Incarnation) -> AsyncGenerator[WatchNotice, None]:
        """What concerns the client: first what is so already, then as it happens.

        Raises:
            Overloaded: too many watch already.
        """
        table = self._table
        known = table.owned_by(incarnation) + table.waited_for_by(incarnation)
        with self.watchers.listening(incarnation, known) as watcher:
            while not watcher.over:
                for key in watcher.take():
                    notice = self._notice(key, incarnation)
                    if notice is not None and not watcher.over:
                        yield notice
                await watcher.changed.wait()

    def _notice(self, key: GroupQueue, incarnation: Incarnation) -> WatchNotice | None:
        entry = self._table.get(key)
        if entry is None:
            return None
        owner, draining = entry.lock.owner, self._members.is_draining(key.group)
        if owner == incarnation:
            evicted = not self._members.is_member(key.group, incarnation)
            wanted = self._table.wanted(key, evicted=evicted, draining=draining)
            if wanted is not None:
                self._term.tenures.told(key, self._clock.monotonic_ms())
            return (key, entry.lock.token, wanted) if wanted else None
        free = owner is None and entry.pending is None and not draining
        return (key, entry.lock.token, None) if free and incarnation in entry.waiters else None

    def _wait(self, key: GroupQueue, asker: Incarnation, parked: int = 0) -> None:
        if self._table.wait(key, asker, self._clock.monotonic_ms(), parked=parked):
            self._tell_owner(key)

    def _tell_owner(self, key: GroupQueue) -> None:
        entry = self._table.get(key)
        if entry is not None and entry.lock.owner is not None:
            self.watchers.tell(entry.lock.owner, key)

    async def _look_and_wake(self, key: GroupQueue) -> None:
        try:
            await self._look(key)
        except BatonError as error:
            log.info("queue not observed key=%s error=%s", key, error)
            return
        finally:
            self._looked_at.discard(key)
        self._wake(key)

    def _wake(self, key: GroupQueue) -> None:
        for woken in self._parked.get(key, ()):
            woken.set()
