"""A cluster with replicas under load of every kind, for what is looked at from outside.

Messages go to a topic and are handled by a group whose members come and go; some fail and become
dead letters, some are for later. Producer and consumers count what they do, and so does what
listens to Spark's queries, which is told of two micro-batches as Spark tells of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from batonmq.admin import Admin
from batonmq.consumer import Consumer
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.results import RetryLater
from batonmq.consuming.session import ConsumerSettings
from batonmq.core.records import Message
from batonmq.local.cluster import LocalCluster
from batonmq.local.layout import ClusterOptions
from batonmq.local.prometheus import targets
from batonmq.metrics import ClientMetrics
from batonmq.producer import Producer
from batonspark.alert_writer import LABELS, AlertGauges
from batonspark.progress import ProgressListener
from tests.support.cluster import SEGMENT_BYTES

TOPIC, GROUP, CLUSTER = "orders", "billing", "baton"
ROUND_S = 4.0
"""So often a member joins, and leaves again."""
_SETTINGS = ConsumerSettings(consume_from="first", retries_max=0, commit_interval_ms=500)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The cluster, and everything that shows metrics, as Prometheus is told of it."""

    cluster: LocalCluster
    targets: list[Mapping[str, Any]]
    addresses: dict[str, list[str]]
    """host:port of the pages of metrics, by who has them: services, `clients`, `spark`."""


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[Loaded]:
    """The load goes on until the block ends. Use it in the body of a test."""
    options = ClusterOptions(
        cluster=CLUSTER,
        storage_replicas=2,
        offsets=2,
        settings={
            "storage": {"segment_bytes": SEGMENT_BYTES},
            "nameserver": {"inspect_interval_ms": 1_000},
        },
    )
    clients, spark = CollectorRegistry(), CollectorRegistry()
    _tell_of_spark(spark)
    pages = {
        who: start_http_server(0, "127.0.0.1", registry)[0]
        for who, registry in (("clients", clients), ("spark", spark))
    }
    told = {who: f"127.0.0.1:{page.server_port}" for who, page in pages.items()}
    try:
        async with LocalCluster(folder, options) as cluster:
            addresses = {who: [address] for who, address in told.items()}
            for target in targets(cluster):
                addresses.setdefault(target["labels"]["node_type"], []).extend(target["targets"])
            others = [
                {"targets": [address], "labels": {"cluster": CLUSTER, "node_type": who}}
                for who, address in told.items()
            ]
            async with Admin(cluster.nameserver) as admin:
                await admin.create_topic(TOPIC, 4)
            async with asyncio.TaskGroup() as tasks:
                metrics = ClientMetrics(clients)
                running = [
                    tasks.create_task(_send(cluster.nameserver, metrics)),
                    tasks.create_task(_consume(cluster.nameserver, metrics, "stays")),
                    tasks.create_task(_come_and_go(cluster.nameserver, metrics)),
                ]
                yield Loaded(cluster, [*targets(cluster), *others], addresses)
                for task in running:
                    task.cancel()
    finally:
        for page in pages.values():
            page.shutdown()
            page.server_close()


async def _send(nameserver: str, metrics: ClientMetrics) -> None:
    async with Producer(nameserver, metrics=metrics) as producer:
        number = 0
        while True:
            for _ in range(20):
                number += 1
                body = b"fails" if number % 100 == 0 else b"order %d" % number
                delay_ms = 500 if number % 50 == 0 else 0
                if delay_ms:
                    await producer.send(TOPIC, body, delay_ms=delay_ms)
                else:
                    await producer.submit(TOPIC, Message(body))
            await asyncio.sleep(0.2)


async def _consume(
    nameserver: str, metrics: ClientMetrics, client_id: str, for_s: float | None = None
) -> None:
    consumer = Consumer(
        nameserver, GROUP, {TOPIC: "*"}, _SETTINGS, client_id=client_id, metrics=metrics
    )
    async with consumer:
        if for_s is not None:
            asyncio.get_running_loop().call_later(for_s, consumer.stop)
        await consumer.run(_handle)


async def _come_and_go(nameserver: str, metrics: ClientMetrics) -> None:
    while True:
        await _consume(nameserver, metrics, "comes", ROUND_S)


async def _handle(message: ReceivedMessage) -> RetryLater | None:
    return RetryLater() if message.body == b"fails" else None


def _tell_of_spark(registry: CollectorRegistry) -> None:
    listener, alerts = ProgressListener(registry), AlertGauges(registry)
    for name in ("bronze", "rollup"):
        listener.onQueryStarted(SimpleNamespace(runId=name, id=name, name=name))
        told = {
            "id": name,
            "name": name,
            "batchId": 7,
            "numInputRows": 900,
            "inputRowsPerSecond": 300.0,
            "processedRowsPerSecond": 450.0,
            "durationMs": {"triggerExecution": 2_000},
            "stateOperators": [
                {"numRowsTotal": 10, "memoryUsedBytes": 4_096, "numRowsDroppedByWatermark": 0}
            ],
            "sources": [],
        }
        listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(json=json.dumps(told))))
    alert = dict.fromkeys(LABELS, "") | {"rule": "lag", "severity": "WARNING", "state": "FIRING"}
    alerts.set([alert])
