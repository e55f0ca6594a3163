"""Remote clients of a run: plain stubs of the RocketMQ 5 contract.

They send, receive and acknowledge. Each calls every gateway, as official clients do. They have two
groups of their own: one gets every message without an ordering key, the other one the messages that
they send with a message group. Messages of a message group are delivered one at a time, each after
a durable acknowledgement: the producers of the members would send more.
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
from tools.faults.history import (
    REMOTE_LANE,
    Queue,
    RemoteDelivery,
    RemoteLedger,
    Send,
    SendOutcome,
)
from tools.faults.load import FREE, Load
from tools.faults.member import TOPIC

FREE_GROUP, ORDERED_GROUP = "remote-survivors", "remote-in-order"
GATEWAY_SETTINGS: Mapping[str, object] = {
    "invisible_ms_min": 1_000,
    "delivery_attempts_max": 1_000,
    "drain_timeout_ms": 3_000,
}
"""No message becomes a dead letter: each has to be acknowledged at last."""
CLIENTS = 2
ORDERED = "ordered"
"""Tag of the messages with a message group of remote clients."""
_TAGS = {FREE_GROUP: FREE, ORDERED_GROUP: ORDERED}
_LEFT_EVERY = 16
"""Of so many messages one is not acknowledged at its first delivery, so that it comes again: if
progress passes it instead, it is lost."""
_LANES = 8
_INVISIBLE_S, _WAIT_S, _CALL_S = 6, 2, 4.0
_BATCH, _SEND_COUNT, _SEND_EVERY_S = 256, 3, 0.25
"""An acknowledgement is answered when it is durable, up to 0.5 s later: large batches keep up."""
_PAUSE_S = 0.2
_TOPIC = pb.Resource(name=TOPIC)
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
        ledgers: Of each group.
    """

    gateways: Mapping[str, str]
    load: Load
    ledgers: Mapping[str, RemoteLedger] = field(
        default_factory=lambda: {
            FREE_GROUP: RemoteLedger(),
            ORDERED_GROUP: RemoteLedger(in_order=True),
        }
    )

    def have_begun(self, least: int) -> bool:
        """Return whether each group has acknowledged something, and one of them `least`."""
        counts = [len(ledger.acks) for ledger in self.ledgers.values()]
        return all(counts) and max(counts) >= least

    def have_acknowledged_all(self, group: str, committed: Mapping[Queue, int]) -> bool:
        """Return whether every message that was stored for a group is acknowledged.

        Args:
            committed: Committed offsets of the group.
        """
        ledger = self.ledgers[group]
        ledger.committed = committed
        return not any(ledger.lost(self.load.sends))

    async def consume(self) -> None:
        """Receive and acknowledge until cancelled."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for name, address in self.gateways.items():
                for group, ledger in self.ledgers.items():
                    for number in range(CLIENTS):
                        client = _Client(await _stub(stack, address), f"{group}-{number}", group)
                        tasks.create_task(self._consume(name, client, ledger))

    async def produce(self) -> None:
        """Send about 10 messages per second, by all gateways in turn, until the load stops.

        Every fourth one has a message group.
        """
        async with AsyncExitStack() as stack:
            stubs = [await _stub(stack, address) for address in self.gateways.values()]
            clients = [_Client(stub, "remote-producer", FREE_GROUP) for stub in stubs]
            turn = 0
            while not self.load.stop.is_set():
                await self._send(clients[turn % len(clients)], turn)
                turn += 1
                await asyncio.sleep(_SEND_EVERY_S)

    async def _send(self, client: _Client, turn: int) -> None:
        begun = [
            Send(number, lane, now_us(), 0, SendOutcome.INDETERMINATE)
            for lane in (*[""] * _SEND_COUNT, f"{REMOTE_LANE}{turn % _LANES}")
            for number in (self.load.number(),)
        ]
        try:
            codes = await client.send(begun)
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

    async def _consume(self, gateway: str, client: _Client, ledger: RemoteLedger) -> None:
        while True:
            try:
                messages = await client.receive()
                at_us = now_us()
                for message in messages:
                    system = message.system_properties
                    ledger.deliveries.append(
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
                taken = [one for one in messages if not _is_left(one)]
                for one in taken:
                    ledger.asked.setdefault(int(one.body), at_us)
                for number in await client.acknowledge(taken):
                    ledger.acks.setdefault(number, now_us())
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
    group: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self.client_id), ("x-mq-language", "JAVA"))

    async def send(self, sends: list[Send]) -> list[str]:
        """Send messages by one call; return the name of the code of each."""
        messages = [
            pb.Message(
                topic=_TOPIC,
                body=str(one.number).encode(),
                system_properties=pb.SystemProperties(
                    message_id=f"remote-{one.number}",
                    tag=ORDERED if one.lane else FREE,
                    message_group=one.lane or None,
                ),
            )
            for one in sends
        ]
        answer = await self.stub.SendMessage(
            service_pb2.SendMessageRequest(messages=messages),
            timeout=_CALL_S,
            metadata=self.metadata,
        )
        if len(answer.entries) != len(sends):
            return [pb.Code.Name(answer.status.code)] * len(sends)
        return [pb.Code.Name(entry.status.code) for entry in answer.entries]

    async def receive(self) -> list[pb.Message]:
        """Receive messages; none if there are none."""
        request = service_pb2.ReceiveMessageRequest(
            group=pb.Resource(name=self.group),
            message_queue=pb.MessageQueue(topic=_TOPIC),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression=_TAGS[self.group]),
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
        request = service_pb2.AckMessageRequest(
            group=pb.Resource(name=self.group), topic=_TOPIC, entries=entries
        )
        answer = await self.stub.AckMessage(request, timeout=_CALL_S, metadata=self.metadata)
        if len(answer.entries) != len(messages):
            return []
        return [
            int(message.body)
            for message, entry in zip(messages, answer.entries, strict=True)
            if entry.status.code == pb.OK
        ]


def _is_left(message: pb.Message) -> bool:
    """Return whether a client leaves a message, so that its lease expires."""
    return not int(message.body) % _LEFT_EVERY and message.system_properties.delivery_attempt == 1


async def _stub(stack: AsyncExitStack, address: str) -> service_pb2_grpc.MessagingServiceAsyncStub:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, _CHANNEL))
    return service_pb2_grpc.MessagingServiceStub(channel)
