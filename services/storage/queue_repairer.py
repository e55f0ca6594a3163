"""Rebuilds damaged entries of consume queues from the log while the node works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batonmq_server.runtime.descriptor_shortage import is_shortage
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_repair import (
    ENTRIES_AT_ONCE,
    QueueRepair,
    apply_repair,
    find_damage,
    read_log,
)
from batonmq_server.storage.core.store import SCANNED_MAX
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

FAILURES_MAX = 10_000


class QueueRepairer:
    """Repairs one queue at a time, when a read of it fails.

    Args:
        in_thread: Runs the blocking reads of the log outside the event loop.
        on_repair: Called once for each repair that changed a file.
    """

    def __init__(
        self, node: StorageNode, in_thread: InThread, on_repair: Callable[[], None]
    ) -> None:
        self._node, self._in_thread, self._on_repair = node, in_thread, on_repair
        self._one_at_a_time = asyncio.Lock()
        self._hopeless: set[tuple[QueueKey, int]] = set()

    async def repair(self, key: QueueKey, offset: int) -> bool:
        """Rebuild the entries that a read at `offset` uses, as far as the log has their batches.

        Returns:
            Whether an entry was changed, so that the read may be repeated. False if the entries are
            good or can't be rebuilt: then the log is damaged.
        """
        async with self._one_at_a_time:
            if (key, offset) in self._hopeless:
                return False
            for first_offset in range(offset, offset + SCANNED_MAX, ENTRIES_AT_ONCE):
                found = find_damage(self._node.store, key, first_offset)
                try:
                    if found is not None and await self._rebuild(found):
                        return True
                except OSError as error:  # for example: retention has removed a segment meanwhile
                    log.warning("consume queue not rebuilt queue=%s error=%s", key, error)
                    if is_shortage(error):
                        return False  # the next read tries again
                await asyncio.sleep(0)
            if len(self._hopeless) < FAILURES_MAX:
                self._hopeless.add((key, offset))
            return False

    async def _rebuild(self, found: QueueRepair) -> bool:
        await self._in_thread(self._read, found)
        changed = apply_repair(self._node.store, found)
        await self._in_thread(self._node.disk.sync, changed)
        if not changed:
            return False
        self._on_repair()
        log.warning(
            "consume queue rebuilt from the log topic_id=%d queue_id=%d first_offset=%d "
            "next_offset=%d files=%s",
            *found.key,
            found.first_offset,
            found.next_offset,
            changed,
        )
        return True

    def _read(self, found: QueueRepair) -> None:
        read_log(self._node.disk, found)
