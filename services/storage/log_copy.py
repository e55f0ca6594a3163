"""A replica's copy of the log: a data directory that can be cut or reset while the node runs.

The state that is derived from the log can't be undone. So to cut the log means: stop all
components, close the directory, cut the files, and recover as after a crash. A disk failure is
handled in the same way: what is not known to be on the disk is cut off, even if it can be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager

from batonmq.errors import DiskFull, NotServing, Unreachable
from batonmq_server.runtime.app import Loop
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.flusher import InThread, disk_failure
from batonmq_server.storage.node import LogStart, StorageNode, reset_disk

log = logging.getLogger(__name__)

_CHANGING = "this copy of the log is being cut"


class LogCopy:
    """The data directory of a replica, and the components that work on it while it is open.

    Args:
        recovered: Opens the directory on `disk` and recovers it; blocks.
        build: Builds the components for an open directory.
        in_thread: Runs blocking calls outside the event loop; waits for them even if cancelled.

    Attributes:
        writing: Lock for writing to the log and for changing the directory.
        on_failure: Called when the disk has failed; from then on no call is served.
    """

    def __init__(
        self,
        disk: Disk,
        recovered: Callable[[], AbstractContextManager[StorageNode]],
        build: Callable[[StorageNode], StorageComponents],
        in_thread: InThread,
    ) -> None:
        self._disk, self._recovered, self._build = disk, recovered, build
        self.in_thread = in_thread
        self.writing = asyncio.Lock()
        self._stack = ExitStack()
        self.on_failure: list[Callable[[], None]] = []
        self._components: StorageComponents | None = None
        self._failure: Exception | None = None
        self._cut_at: int | None = None  # after a failure: the log must still be cut here
        self._opened, self._closing, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def components(self) -> StorageComponents:
        """The components of the open directory.

        Raises:
            NotServing: the directory is being changed, or the disk has failed.
        """
        if self._failure is not None:
            raise disk_failure(f"the disk has failed: {self._failure}")
        if self._components is None or self._closing.is_set():
            raise NotServing(_CHANGING, retry_after_ms=100)
        return self._components

    @property
    def failed(self) -> bool:
        """Whether the disk has failed and `recover` has not succeeded since."""
        return self._failure is not None

    @property
    def position(self) -> ReplicaPosition:
        """End of this copy; NO_POSITION while it is being changed or after its disk has failed."""
        if self._components is None or self._closing.is_set() or self._failure is not None:
            return NO_POSITION
        return self._components.node.position

    async def run(self) -> None:
        """Run the loops of the components until cancelled; run it as one task."""
        while True:
            await self._opened.wait()
            components = self._components
            assert components is not None
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._work(loop)) for loop in components.loops]
                await self._closing.wait()
                # After this no component works on the directory any more, not even `drain`.
                async with (
                    components.cleaner.one_at_a_time,
                    components.checkpointer.one_at_a_time,
                    components.flusher.one_at_a_time,
                ):
                    for task in running:
                        task.cancel()
            self._opened.clear()
            self._idle.set()

    async def open(self) -> None:
        """Open the directory, which is closed now.

        Raises:
            OSError: the disk fails.
        """
        nodes: list[StorageNode] = []
        await self.in_thread(
            lambda _: nodes.append(self._stack.enter_context(self._recovered())), None
        )
        self._components, self._failure = self._build(nodes[0]), None
        self._closing.clear()
        self._idle.clear()
        self._opened.set()

    async def cut(self, position: int, *, damaged: bool = False) -> None:
        """Cut the log at `position` and open it again; the caller holds `writing`.

        Args:
            damaged: Safe messages are lost by this cut: the node must not be elected until it has
                fetched them again.

        Raises:
            NotServing: the disk fails.
        """
        node = self.components.node
        await self._stop()
        log.warning("cutting the log position=%d end=%d", position, node.store.log.next_position)
        async with self._reopened():
            await self.in_thread(lambda _: node.cut(position, damaged=damaged), None)

    async def reset(self, start: LogStart) -> None:
        """Discard the whole copy and open an empty one at `start`; the caller holds `writing`.

        Raises:
            NotServing: the disk fails.
        """
        await self._stop()
        log.warning("discarding the log position=%d", start.segment[0])
        async with self._reopened():
            await self.in_thread(lambda _: self._stack.close(), None)
            await self.in_thread(lambda _: reset_disk(self._disk, start), None)

    def fail(self, error: Exception) -> None:
        """Record that the disk has failed: from now on no call is served."""
        if self._failure is None:
            log.error("disk failed position=%s error=%s", self.position, error)
            self._failure = error
            for call in self.on_failure:
                call()

    async def recover(self) -> None:
        """After a disk failure, reopen the log up to what is synced; the caller holds `writing`.

        A failed sync is not repeated: the kernel may have dropped the pages that it could not
        write, and the next sync would succeed without them. So the log is cut at the position of
        the last good sync; nothing after it was acknowledged by this node.

        Raises:
            NotServing: the disk fails again.
        """
        if self._failure is None:
            return
        if self._closing.is_set():  # the disk failed again while the directory was closed
            async with self._reopened():
                pass
        else:
            self._cut_at = self._node.store.log.synced_position
        if (cut_at := self._cut_at) is not None:
            node = self._node
            await self._stop()
            async with self._reopened():
                position = min(cut_at, node.store.log.next_position)
                await self.in_thread(lambda _: node.cut(position), None)
            self._cut_at = None
        log.warning("disk works again position=%s", self.position)

    async def drain(self) -> None:
        """Make everything durable; nothing to do while the directory is being changed."""
        components = self._components
        if components is None or self._closing.is_set() or self._failure is not None:
            return
        await components.drain()
        log.info("log closed position=%d", components.node.store.log.next_position)

    async def close(self) -> None:
        """Close the directory; `run` has ended."""
        self._stack.close()

    @property
    def _node(self) -> StorageNode:
        assert self._components is not None
        return self._components.node

    async def _work(self, loop: Loop) -> None:
        try:
            await loop()
        except OSError as error:
            self.fail(error)

    @asynccontextmanager
    async def _reopened(self) -> AsyncIterator[None]:
        """Run the body on the stopped directory, then close it and open it again.

        If the body fails, the change is incomplete, as after a crash. It is then repeated, or no
        longer needed.

        Raises:
            NotServing: the disk fails, or the object store does while the indexes are rebuilt from
                it; `recover` opens the directory again.
        """
        try:
            try:
                yield
            finally:
                await self.in_thread(lambda _: self._stack.close(), None)
            await self.open()
        except (OSError, DiskFull, Unreachable) as error:
            self.fail(error)
            raise disk_failure(f"the disk has failed: {error}") from error

    async def _stop(self) -> None:
        """Stop all components of the directory."""
        components = self._components
        assert components is not None
        self._closing.set()
        components.flusher.close(_CHANGING)
        components.end_reads(NotServing(_CHANGING, retry_after_ms=100))
        await self._idle.wait()
