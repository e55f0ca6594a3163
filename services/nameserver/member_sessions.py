"""Members whose connection broke: removed after a short grace, instead of by their lease.

A watch that names its member is that member's session. When it breaks, the member opens another
one, here or at another replica, and sends a heartbeat at once. If it does neither, it has died.
Whether a heartbeat has come to any replica, the member's lease tells: every heartbeat starts it
anew.
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
from batonmq_server.nameserver.core.member_silence import Silence, next_look_ms, silence_of
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.runtime.etcd.session import EtcdSession

log = logging.getLogger(__name__)

IDLE_MS = 60_000


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A member of a group."""

    group: str
    client_id: str
    incarnation_id: int


class MemberSessions:
    """Follows the sessions that are open at this replica.

    Args:
        grace_ms: Time from the break to the removal.
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
        self._heard: dict[SessionKey, int] = {}  # of those that are open, or broken
        self._noticed = asyncio.Event()

    @contextmanager
    def open(self, key: SessionKey) -> Iterator[None]:
        """A session that breaks when the block ends."""
        self._open[key] += 1
        self.heard(key)
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
                now_ms = self._etcd.clock.monotonic_ms()
                self._broken[key] = now_ms, now_ms + next_look_ms(0, self._grace_ms)
                self._noticed.set()

    def heard(self, key: SessionKey) -> None:
        """A heartbeat of the member was accepted here, or it has opened a session."""
        self._broken.pop(key, None)
        self._heard.pop(key, None)
        if key in self._open:
            self._heard[key] = self._etcd.clock.monotonic_ms()

    async def run(self) -> None:
        """Remove for ever; to be run as one task."""
        while True:
            self._noticed.clear()
            now_ms = self._etcd.clock.monotonic_ms()
            for key, (broken_ms, look_ms) in list(self._broken.items()):
                if look_ms <= now_ms and key in self._broken:
                    await self._look(key, broken_ms)
            now_ms = self._etcd.clock.monotonic_ms()
            due_ms = min(
                (look_ms for _, look_ms in self._broken.values()), default=now_ms + IDLE_MS
            )
            await wait_until(self._noticed, max(0, due_ms - now_ms))

    async def _look(self, key: SessionKey, broken_ms: int) -> None:
        """Remove the member if it has been silent since; look again later if that is not sure."""
        try:
            silence = await self._silence(key, broken_ms)
            if self._broken.get(key, (None, 0))[0] != broken_ms:
                return  # heard of meanwhile
            if silence is Silence.SURE:
                await self._remove(key, broken_ms)
        except BatonError as error:
            log.warning("session not ended yet group=%s error=%s", key.group, error)
            silence = Silence.UNKNOWN
        if self._broken.get(key, (None, 0))[0] != broken_ms:
            return
        if silence is Silence.UNKNOWN:
            silent_ms = self._etcd.clock.monotonic_ms() - broken_ms
            self._broken[key] = broken_ms, broken_ms + next_look_ms(silent_ms, self._grace_ms)
        else:
            del self._broken[key], self._heard[key]

    async def _silence(self, key: SessionKey, broken_ms: int) -> Silence:
        live = self._catalog.live.values.get(f"{key.group}/{key.client_id}")
        if live is None or live.value != str(key.incarnation_id).encode():
            return Silence.OVER
        asked_ms, heard_ms = self._etcd.clock.monotonic_ms(), self._heard[key]
        left_s, granted_s = await self._etcd.time_to_live(live.lease_id)
        after_ms = self._etcd.clock.monotonic_ms() - broken_ms
        return silence_of(left_s, granted_s, asked_ms - heard_ms, asked_ms - broken_ms, after_ms)

    async def _remove(self, key: SessionKey, broken_ms: int) -> None:
        outcome = await self._store.leave(key.group, key.client_id, key.incarnation_id)
        if outcome.left:
            silent_ms = self._etcd.clock.monotonic_ms() - broken_ms
            generation = outcome.group.generation if outcome.group else 0
            self._events.session_broken(key.group, key.client_id, silent_ms, generation)
            log.warning(
                "member removed, its session broke group=%s client_id=%s", key.group, key.client_id
            )
