"""A stranger of a run: writes under the producer ids of others.

It may write to the topic, and knows every batch that the producer has sent. With identities,
storage can tell it from the producer.
"""

from __future__ import annotations

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._core.records import BatchBuilder, Header, Message, encode_record
from batonmq.errors import BatonError
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import BROKER, NAMESERVERS, TOPIC
from tests.simulation.run_context import Later, RunContext

EPOCHS = (0, 0, 1, 1_000_000)
"""Added to the epoch of the producer: 0 takes its next sequence, others fence it."""


class SimulatedStranger:
    """Sends one batch at a time under an id of the producer."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._process = SimulatedProcess(context.cluster, "stranger", 0)
        environment = self._process.client_environment()
        self._directory = Directory(NAMESERVERS, environment.random, environment.connect)
        self._count = 0

    def write(self) -> Later:
        """Write a message under the id, and mostly the next sequence, of the producer."""
        sent = self._context.cluster.sent
        if not sent:
            return None
        header = sent[self._context.random.choice(sorted(sent))]
        epoch = header.producer_epoch + self._context.random.choice(EPOCHS)
        self._count += 1
        return self._write(header, epoch, f"x{self._count}.0")

    async def _write(self, header: Header, epoch: int, body: str) -> None:
        message = Message(body.encode(), "a")
        builder = BatchBuilder()
        builder.add(message, encode_record(message))
        batch = builder.encode(
            topic=TOPIC,
            queue_id=header.queue_id,
            producer=(header.producer_id, epoch),
            sequence=header.sequence + header.count if epoch == header.producer_epoch else 0,
        )
        self._context.note(f"a stranger writes {body} as producer {header.producer_id}", "forged")
        request = pb.AppendRequest(batches=[batch])
        try:
            stub = await self._directory.storage(BROKER)
            await stub.Append(request, timeout=CALL_TIMEOUT_S)
        except (BatonError, grpc.aio.AioRpcError) as error:
            self._context.cluster.trace.note("stranger", f"{body} may not be stored", error)
