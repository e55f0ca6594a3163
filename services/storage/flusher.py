"""Group commit: one sync in a worker thread covers everything written before it began.

While it runs the loop goes on taking appends; they ride in the next one. A sync that fails is not
tried again: the kernel may have dropped the pages, so a second try proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from batonmq.errors import NotServing
from batonmq_server.storage.core.commitlog import UnsyncedFiles
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

InThread = Callable[[Callable[[Any], None], Any], Awaitable[None]]


async def in_thread(call: Callable[[Any], None], argument: Any) -> None:
    """Until `call` has returned in another thread, even for who is cancelled meanwhile.

    So nobody is at work any more on what a caller gives back, or closes, once it has ended. What
    `call` raises after the cancellation is lost.
    """
    job = asyncio.get_running_loop().run_in_executor(None, call, argument)
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        while not job.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([job])
        raise


class Flusher:
    """Syncs the log and wakes those who wait for it.

    Args:
        grown: Called with the queues in which readers see more than before.
        took: Called with the seconds that a sync took.
        interval_ms: Time between syncs nobody waits for; 0 syncs at once.
        in_thread: Makes the blocking call that syncs.

    Attributes:
        one_at_a_time: Held while the disk syncs.
        on_sync: Called with the position up to which the log is on disk, each time it is.
    """

    def __init__(
        self,
        node: StorageNode,
        grown: Callable[[frozenset[QueueKey]], None],
        took: Callable[[float], None],
        interval_ms: int = 0,
        in_thread: InThread = in_thread,
    ) -> None:
        self._in_thread = in_thread
        self._store, self._node, self._grown = node.store, node, grown
        self._took, self._interval_ms = took, interval_ms
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._wrote, self._urgent = asyncio.Event(), asyncio.Event()
        self.one_at_a_time = asyncio.Lock()
        self._failure: Exception | None = None
        self._sync_failure: OSError | None = None
        self._closed = ""
        self.on_sync: list[Callable[[int], None]] = []

    def check(self) -> None:
        """Refuse what would need the log after it was closed, or the disk after it has failed.

        Raises:
            NotServing: it has.
        """
        if self._closed:
            raise NotServing(self._closed, retry_after_ms=100)
        if self._failure is not None:
            raise NotServing(f"the log can't be written: {self._failure}", retry_after_ms=500)

    def notify_written(self) -> None:
        """Note that the log has grown."""
        self._wrote.set()

    async def wait_until_safe(self, position: int) -> None:
        """Until everything below `position` is safe: on disk, and where else it has to be.

        Raises:
            NotServing: the disk has failed, or somebody gave up; not known whether it is safe.
        """
        self.check()
        if position <= self._store.readable_position:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((position, future))
        if position > self._store.log.synced_position:
            self._wrote.set()
            self._urgent.set()
        await future

    def confirmed(self, position: int) -> None:
        """Everything below `position` is where else it has to be."""
        self._grown(self._store.confirmed(position))
        self._release()

    def fail_waiters(self, why: str) -> None:
        """Let nobody wait any longer: who waits is told that nothing is known."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(NotServing(why, retry_after_ms=100))

    def close(self, why: str) -> None:
        """As `give_up`, for good."""
        self._closed = why
        self.fail_waiters(why)

    def fail(self, error: Exception) -> None:
        """Stop for good: what is on disk is not known. `run` raises the error."""
        if self._failure is None:
            log.error("log can't be written or synced error=%s", error)
            self._failure = error
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(
                    NotServing(f"the log can't be written: {error}", retry_after_ms=500)
                )
        self._wrote.set()
        self._urgent.set()

    async def run(self) -> None:
        """Sync for ever; to be run as one task.

        Raises:
            OSError: the disk has failed.
        """
        while True:
            await self._wrote.wait()
            if self._interval_ms and not self._urgent.is_set():
                await self._pause()
            self._wrote.clear()
            self._urgent.clear()
            await self.sync()

    async def sync(self) -> None:
        """Sync what is written now; not after `close`, when the files may be closed, too.

        Raises:
            OSError: the disk has failed.
        """
        async with self.one_at_a_time:
            if self._closed:
                return
            if self._failure is not None:
                raise self._failure
            unsynced = self._store.log.unsynced()
            now = asyncio.get_running_loop().time
            begin = now()
            try:
                await self._in_thread(self._sync, unsynced)
            finally:
                if self._sync_failure is not None:
                    self.fail(self._sync_failure)
            self._took(now() - begin)
            self._grown(self._store.synced(unsynced.position))
            for call in self.on_sync:
                call(unsynced.position)
            self._release()

    def _sync(self, unsynced: UnsyncedFiles) -> None:
        try:
            self._node.sync(unsynced)
        except OSError as error:
            self._sync_failure = error  # known also if who waits for it is cancelled
            raise

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._interval_ms / 1000):
                await self._urgent.wait()
        except TimeoutError:
            return

    def _release(self) -> None:
        position = self._store.readable_position
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if item[0] > position:
                self._waiting.append(item)
            elif not item[1].done():
                item[1].set_result(None)
