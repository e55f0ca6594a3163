"""A replica's copy of the log: an open data directory that can be cut, or begun anew, in between.

What is derived from the log can't be taken back. So to cut it is to close everything, cut the
files, and recover, as after a crash. A disk that fails is met in the same way: what is not known to
be on it is cut off, however well it can be read just now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager

from batonmq.errors import DiskFull, NotServing
from batonmq_server.runtime.position import NOWHERE, Position
from batonmq_server.runtime.process import Loop
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.node import LogStart, StorageNode, reset_disk

log = logging.getLogger(__name__)

_CHANGING = "this copy of the log is being cut"


class LogCopy:
    """See the module.

    Args:
        recovered: Opens what is on `disk`; blocks.
        serve: Makes the parts that work on an open directory.
        in_thread: Calls what blocks away from the event loop; also who is cancelled waits for it.

    Attributes:
        writing: Held by whoever may write to the log, or change the directory.
        on_failure: Called when the disk has failed: nobody is answered from now on.
    """

    def __init__(
        self,
        disk: Disk,
        recovered: Callable[[], AbstractContextManager[StorageNode]],
        serve: Callable[[StorageNode], StorageComponents],
        in_thread: InThread,
    ) -> None:
        self._disk, self._recovered, self._build = disk, recovered, serve
        self.in_thread = in_thread
        self.writing = asyncio.Lock()
        self._stack = ExitStack()
        self.on_failure: list[Callable[[], None]] = []
        self._components: StorageComponents | None = None
        self._failure: Exception | None = None
        self._safe_position: int | None = (
            None  # what lies beyond in the log has still to be cut off
        )
        self._opened, self._closing, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def components(self) -> StorageComponents:
        """What works on the directory now.

        Raises:
            NotServing: it is closed for the moment, or its disk has failed.
        """
        if self._failure is not None:
            raise NotServing(f"the disk has failed: {self._failure}", retry_after_ms=500)
        if self._components is None or self._closing.is_set():
            raise NotServing(_CHANGING, retry_after_ms=100)
        return self._components

    @property
    def failed(self) -> bool:
        """Whether the disk has failed, and `mend` was not called since."""
        return self._failure is not None

    @property
    def position(self) -> Position:
        """How far this copy has come; nowhere while it is being changed, or its disk has failed."""
        if self._components is None or self._closing.is_set() or self._failure is not None:
            return NOWHERE
        return self._components.node.position

    async def run(self) -> None:
        """Run what works on the directory, for ever; to be run as one task."""
        while True:
            await self._opened.wait()
            components = self._components
            assert components is not None
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._work(loop)) for loop in components.loops]
                await self._closing.wait()
                # Nobody may be at work on the directory any more after this, not even `drain`.
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
        """Open the directory; it is closed.

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
        """Forget everything from `position` on, and go on; the caller holds `writing`.

        Args:
            damaged: Some of it was safe: this node must not be leader before it has it again.

        Raises:
            NotServing: the disk fails.
        """
        node = self.components.node
        await self._stop()
        log.warning("log is cut position=%d was=%d", position, node.store.log.next_position)
        async with self._reopened():
            await self.in_thread(lambda _: node.cut(position, damaged=damaged), None)

    async def reset(self, start: LogStart) -> None:
        """Give everything up, and begin there; the caller holds `writing`.

        Raises:
            NotServing: the disk fails.
        """
        await self._stop()
        log.warning("log begins anew position=%d", start.segment[0])
        async with self._reopened():
            await self.in_thread(lambda _: self._stack.close(), None)
            await self.in_thread(lambda _: reset_disk(self._disk, start), None)

    def fail(self, error: Exception) -> None:
        """Note that the disk has failed: from now on nobody is answered."""
        if self._failure is None:
            log.error("the disk has failed position=%s error=%s", self.position, error)
            self._failure = error
            for call in self.on_failure:
                call()

    async def recover(self) -> None:
        """After a failure, go on from what is known to be on the disk; the caller holds `writing`.

        A sync that has failed is not tried again: the kernel may have dropped what it could not
        write, and then the next one succeeds. What was not synced was answered for by nobody here.

        Raises:
            NotServing: the disk fails again.
        """
        if self._failure is None:
            return
        if self._closing.is_set():  # it has failed again while nothing was open
            async with self._reopened():
                pass
        else:
            self._safe_position = self._node.store.log.synced_position
        if (safe_position := self._safe_position) is not None:
            node = self._node
            await self._stop()
            async with self._reopened():
                position = min(safe_position, node.store.log.next_position)
                await self.in_thread(lambda _: node.cut(position), None)
            self._safe_position = None
        log.warning("the disk works again position=%s", self.position)

    async def drain(self) -> None:
        """Make everything durable, unless it is being changed, when it is."""
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
        """Close the directory after what is done to it inside, and open it again.

        That may stay half done as by a crash, and then is done anew, or no longer asked for.

        Raises:
            NotServing: the disk fails; `mend` opens the directory.
        """
        try:
            try:
                yield
            finally:
                await self.in_thread(lambda _: self._stack.close(), None)
            await self.open()
        except (OSError, DiskFull) as error:
            self.fail(error)
            raise NotServing(f"the disk fails: {error}", retry_after_ms=500) from error

    async def _stop(self) -> None:
        """Let nothing work on the directory any more."""
        components = self._components
        assert components is not None
        self._closing.set()
        components.flusher.close(_CHANGING)
        components.pulls.end(NotServing(_CHANGING, retry_after_ms=100))
        await self._idle.wait()
