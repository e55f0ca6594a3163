"""Removes the queues that a topic gives up, once everybody has read them.

Every replica does it, at intervals. A topic is written only if it is still the one the question
was asked about, so growing in between wins, and doing it twice does nothing.
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
    """Looks after the topics that give up queues.

    Args:
        offsets: A stub for the leader of the set that keeps a group; raises `Unreachable` if there
            is none.
        connect: Makes a channel to `host:port`.
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
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Look for ever; to be run as one task."""
        await self._catalog.ready()
        while True:
            shrinking = [topic.name for topic in self._catalog.topics.values() if topic.shrinking]
            self._told = {name: why for name, why in self._told.items() if name in shrinking}
            for name in shrinking:
                try:
                    await self._finish(name)
                except BatonError as error:
                    self._tell(name, f"{error.reason}: {error.message}")
            await asyncio.sleep(self._interval_ms / 1000)

    async def _finish(self, name: str) -> None:
        """Remove the topic's queues that are given up, if they are read to the end.

        Raises:
            BatonError: somebody who has to be asked does not answer.
        """
        found = await self._store.read(name)
        if found is None or not found[0].shrinking:
            return
        topic, revision = found
        ends = [
            end
            for part in topic.spread
            if part.writable_count < part.queue_count
            for end in await self._ends(topic, part, revision)
        ]
        waiting = await self._waiting(topic, ends)
        if waiting:
            self._tell(name, waiting)
        elif await self._store.replace(without_retiring_queues(topic), revision):
            log.info("topic has shrunk topic=%s queues=%d", name, topic.queue_count)

    async def _waiting(self, topic: Topic, ends: Sequence[RetiringQueue]) -> str:
        """Who has to read what before the queues may go; empty if nobody."""
        for name in sorted(self._catalog.groups):
            committed = await self._committed(name, topic.name)
            group = self._catalog.groups.get(name)
            for end in ends:
                known = committed.get((end.broker, end.queue_id))
                if unread_count(end, group, topic.name, known):
                    where = f"queue {end.queue_id} of {end.broker}"
                    return f"group {name} has messages to read in {where}"
        return ""

    async def _committed(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """The group's committed offsets on the topic, by broker and queue."""
        request = offsets_pb.QueryGroupRequest(group=group)
        committed: dict[tuple[str, int], int] = {}
        while True:
            call = self._offsets(group).QueryGroup(request, timeout=CALL_TIMEOUT_S)
            answer = await answered(call)
            for found in answer.queues:
                if found.queue.queue.topic == topic:
                    key = found.queue.queue.broker, found.queue.queue.queue_id
                    committed[key] = found.committed_offset
            request.page_token = answer.next_page_token
            if not request.page_token:
                return committed

    async def _ends(self, topic: Topic, part: QueueSpread, revision: int) -> list[RetiringQueue]:
        """What the queues that `part` gives up hold, finally.

        Raises:
            Unreachable: the broker is away.
            NotServing: it does not know yet that they take no more messages.
        """
        address = self._catalog.addresses.get(part.broker)
        if address is None:
            raise Unreachable(f"broker {part.broker} is away")
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

    def _tell(self, name: str, why: str) -> None:
        """Log why a topic does not shrink yet, each time that changes."""
        if self._told.get(name) != why:
            self._told[name] = why
            log.info("topic does not shrink yet topic=%s why=%r", name, why)
