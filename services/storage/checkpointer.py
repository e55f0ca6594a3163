"""Takes checkpoints in the background while the node works, and one at a clean stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from batonmq.errors import BatonError
from batonmq_server.runtime.descriptor_shortage import is_shortage
from batonmq_server.storage.core.checkpoint_writer import CheckpointCapture
from batonmq_server.storage.core.commitlog import NO_SPACE, PositionRange
from batonmq_server.storage.flusher import Flusher, InThread
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

BYTES_MAX = 256 * 1024 * 1024
"""A checkpoint is due once the log has grown by this many bytes."""
INTERVAL_S = 30
"""A checkpoint is due after this time, if the log has grown or index files can be removed."""
_LOOK_S = 1


async def _no_reserve() -> None:
    return


class Checkpointer:
    """Takes checkpoints of a node.

    Args:
        in_thread: Runs the blocking write outside the event loop.
        on_shortage: Called if the process has no free descriptor for a checkpoint.
        on_purge: Called with the segments that a checkpoint has purged.
        free_reserve: Frees a little space, for a checkpoint that frees more.

    Attributes:
        one_at_a_time: Lock held while a checkpoint is taken.
    """

    def __init__(
        self,
        node: StorageNode,
        flusher: Flusher,
        in_thread: InThread,
        on_shortage: Callable[[], None] = lambda: None,
        on_purge: Callable[[Sequence[PositionRange]], None] = lambda _: None,
        free_reserve: Callable[[], Awaitable[None]] = _no_reserve,
    ) -> None:
        self._on_shortage, self._on_purge, self._store = on_shortage, on_purge, node.store
        self._log, self._steps = node.store.log, node.checkpointing
        self._flusher, self._in_thread, self._free_reserve = flusher, in_thread, free_reserve
        self.one_at_a_time = asyncio.Lock()

    def position(self) -> int:
        """Return the position of the last checkpoint: the next start reads the log from there."""
        return self._steps.position

    async def run(self) -> None:
        """Take checkpoints until cancelled; run it as one task.

        Raises:
            OSError: the disk has failed.
        """
        now = asyncio.get_running_loop().time
        taken = now()
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.carry_out()
            grown = self._log.next_position - self._steps.position
            if grown >= BYTES_MAX or (
                (grown or self._steps.has_obsolete) and now() - taken >= INTERVAL_S
            ):
                await self.take()
                taken = now()

    async def carry_out(self) -> None:
        """Carry out the purge orders that are safe, in memory; the next checkpoint records it.

        A leader that has recorded it removes purged segments from the object store. So a follower
        must not read them from there, also if it is elected.
        """
        if self._store.due_orders(self._store.readable_position):
            async with self.one_at_a_time:
                self._steps.carry_out(self._store.readable_position)

    async def take(self) -> bool:
        """Take a checkpoint. Return False if it must be taken later.

        So it is if there is no space for it or no free descriptor, or if the log is not safe.

        Raises:
            OSError: the disk has failed; which index entries are on disk is unknown.
        """
        async with self.one_at_a_time:
            begin = asyncio.get_running_loop().time()
            position = self._log.next_position
            try:
                while (end := self._steps.orders_end) > self._store.readable_position:
                    await self._flusher.wait_until_safe(end)
                capture = self._steps.begin()
                position = capture.position
                for _ in self._steps.collect(capture):
                    await asyncio.sleep(0)
                await self._flusher.wait_until_safe(position)
                await self._write(capture)
            except OSError as error:
                if is_shortage(error):
                    self._on_shortage()
                elif error.errno not in NO_SPACE:
                    raise
                log.warning("no checkpoint now position=%d error=%s", position, error)
                return False
            except BatonError as error:  # the log can't be written, or the wait was abandoned
                log.warning("checkpoint skipped position=%d error=%s", position, error)
                return False
            for _ in self._steps.done(capture):
                await asyncio.sleep(0)
            if capture.purged:
                self._on_purge(capture.purged)
            seconds = asyncio.get_running_loop().time() - begin
            log.info("checkpoint taken position=%d ms=%d", position, seconds * 1000)
            return True

    async def _write(self, capture: CheckpointCapture) -> None:
        """Write a checkpoint; one that purges segments may use the reserve on a full disk.

        Raises:
            OSError: see `CheckpointWriter.write`.
        """
        try:
            await self._in_thread(self._steps.write, capture)
        except OSError as error:
            if not capture.purged or error.errno not in NO_SPACE:
                raise
            await self._free_reserve()
            await self._in_thread(self._steps.write, capture)
