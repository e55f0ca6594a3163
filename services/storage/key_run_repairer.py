"""Rebuilds damaged runs of the key index from the log while the node works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batonmq_server.storage.core.files import BadIndex
from batonmq_server.storage.core.key_repair import KeyRunRepair, rewrite
from batonmq_server.storage.core.keyindex import RunExtent
from batonmq_server.storage.core.queue_repair import segment_spans
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)


class KeyRunRepairer:
    """Repairs one run at a time, when a search finds the damage.

    Args:
        in_thread: Runs the blocking calls outside the event loop.
        on_repair: Called with the extent of each run that was rebuilt.
    """

    def __init__(
        self, node: StorageNode, in_thread: InThread, on_repair: Callable[[RunExtent], None]
    ) -> None:
        self._node, self._in_thread, self._on_repair = node, in_thread, on_repair
        self._one_at_a_time = asyncio.Lock()

    async def repair(self, extent: RunExtent) -> bool:
        """Rebuild a run; return whether the search may be repeated.

        False if the log is damaged there, too, or the file can't be written.
        """
        async with self._one_at_a_time:
            store = self._node.store
            if extent.first_position < store.log.first_position:
                return False  # retention has removed the segment meanwhile
            spans = segment_spans(store.log, extent.first_position, extent.next_position)
            repair = KeyRunRepair(extent, spans)
            try:
                await self._in_thread(self._rewrite, repair)
            except (BadIndex, OSError) as error:
                log.warning(
                    "key index not rebuilt first_position=%d error=%s", extent.first_position, error
                )
                return False
            assert repair.run is not None
            path = repair.run.path
            if not store.keys.replace(repair.run):  # retention has removed it meanwhile
                await self._in_thread(self._node.disk.remove, path)
                return True
            self._on_repair(extent)
            log.warning("key index rebuilt from the log file=%s", path)
            return True

    def _rewrite(self, repair: KeyRunRepair) -> None:
        rewrite(self._node.disk, repair)
