"""The producer of a run: creates the topic and sends bursts of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.errors import BatonError, DuplicateSequence, ProducerFenced
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import NAMESERVERS, PRODUCER, TOPIC
from tests.simulation.run_context import RunContext

TAGS = ("a", "b", "c")
_OF_ANOTHER = (DuplicateSequence, ProducerFenced)
"""Errors of a producer if another one uses its id; with identities none can."""


class SimulatedProducer:
    """Sends bursts.

    Attributes:
        acked: Bodies of messages that were acknowledged.
        unsettled: Bodies of messages without an outcome so far.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._process = SimulatedProcess(context.cluster, PRODUCER, 0)
        self._producer: Producer | None = None
        self._bursts = 0
        self._sending: list[asyncio.Task[None]] = []
        self.acked: dict[str, object] = {}
        self.unsettled: dict[str, None] = {}

    @property
    def ready(self) -> bool:
        """Whether the topic exists."""
        return self._producer is not None

    def start(self) -> None:
        """Start the producer."""
        self._process.run(self._live)

    def burst(self) -> None:
        """Send some more messages."""
        random = self._context.random
        count = random.randint(1, 12)
        self._bursts += 1
        bodies = [f"m{self._bursts}.{index}" for index in range(count)]
        self.unsettled.update(dict.fromkeys(bodies))
        tags = [random.choice(TAGS) for _ in bodies]
        sending = self._send(dict(zip(bodies, tags, strict=True)), self._keys(len(bodies)))
        self._sending.append(self._process.host.spawn(sending))

    def _keys(self, count: int) -> list[str | None]:
        """Draw ordering keys, of which a few are frequent; None for a message without one."""
        if not self._context.options.by_key:
            return [None] * count
        random = self._context.random
        names = [None, "hot", "hot", *(f"k{number}" for number in range(6))]
        return [random.choice(names) for _ in range(count)]

    async def _live(self) -> None:
        environment = self._process.client_environment()
        directory = Directory(NAMESERVERS, environment.random, environment.connect)
        request = pb.CreateTopicRequest(topic=TOPIC, queue_count=self._context.options.queues)
        while True:
            try:
                await directory.nameserver().CreateTopic(request, timeout=CALL_TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                await directory.pause(from_rpc_error(error), 0)
        count_max = environment.random.choice((1, 4))
        settings = ProducerSettings(request_timeout_ms=3_000, batch_messages_max=count_max)
        async with Producer(NAMESERVERS, settings, environment=environment) as producer:
            self._producer = producer
            await asyncio.Event().wait()

    async def _send(self, messages: Mapping[str, str], keys: Sequence[str | None]) -> None:
        assert self._producer is not None
        calls = {
            body: await self._producer.submit(TOPIC, Message(body.encode(), tag), ordering_key=key)
            for (body, tag), key in zip(messages.items(), keys, strict=True)
        }
        for body, pending in calls.items():
            try:
                await pending
                self.acked[body] = True
            except BatonError as error:
                self._context.cluster.trace.note("producer", f"{body} may be lost", error)
                if self._context.options.identities and isinstance(error, _OF_ANOTHER):
                    expected = self._context.cluster.checker.expected
                    expected.fail("P2", f"{body} is refused for a batch of another: {error}")
            del self.unsettled[body]
