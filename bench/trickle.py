"""Time from a send to the call of the handler at a steady rate, and the CPU time of a message.

Producer and consumer are processes of their own (`python -m bench.trickle produce|consume …`), as
the services are. Times are readings of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, process_time
from typing import Any

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

QUEUES, RECORD_BYTES = 8, 100
WARM_UP_S = 2.0
_SENT = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Trickle:
    """One measurement.

    Attributes:
        delays_ms: Milliseconds from the send to the handler, of each message.
        server_ms: CPU time of the services per message, in milliseconds.
        client_ms: CPU time of producer and consumer per message.
    """

    delays_ms: list[float]
    server_ms: float
    client_ms: float

    @property
    def p99_ms(self) -> float:
        """The delay that 99 of 100 messages do not exceed."""
        return quantiles(self.delays_ms, n=100)[-1]


async def trickle(setup: Setup) -> list[Figure]:
    """Measure 2,000, 200 and 100 messages per second over 8 queues, stored in memory."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    results: dict[int, Trickle] = {}
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        for rate in (2_000, 200, 100):
            setup.say(f"{rate} messages per second")
            results[rate] = await measure(cluster, rate, setup.sized(15, 3))
    fast, slow, slowest = results[2_000], results[200], results[100]
    return [
        figure(
            "send to handler at 2,000 messages/s, p50",
            median(fast.delays_ms),
            "ms",
            Goal(value_max=3),
        ),
        figure("send to handler at 2,000 messages/s, p99", fast.p99_ms, "ms", Goal(value_max=15)),
        figure(
            "send to handler at 100 messages/s, p50",
            median(slowest.delays_ms),
            "ms",
            Goal(value_max=2),
        ),
        figure(
            "CPU of a message at 200 messages/s, services and clients",
            slow.server_ms + slow.client_ms,
            "ms",
            Goal(value_max=0.6),
        ),
        figure(
            "CPU of a message at 2,000 messages/s, services and clients",
            fast.server_ms + fast.client_ms,
            "ms",
            Goal(value_max=0.3),
        ),
    ]


async def measure(cluster: LocalCluster, rate: int, seconds: float) -> Trickle:
    """Send `rate` messages per second for `seconds`, and handle them in another process."""
    count = int(rate * seconds)
    async with (
        _client("consume", cluster.nameserver, f"trickle-{rate}", str(count)) as consumer,
        _client("produce", cluster.nameserver, str(rate), str(count)) as producer,
    ):
        await consumer.expect("ready")
        await producer.expect("ready")
        begin_s = cpu_s(cluster)
        producer.go()
        sent = await producer.expect("done")
        handled = await consumer.expect("done")
        server_s = cpu_s(cluster) - begin_s
    return Trickle(
        handled["delays_ms"],
        1_000 * server_s / count,
        1_000 * (sent["cpu_s"] + handled["cpu_s"]) / count,
    )


def cpu_s(cluster: LocalCluster) -> float:
    """Return the CPU time that the services have used."""
    return sum(map(process_cpu_s, filter(None, map(cluster.pid, cluster.options.names))))


def process_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9


class _Client:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def expect(self, kind: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        said: dict[str, Any] = json.loads(line)
        assert said["kind"] == kind, said
        return said


@asynccontextmanager
async def _client(*arguments: str) -> AsyncIterator[_Client]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.trickle",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
    )
    try:
        yield _Client(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _say(kind: str, **values: object) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


async def _consume(nameserver: str, group: str, count: str) -> None:
    delays_ms: list[float] = []
    left = int(count)
    begin_s = 0.0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal left, begin_s
        (sent_s,) = _SENT.unpack_from(message.body)
        if not sent_s:
            return
        if len(delays_ms) == 0:
            begin_s = process_time()
        delays_ms.append(1_000 * (monotonic() - sent_s))
        left -= 1
        if not left:
            consumer.stop()

    granted: set[QueueRef] = set()

    def note(event: OwnershipEvent) -> None:
        if event.kind == "granted" and event.queue not in granted:
            granted.add(event.queue)
            if len(granted) == QUEUES:
                _say("ready")

    settings = ConsumerSettings(consume_from="last", queue_concurrency=4)
    async with Consumer(nameserver, group, {TOPIC: "*"}, settings, on_ownership=note) as consumer:
        await consumer.run(handle)
        cpu = process_time() - begin_s
    _say("done", cpu_s=cpu, delays_ms=delays_ms)


async def _produce(nameserver: str, rate: str, count: str) -> None:
    settings = ProducerSettings(durability=Durability.MEMORY)
    padding = bytes(RECORD_BYTES - _SENT.size)
    async with Producer(nameserver, settings) as producer, asyncio.TaskGroup() as tasks:
        await producer.send(TOPIC, _SENT.pack(0.0) + padding)
        _say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(WARM_UP_S)
        begin_s, cpu_s_begin = monotonic(), process_time()
        interval_s = 1 / int(rate)
        for number in range(int(count)):
            delay_s = begin_s + number * interval_s - monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.create_task(producer.send(TOPIC, _SENT.pack(monotonic()) + padding))
        await producer.flush()
        cpu = process_time() - cpu_s_begin
    _say("done", cpu_s=cpu)


if __name__ == "__main__":
    asyncio.run({"consume": _consume, "produce": _produce}[sys.argv[1]](*sys.argv[2:]))
