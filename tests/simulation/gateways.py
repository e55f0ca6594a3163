"""A run of gateways with faults drawn from a seed: real gateways, with remote clients behind them.

Clients send through either gateway, and repeat a send until it is answered. Others receive,
and acknowledge: soon, late, twice, by replaced handles, or never; they change invisible durations,
and die. Gateways are killed in mid-lease, frozen for longer than their leases, cut off from the
services, and restarted; so are the services behind them. The network loses, repeats and delays
calls. `remote_ledger` has the promises.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from batonmq._connection.directory import ClientEnvironment
from batonmq.errors import BatonError
from batonmq_server.gateway import app as gateway_app
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.gateway.core.receipt_handles import ReceiptSigner
from batonmq_server.gateway.message_proto import duration
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.processes import ServiceSpec, SimulatedProcess
from tests.simulation.other_tasks import cancel_other_tasks
from tests.simulation.remote_ledger import Ack, Delivery, RemoteLedger
from tests.support.conditions import until

TOPIC, GROUP = "orders", "billing"
GATEWAYS = ("gateway-a", "gateway-b")
KEY = b"a key of thirty-two bytes or more"
BROKERS, QUEUES, PRODUCERS, CONSUMERS = 2, 4, 2, 4
FAULTS_S, END_S = 40, 240
LOCK_LEASE_MS = 8_000
FROZEN_S_MAX = 25
"""Longer than a lock lease, and than most message leases."""
HOLDS_MS = (300, 1_500, 4_000, 20_000)
CALL_S = 4.0
CLIENT_TIMEOUT_MS = 3_000
FAULTS = Faults(loss=0.005, duplicate=0.02, slow=0.005, slow_ms_max=4_000)
SETTINGS: dict[str, Any] = {
    "lockmgr": {"lock_lease_ms": LOCK_LEASE_MS},
    "nameserver": {"member_lease_ms": 6_000, "heartbeat_interval_ms": 2_000},
}
GATEWAY_SETTINGS: dict[str, Any] = {
    "invisible_ms_min": 1,
    "delivery_attempts_max": 1_000,
    "renew_ms": 2_000,
    "client_timeout_ms": CLIENT_TIMEOUT_MS,
    "polling_ms_max": 3_000,
    "drain_timeout_ms": 2_000,
    "group_idle_ms": 8_000,
    "in_flight_max": 200,
    "node_lease_ms": 60_000,
    "metrics_stream": False,
}
_BEHIND = ("broker-0", "broker-1", "offsets-0", "lockmgr-0", "nameserver-0")
_KINDS = ("killed", "frozen", "cut off", "restarted")


class GatewayBroker(MemoryBroker):
    """A cluster with gateways."""

    def __init__(self, seed: str, key_file: Path) -> None:
        super().__init__(broker_count=BROKERS, seed=seed, settings=SETTINGS)
        self._key_file = key_file

    def start_gateways(self) -> None:
        """Start the gateways."""
        for name in GATEWAYS:
            settings = GatewaySettings(
                node_id=name, receipt_key_file=str(self._key_file), **GATEWAY_SETTINGS
            )
            self._start(ServiceSpec(name, "gateway", settings, gateway_app.build))

    def set_faults(self, faults: Faults) -> None:
        """Change what the network does."""
        self._environment.network.faults = faults

    def process(self, name: str) -> SimulatedProcess:
        """Return a new process for clients."""
        return SimulatedProcess(self._environment, name, 0)

    async def fail(self, random: Random) -> str:
        """Let a process fail for a while, mostly a gateway; return what was done."""
        is_gateway = random.random() < 0.75
        name = random.choice(GATEWAYS if is_gateway else _BEHIND)
        kind = random.choice(_KINDS if is_gateway else _KINDS[:2])
        while_s = random.uniform(0.2, 3)
        process = self._running[name]
        if kind == "killed":
            await self._kill([name])
            await asyncio.sleep(while_s)
            self._start(process.service)
        elif kind == "restarted":
            process.stop()
            await process.ended()
            await asyncio.sleep(while_s)
            self._start(process.service)
        elif kind == "frozen":
            process.freeze()
            await asyncio.sleep(random.choice((while_s, random.uniform(3, FROZEN_S_MAX))))
            process.thaw()
        else:
            with self._disconnected(name):
                await asyncio.sleep(random.choice((while_s, random.uniform(3, FROZEN_S_MAX))))
        return f"{'gateway' if is_gateway else 'service'} {kind}"

    async def stop_gateways(self) -> None:
        """Stop the gateways gracefully."""
        await self._stop(["gateway"])

    async def lag(self) -> str:
        """Return what the group has not acknowledged, as text; empty if nothing is left."""
        return await self._left(GROUP)


@dataclass(slots=True)
class _Run:
    """One run: its ledger, and whether faults go on.

    Attributes:
        random: Decides for the clients.
    """

    broker: GatewayBroker
    ledger: RemoteLedger
    random: Random
    signer: ReceiptSigner
    faulty: bool = True
    over: bool = False
    number: int = 0

    @staticmethod
    def now_ms() -> int:
        return int(asyncio.get_running_loop().time() * 1_000)


class _Client:
    """The stubs of one remote client, for each gateway."""

    def __init__(self, run: _Run, name: str, environment: ClientEnvironment) -> None:
        self.run, self.name = run, name
        self._metadata = (("x-mq-client-id", name), ("x-mq-language", "JAVA"))
        self._stubs = [
            service_pb2_grpc.MessagingServiceStub(environment.connect(f"{one}:1"))
            for one in GATEWAYS
        ]

    async def call(self, gateway: int, name: str, request: Any) -> Any:
        """Return the answer of a call; None if there is none."""
        try:
            call = getattr(self._stubs[gateway], name)
            return await call(request, timeout=CALL_S, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return None

    async def send(self, body: bytes, message_group: str) -> None:
        """Send a message until the answer is OK, at a gateway drawn anew each time."""
        run = self.run
        message = pb.Message(
            topic=pb.Resource(name=TOPIC),
            body=body,
            system_properties=pb.SystemProperties(
                message_id=body.decode(), message_group=message_group or None
            ),
        )
        run.ledger.tried.add(body)
        request = service_pb2.SendMessageRequest(messages=[message])
        while not run.over:
            answer = await self.call(run.random.randrange(2), "SendMessage", request)
            if answer is not None and answer.status.code == pb.OK:
                run.ledger.sent.add(body)
                return
            run.ledger.counts["repeated sends"] += 1
            await asyncio.sleep(run.random.uniform(0.01, 0.5))

    async def receive(self, gateway: int, hold_ms: int, renewed: bool) -> list[Delivery]:
        """Return the deliveries of one call; none if it failed, as their handles may be lost."""
        run = self.run
        request = service_pb2.ReceiveMessageRequest(
            group=pb.Resource(name=GROUP),
            message_queue=pb.MessageQueue(topic=pb.Resource(name=TOPIC)),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=run.random.choice((1, 4, 16)),
            invisible_duration=duration(hold_ms),
            long_polling_timeout=duration(2_000),
            auto_renew=renewed,
        )
        frames = self._stubs[gateway].ReceiveMessage(
            request, timeout=CALL_S, metadata=self._metadata
        )
        try:
            found = [frame.message async for frame in frames if frame.HasField("message")]
        except grpc.aio.AioRpcError:
            run.ledger.counts["receive calls failed"] += 1
            await asyncio.sleep(run.random.uniform(0.05, 0.5))
            return []
        deliveries = []
        for message in found:
            system = message.system_properties
            one = Delivery(
                message.body,
                system.message_group,
                self.name,
                run.signer.read(system.receipt_handle),
                hold_ms,
                run.now_ms(),
            )
            run.ledger.delivered(one)
            deliveries.append(one)
        return deliveries

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries by one call."""
        run = self.run
        acks: list[Ack] = [run.ledger.begin_ack(one, run.now_ms()) for one in deliveries]
        entries = [
            service_pb2.AckMessageEntry(receipt_handle=run.signer.write(one.handle))
            for one in deliveries
        ]
        request = service_pb2.AckMessageRequest(
            group=pb.Resource(name=GROUP), topic=pb.Resource(name=TOPIC), entries=entries
        )
        answer = await self.call(
            GATEWAYS.index(deliveries[0].handle.gateway), "AckMessage", request
        )
        if answer is None:
            return
        for ack, entry in zip(acks, answer.entries, strict=False):
            lost = entry.status.message.startswith("the queue was lost")
            if entry.status.code != pb.PROXY_TIMEOUT and not lost:
                run.ledger.end_ack(ack, entry.status.code, run.now_ms())

    async def change(self, one: Delivery, hold_ms: int) -> Delivery | None:
        """Change the invisible duration; return the delivery with its new handle."""
        run = self.run
        request = service_pb2.ChangeInvisibleDurationRequest(
            group=pb.Resource(name=GROUP),
            topic=pb.Resource(name=TOPIC),
            receipt_handle=run.signer.write(one.handle),
            invisible_duration=duration(hold_ms),
        )
        sent_ms, end_ms = run.now_ms(), one.end_ms
        one.end_ms = min(end_ms, sent_ms)  # the lease may end now, and its handle with it
        gateway = GATEWAYS.index(one.handle.gateway)
        answer = await self.call(gateway, "ChangeInvisibleDuration", request)
        if answer is None:
            one.end_ms = min(end_ms, sent_ms)
            return None
        if answer.status.code != pb.OK:
            run.ledger.counts["changes refused"] += 1
            return None
        run.ledger.counts["changes"] += 1
        one.replaced_ms = run.now_ms()
        if sent_ms >= one.expires_ms:
            run.ledger.fail("expired", f"{one.handle} changed at {sent_ms}")
        handle = run.signer.read(answer.receipt_handle)
        changed = Delivery(one.body, one.message_group, self.name, handle, hold_ms, run.now_ms())
        run.ledger.changed(changed)
        return changed

    async def consume(self) -> None:
        """Receive, and do with each message what some client would do, until cancelled."""
        run, random = self.run, self.run.random
        async with asyncio.TaskGroup() as tasks:
            while True:
                renewed = run.faulty and random.random() < 0.25
                hold_ms = random.choice(HOLDS_MS) if run.faulty else 20_000
                deliveries = await self.receive(random.randrange(2), hold_ms, renewed)
                if not deliveries:
                    await asyncio.sleep(random.uniform(0.01, 0.3))
                elif not run.faulty or random.random() < 0.3:
                    tasks.create_task(self.ack(deliveries))
                else:
                    for one in deliveries:
                        tasks.create_task(self._handle(one))

    async def _handle(self, one: Delivery) -> None:
        random = self.run.random
        await asyncio.sleep(random.choice((0, 0.05, 1)) * random.random())
        match random.choices(range(6), (50, 12, 12, 12, 8, 6))[0]:
            case 0:
                await self.ack([one])
            case 1:  # late
                await asyncio.sleep(one.hold_ms / 1_000 * random.uniform(0.9, 1.5))
                await self.ack([one])
            case 2:  # twice
                await self.ack([one])
                await self.ack([one])
            case 3:  # by a new handle, and by the one before
                changed = await self.change(one, random.choice((0, 50, 3_000)))
                await self.ack([one])
                if changed is not None:
                    await self.ack([changed])
            case 4:  # given back
                await self.change(one, random.choice((0, 0, 200)))
            case _:  # never
                pass


def play_gateways(seed: str) -> RemoteLedger:
    """Play the run of a seed; return what its clients saw."""
    ledger = RemoteLedger(pb.OK)
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "key"
        key_file.write_bytes(KEY)
        broker = GatewayBroker(seed, key_file)
        run = _Run(broker, ledger, Random(seed), ReceiptSigner(KEY))
        gc.disable()  # it would close abandoned coroutines at random times
        try:
            run_virtual(_whole(run))
        finally:
            gc.enable()
    return ledger


async def _whole(run: _Run) -> None:
    """Play the run, then end the tasks of all processes, also of killed ones."""
    try:
        await _play(run)
    finally:
        await cancel_other_tasks()


async def _play(run: _Run) -> None:
    random, ledger = Random(run.random.getrandbits(32)), run.ledger
    async with run.broker as broker:
        await broker.create_topic(TOPIC, QUEUES)
        broker.start_gateways()
        await broker._registered()
        broker.set_faults(FAULTS)
        async with asyncio.TaskGroup() as tasks:
            living = [
                tasks.create_task(_lives(run, f"consumer-{n}", _consume)) for n in range(CONSUMERS)
            ]
            living += [
                tasks.create_task(_lives(run, f"producer-{n}", _produce)) for n in range(PRODUCERS)
            ]
            end_s = asyncio.get_running_loop().time() + FAULTS_S
            while asyncio.get_running_loop().time() < end_s:
                await asyncio.sleep(random.uniform(0.2, 4))
                ledger.counts[await broker.fail(random)] += 1
            run.faulty = False
            broker.set_faults(Faults())
            try:
                await until(lambda: _all_done(run), timeout_s=END_S)
            except TimeoutError:
                ledger.fail("lost", f"not done {END_S} s after the faults: {await broker.lag()}")
            run.over = True
            for task in living:
                task.cancel()
        stored: dict[tuple[str, int], list[tuple[int, bytes, str]]] = defaultdict(list)
        for one in await broker.messages(TOPIC):
            queue = one.queue.broker, one.queue.queue_id
            stored[queue].append((one.offset, one.body, one.ordering_key or ""))
        ledger.judge(stored)
        await broker.stop_gateways()


async def _all_done(run: _Run) -> bool:
    if run.ledger.tried != run.ledger.sent:
        return False
    try:
        return not await run.broker.lag()
    except BatonError:
        return False


async def _lives(run: _Run, name: str, live: Any) -> None:
    """Run one client after the other; each dies after a while, with all that it holds."""
    life = 0
    while True:
        life += 1
        process = run.broker.process(f"{name}-{life}")
        client = _Client(run, process.name, process.client_environment())
        working = _on(process, live(run, client))
        try:
            faulty_s = run.random.uniform(2, 20) if name.startswith("consumer") else 1_000
            await asyncio.wait({working}, timeout=faulty_s if run.faulty else None)
        finally:
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled() and (error := working.exception()) is not None:
            raise error
        if working.done() and not working.cancelled():
            return
        run.ledger.counts["client deaths"] += 1


def _on(process: SimulatedProcess, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task: asyncio.Task[None] = process.host.spawn(work)
    return task


async def _consume(_: _Run, client: _Client) -> None:
    await client.consume()


async def _produce(run: _Run, client: _Client) -> None:
    """Send messages while there are faults: some at once, some in message groups, in order."""
    random = run.random
    while run.faulty:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(random.randrange(4)):
                tasks.create_task(_send_some(run, client))
        await asyncio.sleep(random.choice((0.05, 0.5)))


async def _send_some(run: _Run, client: _Client) -> None:
    message_group = run.random.choice(("", "", "red", "blue"))
    for _ in range(run.random.randint(1, 3)):
        run.number += 1
        await client.send(b"%d" % run.number, message_group)
