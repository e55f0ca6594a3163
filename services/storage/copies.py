"""A replica's copy of the log: an open data directory that can be cut, or begun anew, in between.

What is derived from the log can't be taken back. So to cut it is to close everything, cut the
files, and recover, as after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from batonmq.common.errors import NotServing
from services.runtime.position import NOWHERE, Position
from services.storage.core.files import Disk
from services.storage.flush import InThread
from services.storage.node import Beginning, Node, begin_anew
from services.storage.serving import Serving

log = logging.getLogger(__name__)

_CHANGING = "this copy of the log is being cut"


class Copy:
    """See the module.

    Args:
        recovered: Opens what is on `disk`; blocks.
        serve: Makes the parts that work on an open directory.
        in_thread: Calls what blocks away from the event loop.

    Attributes:
        writing: Held by whoever may write to the log, or change the directory.
    """

    def __init__(
        self,
        disk: Disk,
        recovered: Callable[[], AbstractContextManager[Node]],
        serve: Callable[[Node], Serving],
        in_thread: InThread,
    ) -> None:
        self._disk, self._recovered, self._serve = disk, recovered, serve
        self._in_thread = in_thread
        self.writing = asyncio.Lock()
        self._stack = ExitStack()
        self._serving: Serving | None = None
        self._opened, self._closing, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def serving(self) -> Serving:
        """What works on the directory now.

        Raises:
            NotServing: it is closed for the moment.
        """
        if self._serving is None or self._closing.is_set():
            raise NotServing(_CHANGING, retry_after_ms=100)
        return self._serving

    @property
    def position(self) -> Position:
        """How far this copy has come; nowhere while it is being changed."""
        if self._serving is None or self._closing.is_set():
            return NOWHERE
        return self._serving.node.position

    async def run(self) -> None:
        """Run what works on the directory, for ever; to be run as one task.

        Raises:
            OSError: the disk has failed.
        """
        while True:
            await self._opened.wait()
            serving = self._serving
            assert serving is not None
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(loop()) for loop in serving.loops]
                await self._closing.wait()
                # No thread may be at work on the directory once these have ended.
                async with (
                    serving.cleaner.one_at_a_time,
                    serving.checkpointer.one_at_a_time,
                    serving.flusher.one_at_a_time,
                ):
                    for task in running:
                        task.cancel()
            self._opened.clear()
            self._idle.set()

    async def open(self) -> None:
        """Open the directory; it is closed."""
        nodes: list[Node] = []
        await self._in_thread(
            lambda _: nodes.append(self._stack.enter_context(self._recovered())), None
        )
        self._serving = self._serve(nodes[0])
        self._closing.clear()
        self._idle.clear()
        self._opened.set()

    async def cut(self, position: int, *, damaged: bool = False) -> None:
        """Forget everything from `position` on, and go on; the caller holds `writing`.

        Args:
            damaged: Some of it was safe: this node must not be master before it has it again.
        """
        serving = await self._stop()
        node = serving.node
        log.warning("log is cut position=%d was=%d", position, node.store.log.next_position)
        await self._in_thread(lambda _: node.cut(position, damaged=damaged), None)
        await self._in_thread(lambda _: self._stack.close(), None)
        await self.open()

    async def begin_anew(self, beginning: Beginning) -> None:
        """Give everything up, and begin there; the caller holds `writing`."""
        await self._stop()
        log.warning("log begins anew position=%d", beginning.segment[0])
        await self._in_thread(lambda _: self._stack.close(), None)
        await self._in_thread(lambda _: begin_anew(self._disk, beginning), None)
        await self.open()

    async def drain(self) -> None:
        """Make everything durable, unless it is being changed, when it is."""
        serving = self._serving
        if serving is None or self._closing.is_set():
            return
        await serving.drain()
        log.info("log closed position=%d", serving.node.store.log.next_position)

    async def close(self) -> None:
        """Close the directory; `run` has ended."""
        self._stack.close()

    async def _stop(self) -> Serving:
        """Let nothing work on the directory any more; what did."""
        serving = self.serving
        self._closing.set()
        serving.flusher.close(_CHANGING)
        serving.pulls.end(NotServing(_CHANGING, retry_after_ms=100))
        await self._idle.wait()
        return serving
