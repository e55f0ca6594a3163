"""The gateway: a send against a native one, its clients at rest, and RocketMQ's own proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from time import perf_counter

import grpc.aio

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.gateway.config import PING_INTERVAL_MS
from batonmq_server.gateway.message_proto import duration
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure
from bench.java_client import JavaClient
from bench.peers import process_tree
from bench.peers.brokers import RocketMq
from bench.peers.clients.task import TOPICS
from bench.peers.downloads import PeerFailed
from bench.peers.steps import GROUPS
from bench.setup import TOPIC, Setup

QUEUES = 8
EMPTY_TOPIC = "bench-empty"
BODY = b"x" * 100
WARM_UP_COUNT = 200
CALL_S = 30.0
CONNECTIONS_AT_ONCE = 20
POLL_MS = 600_000
REPEATED_MS = 20_000
SETTLED_S = 10
"""The settings are pushed again until 5 s after they came."""
WINDOW_S = 20
WAITING_S = 2 * PING_INTERVAL_MS // 1_000
"""Connections that were made together are pinged together: each window has the same pings."""
GROUP, DRAINED_GROUP = "bench", next(group for group in GROUPS if group.startswith(TOPICS[0]))
KIB = 1024


class RemoteClient:
    """A plain stub of one client on a connection of its own."""

    def __init__(self, channel: grpc.aio.Channel, client_id: str, topic: str) -> None:
        self._topic = pb.Resource(name=topic)
        self._stub = service_pb2_grpc.MessagingServiceStub(channel)
        self._metadata = (("x-mq-client-id", client_id), ("x-mq-language", "JAVA"))
        self._number = 0

    async def send(self) -> None:
        """Send one message."""
        self._number += 1
        system = pb.SystemProperties(message_id=f"{id(self):x}-{self._number}")
        message = pb.Message(topic=self._topic, body=BODY, system_properties=system)
        request = service_pb2.SendMessageRequest(messages=[message])
        answer = await self._stub.SendMessage(request, timeout=CALL_S, metadata=self._metadata)
        assert answer.status.code == pb.OK, answer

    async def receive(self, count: int, wait_ms: int) -> int:
        """Receive up to `count` messages, to hold them; return their number."""
        request = service_pb2.ReceiveMessageRequest(
            group=pb.Resource(name=GROUP),
            message_queue=pb.MessageQueue(topic=self._topic),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=count,
            invisible_duration=duration(POLL_MS),
            long_polling_timeout=duration(wait_ms),
        )
        frames = self._stub.ReceiveMessage(
            request, timeout=wait_ms / 1_000 + CALL_S, metadata=self._metadata
        )
        return sum([frame.HasField("message") async for frame in frames])

    async def telemetry(self, opened: asyncio.Event) -> None:
        """Hold the telemetry stream of a simple consumer open, as the official clients do."""
        stream = self._stub.Telemetry(metadata=self._metadata)
        settings = pb.Settings(
            client_type=pb.SIMPLE_CONSUMER,
            subscription=pb.Subscription(
                group=pb.Resource(name=GROUP),
                subscriptions=[
                    pb.SubscriptionEntry(
                        topic=self._topic,
                        expression=pb.FilterExpression(type=pb.TAG, expression="*"),
                    )
                ],
            ),
        )
        await stream.write(service_pb2.TelemetryCommand(settings=settings))
        async for _ in stream:
            opened.set()


async def gateway(setup: Setup) -> list[Figure]:
    """Measure sends, clients that wait, messages in flight, and a proxy of RocketMQ."""
    settings = {"gateway": {"polling_ms_max": POLL_MS}}
    options = ClusterOptions(gateways=1, settings=settings, auto_restart=False, log_level="WARNING")
    async with (
        LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster,
        AsyncExitStack() as stack,
    ):
        async with Admin(cluster.nameserver) as admin:
            for topic in (TOPIC, EMPTY_TOPIC):
                await admin.create_topic(topic, QUEUES)
        pid = cluster.pid("gateway")
        assert pid is not None
        connect = partial(_connect, stack, cluster.addresses["gateway"])
        producer, holder = await connect("producer", TOPIC), await connect("holder", TOPIC)
        figures = [await _sends(setup, cluster.nameserver, producer)]
        figures.append(await _in_flight(setup, cluster.nameserver, holder, pid))
        figures += await _clients(setup, connect, pid)
    return figures + await _against_proxy(setup)


async def _connect(
    stack: AsyncExitStack, address: str, client_id: str, topic: str = EMPTY_TOPIC
) -> RemoteClient:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
    return RemoteClient(channel, client_id, topic)


async def _sends(setup: Setup, nameserver: str, client: RemoteClient) -> Figure:
    setup.say("one send at a time, native and through the gateway, by turns")
    times_ms: dict[str, list[float]] = {"native": [], "gateway": []}
    async with Producer(nameserver) as producer:

        async def native() -> None:
            await producer.send(TOPIC, BODY)

        calls: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("native", native),
            ("gateway", client.send),
        )
        for number in range(WARM_UP_COUNT + setup.sized(3_000, 200)):
            for name, call in calls:
                begin_s = perf_counter()
                await call()
                if number >= WARM_UP_COUNT:
                    times_ms[name].append(1_000 * (perf_counter() - begin_s))
    return figure(
        "SendMessage p50 against a native send",
        median(times_ms["gateway"]),
        "ms",
        Goal(ratio_max=2),
        reference=median(times_ms["native"]),
    )


async def _in_flight(setup: Setup, nameserver: str, client: RemoteClient, pid: int) -> Figure:
    """Measure the memory of messages that one client holds."""
    wanted = setup.sized(10_000, 1_000)
    setup.say(f"{wanted:,} messages in flight at one client")
    async with Producer(nameserver) as producer:
        await producer.send_many(TOPIC, [BODY] * (wanted + wanted // 2))
    before = process_tree.rss_bytes([pid])
    held = 0
    while held < wanted:
        count = await client.receive(min(1_000, wanted - held), 5_000)
        assert count, f"{held} messages came"
        held += count
    each = (process_tree.rss_bytes([pid]) - before) / held
    return figure(
        f"memory of each of {wanted:,} messages in flight at one client",
        each / KIB,
        "KiB",
        Goal(value_max=10),
    )


class Pollers:
    """Clients with a connection, a telemetry stream and a long poll each; they get no message.

    Attributes:
        poll_ms: How long the polls wait that are sent from now on.
        ended: Number of polls that have ended.
    """

    def __init__(self, connect: Callable[[str], Awaitable[RemoteClient]], count: int) -> None:
        self._connect, self._count = connect, count
        self._slots, self._left = asyncio.Semaphore(CONNECTIONS_AT_ONCE), count
        self._opened = asyncio.Event()
        self.poll_ms = REPEATED_MS
        self.ended = 0

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Connect all of them, and poll inside `async with`."""
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(self._live(number)) for number in range(self._count)]
            await self._opened.wait()
            yield
            for one in lives:
                one.cancel()

    async def _live(self, number: int) -> None:
        async with self._slots:
            client = await self._connect(f"client-{number}")
            opened = asyncio.Event()
            stream = asyncio.create_task(client.telemetry(opened))
            await opened.wait()
        self._left -= 1
        if not self._left:
            self._opened.set()
        # The first one is shorter, so that their ends are spread as those of real clients are.
        wait_ms = max(1, self.poll_ms * (number + 1) // self._count)
        try:
            while True:
                assert not await client.receive(1, wait_ms), "no message is sent"
                self.ended += 1
                wait_ms = self.poll_ms
        finally:
            stream.cancel()


async def _clients(
    setup: Setup, connect: Callable[[str], Awaitable[RemoteClient]], pid: int
) -> list[Figure]:
    """Measure long polls that end and are sent again, and then those that only wait."""
    setup.say("one long poll waits")  # so that the gateway has joined the group
    one = Pollers(connect, 1)
    one.poll_ms = POLL_MS
    async with one.polling():
        await asyncio.sleep(SETTLED_S)
        at_rest = await _share(pid, setup.sized(WINDOW_S, 2))
    count, before = setup.sized(1_000, 50), process_tree.rss_bytes([pid])
    setup.say(f"{100 * at_rest:.2f} % of a core. {count:,} clients connect")
    pollers = Pollers(connect, count)
    async with pollers.polling():
        await asyncio.sleep(SETTLED_S)
        setup.say(f"{count:,} long polls end and are sent again")
        begin = pollers.ended
        repeated = await _share(pid, 2 * setup.sized(WINDOW_S, 10))
        setup.say(f"{pollers.ended - begin:,} long polls ended")
        pollers.poll_ms = POLL_MS
        await asyncio.sleep(REPEATED_MS / 1_000 + SETTLED_S)
        each = (process_tree.rss_bytes([pid]) - before) / count
        setup.say(f"{count:,} long polls wait")
        begin = pollers.ended
        waiting = await _share(pid, setup.sized(WAITING_S, 2))
        assert pollers.ended == begin, "a long poll ended"
    return [
        figure(
            f"memory of each of {count:,} connected clients",
            each / KIB,
            "KiB",
            Goal(value_max=100),
        ),
        figure(
            f"processor time of {count:,} long polls that wait, beyond that of one",
            100 * (waiting - at_rest),
            "% of a core",
            Goal(value_max=1),
        ),
        figure(
            f"processor time of {count:,} long polls, each sent again after "
            f"{REPEATED_MS // 1_000} s, beyond that of one that waits",
            100 * (repeated - at_rest),
            "% of a core",
            Goal(value_max=1),
        ),
    ]


async def _share(pid: int, seconds: float) -> float:
    """Return the processor time of a process during a window, as a share of one core."""
    begin_cpu_s, begin_s = process_tree.cpu_s([pid]), perf_counter()
    await asyncio.sleep(seconds)
    return (process_tree.cpu_s([pid]) - begin_cpu_s) / (perf_counter() - begin_s)


async def _against_proxy(setup: Setup) -> list[Figure]:
    """Measure messages per second of server CPU with the official Java client, by turns."""
    try:
        return [await _drained(setup, await JavaClient.compiled(setup.folder))]
    except PeerFailed as error:
        print(f"NOT MEASURED: ReceiveMessage and AckMessage against RocketMQ's proxy: {error}")
        return []


async def _drained(setup: Setup, java: JavaClient) -> Figure:
    count, rounds, topic = setup.sized(10_000, 1_000), setup.sized(3, 1), TOPICS[0]
    proxy = RocketMq()
    await proxy.prepare()
    rates: dict[str, list[float]] = {"gateway": [], "proxy": []}
    (setup.folder / "proxy").mkdir()
    options = ClusterOptions(gateways=1, auto_restart=False, log_level="WARNING")
    async with (
        LocalCluster(setup.folder / "drained", options, start=start_program) as cluster,
        proxy.serve(setup.folder / "proxy", fsync=True) as servers,
    ):
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(topic, QUEUES)
        own = tuple(one.pid for one in cluster.endpoints() if one.pid is not None)
        subjects = (
            ("gateway", cluster.addresses["gateway"], own),
            ("proxy", servers.address, servers.pids),
        )
        for number in range(rounds + 1):
            for name, address, pids in subjects:
                setup.say(f"round {number} of {rounds}: {name}, {count:,} messages")
                try:
                    if not number:  # a new group of RocketMQ starts at the end of the topic
                        await java.join(address, topic, DRAINED_GROUP)
                    await java.fill(address, topic, count)
                    begin_cpu_s = process_tree.cpu_s(pids)
                    drained = await java.drain(address, topic, DRAINED_GROUP, count)
                except PeerFailed as error:
                    raise PeerFailed(f"{name}, round {number}: {error}") from error
                used_s = process_tree.cpu_s(pids) - begin_cpu_s
                if number:  # the first round warms up
                    rates[name].append(drained.message_count / used_s)
    return figure(
        "ReceiveMessage and AckMessage per second of server CPU, against RocketMQ's proxy",
        median(rates["gateway"]),
        "msg/s",
        Goal(ratio_min=0.5),
        reference=median(rates["proxy"]),
    )
