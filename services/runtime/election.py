"""Leader election: the leader holds a key of etcd under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batonmq._common import timeouts
from batonmq._common.aio import wait_until
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import kv_pb2
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Lease, Put

log = logging.getLogger(__name__)

SAFETY_MS = 1_000
"""With less of its lease left a leader no longer answers (protocol section 8)."""

RENEWALS = 10
"""Renewals of a lease in the time after which it expires."""
END_MS = 200
"""With less of its lease left a leader gives up; until then it tries to renew the lease."""

_NEVER = -1  # no key has this revision; 0 would mean that the key must not exist


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Further conditions and writes of the transaction that elects a node."""

    compare: Sequence[Compare] = ()
    put: Sequence[Put] = ()


async def _unconditional() -> Candidacy | None:
    return Candidacy()


def drain_key(election_key: str, node_id: str) -> str:
    """Return the key that excludes a node from an election while it exists.

    It is below the key of the election, so the watch that a leader keeps on its own key has it too.
    """
    return f"{election_key}/drained/{node_id}"


class Election:
    """Campaigns for the key `elections/<name>`; the term is the key's create revision.

    Args:
        name: Name of the election, such as "lockmgr".
        node_id: Value of the key, for operators and redirects.
        ttl_ms: Length of the lease; after it a crashed leader can be replaced.
        stand: Called before each try; returns None if this node must not be elected now.

    Attributes:
        term: Term of this node's leadership; 0 if it does not lead.
        reachable: Whether etcd answered the last call.
        drained: Excluded nodes; kept up to date while this node leads.
    """

    def __init__(
        self,
        session: EtcdSession,
        name: str,
        node_id: str,
        *,
        ttl_ms: int = 5_000,
        stand: Callable[[], Awaitable[Candidacy | None]] = _unconditional,
    ) -> None:
        self.session, self.node_id, self._ttl_ms = session, node_id, ttl_ms
        self._stand = stand
        self.key = session.key("elections", *name.split("/"))
        self.term = 0
        self.reachable = True
        self.drained: frozenset[str] = frozenset()
        self._valid_until_ms = 0
        self._answered_ms: int | None = None
        self._resigns = asyncio.Event()

    def valid(self) -> bool:
        """Return whether this node leads with more than `SAFETY_MS` of its lease left."""
        return self.session.clock.monotonic_ms() + SAFETY_MS < self._valid_until_ms

    def confirmed_age_ms(self) -> int:
        """Return the time since this node sent the call by which etcd last confirmed its lease."""
        return self.session.clock.monotonic_ms() + self._ttl_ms - self._valid_until_ms

    def in_touch(self) -> bool:
        """Return whether etcd has answered a call that this node sent within one lease time.

        A call that is older proves nothing: another node may have been elected since.
        """
        if self._answered_ms is None:
            return False
        return self.session.clock.monotonic_ms() - self._answered_ms < self._ttl_ms

    def resign(self) -> None:
        """Give up the leadership: `lead` is cancelled and the lease revoked.

        This happens at once, or when the refresh in progress is answered or times out.
        """
        self._resigns.set()
        self._valid_until_ms = 0

    def compare(self) -> Compare:
        """Return a condition that holds only in this term; it never holds for a follower."""
        return Compare(self.key, create_revision=self.term or _NEVER)

    async def run(self, lead: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Campaign until cancelled; while elected run `lead(term)`, which is cancelled on loss.

        If `lead` raises, the leadership is given up and the exception is passed on.
        """
        while True:
            lease: Lease | None = None
            self._resigns.clear()
            try:
                await self._end_earlier_lease()
                sent_ms = self.session.clock.monotonic_ms()
                lease = await self.session.lease(self._ttl_ms)
                self._answered_ms = sent_ms
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

    def _left_ms(self) -> int:
        return self._valid_until_ms - END_MS - self.session.clock.monotonic_ms()

    async def _end_earlier_lease(self) -> None:
        """End the lease of an earlier leadership of this node, of this process or one before it.

        A restarted leader need not wait until the lease of its killed process expires.
        """
        stored = await self.session.get(self.key)
        if stored is not None and stored.value == self.node_id.encode():
            log.info("ends the lease of an earlier leadership key=%s", self.key)
            await self.session.revoke(stored.lease_id)

    async def _campaign(self, lease: Lease, sent_ms: int) -> int:
        """Wait until elected, which sets the term, or until the lease has expired.

        Returns:
            Time at which the lease was last requested: `sent_ms`, or that of a later refresh.
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
            sent_ms = self._answered_ms = refresh_ms

    async def _try(self, lease: Lease, candidacy: Candidacy) -> int | None:
        vacant = Compare(self.key, create_revision=0)
        put = Put(self.key, self.node_id.encode(), lease)
        allowed = Compare(drain_key(self.key, self.node_id), create_revision=0)
        return await self.session.txn(
            compare=[vacant, allowed, *candidacy.compare], put=[put, *candidacy.put]
        )

    async def _wait_for_vacancy(self, lease: Lease) -> None:
        """Wait until this node may be elected, or the lease must be refreshed."""
        # From the revision of the read: that of the key may have been compacted.
        entries, revision = await self.session.get_prefix(self.key)
        self._read_drained(entries)
        vacant = all(stored.key != self.key for stored in entries)
        if vacant and self.node_id not in self.drained:
            return
        with contextlib.suppress(TimeoutError, NoQuorum):  # the refresh shows whether etcd answers
            async with (
                timeouts.timeout(self._ttl_ms / 3000),
                contextlib.aclosing(self.session.watch(self.key, revision + 1)) as answers,
            ):
                async for answer in answers:
                    if any(event.type == event.DELETE for event in answer.events):
                        return

    async def _lead(self, lease: Lease, lead: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(lead(self.term))
            watching = tasks.create_task(self._watch_own_key())
            try:
                await self._hold(lease)
            finally:
                self._valid_until_ms = 0
                log.warning("leadership ends key=%s term=%d", self.key, self.term)
                leading.cancel()
                watching.cancel()

    async def _watch_own_key(self) -> None:
        """Resign as soon as the key is gone: another node has ended the lease, or it has expired.

        The next refresh would show it too, up to a tenth of the lease later. Keeps `drained`.
        """
        while True:
            try:
                entries, revision = await self.session.get_prefix(self.key)
                self._read_drained(entries)
                own = [stored for stored in entries if stored.key == self.key]
                if not own or own[0].create_revision != self.term:
                    break
                async with contextlib.aclosing(
                    self.session.watch(self.key, revision + 1)
                ) as answers:
                    async for answer in answers:
                        if any(event.type == event.DELETE for event in answer.events):
                            break
                        self._note_drained(answer.events)
            except NoQuorum:
                await asyncio.sleep(0.5)  # the refresh shows how long etcd may be unreachable
        log.warning("the lease was ended by another node key=%s term=%d", self.key, self.term)
        self.resign()

    def _read_drained(self, entries: Sequence[KeyValue]) -> None:
        names = map(self._drained_node, (stored.key for stored in entries))
        self.drained = frozenset(filter(None, names))

    def _note_drained(self, writes: Iterable[kv_pb2.Event]) -> None:
        names = [self._drained_node(self.session.key_value(event.kv).key) for event in writes]
        self.drained |= frozenset(filter(None, names))

    def _drained_node(self, key: str) -> str:
        """Return the node that a key excludes from this election; empty for another key."""
        prefix = drain_key(self.key, "")
        return key.removeprefix(prefix) if key.startswith(prefix) else ""

    async def _hold(self, lease: Lease) -> None:
        """Refresh the lease until it is lost, may have expired, or the node resigns.

        A leader that starved answers nothing with less than `SAFETY_MS` left, but as long as the
        lease has not expired no other node was elected: once it is renewed, this one
        continues to lead.
        """
        while self._left_ms() > 0:
            if await wait_until(
                self._resigns, self._ttl_ms // (RENEWALS if self.reachable else 15)
            ):
                return
            sent_ms, left_ms = self.session.clock.monotonic_ms(), self._left_ms()
            try:
                async with timeouts.timeout(max(0, left_ms) / 1_000):
                    if not await lease.refresh():
                        return
            except (NoQuorum, TimeoutError):
                self.reachable = False
                continue
            self.reachable, self._answered_ms = True, sent_ms
            self._valid_until_ms = 0 if self._resigns.is_set() else sent_ms + self._ttl_ms
