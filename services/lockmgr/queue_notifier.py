"""Wakes held Acquire requests and notifies Watch streams when the state of a queue changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from batonmq._common import timeouts
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.lock_proto import WatchNotice
from batonmq_server.lockmgr.term import Term
from batonmq_server.lockmgr.watch_streams import WatchStreams

log = logging.getLogger(__name__)

_OBSERVE_INTERVAL_MS = 50


class QueueNotifier:
    """The held requests and the Watch streams of one term.

    Args:
        observe: Observes a queue at offsets; raises a BatonError if offsets does not answer.
        watchers_max: Greatest number of Watch streams.
    """

    def __init__(
        self,
        term: Term,
        members: GroupMembership,
        observe: Callable[[GroupQueue], Awaitable[object]],
        watchers_max: int,
    ) -> None:
        self._term, self._table = term, term.table
        self._members, self._observe = members, observe
        self.streams = WatchStreams(watchers_max)
        self._held: dict[GroupQueue, dict[asyncio.Event, None]] = {}
        self._being_observed: set[GroupQueue] = set()
        self._request_held = asyncio.Event()

    # Changes

    def change_ended(self, key: GroupQueue) -> None:
        """Wake the held requests for `key`, and notify the streams of its waiters and owner."""
        self._wake(key)
        entry = self._table.get(key)
        if entry is None:
            return
        for waiter in entry.waiters:
            self.streams.notify(waiter, key)
        self._notify_owner(key)

    async def follow_groups(self) -> None:
        """Notify owners that have left their group, until cancelled."""
        async for groups in self._members.changed_groups():
            for group in groups:
                members = self._members.group(group)
                for key in self._table.owned_in(group):
                    entry = self._table.get(key)
                    owner = entry.lock.owner if entry is not None else None
                    if owner is not None and not members.has(owner):
                        self._notify_owner(key)

    async def follow_gates(self) -> None:
        """Notify owners when a subscription change begins, and waiters when it ends.

        Runs until cancelled.
        """
        async for groups in self._members.changed_gates():
            for group in groups:
                if self._members.is_draining(group):
                    for key in self._table.owned_in(group):
                        self._notify_owner(key)
                else:
                    for key in self._table.waited_for_in(group):
                        self.change_ended(key)

    # Held requests

    async def hold(self, key: GroupQueue, requester: Incarnation, until_ms: int) -> bool:
        """Return True once the state of `key` has changed; False at `until_ms`."""
        now_ms = self._term.now_ms()
        if now_ms >= until_ms:
            self._add_waiter(key, requester)
            return False
        woken = asyncio.Event()
        self._held.setdefault(key, {})[woken] = None
        self._request_held.set()
        self._add_waiter(key, requester, held_delta=1)
        try:
            async with timeouts.timeout((until_ms - now_ms) / 1000):
                await woken.wait()
        except TimeoutError:
            return False
        finally:
            self._add_waiter(key, requester, held_delta=-1)
            del self._held[key][woken]
            if not self._held[key]:
                del self._held[key]
            if not self._held:
                self._request_held.clear()
        return True

    async def observe_held(self) -> None:
        """Observe each queue with held requests once per slot, until cancelled.

        Observations do not wait for each other, so a replica set of offsets that does not answer
        delays its own queues only.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._request_held.wait()
                now_ms = self._term.now_ms()
                due = {
                    key: self._table.due_ms(key, now_ms)
                    for key in self._held.keys() - self._being_observed
                }
                for key in sorted(key for key, ms in due.items() if ms <= 0):
                    self._being_observed.add(key)
                    tasks.create_task(self._observe_and_wake(key))
                later = [ms for ms in due.values() if ms > 0]
                await asyncio.sleep(min(later, default=_OBSERVE_INTERVAL_MS) / 1000)

    # Streams

    async def watch(
        self, incarnation: Incarnation, together_max: int
    ) -> AsyncGenerator[Sequence[WatchNotice], None]:
        """Yield the notices for a client: first those that hold already, then as they arise.

        Args:
            together_max: Greatest number of notices that are yielded together.

        Raises:
            Overloaded: the limit of streams is reached.
        """
        table = self._table
        known = table.owned_by(incarnation) + table.waited_for_by(incarnation)
        with self.streams.open(incarnation, known) as stream:
            while not stream.ended:
                keys = stream.take_keys()
                for begin in range(0, len(keys), together_max):
                    some = keys[begin : begin + together_max]
                    made = (self._notice(key, incarnation) for key in some)
                    notices = [notice for notice in made if notice is not None]
                    if notices and not stream.ended:
                        yield notices
                await stream.changed.wait()

    def _notice(self, key: GroupQueue, incarnation: Incarnation) -> WatchNotice | None:
        entry = self._table.get(key)
        if entry is None:
            return None
        owner, draining = entry.lock.owner, self._members.is_draining(key.group)
        if incarnation.matches(owner):
            evicted = not self._members.is_member(key.group, incarnation)
            wanted = self._table.wanted_notice(key, evicted=evicted, draining=draining)
            if wanted is not None:
                self._term.timings.owner_notified(key, self._term.now_ms())
            return (key, entry.lock.token, wanted) if wanted else None
        free = owner is None and entry.pending is None and not draining
        return (key, entry.lock.token, None) if free and incarnation in entry.waiters else None

    def _add_waiter(self, key: GroupQueue, requester: Incarnation, held_delta: int = 0) -> None:
        now_ms = self._term.now_ms()
        if self._table.add_waiter(key, requester, now_ms, held_delta=held_delta):
            self._notify_owner(key)

    def _notify_owner(self, key: GroupQueue) -> None:
        entry = self._table.get(key)
        if entry is not None and entry.lock.owner is not None:
            self.streams.notify(entry.lock.owner, key)

    async def _observe_and_wake(self, key: GroupQueue) -> None:
        try:
            await self._observe(key)
        except BatonError as error:
            log.info("queue not observed key=%s error=%s", key, error)
            return
        finally:
            self._being_observed.discard(key)
        self._wake(key)

    def _wake(self, key: GroupQueue) -> None:
        for woken in self._held.get(key, ()):
            woken.set()
