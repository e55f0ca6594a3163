"""Processor time of a console while people have its pages open, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.console import LocalConsole
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure
from bench.measured_process import process_cpu_s
from bench.setup import TOPIC, Setup

START_S = 120
GROUP, QUEUES, RATE = "bench-viewers", 8, 50
VIEWERS = {"/": 20, "/topics": 10, f"/topics/{TOPIC}": 5, "/groups": 10, f"/groups/{GROUP}": 5}
"""Number of people that have a page open: 50."""


async def viewers(setup: Setup) -> list[Figure]:
    """Measure a console with 50 viewers of five pages, which change: messages flow meanwhile."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with LocalConsole(cluster, setup.say, port=0) as console, _messages(cluster):
            base = f"http://{console.address}"
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(
                    base_url=base, limits=limits, timeout=None, trust_env=False
                ) as browser,
                asyncio.TaskGroup() as tasks,
            ):
                seen, ready = dict.fromkeys(VIEWERS, 0), asyncio.Event()
                looking = [
                    tasks.create_task(_look(browser, path, seen, ready))
                    for path, count in VIEWERS.items()
                    for _ in range(count)
                ]
                async with asyncio.timeout(START_S):
                    await ready.wait()
                await asyncio.sleep(setup.sized(10, 1))
                assert console.pid is not None
                seconds, before = setup.sized(60, 3), dict(seen)
                begin_s = process_cpu_s(console.pid)
                setup.say(f"{sum(VIEWERS.values())} viewers look for {seconds} s")
                await asyncio.sleep(seconds)
                used_s = process_cpu_s(console.pid) - begin_s
                for task in looking:
                    task.cancel()
    updates = sum(seen.values()) - sum(before.values())
    setup.say(f"{updates / seconds:.0f} updates a second")
    name = f"processor time of a console with {sum(VIEWERS.values())} viewers"
    return [figure(name, 100 * used_s / seconds, "% of a core", Goal(value_max=5))]


@asynccontextmanager
async def _messages(cluster: LocalCluster) -> AsyncIterator[None]:
    """Send and handle messages, so that every page changes."""

    async def handle(_: ReceivedMessage) -> None:
        pass

    async def produce() -> None:
        async with Producer(cluster.nameserver) as producer:
            while True:
                await producer.send(TOPIC, bytes(100))
                await asyncio.sleep(1 / RATE)

    settings = ConsumerSettings(consume_from="first")
    async with (
        Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        handling = tasks.create_task(consumer.run(handle))
        producing = tasks.create_task(produce())
        yield
        producing.cancel()
        consumer.stop()
        await handling


async def _look(
    browser: httpx.AsyncClient, path: str, seen: dict[str, int], ready: asyncio.Event
) -> None:
    """Load a page, and count its updates; set `ready` when all pages have some."""
    (await browser.get(path)).raise_for_status()
    async with browser.stream("GET", path, params={"live": "1"}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: live"):
                seen[path] += 1
                if all(seen[one] >= count for one, count in VIEWERS.items()):
                    ready.set()
