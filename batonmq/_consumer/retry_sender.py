"""Sends failed messages back: to the group's retry topic, or to its dead-letter topic.

A message is scheduled on its own broker, in a batch. Its producer id is derived from the message.
Every owner that sends the message back uses the same id, so storage keeps one copy: its record of
producer ids survives restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.storage.v1 import schedule_service_pb2 as pb
from batonmq._common.batcher import Batcher
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._connection.routes import query_route, writable_queues_of
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import Session
from batonmq._core.delays import DelayLeft
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    STORED_PROPERTIES_BYTES_MAX,
    BatchBuilder,
    Message,
    encode_record,
)
from batonmq._core.retries import (
    PROPERTIES,
    HandlingFailure,
    dead_letter_topic,
    origin_of,
    properties_of,
    retry_producer_id,
    retry_queue,
    retry_topic,
    with_origin_key,
    without_origin_key,
)
from batonmq._producer.item_sender import REQUEST_ITEMS_MAX, parts
from batonmq.errors import BatonError, QueueNotFound, Retry, TopicExists, TopicNotFound

log = logging.getLogger(__name__)

_Outcome = pb.ScheduleReceipt | BatonError


def restore_original(message: ReceivedMessage, group: str) -> None:
    """Restore the fields that a message of the retry topic had when it was first sent."""
    if message.queue.topic == retry_topic(group) and not restore_copy(message):
        log.warning("message in the retry topic names no origin %r", message)


def restore_copy(message: ReceivedMessage) -> bool:
    """Restore the fields that a copy had when it was first sent; return False if it is none."""
    origin_attempts = origin_of(message.properties)
    if origin_attempts is None:
        return False
    message.origin, attempts = origin_attempts
    message.keys = without_origin_key(message.keys, message.origin)
    message.attempts += attempts
    message.properties = {
        name: value for name, value in message.properties.items() if name not in PROPERTIES
    }
    return True


async def create_topic(session: Session, topic: str) -> None:
    """Create a topic with one queue on each broker, unless it exists.

    Raises:
        InvalidName: the group's name is too long for the topic's name.
        BatonError: the nameserver refused.
    """
    nodes = await session.directory.refresh()
    storages = [node for node in nodes if node.service == nameserver_pb.SERVICE_KIND_STORAGE]
    brokers = {node.replica_set or node.node_id for node in storages}
    request = nameserver_pb.CreateTopicRequest(topic=topic, queue_count=max(len(brokers), 1))
    try:
        await session.directory.nameserver().CreateTopic(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        session.directory.next_nameserver()
        error = from_rpc_error(failure)
        if not isinstance(error, TopicExists):  # another member saw more or fewer brokers
            raise error from failure


async def create_group_topic(session: Session, topic: str) -> None:
    """Create a topic of the group, unless it exists; within the start timeout.

    Raises:
        InvalidName: the group's name is too long for the topic's name.
        Unreachable: no nameserver answered in time.
    """
    clock, failures = session.clock, 0
    deadline_ms = clock.monotonic_ms() + session.settings.start_timeout_ms
    while True:
        try:
            return await create_topic(session, topic)
        except BatonError as error:
            if error.retry is Retry.NEVER or clock.monotonic_ms() > deadline_ms:
                raise
            await session.directory.pause(error, failures)
            failures += 1


@dataclass(frozen=True, slots=True)
class RetryRequest:
    """A message to be sent back.

    Attributes:
        reset_epoch: Reset epoch under which the message was delivered.
        delay_ms: Delay before it is delivered again; None for the dead-letter topic.
        still_owned: Returns whether this consumer still owns the message's queue.
    """

    message: ReceivedMessage
    reset_epoch: int
    failure: HandlingFailure
    delay_ms: int | None
    still_owned: Callable[[], bool]


class RetrySender:
    """Sends back the messages that one consumer could not handle.

    Args:
        spawn: Runs a coroutine until the consumer ends.
    """

    def __init__(
        self, session: Session, spawn: Callable[[Coroutine[object, object, None]], object]
    ) -> None:
        self._session, self._spawn = session, spawn
        self._queues: dict[str, tuple[QueueRef, ...]] = {}
        self._finding = asyncio.Lock()
        self._batchers: dict[str, Batcher[pb.ScheduleItem, _Outcome]] = {}

    async def send(self, request: RetryRequest) -> bool:
        """Repeat until the message is stored; return False if its queue is lost before that."""
        session, message, failures = self._session, request.message, 0
        delay = DelayLeft(request.delay_ms or 0, session.clock.monotonic_ms())
        name = retry_topic if request.delay_ms is not None else dead_letter_topic
        topic = name(session.group)
        while request.still_owned():
            try:
                receipt = await self._send(request, topic, delay)
            except BatonError as error:
                self._queues.pop(topic, None)
                level = logging.ERROR if error.retry is Retry.NEVER else logging.WARNING
                log.log(level, "message %r not sent back, trying again: %s", message, error)
                await session.directory.pause(error, failures)
                failures += 1
            else:
                log.info("sent back %r topic=%s duplicate=%s", message, topic, receipt.duplicate)
                return True
        return False

    async def _send(
        self, request: RetryRequest, topic: str, delay: DelayLeft
    ) -> pb.ScheduleReceipt:
        message, clock = request.message, self._session.clock
        once = retry_producer_id(
            message.queue, message.topic_id, message.offset, request.reset_epoch
        )
        queues = await self._queues_of(topic)
        queue = retry_queue(queues, message.queue.broker, once)
        delay_ms = delay.at(clock.monotonic_ms())
        item = pb.ScheduleItem(
            batch=_encode(request, queue, once, self._session.incarnation.client_id),
            deliver_unix_ms=clock.unix_ms() + delay_ms,  # for storage of an earlier version
            delay_ms=delay_ms,
        )
        outcome = await self._batcher(queue.broker).call(item)
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def _queues_of(self, topic: str) -> tuple[QueueRef, ...]:
        async with self._finding:
            queues = self._queues.get(topic)
            if queues is None:
                queues = self._queues[topic] = await self._find_queues(topic)
            return queues

    async def _find_queues(self, topic: str) -> tuple[QueueRef, ...]:
        directory = self._session.directory
        try:
            route = await query_route(directory, topic)
        except TopicNotFound:
            await create_topic(self._session, topic)
            route = await query_route(directory, topic)
        queues = writable_queues_of(route)
        if not queues:
            raise QueueNotFound(
                f"no queue of topic {topic} accepts messages", facts={"topic": topic}
            )
        return queues

    def _batcher(self, broker: str) -> Batcher[pb.ScheduleItem, _Outcome]:
        batcher = self._batchers.get(broker)
        if batcher is None:

            async def schedule(items: Sequence[pb.ScheduleItem]) -> Sequence[_Outcome]:
                return await self._request(broker, items)

            batcher = Batcher(schedule, items_max=REQUEST_ITEMS_MAX)
            try:
                self._spawn(batcher.run())
            except RuntimeError as error:
                # The consumer has ended: as a batcher that has ended, cancel its callers.
                raise asyncio.CancelledError from error
            self._batchers[broker] = batcher
        return batcher

    async def _request(self, broker: str, items: Sequence[pb.ScheduleItem]) -> list[_Outcome]:
        """Return one outcome per item; if a call failed, its error for each of its items."""
        return [
            outcome for part in parts(items) for outcome in await self._request_part(broker, part)
        ]

    async def _request_part(self, broker: str, items: Sequence[pb.ScheduleItem]) -> list[_Outcome]:
        try:
            stub = await self._session.directory.schedule(broker)
            answer = await stub.Schedule(pb.ScheduleRequest(items=items), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(items)
        except BatonError as error:
            return [error] * len(items)
        return [
            error_from_pb(one.error) if one.HasField("error") else one.receipt
            for one in answer.outcomes
        ]


def _encode(request: RetryRequest, queue: QueueRef, once: int, client_id: str) -> bytes:
    received = request.message
    added = properties_of(received.origin, received.attempts, request.failure, client_id)
    keys = with_origin_key(received.keys, received.origin)
    message = Message(received.body, received.tag, keys, {**received.properties, **added})
    builder = BatchBuilder()
    record = encode_record(message, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX)
    builder.add(message, record)
    return builder.encode(
        topic=queue.topic,
        queue_id=queue.queue_id,
        producer=(once, ONE_BATCH_EPOCH),
        sequence=0,
        born_unix_ms=received.born_unix_ms,
    )
