"""Remote clients of a run: plain stubs of the RocketMQ 5 contract.

They send, receive and acknowledge. Each calls every gateway, as official clients do. Their group is
another one than that of the members. It gets every message without an ordering key: messages with
one are delivered one at a time, each after a durable acknowledgement, and the load has more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from tests.support.member import now_us
from tools.faults.history import Queue, RemoteDelivery, Send, SendOutcome
from tools.faults.load import FREE, Load
from tools.faults.member import TOPIC

REMOTE_GROUP = "remote-survivors"
GATEWAY_SETTINGS: Mapping[str, object] = {
    "invisible_ms_min": 1_000,
    "delivery_attempts_max": 1_000,
    "drain_timeout_ms": 3_000,
}
"""No message becomes a dead letter: each has to be acknowledged at last."""
CLIENTS = 2
_INVISIBLE_S, _WAIT_S, _CALL_S = 6, 2, 4.0
_BATCH, _SEND_COUNT, _SEND_EVERY_S = 256, 3, 0.25
"""An acknowledgement is answered when it is durable, up to 0.5 s later: large batches keep up."""
_PAUSE_S = 0.2
_TOPIC, _GROUP = pb.Resource(name=TOPIC), pb.Resource(name=REMOTE_GROUP)
_CHANNEL = (
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True)
class RemoteClients:
    """The remote clients, and what they have got.

    Attributes:
        gateways: host:port of each gateway, by the name of its process.
        load: Gets the outcomes of their sends.
        acks: When the first acknowledgement of each message was answered OK.
        committed: Committed offsets of their group, as last read.
    """

    gateways: Mapping[str, str]
    load: Load
    deliveries: list[RemoteDelivery] = field(default_factory=list)
    acks: dict[int, int] = field(default_factory=dict)
    committed: Mapping[Queue, int] = field(default_factory=dict)

    def have_acknowledged_all(self, committed: Mapping[Queue, int]) -> bool:
        """Return whether every message that was stored for them is acknowledged.

        The answer to an acknowledgement may be lost with its gateway; then progress counts.

        Args:
            committed: Committed offsets of their group.
        """
        self.committed = committed
        settled = self.acks.keys() | {
            one.number for one in self.deliveries if one.offset < committed.get(one.queue, 0)
        }
        return all(
            send.number in settled
            for send in self.load.sends
            if send.outcome is SendOutcome.OK and not send.lane
        )

    async def consume(self) -> None:
        """Receive and acknowledge until cancelled."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                for name, address in self.gateways.items():
                    client = _Client(await _stub(stack, address), f"remote-{number}")
                    tasks.create_task(self._consume(name, client))

    async def produce(self) -> None:
        """Send about 10 messages per second, by all gateways in turn, until the load stops."""
        async with AsyncExitStack() as stack:
            stubs = [await _stub(stack, address) for address in self.gateways.values()]
            clients = [_Client(stub, "remote-producer") for stub in stubs]
            turn = 0
            while not self.load.stop.is_set():
                await self._send(clients[turn % len(clients)])
                turn += 1
                await asyncio.sleep(_SEND_EVERY_S)

    async def _send(self, client: _Client) -> None:
        begun = [
            Send(self.load.number(), "", now_us(), 0, SendOutcome.INDETERMINATE)
            for _ in range(_SEND_COUNT)
        ]
        try:
            codes = await client.send([one.number for one in begun])
        except grpc.aio.AioRpcError as error:
            codes = [error.code().name] * len(begun)
        for one, code in zip(begun, codes, strict=True):
            done = one._replace(end_us=now_us())
            # A refusal may come after the message was stored: only OK is certain.
            stored = code == "OK"
            self.load.sends.append(
                done._replace(outcome=SendOutcome.OK)
                if stored
                else done._replace(reason=f"gateway: {code}")
            )

    async def _consume(self, gateway: str, client: _Client) -> None:
        while True:
            try:
                messages = await client.receive()
                at_us = now_us()
                for message in messages:
                    system = message.system_properties
                    self.deliveries.append(
                        RemoteDelivery(
                            client.client_id,
                            gateway,
                            int(message.body),
                            system.delivery_attempt,
                            at_us,
                            (system.store_host, system.queue_id),
                            system.queue_offset,
                        )
                    )
                for number in await client.acknowledge(messages):
                    self.acks.setdefault(number, now_us())
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_PAUSE_S)
            else:
                if not messages:
                    await asyncio.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _Client:
    """The calls of one client to one gateway."""

    stub: service_pb2_grpc.MessagingServiceAsyncStub
    client_id: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self.client_id), ("x-mq-language", "JAVA"))

    async def send(self, numbers: list[int]) -> list[str]:
        """Send messages by one call; return the name of the code of each."""
        messages = [
            pb.Message(
                topic=_TOPIC,
                body=str(number).encode(),
                system_properties=pb.SystemProperties(message_id=f"remote-{number}", tag=FREE),
            )
            for number in numbers
        ]
        answer = await self.stub.SendMessage(
            service_pb2.SendMessageRequest(messages=messages),
            timeout=_CALL_S,
            metadata=self.metadata,
        )
        if len(answer.entries) != len(numbers):
            return [pb.Code.Name(answer.status.code)] * len(numbers)
        return [pb.Code.Name(entry.status.code) for entry in answer.entries]

    async def receive(self) -> list[pb.Message]:
        """Receive messages; none if there are none."""
        request = service_pb2.ReceiveMessageRequest(
            group=_GROUP,
            message_queue=pb.MessageQueue(topic=_TOPIC),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression=FREE),
            batch_size=_BATCH,
            invisible_duration=Duration(seconds=_INVISIBLE_S),
            long_polling_timeout=Duration(seconds=_WAIT_S),
        )
        frames = self.stub.ReceiveMessage(
            request, timeout=_WAIT_S + _CALL_S, metadata=self.metadata
        )
        return [frame.message async for frame in frames if frame.HasField("message")]

    async def acknowledge(self, messages: list[pb.Message]) -> list[int]:
        """Acknowledge messages; return those that were answered OK."""
        if not messages:
            return []
        entries = [
            service_pb2.AckMessageEntry(receipt_handle=one.system_properties.receipt_handle)
            for one in messages
        ]
        request = service_pb2.AckMessageRequest(group=_GROUP, topic=_TOPIC, entries=entries)
        answer = await self.stub.AckMessage(request, timeout=_CALL_S, metadata=self.metadata)
        if len(answer.entries) != len(messages):
            return []
        return [
            int(message.body)
            for message, entry in zip(messages, answer.entries, strict=True)
            if entry.status.code == pb.OK
        ]


async def _stub(stack: AsyncExitStack, address: str) -> service_pb2_grpc.MessagingServiceAsyncStub:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, _CHANNEL))
    return service_pb2_grpc.MessagingServiceStub(channel)
