"""Asks remote producers what became of transactions, when a broker asks.

RocketMQ 5 knows no producer groups: any producer of the topic may be asked. So each topic has a
producer group of its own, and the gateway holds the streams of checks of those topics that a live
producer publishes. A broker asks one gateway, and that gateway one producer; the answer is an
EndTransaction. Without one the broker asks again after its interval, perhaps another gateway.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from baton.storage.v1 import transaction_service_pb2 as storage_pb
from batonmq._connection.directory import Directory
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.names import check_group
from batonmq._core.queues import QueueRef
from batonmq._core.records import decode_records, read_header
from batonmq._core.transactions import broker_of
from batonmq._producer.check_watcher import CheckWatcher
from batonmq.errors import BatonError, InvalidName, NotServing
from batonmq_server.gateway.client_commands import CommandStream
from batonmq_server.gateway.core.live_producers import LiveProducers
from batonmq_server.gateway.message_proto import DeliveryFields, received
from batonmq_server.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

TOPICS_MAX = 1_000
"""Topics whose transactions one gateway asks for, at most: each needs a stream to each broker."""
_GROUP_PREFIX = "rocketmq-"


def producer_group(topic: str) -> str:
    """Return the producer group of the transactions of remote clients on a topic."""
    try:
        return check_group(f"{_GROUP_PREFIX}{topic}")
    except InvalidName:  # too long
        return f"{_GROUP_PREFIX}{hashlib.sha256(topic.encode()).hexdigest()}"


class TransactionChecks:
    """Holds the streams of checks of the topics that live producers publish.

    Args:
        spawn: Starts a task that lives as long as the gateway, at most.
    """

    def __init__(
        self,
        directory: Directory,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        metrics: GatewayMetrics,
    ) -> None:
        self._directory, self._spawn, self._metrics = directory, spawn, metrics
        self._producers: LiveProducers[CommandStream] = LiveProducers()
        self._watched: dict[str, asyncio.Task[None]] = {}

    def open(self, client_id: str, stream: CommandStream, topics: Iterable[str]) -> None:
        """Note the stream of a producer, and the topics that it publishes."""
        self._producers.open(client_id, stream)
        self.publish(client_id, topics)

    def publish(self, client_id: str, topics: Iterable[str]) -> None:
        """Note that a producer publishes topics."""
        if self._producers.publish(client_id, topics):
            self._watch()

    def close(self, client_id: str, stream: CommandStream) -> None:
        """Note that a stream has ended."""
        self._producers.close(client_id, stream)
        live = set(self._producers.topics)
        for topic in self._watched.keys() - live:
            self._watched.pop(topic).cancel()
        self._watch()

    def _watch(self) -> None:
        for topic in self._producers.topics:
            if topic in self._watched:
                continue
            if len(self._watched) >= TOPICS_MAX:
                log.warning("transactions of more topics are not asked for topic=%s", topic)
                return
            try:
                self._watched[topic] = self._spawn(self._follow(topic))
            except NotServing:
                return  # the gateway stops

    async def _follow(self, topic: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            watcher = CheckWatcher(
                self._directory,
                tasks.create_task,
                producer_group(topic),
                lambda check: self._ask(topic, check),
            )
            await watcher.run()

    def _ask(self, topic: str, check: storage_pb.TransactionCheck) -> None:
        for stream in self._producers.in_turn(topic):
            try:
                command = _command(check, stream.name_of(topic))
            except BatonError as error:
                log.warning(
                    "half message not readable transaction_id=%s error=%s",
                    check.transaction_id,
                    error,
                )
                return
            if stream.command(command):
                self._metrics.transaction_checks.inc()
                return
        log.info("check dropped: no producer takes it transaction_id=%s", check.transaction_id)


def _command(
    check: storage_pb.TransactionCheck, topic: pb.Resource
) -> service_pb2.TelemetryCommand:
    header = read_header(check.batch)
    (record,) = decode_records(check.batch, header, range(1))
    queue = QueueRef(header.topic, broker_of(check.transaction_id), header.queue_id)
    message = ReceivedMessage(queue, 0, header, record, redelivered=False)
    return service_pb2.TelemetryCommand(
        recover_orphaned_transaction_command=service_pb2.RecoverOrphanedTransactionCommand(
            message=received(message, topic, DeliveryFields("", 1, 0)),
            transaction_id=check.transaction_id,
        )
    )
