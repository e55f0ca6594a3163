"""A cluster that runs the demo, for pictures and tests of the dashboards.

The demo is that of `batonmq_server.demo`, with fewer flights. It exports no metrics of clients, has
no failed messages and schedules none. So a second program sends to a topic of its own and exports
the metrics of its clients; one message in a hundred becomes a dead letter, and one in fifty is
scheduled. Without it these panels would be empty:

    Topic    Send latency
    Group    Messages handled, Handler time, Messages in the client, Queues acquired and lost
    Storage  Lateness of scheduled messages
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.admin.admin import Admin
from batonmq_server.demo.demo_run import DemoResult, run_demo
from batonmq_server.demo.flights import Flight
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.prometheus import scrape_targets
from tests.support.cluster import SEGMENT_BYTES, fork_server

TOPIC, GROUP, CLUSTER = "orders", "billing", "baton"
_OPTIONS = ClusterOptions(
    cluster=CLUSTER,
    storage_replicas=2,
    offsets=2,
    secure=True,
    settings={
        "storage": {"segment_bytes": SEGMENT_BYTES},
        "nameserver": {"inspect_interval_ms": 1_000},
    },
)
"""Options with replicas and certificates."""


@dataclass(frozen=True, slots=True)
class DemoCluster:
    """The cluster and the targets of Prometheus."""

    cluster: LocalCluster
    targets: list[Mapping[str, Any]]
    addresses: dict[str, list[str]]
    """host:port of the pages of metrics, by service; those of clients under `clients`."""

    async def demo(self, flights: list[Flight], folder: Path, pace: int) -> DemoResult:
        """Run the demo once; see `batonmq_server.demo.demo_run.run_demo`."""
        return await run_demo(
            self.cluster.nameserver,
            flights,
            folder,
            lambda what, done, total: None,
            pace=pace,
            security=self.cluster.security,
        )


@asynccontextmanager
async def demo_cluster(folder: Path) -> AsyncIterator[DemoCluster]:
    """Run the cluster and the second program until the block ends.

    Use it in the body of a test, not in a fixture: one task must enter and leave it.
    """
    registry = CollectorRegistry()
    page, _ = start_http_server(0, "127.0.0.1", registry)
    try:
        async with (
            LocalCluster(folder, _OPTIONS, start=fork_server().start) as cluster,
            asyncio.TaskGroup() as tasks,
        ):
            client_address = f"127.0.0.1:{page.server_port}"
            targets = [
                *scrape_targets(cluster),
                {
                    "targets": [client_address],
                    "labels": {"cluster": CLUSTER, "node_type": "clients"},
                },
            ]
            addresses: dict[str, list[str]] = {}
            for target in targets:
                addresses.setdefault(target["labels"]["node_type"], []).extend(target["targets"])
            second_program = tasks.create_task(
                _run_second_program(cluster.nameserver, cluster.security, ClientMetrics(registry))
            )
            yield DemoCluster(cluster, targets, addresses)
            second_program.cancel()
    finally:
        page.shutdown()
        page.server_close()


async def _run_second_program(
    nameserver: str, security: Security | None, metrics: ClientMetrics
) -> None:
    """Run the second program."""
    # On a busy machine the replicas need a while to be in sync.
    async with Admin(nameserver, security=security, timeout_s=60) as admin:
        await admin.create_topic(TOPIC, 4)
    settings = ConsumerSettings(consume_from="first", retries_max=0, security=security)
    async with (
        Producer(nameserver, ProducerSettings(security=security), metrics=metrics) as producer,
        Consumer(nameserver, GROUP, {TOPIC: "*"}, settings, metrics=metrics) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(_send(producer))
        tasks.create_task(consumer.run(_handle))


async def _send(producer: Producer) -> None:
    number = 0
    while True:
        for _ in range(20):
            number += 1
            if number % 50 == 0:
                await producer.send(TOPIC, b"order %d" % number, delay_ms=500)
            else:
                body = b"fails" if number % 100 == 1 else b"order %d" % number
                await producer.submit(TOPIC, Message(body))
        await asyncio.sleep(0.2)


async def _handle(message: ReceivedMessage) -> RetryLater | None:
    return RetryLater() if message.body == b"fails" else None
