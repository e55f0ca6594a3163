"""Reads segments that are only in the object store: cache, read-ahead, deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from batonmq._common.threads import DaemonThreads
from batonmq.admin.backup_store import open_object_store
from batonmq.errors import BatonError, DataLoss, LimitExceeded, NotServing, Unreachable
from batonmq_server.runtime.call_tasks import CallTasks
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.tier import (
    FETCH_BLOCKS,
    BlockCache,
    BlockKey,
    NotCached,
    SegmentName,
    TierManifest,
    fetch_ranges,
)
from batonmq_server.storage.core.tier_file import FetchBlocks
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.tier_store import ObjectFiles, SegmentStore, unreachable
from batonmq_server.storage.timed_objects import TimedObjects

Value = TypeVar("Value")
CALLS_MAX = 8
"""Calls of the store at once; a call that takes longer than a reader waits does not count."""
AHEAD = 3
"""Ranges that are read ahead for a reader that reads one range after another: 12 MiB."""
HELD_MAX = 128
"""Blocks that one search holds: 32 MiB."""
_Range = tuple[SegmentName, int]
_THREADS = DaemonThreads("object-store")


async def in_store_thread(call: Callable[[Any], None], argument: Any) -> None:
    """Run a call of the object store in a thread; a caller that is cancelled does not wait for it.

    The threads are not those of the local disk, so a store that hangs delays no sync of the log. A
    call that continues after its caller writes or removes what its caller was to.
    """
    await asyncio.wrap_future(_THREADS.submit(partial(call, argument)))


class RemoteReads(Protocol):
    """Fetches what the log has only in the object store."""

    async def reading(self, call: Callable[[], Value]) -> Value:
        """Return the result of `call`, which reads the log; fetch what it misses."""
        ...

    async def fetch(self, miss: NotCached) -> object:
        """Fetch missing blocks, so that the read may be repeated."""
        ...


class LocalReads:
    """The reads of a node without an object store: nothing is ever missing."""

    async def reading(self, call: Callable[[], Value]) -> Value:
        """Return the result of `call`."""
        return call()

    async def fetch(self, miss: NotCached) -> None:
        """See RemoteReads; never called."""
        raise miss


class TierReader:
    """Reads blocks of the store into a cache, which the log reads. Run `run` as one task.

    Args:
        timeout_ms: Time that a caller waits for the store.
        in_thread: Runs calls of the store outside the event loop.

    Attributes:
        in_thread: As given.
        on_read: Called with the bytes that were read from the store.
        on_failure: Called when a reader can't get what it needs.
        may_block: Whether a read of the log waits for the store in its own thread: true while a
            directory is recovered.
    """

    def __init__(
        self,
        store: SegmentStore,
        in_thread: InThread,
        *,
        cache_bytes: int,
        timeout_ms: int,
    ) -> None:
        self.store, self.in_thread = store, in_thread
        self._timeout_ms = timeout_ms
        self._cache = BlockCache(cache_bytes)
        self._calls = asyncio.Semaphore(CALLS_MAX)
        self._running: dict[_Range, asyncio.Future[dict[int, bytes]]] = {}
        self._tasks = CallTasks("the reader of the object store")
        self.may_block = False
        self.on_read: Callable[[int], None] = lambda _: None
        self.on_failure: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Read what callers need, until cancelled."""
        async with self._tasks.open():
            await asyncio.Event().wait()

    def read(self, manifest: TierManifest, at: int, bytes_max: int) -> bytes:
        """See RemoteSegments.

        Raises:
            Unreachable: during a recovery: the store can't be read, or an object is damaged. It is
                no DataLoss: nothing of the log may be cut for it.
        """
        while True:
            try:
                return self._cache.read(manifest, at, bytes_max)
            except NotCached as miss:
                if not self.may_block:
                    raise
                for blocks in fetch_ranges(manifest, miss.blocks):
                    self._fetch_now(manifest, blocks)

    @property
    def fetch_now(self) -> FetchBlocks:
        """Read blocks from the store in the thread of the caller."""
        return self.store.fetch

    def manifest_now(self, name: SegmentName) -> TierManifest | None:
        """Return the manifest of a segment, read in the thread of the caller; None if none.

        Raises:
            DataLoss: it is damaged.
            Unreachable: the store can't be read.
        """
        return self.store.manifest(name)

    def has(self, manifest: TierManifest, at: int, length: int) -> bool:
        """See RemoteSegments."""
        return self._cache.has(manifest, at, length)

    async def reading(self, call: Callable[[], Value]) -> Value:
        """Return the result of `call`, which reads the log; fetch what it misses.

        Raises:
            Unreachable: the store did not answer in time.
            DataLoss: an object is missing or damaged.
            LimitExceeded: the call needs more than HELD_MAX blocks.
        """
        held: dict[BlockKey, bytes] = {}
        while True:
            self._cache.held = held
            try:
                return call()
            except NotCached as error:
                miss = error
            finally:
                self._cache.held = {}
            if len(held) + len(miss.blocks) > HELD_MAX:
                raise LimitExceeded(
                    f"the search needs more than {HELD_MAX} blocks of the object store",
                    remedy="Search a shorter time, or another key.",
                    facts={"field": "blocks", "limit": HELD_MAX},
                )
            held |= await self.fetch(miss)

    async def fetch(self, miss: NotCached) -> dict[BlockKey, bytes]:
        """Fetch missing blocks into the cache, and return them.

        Raises:
            Unreachable, DataLoss: as `reading`.
        """
        manifest, found = miss.manifest, dict[BlockKey, bytes]()
        ranges = fetch_ranges(manifest, miss.blocks)
        futures = [self._start(manifest, blocks) for blocks in ranges]
        self._read_ahead(manifest, ranges)
        await asyncio.wait(futures, timeout=self._timeout_ms / 1000)
        for future in futures:
            if not future.done():
                self.on_failure()
                name = manifest.name.manifest
                raise unreachable(name, f"no answer within {self._timeout_ms} ms")
            if future.cancelled():
                raise NotServing("the node is stopping", retry_after_ms=100)
            for number, block in future.result().items():
                if number in miss.blocks:
                    found[manifest.name, number] = block
        return found

    def _read_ahead(self, manifest: TierManifest, ranges: list[range]) -> None:
        """Start to read the next ranges if the one before `ranges` has just been read."""
        if not ranges or (manifest.name, ranges[0].start - 1) not in self._cache:
            return
        begin = ranges[-1].stop
        ahead = range(begin, min(begin + AHEAD * FETCH_BLOCKS, len(manifest.checksums)))
        for blocks in fetch_ranges(manifest, ahead) if ahead else ():
            if (manifest.name, blocks.start) not in self._cache:
                with suppress(BatonError):
                    self._start(manifest, blocks)

    def _start(self, manifest: TierManifest, blocks: range) -> asyncio.Future[dict[int, bytes]]:
        """Start to read a range unless it is being read; return what it will be."""
        key = manifest.name, blocks.start
        future = self._running.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieved)
            self._running[key] = future
            try:
                self._tasks.spawn(self._fill(key, manifest, blocks, future))
            except BatonError:
                del self._running[key]
                raise
        return future

    async def _fill(
        self,
        key: _Range,
        manifest: TierManifest,
        blocks: range,
        future: asyncio.Future[dict[int, bytes]],
    ) -> None:
        found: dict[int, bytes] = {}
        try:
            async with self._slot():
                await self.in_thread(
                    lambda _: found.update(self.store.fetch(manifest, blocks)), None
                )
            self._keep(manifest, found)
            future.set_result(found)
        except BatonError as error:
            self.on_failure()
            future.set_exception(error)
        finally:
            del self._running[key]
            if not future.done():
                future.cancel()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait until a call may begin. Calls that hang do not keep others waiting for ever."""
        await self._calls.acquire()
        held = [True]

        def free() -> None:
            if held:
                held.clear()
                self._calls.release()

        timer = asyncio.get_running_loop().call_later(self._timeout_ms / 1000, free)
        try:
            yield
        finally:
            timer.cancel()
            free()

    def _fetch_now(self, manifest: TierManifest, blocks: range) -> None:
        try:
            self._keep(manifest, self.store.fetch(manifest, blocks))
        except DataLoss as error:
            raise Unreachable(error.message, remedy=error.remedy, facts=error.facts) from error

    def _keep(self, manifest: TierManifest, found: dict[int, bytes]) -> None:
        self._cache.put(manifest.name, found)
        self.on_read(sum(map(len, found.values())))


def _retrieved(future: asyncio.Future[dict[int, bytes]]) -> None:
    """Mark the error of a range that was read ahead as seen: a reader that needs it reads again."""
    if not future.cancelled():
        future.exception()


def open_tier(
    settings: StorageSettings, in_thread: InThread, files: ObjectFiles | None = None
) -> TierReader | None:
    """Return the reader of the object store of this node; None if none is set.

    Args:
        files: The store; the one at `tier_url` if None.

    Raises:
        InvalidArgument: `tier_url` can't be used.
    """
    if not settings.tier_url:
        return None
    found = files
    if found is None:
        found = TimedObjects(open_object_store(settings.tier_url), settings.tier_timeout_ms)
    return TierReader(
        SegmentStore(found, f"{settings.cluster}/{settings.broker_name}"),
        in_thread,
        cache_bytes=settings.tier_cache_bytes,
        timeout_ms=settings.tier_timeout_ms,
    )
