"""Removal of retiring queues, once every group has read them.

Every replica checks at intervals. A topic is written only if it is unchanged since it was read: if
queues were added in between, the addition wins, and a repeated removal does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.rpc import answered, error_from_pb, from_rpc_error
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq.errors import BatonError, NotServing, Unreachable
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.topic_resize import (
    RetiringQueue,
    unread_count,
    without_retiring_queues,
)
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.topic_store import TopicStore

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5


class TopicShrinker:
    """Removes the retiring queues of topics.

    Args:
        offsets: Returns a stub for the leader of the set that keeps a group; raises `Unreachable`
            if there is none.
        connect: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: TopicStore,
        offsets: Callable[[str], offsets_grpc.OffsetsServiceAsyncStub],
        connect: Callable[[str], grpc.aio.Channel],
        *,
        interval_ms: int,
    ) -> None:
        self._catalog, self._store, self._offsets = catalog, store, offsets
        self._connect, self._interval_ms = connect, interval_ms
        self._logged: dict[str, str] = {}

    async def run(self) -> None:
        """Check until cancelled; to be run as one task."""
        await self._catalog.ready()
        while True:
            shrinking = [topic.name for topic in self._catalog.topics.values() if topic.shrinking]
            self._logged = {
                name: reason for name, reason in self._logged.items() if name in shrinking
            }
            for name in shrinking:
                try:
                    await self._finish(name)
                except BatonError as error:
                    self._log_reason(name, f"{error.reason}: {error.message}")
            await asyncio.sleep(self._interval_ms / 1000)

    async def _finish(self, name: str) -> None:
        """Remove the topic's retiring queues if they are read to the end.

        Raises:
            BatonError: a service does not answer.
        """
        entry = await self._store.read(name)
        if entry is None or not entry[0].shrinking:
            return
        topic, revision = entry
        retiring = [
            queue
            for part in topic.spread
            if part.writable_count < part.queue_count
            for queue in await self._retiring_queues(topic, part, revision)
        ]
        reader = await self._reader_left(topic, retiring)
        if reader:
            self._log_reason(name, reader)
        elif await self._store.replace(without_retiring_queues(topic), revision):
            log.info("retiring queues removed topic=%s queues=%d", name, topic.queue_count)

    async def _reader_left(self, topic: Topic, retiring: Sequence[RetiringQueue]) -> str:
        """Return which group still has messages to read, as text; empty if none."""
        for name in sorted(self._catalog.groups):
            committed = await self._committed(name, topic.name)
            group = self._catalog.groups.get(name)
            for queue in retiring:
                known = committed.get((queue.broker, queue.queue_id))
                if unread_count(queue, group, topic.name, known):
                    where = f"queue {queue.queue_id} of {queue.broker}"
                    return f"group {name} has messages to read in {where}"
        return ""

    async def _committed(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """Return the group's committed offsets on the topic, by broker and queue id."""
        request = offsets_pb.QueryGroupRequest(group=group)
        committed: dict[tuple[str, int], int] = {}
        while True:
            call = self._offsets(group).QueryGroup(request, timeout=CALL_TIMEOUT_S)
            answer = await answered(call)
            for entry in answer.queues:
                if entry.queue.queue.topic == topic:
                    key = entry.queue.queue.broker, entry.queue.queue.queue_id
                    committed[key] = entry.committed_offset
            request.page_token = answer.next_page_token
            if not request.page_token:
                return committed

    async def _retiring_queues(
        self, topic: Topic, part: QueueSpread, revision: int
    ) -> list[RetiringQueue]:
        """Return the retiring queues of `part` with their final offsets.

        Raises:
            Unreachable: the broker is not registered.
            NotServing: the broker does not know yet that the queues are retiring.
        """
        address = self._catalog.addresses.get(part.broker)
        if address is None:
            raise Unreachable(f"broker {part.broker} is not registered")
        queue_ids = range(part.writable_count, part.queue_count)
        request = storage_pb.QueryOffsetsRequest(
            queues=[
                queue_pb2.QueueRef(topic=topic.name, broker=part.broker, queue_id=queue_id)
                for queue_id in queue_ids
            ]
        )
        async with self._connect(address) as channel:
            call = storage_grpc.StorageServiceStub(channel).QueryOffsets(
                request, timeout=CALL_TIMEOUT_S
            )
            try:
                answer = await call
                trailer = dict(await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        if int(trailer.get(TOPICS_REVISION, 0)) < revision:
            raise NotServing(f"broker {part.broker} has not seen revision {revision} yet")
        for outcome in answer.outcomes:
            if outcome.HasField("error"):
                raise error_from_pb(outcome.error)
        return [
            RetiringQueue(part.broker, queue_id, o.offsets.first_offset, o.offsets.next_offset)
            for queue_id, o in zip(queue_ids, answer.outcomes, strict=True)
        ]

    def _log_reason(self, name: str, reason: str) -> None:
        """Log why retiring queues are not removed yet, each time the reason changes."""
        if self._logged.get(name) != reason:
            self._logged[name] = reason
            log.info("retiring queues not removed yet topic=%s reason=%r", name, reason)
