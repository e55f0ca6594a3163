"""A remote client without any client library: the calls of the contract, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from batonmq_server.gateway.message_proto import duration

TIMEOUT_S = 10.0


Checks = asyncio.Queue[tuple[str, service_pb2.RecoverOrphanedTransactionCommand]]
"""Checks that producers got: the client id and the check."""


class RemoteStub:
    """Calls a gateway as one client."""

    def __init__(
        self, channel: grpc.aio.Channel, client_id: str, more: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.stub = service_pb2_grpc.MessagingServiceStub(channel)
        self.client_id = client_id
        self.metadata = (("x-mq-client-id", client_id), ("x-mq-language", "JAVA"), *more)

    async def call(self, name: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the answer of a call with one answer."""
        return await getattr(self.stub, name)(request, timeout=timeout_s, metadata=self.metadata)

    async def send(self, topic: str, *bodies: bytes, message_group: str = "") -> pb.Status:
        """Send messages by one call; return its status."""
        messages = [
            pb.Message(
                topic=pb.Resource(name=topic),
                body=body,
                system_properties=pb.SystemProperties(
                    message_id=f"id-{body[:40].decode()}",
                    message_type=pb.FIFO if message_group else pb.NORMAL,
                    message_group=message_group or None,
                ),
            )
            for body in bodies
        ]
        answer = await self.call("SendMessage", service_pb2.SendMessageRequest(messages=messages))
        status: pb.Status = answer.status
        return status

    async def begin(self, topic: str, body: bytes) -> str:
        """Send a message that begins a transaction; return its id."""
        message = pb.Message(
            topic=pb.Resource(name=topic),
            body=body,
            system_properties=pb.SystemProperties(
                message_id=f"id-{body[:40].decode()}", message_type=pb.TRANSACTION
            ),
        )
        answer = await self.call("SendMessage", service_pb2.SendMessageRequest(messages=[message]))
        assert answer.status.code == pb.OK, answer
        transaction_id: str = answer.entries[0].transaction_id
        return transaction_id

    async def end(
        self, topic: str, transaction_id: str, resolution: pb.TransactionResolution.ValueType
    ) -> pb.Status:
        """End a transaction; return the status."""
        request = service_pb2.EndTransactionRequest(
            topic=pb.Resource(name=topic), transaction_id=transaction_id, resolution=resolution
        )
        status: pb.Status = (await self.call("EndTransaction", request)).status
        return status

    @asynccontextmanager
    async def producing(self, *topics: str, checks: Checks) -> AsyncIterator[None]:
        """Open a telemetry stream as a producer of topics; put what it is asked into `checks`."""
        stream = self.stub.Telemetry(metadata=self.metadata)
        settings = pb.Settings(
            client_type=pb.PRODUCER,
            publishing=pb.Publishing(topics=[pb.Resource(name=topic) for topic in topics]),
        )
        await stream.write(service_pb2.TelemetryCommand(settings=settings))

        async def read() -> None:
            try:
                async for command in stream:
                    if command.HasField("recover_orphaned_transaction_command"):
                        asked = command.recover_orphaned_transaction_command
                        checks.put_nowait((self.client_id, asked))
            except grpc.aio.AioRpcError:
                pass  # the gateway was killed

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            try:
                yield
            finally:
                stream.cancel()
                reading.cancel()

    async def receive(
        self,
        group: str,
        topic: str,
        *,
        batch: int = 32,
        invisible_ms: int = 10_000,
        wait_ms: int = 5_000,
        renewed: bool = False,
        filtered: pb.FilterExpression | None = None,
        attempt_id: str | None = None,
    ) -> tuple[pb.Status, list[pb.Message]]:
        """Receive by one call; return its status and the messages."""
        request = service_pb2.ReceiveMessageRequest(
            group=pb.Resource(name=group),
            message_queue=pb.MessageQueue(topic=pb.Resource(name=topic)),
            filter_expression=filtered or pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=batch,
            invisible_duration=duration(invisible_ms),
            long_polling_timeout=duration(wait_ms),
            auto_renew=renewed,
            attempt_id=attempt_id,
        )
        status, messages = pb.Status(), list[pb.Message]()
        frames = self.stub.ReceiveMessage(
            request, timeout=wait_ms / 1_000 + 30, metadata=self.metadata
        )
        async for frame in frames:
            if frame.HasField("status"):
                status = frame.status
            if frame.HasField("message"):
                messages.append(frame.message)
        return status, messages

    async def receive_until(
        self, group: str, topic: str, count: int, **options: Any
    ) -> list[pb.Message]:
        """Receive until `count` messages arrived, or a call finds none."""
        received: list[pb.Message] = []
        while len(received) < count:
            _, messages = await self.receive(group, topic, **options)
            if not messages:
                break
            received += messages
        return received

    async def ack(self, group: str, topic: str, handles: Sequence[str]) -> list[int]:
        """Acknowledge deliveries by one call; return the code of each."""
        request = service_pb2.AckMessageRequest(
            group=pb.Resource(name=group),
            topic=pb.Resource(name=topic),
            entries=[service_pb2.AckMessageEntry(receipt_handle=handle) for handle in handles],
        )
        answer = await self.call("AckMessage", request)
        return [entry.status.code for entry in answer.entries] or [answer.status.code]

    async def forward(self, group: str, topic: str, handle: str) -> pb.Status:
        """Forward a delivery to the dead letters; return the status."""
        request = service_pb2.ForwardMessageToDeadLetterQueueRequest(
            group=pb.Resource(name=group),
            topic=pb.Resource(name=topic),
            receipt_handle=handle,
            delivery_attempt=1,
        )
        status: pb.Status = (await self.call("ForwardMessageToDeadLetterQueue", request)).status
        return status

    async def end_client(self, group: str) -> None:
        """Notify the gateway that this client ends."""
        request = service_pb2.NotifyClientTerminationRequest(group=pb.Resource(name=group))
        await self.call("NotifyClientTermination", request)

    async def change(
        self, group: str, topic: str, handle: str, invisible_ms: int
    ) -> tuple[int, str]:
        """Change the invisible duration; return the code and the new handle."""
        request = service_pb2.ChangeInvisibleDurationRequest(
            group=pb.Resource(name=group),
            topic=pb.Resource(name=topic),
            receipt_handle=handle,
            invisible_duration=duration(invisible_ms),
        )
        answer = await self.call("ChangeInvisibleDuration", request)
        return answer.status.code, answer.receipt_handle


def handle_of(message: pb.Message) -> str:
    """Return the receipt handle of a delivery."""
    return message.system_properties.receipt_handle


@asynccontextmanager
async def remote_client(address: str, client_id: str = "stub@1@0@a") -> AsyncIterator[RemoteStub]:
    """Connect a client to a gateway."""
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        yield RemoteStub(channel, client_id)
