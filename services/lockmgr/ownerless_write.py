"""Writes a lock that has no owner any more: freed, or removed."""

from __future__ import annotations

import logging

from batonmq_server.lockmgr.core.lock_entry import LockEntry, LockRecord
from batonmq_server.lockmgr.lock_store import LockWrite, WriteConflict
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)


async def write_ownerless(term: Term, entry: LockEntry, lock: LockRecord | None) -> bool | None:
    """Write the lock of a marked entry, or remove it if `lock` is None, and end the change.

    Returns:
        Whether it was written; None, with the entry still marked, if the term has ended.
    """
    result = await term.store.persist(LockWrite(entry.key, lock, entry.revision))
    if not isinstance(result, WriteConflict):
        if lock is None:
            term.table.end_removed(entry.key)
        else:
            term.table.end_freed(entry.key, lock, result, term.now_ms())
        return True
    if result.deposed:
        return None
    log.error("lock in etcd was changed by another writer key=%s", entry.key)
    term.table.end_reloaded(entry.key, result.lock, result.revision, fenced=False)
    return False
