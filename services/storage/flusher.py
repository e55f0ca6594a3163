"""Group commit: one sync beside the event loop covers everything written before it began.

Appends continue while a sync runs; the next sync covers them. A failed sync is not repeated: the
kernel may have dropped the pages, so a second attempt that succeeds proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from batonmq._common import timeouts
from batonmq._common.outside_call import OutsideCall
from batonmq._common.threads import DaemonThreads
from batonmq.errors import NotServing
from batonmq_server.runtime.descriptor_shortage import is_shortage
from batonmq_server.storage.core.commitlog import UnsyncedFiles
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

SHORTAGE_PAUSE_S = 1.0
_THREADS = DaemonThreads("disk")
InThread = Callable[[Callable[[Any], None], Any], Awaitable[None]]
BeginSync = Callable[[int], OutsideCall[None] | None]
"""Begins the sync of a file, given by its descriptor; see `KernelSync.begin`."""


async def in_thread(call: Callable[[Any], None], argument: Any) -> None:
    """Run `call` in another thread and wait until it has returned, even if cancelled meanwhile.

    So the thread never works on a file that the caller has closed. An error that `call` raises
    after the cancellation is lost.
    """
    await _THREADS.run(partial(call, argument))


def waiting_for_descriptors(in_thread: InThread, on_shortage: Callable[[], None]) -> InThread:
    """Return `in_thread` for calls that may be repeated if the process has no free descriptor.

    Such a call is repeated every second until it gets one.

    Args:
        on_shortage: Called each time a call fails for lack of a descriptor.
    """

    async def run(call: Callable[[Any], None], argument: Any) -> None:
        while True:
            try:
                return await in_thread(call, argument)
            except OSError as error:
                if not is_shortage(error):
                    raise
                on_shortage()
                log.warning("work waits for a free file descriptor error=%s", error)
            await asyncio.sleep(SHORTAGE_PAUSE_S)

    return run


def disk_failure(message: str) -> NotServing:
    """Return the error of calls to a node whose disk has failed."""
    return NotServing(
        message, remedy="Check the disk of the node, and its log.", retry_after_ms=500
    )


class Flusher:
    """Syncs the log and wakes the calls that wait for it.

    Args:
        grown: Called with the queues in which new messages have become visible.
        took: Called with the duration of each sync, in seconds.
        interval_ms: Time between syncs that no call waits for; 0 syncs at once.
        in_thread: Runs a blocking sync outside the event loop.
        begin_sync: Syncs a file without a thread; it returns None if a thread has to sync it.

    Attributes:
        one_at_a_time: Lock held while the disk syncs.
        on_sync: Called after each sync with the position up to which the log is on disk.
    """

    def __init__(
        self,
        node: StorageNode,
        grown: Callable[[frozenset[QueueKey]], None],
        took: Callable[[float], None],
        interval_ms: int = 0,
        in_thread: InThread = in_thread,
        begin_sync: BeginSync = lambda _: None,
    ) -> None:
        self._in_thread, self._begin_sync = in_thread, begin_sync
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
        """Check that the log can be written.

        Raises:
            NotServing: the log is closed, or the disk has failed.
        """
        if self._closed:
            raise NotServing(self._closed, retry_after_ms=100)
        if self._failure is not None:
            raise disk_failure(f"the log can't be written: {self._failure}")

    def notify_written(self) -> None:
        """Record that the log has grown, so that `run` syncs it."""
        self._wrote.set()

    async def wait_until_safe(self, position: int) -> None:
        """Wait until everything below `position` is safe: on this disk and on the in-sync set.

        Raises:
            NotServing: the disk has failed or the wait was ended; whether it is safe is unknown.
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
        """Record that the whole in-sync set has everything below `position`."""
        self._grown(self._store.confirmed(position))
        self._release()

    def fail_waiters(self, why: str) -> None:
        """Fail all waiting calls with NotServing: whether their messages are safe is unknown."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(NotServing(why, retry_after_ms=100))

    def close(self, why: str) -> None:
        """Close the log: as `fail_waiters`, and all later calls fail too."""
        self._closed = why
        self.fail_waiters(why)

    def fail(self, error: Exception) -> None:
        """Stop after a disk error: what is on disk is unknown. `run` raises `error`."""
        if self._failure is None:
            log.error("log can't be written or synced error=%s", error)
            self._failure = error
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(disk_failure(f"the log can't be written: {error}"))
        self._wrote.set()
        self._urgent.set()

    async def run(self) -> None:
        """Sync until cancelled; run it as one task.

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
        """Sync what is written now; does nothing after `close`, as the files may be closed.

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
                if not await self._synced_without_thread(unsynced):
                    await self._in_thread(self._sync, unsynced)
            finally:
                if self._sync_failure is not None:
                    self.fail(self._sync_failure)
            self._took(now() - begin)
            self._grown(self._store.synced(unsynced.position))
            for call in self.on_sync:
                call(unsynced.position)
            self._release()

    async def _synced_without_thread(self, unsynced: UnsyncedFiles) -> bool:
        for file in unsynced.files:
            begun = self._begin_sync(file.descriptor)
            if begun is None:
                return False
            try:
                await begun.finish()
            finally:
                if isinstance(begun.error, OSError):
                    self._sync_failure = begun.error  # kept in case the task is cancelled
        with self._failure_kept():
            self._node.note_synced(unsynced.position)
        return True

    def _sync(self, unsynced: UnsyncedFiles) -> None:
        with self._failure_kept():
            self._node.sync(unsynced)

    @contextmanager
    def _failure_kept(self) -> Iterator[None]:
        """Keep the failure of the disk, in case the waiting task is cancelled."""
        try:
            yield
        except OSError as error:
            self._sync_failure = error
            raise

    async def _pause(self) -> None:
        try:
            async with timeouts.timeout(self._interval_ms / 1000):
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
