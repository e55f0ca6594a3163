"""What retiring queues wait for, read from offsets and storage."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.rpc import answered, error_from_pb, from_rpc_error
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq.errors import BatonError, NotServing, QueueNotFound, TopicNotFound, Unreachable
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.removal_obstacle import (
    HeldMessages,
    HeldOutputs,
    ObstacleKind,
    QueueKey,
    RemovalObstacle,
    held_obstacles,
    kept_obstacle,
    output_obstacles,
    removing_obstacle,
    unread_obstacle,
)
from batonmq_server.nameserver.core.topic_resize import RetiringQueue
from batonmq_server.nameserver.core.topics import QueueSpread, Topic

CALL_TIMEOUT_S = 5
OBSTACLES_MAX = 1_000
PAUSE_FACTOR = 10
"""A broker is not asked again for this many times the time that its last answer took."""
QUEUES_MAX = 2_000
"""Queues of one request to a broker; a topic has at most half of them."""


Held = tuple[dict[str, HeldMessages], list[HeldOutputs]]


class Progress(NamedTuple):
    """Committed offset of a queue, and ranges of acked offsets beyond it, at most 1,000."""

    committed: int
    acked: Sequence[tuple[int, int]]


class SharedHeld:
    """What brokers hold, asked of each once, for several topics.

    Every topic is confirmed before the first broker is asked: so the broker knew of each that it
    takes no more messages there, and what it holds of it did not grow after the answer.
    """

    def __init__(self) -> None:
        self.confirmed: dict[str, set[str]] = defaultdict(set)
        """Addresses at which a broker has confirmed topics."""
        self.answers: dict[str, Held] = {}


class RetirementReader:
    """Reads what queues and brokers that are to be removed still hold.

    Args:
        offsets: Returns a stub for the leader of the set that keeps a group; raises `Unreachable`
            if there is none.
        connect: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        catalog: Catalog,
        offsets: Callable[[str], offsets_grpc.OffsetsServiceAsyncStub],
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._catalog, self._offsets, self._connect = catalog, offsets, connect
        self._ask_again_s: dict[str, float] = {}

    async def progress(self, group: str) -> dict[QueueKey, Progress]:
        """Return the group's progress by topic, broker and queue id."""
        request = offsets_pb.QueryGroupRequest(group=group)
        progress: dict[QueueKey, Progress] = {}
        while True:
            call = self._offsets(group).QueryGroup(request, timeout=CALL_TIMEOUT_S)
            answer = await answered(call)
            for entry in answer.queues:
                queue = entry.queue.queue
                progress[queue.topic, queue.broker, queue.queue_id] = Progress(
                    entry.committed_offset,
                    [(one.first_offset, one.next_offset) for one in entry.acked],
                )
            request.page_token = answer.next_page_token
            if not request.page_token:
                return progress

    async def extents(
        self, broker: str, queues: Sequence[tuple[str, int]], revision: int = 0
    ) -> dict[str, list[RetiringQueue]]:
        """Return queues of a broker with their offsets, by topic.

        Args:
            queues: Topic and queue id of each.
            revision: The broker must know this revision of the topics, so that the offsets of
                retiring queues are final. 0: queues that it does not know are left out.

        Raises:
            Unreachable: the broker is not registered.
            NotServing: the broker does not know the revision yet.
        """
        found: dict[str, list[RetiringQueue]] = defaultdict(list)
        async with self._connect(self._address(broker)) as channel:
            stub = storage_grpc.StorageServiceStub(channel)
            for begin in range(0, len(queues), QUEUES_MAX):
                page = queues[begin : begin + QUEUES_MAX]
                call = stub.QueryOffsets(_offsets_request(broker, page), timeout=CALL_TIMEOUT_S)
                try:
                    answer = await call
                    trailer = dict(await call.trailing_metadata())
                except grpc.aio.AioRpcError as failure:
                    raise from_rpc_error(failure) from failure
                _check_revision(broker, trailer, revision)
                for (topic, queue_id), outcome in zip(page, answer.outcomes, strict=True):
                    if outcome.HasField("offsets"):
                        ends = outcome.offsets
                        found[topic].append(
                            RetiringQueue(broker, queue_id, ends.first_offset, ends.next_offset)
                        )
                        continue
                    error = error_from_pb(outcome.error)
                    if revision or not isinstance(error, (QueueNotFound, TopicNotFound)):
                        raise error
        return found

    async def held(self, broker: str, topic: str = "", revision: int = 0) -> Held:
        """Return what a broker holds beside the messages of its queues, by topic, and outputs.

        Args:
            topic: Topic of which the broker must know `revision`, so that what it holds of it does
                not grow any more; empty for none.

        Raises:
            Unreachable, NotServing: as `extents`.
        """
        held: dict[str, HeldMessages] = {}
        outputs: list[HeldOutputs] = []
        names = {one.topic_id: one.name for one in self._catalog.topics.values()}
        request = storage_pb.QueryHeldRequest(topic=topic)
        async with self._connect(self._address(broker)) as channel:
            stub = storage_grpc.StorageServiceStub(channel)
            while True:
                call = stub.QueryHeld(request, timeout=CALL_TIMEOUT_S)
                try:
                    answer = await call
                    trailer = dict(await call.trailing_metadata())
                except grpc.aio.AioRpcError as error:
                    raise from_rpc_error(error) from error
                _check_revision(broker, trailer, revision)
                for one in answer.held:
                    held[one.topic] = _merged(held.get(one.topic, HeldMessages()), one)
                for output in answer.outputs:
                    input_topic = names.get(output.topic_id, "")
                    outputs.append(
                        HeldOutputs(
                            output.topic,
                            output.group,
                            input_topic,
                            output.broker,
                            output.queue_id,
                            output.last_offset,
                        )
                    )
                request.position = answer.next_position
                if not request.position:
                    return held, outputs

    async def obstacles_of(self, topic: Topic, revision: int) -> list[RemovalObstacle]:
        """Return what the retiring queues of a topic wait for.

        Raises:
            BatonError: a service does not answer.
        """
        found: list[RemovalObstacle] = []
        for part in topic.spread:
            if part.closed:
                held = await self.held(part.broker, topic.name, revision)
                found += await self._held_by(topic, part, held)
        queues = await self._retiring(topic, revision)
        found += await self._unread({topic.name: queues})
        return found[:OBSTACLES_MAX]

    async def first_unread(
        self, topic: Topic, revision: int, shared: SharedHeld
    ) -> RemovalObstacle | None:
        """Return the first message that is needed in the retiring queues of a topic.

        The brokers of its closed queues confirm the topic in `shared`.

        Raises:
            BatonError: a service does not answer.
        """
        closed = [part.broker for part in topic.spread if part.closed]
        addresses = {broker: self._address(broker) for broker in closed}
        queues = await self._retiring(topic, revision)
        for broker, address in addresses.items():
            shared.confirmed[broker].add(address)
        return next(iter(await self._unread({topic.name: queues}, first_only=True)), None)

    async def first_obstacle(
        self, topic: Topic, revision: int, shared: SharedHeld
    ) -> RemovalObstacle | None:
        """Return the first thing that a topic's retiring queues wait for, beside their messages.

        Args:
            shared: The topic was confirmed in it before any broker was asked.

        Raises:
            NotServing: a broker holds much, and is not asked again yet.
            BatonError: a service does not answer.
        """
        for part in topic.spread:
            if part.closed:
                held = await self._held_once(part.broker, shared)
                if found := await self._held_by(topic, part, held):
                    return found[0]
        # What was delivered since is in the queues now.
        return await self.first_unread(topic, revision, shared)

    async def _held_once(self, broker: str, shared: SharedHeld) -> Held:
        if broker not in shared.answers:
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            if begin_s < self._ask_again_s.get(broker, 0):
                raise NotServing(f"{broker} has many held messages, so it is asked again later")
            if shared.confirmed[broker] != {self._address(broker)}:
                raise NotServing(f"broker {broker} has a new leader")
            held = await self.held(broker)
            self._ask_again_s[broker] = loop.time() + PAUSE_FACTOR * (loop.time() - begin_s)
            shared.answers[broker] = held
        return shared.answers[broker]

    async def _retiring(self, topic: Topic, revision: int) -> list[RetiringQueue]:
        """Return the retiring queues of a topic, whose offsets are final."""
        queues: list[RetiringQueue] = []
        for part in topic.spread:
            if part.writable_count < part.queue_count:
                ids = range(part.writable_count, part.queue_count)
                own = [(topic.name, queue_id) for queue_id in ids]
                queues += (await self.extents(part.broker, own, revision))[topic.name]
        return queues

    async def obstacles_on(self, broker: str) -> list[RemovalObstacle]:
        """Return what a broker holds that is still needed; services may not answer."""
        topics = [
            (topic, part)
            for topic in sorted(self._catalog.topics.values(), key=lambda topic: topic.name)
            for part in topic.spread
            if part.broker == broker
        ]
        try:
            found = await self._needed_on(broker, topics)
        except BatonError as error:
            found = [
                RemovalObstacle(
                    kind=ObstacleKind.UNREACHABLE,
                    topic="",
                    broker=broker,
                    message=f"not known what {broker} still holds: {error.message}",
                )
            ]
        if not found:
            found = [removing_obstacle(topic.name, broker, part) for topic, part in topics]
        return found[:OBSTACLES_MAX]

    async def _needed_on(
        self, broker: str, topics: Sequence[tuple[Topic, QueueSpread]]
    ) -> list[RemovalObstacle]:
        held, outputs = await self.held(broker)
        found: list[RemovalObstacle] = []
        for name, each in held.items():
            if name not in self._catalog.topics:  # it was deleted: nothing is delivered
                each = replace(each, scheduled_count=0)  # noqa: PLW2901
            found += held_obstacles(name, broker, each)
        found += await self._unacknowledged(broker, outputs)
        queues = [(topic.name, each) for topic, part in topics for each in range(part.queue_count)]
        return found + await self._unread(await self.extents(broker, queues))

    async def _held_by(
        self, topic: Topic, part: QueueSpread, answer: Held
    ) -> list[RemovalObstacle]:
        """Return what keeps the last queues of a topic on a broker, beside their messages."""
        held, outputs = answer
        found = held_obstacles(topic.name, part.broker, held.get(topic.name, HeldMessages()))
        if topic.name == UNRESOLVED_TOPIC:  # any open transaction may end there
            for name, each in held.items():
                found += held_obstacles(name, part.broker, replace(each, scheduled_count=0))
        own = [one for one in outputs if one.topic in ("", topic.name)]
        return found + await self._unacknowledged(part.broker, own)

    async def _unacknowledged(
        self, broker: str, outputs: Collection[HeldOutputs]
    ) -> list[RemovalObstacle]:
        groups = self._catalog.groups.keys() & {one.group for one in outputs}
        committed: dict[str, dict[QueueKey, int]] = {}
        for name in sorted(groups):
            progress = await self.progress(name)
            committed[name] = {key: one.committed for key, one in progress.items()}
        return output_obstacles(broker, outputs, committed)

    async def _unread(
        self, queues: Mapping[str, Sequence[RetiringQueue]], *, first_only: bool = False
    ) -> list[RemovalObstacle]:
        """Return the groups that need messages of queues; the queues are given by topic.

        At most `OBSTACLES_MAX`, or one with `first_only`. Others run between two groups.
        """
        found: list[RemovalObstacle] = []
        count_max = 1 if first_only else OBSTACLES_MAX
        redriven: dict[str, dict[QueueKey, Progress]] = {}
        present = [
            (name, queue)
            for name, each in queues.items()
            for queue in each
            if queue.first_offset < queue.next_offset
        ]
        for group in sorted(self._catalog.groups) if present or first_only else ():
            progress = await self.progress(group)
            record = self._catalog.groups.get(group)
            if group in queues:
                redriven[group] = progress
            for name, queue in present:
                known = progress.get((name, queue.broker, queue.queue_id))
                committed = known.committed if known is not None else None
                obstacle = unread_obstacle(queue, name, group, record, committed)
                if obstacle is not None:
                    found.append(obstacle)
                    if len(found) == count_max:
                        return found
        for name, queue in present:
            own = redriven.get(name, {}).get((name, queue.broker, queue.queue_id), Progress(0, []))
            kept = kept_obstacle(queue, name, own.committed, own.acked)
            found += [kept] if kept is not None else []
        return found

    def _address(self, broker: str) -> str:
        address = self._catalog.addresses.get(broker)
        if address is None:
            raise Unreachable(f"broker {broker} is not registered")
        return address


def _offsets_request(
    broker: str, queues: Sequence[tuple[str, int]]
) -> storage_pb.QueryOffsetsRequest:
    return storage_pb.QueryOffsetsRequest(
        queues=[
            queue_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
            for topic, queue_id in queues
        ]
    )


def _check_revision(broker: str, trailer: Mapping[str, str | bytes], revision: int) -> None:
    if int(trailer.get(TOPICS_REVISION, 0)) < revision:
        raise NotServing(f"broker {broker} has not seen revision {revision} yet")


def _merged(before: HeldMessages, page: storage_pb.HeldMessages) -> HeldMessages:
    firsts = [one for one in (before.first_deliver_unix_ms, page.first_deliver_unix_ms) if one]
    return HeldMessages(
        before.scheduled_count + page.scheduled_count,
        min(firsts, default=0),
        max(before.last_deliver_unix_ms, page.last_deliver_unix_ms),
        before.transaction_count + page.transaction_count,
        before.first_begin_unix_ms or page.first_begin_unix_ms,
    )
