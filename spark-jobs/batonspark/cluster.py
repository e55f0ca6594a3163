"""Blocking client of a cluster for Spark: queues of a topic, their offsets and their messages.

Spark does not use asyncio, so the clients run in an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.aio import without_group
from batonmq._common.rpc import error_from_pb
from batonmq._connection.routes import query_route, queues_of
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import QueueNotFound, Unreachable
from batonspark.options import FETCH_BYTES_MAX, FETCH_MESSAGES_MAX, ConnectionOptions

T = TypeVar("T")
_CALL_S = 15.0
"""Timeout of one attempt of a call; a later attempt may use another node."""


@dataclass(frozen=True, slots=True)
class StoredExtent:
    """Offsets [first_offset, next_offset) that a queue stores, of the topic with this id."""

    first_offset: int
    next_offset: int
    topic_id: int


@dataclass(frozen=True, slots=True)
class FetchedRange:
    """Stored batches with the messages [offset, next_offset); the first may begin earlier."""

    offset: int
    next_offset: int
    batches: Sequence[bytes]


class LoopThread:
    """An event loop in a thread; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="batonspark", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; of a group of errors raise the first one alone."""
        with without_group():
            return self.submit(work).result()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class ClusterClient:
    """A client of a cluster with blocking calls; a context manager.

    Failures are raised as the classes of `batonmq.errors`. Failures that may be temporary are
    retried until `timeout_ms` has passed.
    """

    def __init__(self, connection: ConnectionOptions) -> None:
        self._thread = LoopThread()
        self._connection = connection

    def __enter__(self) -> Self:
        self._thread.__enter__()
        self.admin = self._thread.call(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._thread.call(self.admin.close())
        finally:
            self._thread.__exit__(kind, error, trace)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`, which uses `admin`."""
        return self._thread.submit(work)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which uses `admin`."""
        return self._thread.call(work)

    def extents(self, topic: str) -> dict[QueueRef, StoredExtent]:
        """Return the stored offsets of each queue of a topic; deleted queues are left out.

        Raises:
            TopicNotFound: the topic does not exist.
        """
        return self._thread.call(_extents(self.admin, topic))

    def offsets_at(self, queues: Iterable[QueueRef], unix_ms: int) -> dict[QueueRef, int]:
        """Return the first offset of each queue stored at or after a time; its end if none is."""
        return self._thread.call(_offsets_at(self.admin, list(queues), unix_ms))

    async def _open(self) -> Admin:
        return self._connection.admin()


class QueueFetcher:
    """Fetches messages of one queue; call it in the event loop of `admin`.

    Args:
        followers: Whether to read from followers first.
    """

    def __init__(self, admin: Admin, queue: QueueRef, *, followers: bool) -> None:
        self._admin, self._queue, self._followers = admin, queue, followers
        self._node_id: str | None = None

    async def fetch(self, offset: int, next_offset: int) -> FetchedRange:
        """Return the first messages of [offset, next_offset), as many as one response has.

        A response without messages is retried, since the messages are known to exist.

        Raises:
            OffsetOutOfRange: the messages were removed.
            BatonError: no node has answered.
        """
        request = query_pb.ReadRequest(
            queue=queue_to_pb(self._queue),
            offset=offset,
            bytes_max=FETCH_BYTES_MAX,
            messages_max=min(next_offset - offset, FETCH_MESSAGES_MAX),
        )

        async def ask(limit_s: float) -> query_pb.ReadResponse:
            stub = await self._admin.directory.query(self._queue.broker, await self._source())
            try:
                answer = await stub.Read(request, timeout=min(limit_s, _CALL_S))
            except grpc.aio.AioRpcError:
                self._use_next_node()
                raise
            if answer.next_offset == offset:
                self._use_next_node()
                raise Unreachable(f"{self._queue} ends at {offset}, expected more messages")
            return answer

        answer = await self._admin.ask(ask)
        return FetchedRange(offset, min(answer.next_offset, next_offset), answer.batches)

    def _use_next_node(self) -> None:
        """Read from another node next time, if followers may be read."""
        if self._followers:
            directory = self._admin.directory
            self._node_id = directory.next_reader(self._queue.broker, self._node_id or "")

    async def _source(self) -> str:
        if self._node_id is None:
            followers = (
                await self._admin.directory.followers(self._queue.broker) if self._followers else []
            )
            self._node_id = followers[self._queue.queue_id % len(followers)] if followers else ""
        return self._node_id


async def _extents(admin: Admin, topic: str) -> dict[QueueRef, StoredExtent]:
    queues = queues_of(await admin.ask(lambda _: query_route(admin.directory, topic)))
    by_broker: defaultdict[str, list[QueueRef]] = defaultdict(list)
    for queue in queues:
        by_broker[queue.broker].append(queue)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_extents_at(admin, b, share)) for b, share in by_broker.items()]
    return {queue: extent for task in calls for queue, extent in task.result().items()}


async def _extents_at(
    admin: Admin, broker: str, queues: Sequence[QueueRef]
) -> Mapping[QueueRef, StoredExtent]:
    request = storage_pb.QueryOffsetsRequest(queues=map(queue_to_pb, queues))

    async def ask(limit_s: float) -> dict[QueueRef, StoredExtent]:
        stub = await admin.directory.storage(broker)
        answer = await stub.QueryOffsets(request, timeout=min(limit_s, _CALL_S))
        found: dict[QueueRef, StoredExtent] = {}
        for queue, outcome in zip(queues, answer.outcomes, strict=True):
            if outcome.HasField("offsets"):
                held = outcome.offsets
                found[queue] = StoredExtent(held.first_offset, held.next_offset, held.topic_id)
                continue
            error = error_from_pb(outcome.error)
            if not isinstance(error, QueueNotFound):
                raise error
        return found

    return await admin.ask(ask)


async def _offsets_at(
    admin: Admin, queues: Sequence[QueueRef], unix_ms: int
) -> dict[QueueRef, int]:
    async def one(queue: QueueRef) -> int:
        request = query_pb.SearchOffsetRequest(queue=queue_to_pb(queue), unix_ms=unix_ms)

        async def ask(limit_s: float) -> query_pb.SearchOffsetResponse:
            stub = await admin.directory.query(queue.broker)
            return await stub.SearchOffset(request, timeout=min(limit_s, _CALL_S))

        return (await admin.ask(ask)).offset

    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(one(queue)) for queue in queues]
    return {queue: task.result() for queue, task in zip(queues, calls, strict=True)}
