"""Time from a send to the call of the handler at a steady rate, and the CPU time of a message.

Producer and consumer are processes of their own (`python -m bench.trickle produce|consume …`), as
the services are. Times are readings of the machine's monotonic clock, which all processes share.
The reference is a broker that does nothing (`bench.relay`).
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import monotonic, process_time
from typing import Any
from uuid import uuid4

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
from bench.measured_process import (
    MeasuredProcess,
    measured_process,
    process_cpu_s,
    say,
    ticks,
    wait_for_go,
)
from bench.setup import TOPIC, Setup

QUEUES, RECORD_BYTES = 8, 100
WARM_UP_S = 2.0
_SENT = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Trickle:
    """One measurement.

    Attributes:
        p50_ms: Milliseconds from the send to the handler: the median,
        p99_ms: and what 99 of 100 messages do not exceed.
        cpu_ms: CPU time of services, producer and consumer per message, in milliseconds.
    """

    p50_ms: float
    p99_ms: float
    cpu_ms: float


async def trickle(setup: Setup) -> list[Figure]:
    """Measure 2,000, 200 and 100 messages per second over 8 queues, stored in memory."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    results: dict[int, tuple[Trickle, Trickle]] = {}
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        for rate in (2_000, 200, 100):
            setup.say(f"{rate} messages per second")
            results[rate] = await _by_turns(cluster, rate, setup.sized(5, 3), setup.sized(5, 1))
    (fast, fast_relay), (slow, slow_relay), (slowest, slowest_relay) = results.values()
    at_2000, at_200 = "at 2,000 messages/s", "at 200 messages/s"
    return [
        figure(
            f"send to handler {at_2000}, p50",
            fast.p50_ms,
            "ms",
            Goal(value_max=3),
            reference=fast_relay.p50_ms,
        ),
        figure(
            f"send to handler {at_2000}, p99",
            fast.p99_ms,
            "ms",
            Goal(value_max=15),
            reference=fast_relay.p99_ms,
        ),
        figure(
            "send to handler at 100 messages/s, p50",
            slowest.p50_ms,
            "ms",
            Goal(value_max=2),
            reference=slowest_relay.p50_ms,
        ),
        figure(
            f"CPU of a message {at_200}, services and clients",
            slow.cpu_ms,
            "ms",
            Goal(value_max=0.6),
            reference=slow_relay.cpu_ms,
        ),
        figure(
            f"CPU of a message {at_2000}, services and clients",
            fast.cpu_ms,
            "ms",
            Goal(value_max=0.3),
            reference=fast_relay.cpu_ms,
        ),
    ]


async def _by_turns(
    cluster: LocalCluster, rate: int, seconds: float, rounds: int
) -> tuple[Trickle, Trickle]:
    """Measure the cluster and the relay by turns; return the medians of both."""
    measured, reference = [], []
    for _ in range(rounds):
        measured.append(await measure(cluster, rate, seconds))
        reference.append(await _measure_relay(rate, seconds))
    return _medians(measured), _medians(reference)


def _medians(runs: list[Trickle]) -> Trickle:
    return Trickle(
        median(run.p50_ms for run in runs),
        median(run.p99_ms for run in runs),
        median(run.cpu_ms for run in runs),
    )


async def measure(cluster: LocalCluster, rate: int, seconds: float) -> Trickle:
    """Send `rate` messages per second for `seconds`, and handle them in another process."""
    count, module, nameserver = int(rate * seconds), "bench.trickle", cluster.nameserver
    group = f"trickle-{uuid4().hex}"
    async with (
        measured_process(module, "consume", nameserver, group, str(count)) as consumer,
        measured_process(module, "produce", nameserver, str(rate), str(count)) as producer,
    ):
        return await _measure(consumer, producer, count, lambda: cpu_s(cluster))


async def _measure_relay(rate: int, seconds: float) -> Trickle:
    """Do the same with a broker that does nothing."""
    count, module = int(rate * seconds), "bench.relay"
    async with measured_process(module, "serve") as server:
        port = str((await server.expect("serves"))["port"])
        async with (
            measured_process(module, "consume", port, str(count)) as consumer,
            measured_process(module, "produce", port, str(rate), str(count)) as producer,
        ):
            return await _measure(consumer, producer, count, lambda: process_cpu_s(server.pid))


async def _measure(
    consumer: MeasuredProcess,
    producer: MeasuredProcess,
    count: int,
    server_cpu_s: Callable[[], float],
) -> Trickle:
    await consumer.expect("ready")
    await producer.expect("ready")
    begin_s = server_cpu_s()
    producer.go()
    said: list[Mapping[str, Any]] = [await producer.expect("done"), await consumer.expect("done")]
    spent_s = server_cpu_s() - begin_s + sum(each["cpu_s"] for each in said)
    delays_ms = said[1]["delays_ms"]
    return Trickle(median(delays_ms), quantiles(delays_ms, n=100)[-1], 1_000 * spent_s / count)


def cpu_s(cluster: LocalCluster) -> float:
    """Return the CPU time that the services have used."""
    return sum(map(process_cpu_s, filter(None, map(cluster.pid, cluster.options.names))))


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
                say("ready")

    settings = ConsumerSettings(consume_from="last", queue_concurrency=4)
    async with Consumer(nameserver, group, {TOPIC: "*"}, settings, on_ownership=note) as consumer:
        await consumer.run(handle)
        cpu = process_time() - begin_s
    say("done", cpu_s=cpu, delays_ms=delays_ms)


async def _produce(nameserver: str, rate: str, count: str) -> None:
    settings = ProducerSettings(durability=Durability.MEMORY)
    padding = bytes(RECORD_BYTES - _SENT.size)
    async with Producer(nameserver, settings) as producer, asyncio.TaskGroup() as tasks:
        await producer.send(TOPIC, _SENT.pack(0.0) + padding)
        say("ready")
        await wait_for_go()
        await asyncio.sleep(WARM_UP_S)
        cpu_s_begin = process_time()
        async for now_s in ticks(int(rate), int(count)):
            tasks.create_task(producer.send(TOPIC, _SENT.pack(now_s) + padding))
        await producer.flush()
        cpu = process_time() - cpu_s_begin
    say("done", cpu_s=cpu)


if __name__ == "__main__":
    asyncio.run({"consume": _consume, "produce": _produce}[sys.argv[1]](*sys.argv[2:]))
