"""Leadership under an etcd lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from batonmq._common.aio import wait_until
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Lease, Put

log = logging.getLogger(__name__)

SAFETY_MS = 1_000
"""A leader with less of its lease left than this no longer answers (protocol section 8)."""

_NEVER = -1  # no key has this revision; 0 would mean that the key must not exist


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What has to hold for an election besides that nobody leads, and what it writes besides."""

    compare: Sequence[Compare] = ()
    put: Sequence[Put] = ()


async def _anybody() -> Candidacy | None:
    return Candidacy()


class Election:
    """Campaigns for `elections/<name>`; the term is the create revision of the key.

    Args:
        name: What is led, such as "lockmgr".
        node_id: Written into the key, for people and for redirects.
        ttl_ms: Length of the lease; an unannounced death is noticed after it.
        stand: Asked before every try; None if this node may not be elected at the moment.

    Attributes:
        term: Of this node's leadership; 0 without.
        reachable: Whether etcd has answered, when it was asked last.
    """

    def __init__(
        self,
        session: EtcdSession,
        name: str,
        node_id: str,
        *,
        ttl_ms: int = 5_000,
        stand: Callable[[], Awaitable[Candidacy | None]] = _anybody,
    ) -> None:
        self.session, self.node_id, self._ttl_ms = session, node_id, ttl_ms
        self._stand = stand
        self.key = session.key("elections", *name.split("/"))
        self.term = 0
        self.reachable = True
        self._valid_until_ms = 0
        self._resigns = asyncio.Event()

    def valid(self) -> bool:
        """Leading, with more than a second of the lease left, by our own monotonic clock."""
        return self.session.clock.monotonic_ms() + SAFETY_MS < self._valid_until_ms

    def resign(self) -> None:
        """Lead no more: `lead` is cancelled and the lease given back at once, or when etcd has
        answered the refresh that is under way, or would have had to.

        A leader that led on, and heard no follower any more, would let all of them out of its set.
        """
        self._resigns.set()
        self._valid_until_ms = 0

    def compare(self) -> Compare:
        """Condition for transactions that only this term may make; never met if not leading."""
        return Compare(self.key, create_revision=self.term or _NEVER)

    async def run(self, lead: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Campaign for ever; while leading, run `lead(term)`, which is cancelled on loss.

        If `lead` raises, leadership is given up and the exception passes through.
        """
        while True:
            lease: Lease | None = None
            self._resigns.clear()
            try:
                sent_ms = self.session.clock.monotonic_ms()
                lease = await self.session.lease(self._ttl_ms)
                sent_ms = await self._campaign(lease, sent_ms)
                if self.term:
                    self._valid_until_ms = sent_ms + self._ttl_ms
                    await self._lead(lease, lead)
            except NoQuorum as error:
                self.reachable = False
                log.warning("election waits for etcd key=%s error=%s", self.key, error)
                await asyncio.sleep(0.5)
            finally:
                self._valid_until_ms = self.term = 0
                if lease is not None:
                    with contextlib.suppress(NoQuorum):
                        await lease.revoke()

    async def _campaign(self, lease: Lease, sent_ms: int) -> int:
        """Until elected, which sets the term, or the lease is gone.

        Returns:
            When the lease was last known to be asked for: by `sent_ms`, or by a later refresh.
        """
        while True:
            candidacy = await self._stand()
            if candidacy is None:
                await asyncio.sleep(self._ttl_ms / 10_000)
            elif revision := await self._try(lease, candidacy):
                self.term = revision
                log.info("elected key=%s term=%d", self.key, revision)
                return sent_ms
            else:
                await self._wait_for_vacancy(lease)
            self.reachable = True
            refresh_ms = self.session.clock.monotonic_ms()
            if not await lease.refresh():
                return sent_ms
            sent_ms = refresh_ms

    async def _try(self, lease: Lease, candidacy: Candidacy) -> int | None:
        vacant = Compare(self.key, create_revision=0)
        put = Put(self.key, self.node_id.encode(), lease)
        return await self.session.txn(
            compare=[vacant, *candidacy.compare], put=[put, *candidacy.put]
        )

    async def _wait_for_vacancy(self, lease: Lease) -> None:
        """Until the key may be free, or it is time to refresh the lease."""
        # From the revision of the read on: that of the key may long have been compacted.
        found, revision = await self.session.get_prefix(self.key)
        if all(stored.key != self.key for stored in found):
            return
        with contextlib.suppress(TimeoutError, NoQuorum):  # whether etcd answers, refreshing tells
            async with (
                asyncio.timeout(self._ttl_ms / 3000),
                contextlib.aclosing(self.session.watch(self.key, revision + 1)) as answers,
            ):
                async for answer in answers:
                    if any(event.type == event.DELETE for event in answer.events):
                        return

    async def _lead(self, lease: Lease, lead: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(lead(self.term))
            try:
                await self._hold(lease)
            finally:
                self._valid_until_ms = 0
                log.warning("leadership ends key=%s term=%d", self.key, self.term)
                leading.cancel()

    async def _hold(self, lease: Lease) -> None:
        """Refresh the lease until it is lost or can't be known to live."""
        while self.valid():
            if await wait_until(self._resigns, self._ttl_ms // (5 if self.reachable else 15)):
                return
            sent_ms = self.session.clock.monotonic_ms()
            left_ms = self._valid_until_ms - SAFETY_MS - sent_ms
            try:
                async with asyncio.timeout(max(0, left_ms) / 1_000):
                    if not await lease.refresh():
                        return
            except (NoQuorum, TimeoutError):
                self.reachable = False
                continue
            self.reachable = True
            self._valid_until_ms = 0 if self._resigns.is_set() else sent_ms + self._ttl_ms
