"""The schemas of Avro in use, kept in a compacted topic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from types import TracebackType
from typing import Self

from batonmq._common import timeouts
from batonmq._connection.directory import ClientEnvironment
from batonmq._connection.security import Security
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller, PullerSettings
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.reports import Compaction, Topic
from batonmq.errors import InvalidArgument, PermissionDenied, TopicExists, Unreachable
from batonmq.schemas.avro_schema import AvroSchema, Definition, ParsedSchema

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 30.0
"""Timeout of reading the new part of the topic; what was read by then is kept."""


class SchemaRegistry:
    """Finds schemas of Avro by their fingerprints. Use it as an async context manager.

    The registry is a compacted topic with one queue. The ordering key of a message is the
    fingerprint of a schema in hexadecimal, its body is the schema. A producer stores its schema
    there, durably, before it sends the first body. So a reader that meets a fingerprint for the
    first time reads the new part of the topic, and then knows the schema, or knows that there is
    none. Needs the extra `avro`.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        topic: The topic; it is created if it is missing and the program may do so.
        security: TLS settings; None for plain connections.
        environment: Clock, random numbers and transport, for tests.
    """

    def __init__(
        self,
        nameserver: str,
        topic: str = "schemas",
        *,
        security: Security | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        self._nameserver, self._topic = nameserver, topic
        self._security, self._environment = security, environment
        self._admin = Admin(nameserver, security=security, environment=environment)
        self._schemas: dict[bytes, ParsedSchema] = {}
        self._stored: set[bytes] = set()  # in the present topic of this name
        self._topic_id = self._next_offset = 0
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Check the topic, create it if need be, and read it.

        Raises:
            InvalidArgument: The topic is not compacted, or has more than one queue.
            BatonError: It can't be read.
        """
        await self._admin.__aenter__()
        try:
            await self._create_topic()
            await self._read_new()
        except BaseException:
            await self._admin.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._admin.close()

    async def avro(self, definition: Definition) -> AvroSchema:
        """Return a schema to encode and decode with; it is stored first if it is new.

        Each call looks at the topic, so call it once per schema. A call after the topic was deleted
        and created again stores the schema there.

        Args:
            definition: The schema as the JSON of Avro says it.

        Raises:
            InvalidArgument: It is no schema, or the topic is no registry any more.
            BatonError: It can't be stored.
        """
        schema = ParsedSchema(definition)
        await self._read_new()
        if schema.fingerprint not in self._stored:
            await self._store(schema)
        return AvroSchema(schema, self)

    async def _find(self, fingerprint: bytes) -> ParsedSchema | None:
        """Return the schema with a fingerprint, 8 bytes; None if it is not stored.

        Raises:
            BatonError: The topic can't be read.
        """
        if fingerprint not in self._schemas:
            await self._read_new()
        return self._schemas.get(fingerprint)

    async def _create_topic(self) -> None:
        with contextlib.suppress(PermissionDenied, TopicExists):
            await self._admin.create_topic(self._topic, 1, compaction=Compaction())

    def _check(self, topic: Topic) -> None:
        if topic.compaction is None or len(topic.queues) != 1:
            raise InvalidArgument(
                f"topic {self._topic} is no registry: it must be compacted and have one queue",
                remedy="Give the registry a topic of its own.",
                facts={"field": "topic", "topic": self._topic},
            )

    async def _read_new(self) -> None:
        """Read what was stored since the last time; callers that come meanwhile wait for it."""
        async with self._reading:
            described = await self._admin.describe_topic(self._topic)
            if described.topic.topic_id != self._topic_id:  # at first, or it was created again
                self._check(described.topic)
                self._topic_id, self._next_offset = described.topic.topic_id, 0
                self._stored.clear()
            (extent,) = described.queues
            self._queue = extent.queue
            if extent.next_offset is None:
                raise Unreachable(
                    f"the broker {extent.queue.broker} of topic {self._topic} does not answer",
                    retry_after_ms=500,
                    facts={"service": "storage"},
                )
            if self._next_offset < extent.next_offset:
                await self._read_to(extent.next_offset)

    async def _read_to(self, end: int) -> None:
        settings = PullerSettings(consume_from="first", security=self._security)
        async with Puller(
            self._nameserver, settings=settings, environment=self._environment
        ) as puller:
            await puller.assign([self._queue])
            await puller.seek(self._queue, self._next_offset)
            try:
                async with timeouts.timeout(READ_TIMEOUT_S):
                    while (position := await puller.position(self._queue)) < end:
                        for messages in (await puller.poll()).values():
                            for message in messages:
                                self._take(message)
            except TimeoutError as error:
                raise Unreachable(
                    f"the schemas in topic {self._topic} were not read within {READ_TIMEOUT_S:g} s",
                    retry_after_ms=500,
                    facts={"service": "storage"},
                ) from error
            self._next_offset = position

    def _take(self, message: ReceivedMessage) -> None:
        try:
            schema = ParsedSchema(json.loads(message.body))
        except (ValueError, InvalidArgument) as error:  # another program writes to the topic
            log.warning("not a schema %r error=%s", message, error)
        else:
            if schema.fingerprint.hex() == message.ordering_key:
                self._add(schema)

    def _add(self, schema: ParsedSchema) -> None:
        self._schemas[schema.fingerprint] = schema
        self._stored.add(schema.fingerprint)

    async def _store(self, schema: ParsedSchema) -> None:
        settings = ProducerSettings(durability=Durability.FSYNCED, security=self._security)
        async with Producer(self._nameserver, settings, environment=self._environment) as producer:
            key = schema.fingerprint.hex()
            await producer.send(self._topic, schema.text.encode(), ordering_key=key)
        self._add(schema)
