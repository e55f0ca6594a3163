"""Lock entries in etcd, under locks/<group>/<topic>/<broker>/<queue_id>."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from baton.lockmgr.v1 import stored_lock_pb2
from batonmq._common.aio import in_steps
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
_WRITES_MAX = 100
_COMPARES_MAX = 128
"""etcd's limit per transaction: the leader's guard, the entries and their groups' gates count."""


@dataclass(frozen=True, slots=True)
class LockWrite:
    """One lock to write.

    Attributes:
        lock: None to remove the entry.
        revision: Modification revision that etcd must have; 0 for a queue without an entry.
        gate: A condition on the group's gate; None if any gate will do.
    """

    key: GroupQueue
    lock: LockRecord | None
    revision: int
    gate: Compare | None = None


@dataclass(frozen=True, slots=True)
class WriteConflict:
    """A write that was rejected.

    Attributes:
        lock: What etcd has instead; None if it has no entry.
        revision: Modification revision of `lock`.
        deposed: Whether it was rejected because this term is over.
        gate_changed: Whether it was rejected because of the group's gate alone.
    """

    lock: LockRecord | None
    revision: int
    deposed: bool = False
    gate_changed: bool = False


WriteResult = int | WriteConflict


class LockStore:
    """Reads and writes locks in one term.

    Args:
        guard: Condition of every write: the leader's election key is this term's.
    """

    def __init__(self, session: EtcdSession, guard: Compare, random: Random) -> None:
        self._session, self._guard, self._random = session, guard, random
        self._writes: Batcher[LockWrite, WriteResult] = Batcher(self._write, items_max=_WRITES_MAX)

    async def run(self) -> None:
        """Make the queued writes until cancelled."""
        await self._writes.run()

    async def load(self) -> list[tuple[GroupQueue, LockRecord, int]]:
        """Return every entry with its lock and modification revision.

        Raises:
            NoQuorum: etcd did not answer; the caller must not go on with an empty table.
        """
        stored_locks, _ = await self._session.get_prefix(PREFIX)
        entries = []
        async for stored in in_steps(stored_locks):  # else 100,000 would take the leader's lease
            message = stored_lock_pb2.StoredLock.FromString(stored.value)
            entries.append((key_from_pb(message.queue), lock_from_pb(message), stored.mod_revision))
        return entries

    async def persist(self, write: LockWrite) -> WriteResult:
        """Write one lock, and return once it is known whether it was written.

        Returns:
            The revision of the write, or the conflict.
        """
        return await self._writes.call(write)

    async def _write(self, writes: Sequence[LockWrite]) -> Sequence[WriteResult]:
        if len(self._compares(writes)) > _COMPARES_MAX:
            middle = len(writes) // 2
            return [*await self._write(writes[:middle]), *await self._write(writes[middle:])]
        revision = await self._txn(writes)
        if revision is not None:
            return [revision] * len(writes)
        # Rejected, or made by an earlier try with a lost answer: read each back.
        results = [await self._read_back(write) for write in writes]
        if len(writes) == 1:
            return results
        for index, (write, result) in enumerate(zip(writes, results, strict=True)):
            if isinstance(result, WriteConflict):
                alone = await self._txn([write])
                results[index] = await self._read_back(write) if alone is None else alone
        return results

    async def _txn(self, writes: Sequence[LockWrite]) -> int | None:
        """Repeat the transaction until its outcome is known; None if it was rejected.

        A try with a lost answer may be applied later, but only while its comparisons hold. Once
        a repetition was applied or rejected, they never hold again.
        """
        compare = self._compares(writes)
        put = [
            Put(_key(w.key), lock_to_pb(w.key, w.lock).SerializeToString())
            for w in writes
            if w.lock is not None
        ]
        delete = [_key(w.key) for w in writes if w.lock is None]
        tries = 0
        while True:
            try:
                return await self._session.txn(compare=compare, put=put, delete=delete)
            except NoQuorum as error:
                log.warning("outcome of the write not known locks=%d error=%s", len(writes), error)
            await self._pause(tries)
            tries += 1

    def _compares(self, writes: Sequence[LockWrite]) -> list[Compare]:
        entries = [Compare(_key(w.key), mod_revision=w.revision) for w in writes]
        gates = dict.fromkeys(w.gate for w in writes if w.gate is not None)
        return [self._guard, *entries, *gates]

    async def _read_back(self, write: LockWrite) -> WriteResult:
        stored = await self._get(_key(write.key))
        lock = _lock(stored) if stored else None
        revision = stored.mod_revision if stored else 0
        if lock == write.lock and revision != write.revision:
            return revision
        leader = await self._get(self._guard.key)
        deposed = leader is None or leader.create_revision != self._guard.create_revision
        gate_changed = write.gate is not None and revision == write.revision and not deposed
        return WriteConflict(lock, revision, deposed, gate_changed)

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
