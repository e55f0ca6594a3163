"""Sessions of members: a member with a broken connection is removed before its lease expires.

A WatchGroup stream that names its member is that member's session. When the stream breaks, a live
member opens another one, here or at another replica, and sends a heartbeat at once. A member that
does neither within a grace period is dead. Whether any replica has received a heartbeat is found
from the member's lease, as every heartbeat renews it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from batonmq._common.aio import wait_until
from batonmq.errors import BatonError
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.member_silence import Silence, next_check_ms, silence_of
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.runtime.etcd.session import EtcdSession

log = logging.getLogger(__name__)

IDLE_MS = 60_000
READS_AT_ONCE_MAX = 64
"""Leases that are read from etcd at once."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Identifies a session: group, client id, incarnation and owner number of the member."""

    group: str
    client_id: str
    incarnation_id: int
    owner: int = 0


class MemberSessions:
    """Tracks the sessions at this replica, and removes members after their session broke.

    Args:
        grace_ms: Time from the break of a session to the removal of the member.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        catalog: Catalog,
        store: GroupStore,
        events: GroupEvents,
        *,
        grace_ms: int,
    ) -> None:
        self._etcd, self._catalog, self._store = etcd, catalog, store
        self._events, self._grace_ms = events, grace_ms
        self._open: Counter[SessionKey] = Counter()
        self._broken: dict[SessionKey, tuple[int, int]] = {}
        # Time of the last heartbeat, or of the opening, of open and broken sessions.
        self._heard: dict[SessionKey, int] = {}
        self._broken_changed = asyncio.Event()
        self._checking: set[SessionKey] = set()
        self._reads = asyncio.Semaphore(READS_AT_ONCE_MAX)

    @contextmanager
    def open(self, key: SessionKey) -> Iterator[None]:
        """Open a session, which breaks when the block ends."""
        self._open[key] += 1
        self.heartbeat_received(key)
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
                now_ms = self._etcd.clock.monotonic_ms()
                self._broken[key] = now_ms, now_ms + next_check_ms(0, self._grace_ms)
                self._broken_changed.set()

    def heartbeat_received(self, key: SessionKey) -> None:
        """Record that a heartbeat of the member was accepted here, or that it opened a session."""
        self._broken.pop(key, None)
        self._heard.pop(key, None)
        if key in self._open:
            self._heard[key] = self._etcd.clock.monotonic_ms()

    async def run(self) -> None:
        """Check broken sessions until cancelled; to be run as one task.

        The checks do not wait for each other: so the members of one group that die at once are
        removed by a few writes, and a large group, which is written seldom, delays no other group.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._broken_changed.clear()
                now_ms = self._etcd.clock.monotonic_ms()
                due_ms = now_ms + IDLE_MS
                for key, (broken_ms, check_ms) in self._broken.items():
                    if key in self._checking:
                        continue
                    if check_ms <= now_ms:
                        self._checking.add(key)
                        tasks.create_task(self._check(key, broken_ms))
                    else:
                        due_ms = min(due_ms, check_ms)
                await wait_until(self._broken_changed, due_ms - now_ms)

    async def _check(self, key: SessionKey, broken_ms: int) -> None:
        """Remove the member if it was silent since the break; check again later if unsure."""
        silence = Silence.UNKNOWN
        try:
            async with self._reads:
                if not self._is_broken_since(key, broken_ms):
                    return  # A heartbeat arrived in the meantime.
                silence = await self._silence(key, broken_ms)
            if silence is Silence.SURE and self._is_broken_since(key, broken_ms):
                await self._remove(key, broken_ms)
        except BatonError as error:
            log.warning("session check is retried group=%s error=%s", key.group, error)
            silence = Silence.UNKNOWN
        finally:
            self._checking.discard(key)
            self._broken_changed.set()
        if not self._is_broken_since(key, broken_ms):
            return
        if silence is Silence.UNKNOWN:
            silent_ms = self._etcd.clock.monotonic_ms() - broken_ms
            self._broken[key] = broken_ms, broken_ms + next_check_ms(silent_ms, self._grace_ms)
        else:
            del self._broken[key], self._heard[key]

    def _is_broken_since(self, key: SessionKey, broken_ms: int) -> bool:
        return self._broken.get(key, (None, 0))[0] == broken_ms

    async def _silence(self, key: SessionKey, broken_ms: int) -> Silence:
        live = self._catalog.live.values.get(f"{key.group}/{key.client_id}")
        if live is None or live.value != str(key.incarnation_id).encode():
            return Silence.OVER
        request_ms, heard_ms = self._etcd.clock.monotonic_ms(), self._heard[key]
        left_s, granted_s = await self._etcd.time_to_live(live.lease_id)
        after_ms = self._etcd.clock.monotonic_ms() - broken_ms
        return silence_of(
            left_s, granted_s, request_ms - heard_ms, request_ms - broken_ms, after_ms
        )

    async def _remove(self, key: SessionKey, broken_ms: int) -> None:
        outcome = await self._store.leave(key.group, key.client_id, key.incarnation_id, key.owner)
        if outcome.left:
            silent_ms = self._etcd.clock.monotonic_ms() - broken_ms
            generation = outcome.group.generation if outcome.group else 0
            self._events.session_broken(key.group, key.client_id, silent_ms, generation)
            log.warning(
                "member removed after its session broke group=%s client_id=%s",
                key.group,
                key.client_id,
            )
