"""Lock entries in etcd, under locks/<group>/<topic>/<broker>/<queue_id>."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from baton.lockmgr.v1 import stored_lock_pb2
from batonmq._common.backoff import Backoff
from batonmq._common.batcher import Batcher
from batonmq._core.queues import GroupQueue
from batonmq.errors import NoQuorum
from batonmq_server.lockmgr.core.lock_entry import LockRecord
from batonmq_server.lockmgr.lock_proto import key_from_pb, lock_from_pb, lock_to_pb
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put

log = logging.getLogger(__name__)

PREFIX = "locks/"
BACKOFF = Backoff(first_ms=50, delay_ms_max=2_000)
_CHANGES_MAX = 100
_COMPARES_MAX = 128
"""etcd takes no more per transaction: the leader's guard, the entries, their groups' gates."""


@dataclass(frozen=True, slots=True)
class LockWrite:
    """A lock to be written over the one of `revision`; 0 for a queue that has no entry.

    `gate`: what must hold of the group's gate; None for a change that any gate allows.
    """

    key: GroupQueue
    lock: LockRecord
    revision: int
    gate: Compare | None = None


@dataclass(frozen=True, slots=True)
class WriteConflict:
    """A change that was not made, and what stands in etcd instead.

    `deposed`: because this term is over; `gate`: because of the group's gate alone.
    """

    lock: LockRecord | None
    revision: int
    deposed: bool = False
    gate: bool = False


WriteResult = int | WriteConflict


class LockStore:
    """Writes of one term: each only while the leader's election key is its own.

    Args:
        guard: Holds as long as this term leads.
    """

    def __init__(self, session: EtcdSession, guard: Compare, random: Random) -> None:
        self._session, self._guard, self._random = session, guard, random
        self._changes: Batcher[LockWrite, WriteResult] = Batcher(
            self._write, items_max=_CHANGES_MAX
        )

    async def run(self) -> None:
        """Write what is asked for, for ever; to be run as one task."""
        await self._changes.run()

    async def load(self) -> list[tuple[GroupQueue, LockRecord, int]]:
        """Every entry with its lock and modification revision.

        Raises:
            NoQuorum: not known; an empty table must never be served in its place.
        """
        found, _ = await self._session.get_prefix(PREFIX)
        entries = []
        for stored in found:
            message = stored_lock_pb2.StoredLock.FromString(stored.value)
            entries.append((key_from_pb(message.queue), lock_from_pb(message), stored.mod_revision))
        return entries

    async def persist(self, change: LockWrite) -> WriteResult:
        """Make one change; returns once it is known whether it was made.

        Returns:
            The entry's new revision, or what stands there instead.
        """
        return await self._changes.call(change)

    async def _write(self, changes: Sequence[LockWrite]) -> Sequence[WriteResult]:
        if len(self._compares(changes)) > _COMPARES_MAX:
            middle = len(changes) // 2
            return [*await self._write(changes[:middle]), *await self._write(changes[middle:])]
        revision = await self._txn(changes)
        if revision is not None:
            return [revision] * len(changes)
        # Refused, or made by an earlier try whose answer was lost: look at each.
        outcomes = [await self._read_back(change) for change in changes]
        if len(changes) == 1:
            return outcomes
        for place, (change, outcome) in enumerate(zip(changes, outcomes, strict=True)):
            if isinstance(outcome, WriteConflict):
                alone = await self._txn([change])
                outcomes[place] = await self._read_back(change) if alone is None else alone
        return outcomes

    async def _txn(self, changes: Sequence[LockWrite]) -> int | None:
        """Repeat the transaction until its outcome is known.

        A try whose answer was lost may still be made later, but only as long as its comparisons
        hold: once a repetition has been made or refused, nothing of it can land any more.
        """
        compare = self._compares(changes)
        put = [Put(_key(c.key), lock_to_pb(c.key, c.lock).SerializeToString()) for c in changes]
        tries = 0
        while True:
            try:
                return await self._session.txn(compare=compare, put=put)
            except NoQuorum as error:
                log.warning("locks not known to be written count=%d error=%s", len(put), error)
            await self._pause(tries)
            tries += 1

    def _compares(self, changes: Sequence[LockWrite]) -> list[Compare]:
        entries = [Compare(_key(c.key), mod_revision=c.revision) for c in changes]
        gates = dict.fromkeys(c.gate for c in changes if c.gate is not None)
        return [self._guard, *entries, *gates]

    async def _read_back(self, change: LockWrite) -> WriteResult:
        stored = await self._get(_key(change.key))
        lock = _lock(stored) if stored else None
        revision = stored.mod_revision if stored else 0
        if lock == change.lock and revision != change.revision:
            return revision
        leader = await self._get(self._guard.key)
        deposed = leader is None or leader.create_revision != self._guard.create_revision
        gate = change.gate is not None and revision == change.revision and not deposed
        return WriteConflict(lock, revision, deposed, gate)

    async def _get(self, key: str) -> KeyValue | None:
        tries = 0
        while True:
            try:
                return await self._session.get(key)
            except NoQuorum:
                await self._pause(tries)
                tries += 1

    async def _pause(self, tries: int) -> None:
        await asyncio.sleep(BACKOFF.delay_ms(tries, self._random) / 1000)


def _key(key: GroupQueue) -> str:
    return EtcdSession.key("locks", key.group, key.topic, key.broker, str(key.queue_id))


def _lock(stored: KeyValue) -> LockRecord:
    return lock_from_pb(stored_lock_pb2.StoredLock.FromString(stored.value))
