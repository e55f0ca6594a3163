"""A storage node as `python -m batonmq_server.storage` builds it, inside the test's process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import connect
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.app import build
from batonmq_server.storage.config import StorageSettings
from tests.storage.batches import TOPIC, TOPIC_ID
from tests.storage.offsets_twin import OffsetsTwin
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

BROKER = "broker-a"
GROUP = "billing"
TIMEOUT_S = 30
SEGMENT_BYTES = 64 * 1024 * 1024
WATERMARKS: dict[str, object] = {
    "disk_warn_percent": 97,
    "disk_clean_percent": 98,
    "disk_clean_forcibly_percent": 99,
    "disk_full_percent": 100,
}
"""Watermarks so high that the disk usage of the machine does not matter."""


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A running node, its stubs, its offsets twin and its etcd."""

    stub: pb_grpc.StorageServiceAsyncStub
    offsets: OffsetsTwin
    etcd: EtcdSession
    runtime: Runtime
    settings: StorageSettings
    queries: query_grpc.QueryServiceAsyncStub
    schedule: schedule_grpc.ScheduleServiceAsyncStub

    async def append(
        self, *batches: bytes, durability: pb.Durability.ValueType = pb.DURABILITY_UNSPECIFIED
    ) -> list[pb.AppendReceipt]:
        """Append and return the receipts; raise the first item error."""
        outcomes = await self.outcomes(*batches, durability=durability)
        for outcome in outcomes:
            if outcome.HasField("error"):
                raise error_from_pb(outcome.error)
        return [outcome.receipt for outcome in outcomes]

    async def outcomes(
        self, *batches: bytes, durability: pb.Durability.ValueType = pb.DURABILITY_UNSPECIFIED
    ) -> list[pb.AppendOutcome]:
        request = pb.AppendRequest(batches=batches, durability=durability)
        try:
            answer = await self.stub.Append(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return list(answer.outcomes)

    async def pull(self, **fields: object) -> pb.PullResponse:
        """Send `pull_request(**fields)` and return the answer; raise the BatonError of a status."""
        try:
            return await self.stub.Pull(pull_request(**fields), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def describe(self) -> pb.DescribeResponse:
        return await self.stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)

    async def put_topic(
        self, topic: str = TOPIC, topic_id: int = TOPIC_ID, **queue_counts: int
    ) -> int:
        """Write a topic as the nameserver does; return the revision."""
        spread = [
            nameserver_pb.QueueSpread(broker=broker.replace("_", "-"), queue_count=count)
            for broker, count in (queue_counts or {"broker_a": 8}).items()
        ]
        value = StoredTopic(name=topic, topic_id=topic_id, spread=spread)
        return await self.write_topic(value)

    async def write_topic(self, topic: StoredTopic) -> int:
        """Write any topic; return the revision."""
        return await self.etcd.put(self.etcd.key("topics", topic.name), topic.SerializeToString())

    async def put_gate(self, group: str = GROUP, **fields: Any) -> None:
        """Write a group's gate as the nameserver does."""
        gate = StoredGate(**fields)
        await self.etcd.put(self.etcd.key("gates", group), gate.SerializeToString())

    async def wait_long_polls(self, count: int) -> None:
        """Wait until there are `count` long polls."""
        await until(lambda: self._has_long_polls(count))

    async def _has_long_polls(self, count: int) -> bool:
        return (await self.describe()).long_poll_count == count


def pull_request(**fields: object) -> pb.PullRequest:
    """Return a pull of queue 0 from offset 0 under token 1, without a hold time.

    `group`, `topic`, `broker` and `queue_id` name the queue; all other `fields` set fields of the
    request.
    """
    names = {
        name: fields.pop(name, default)
        for name, default in (("topic", TOPIC), ("broker", BROKER), ("queue_id", 0))
    }
    group = fields.pop("group", GROUP)
    queue = queue_pb2.GroupQueue(group=group, queue=queue_pb2.QueueRef(**names))  # type: ignore[arg-type]
    return pb.PullRequest(**({"queue": queue, "token": 1, "pull_id": 9} | fields))  # type: ignore[arg-type]


@asynccontextmanager
async def running_node(
    etcd_endpoint: str, folder: Path, *, cluster: str = "", **settings: object
) -> AsyncIterator[RunningNode]:
    """Yield a node on `folder` in its own cluster, with the topic `orders` of 8 queues."""
    offsets = OffsetsTwin()  # type: ignore[abstract]
    cluster = cluster or secrets.token_hex(8)
    now = datetime.fromtimestamp(Clock().unix_ms() / 1000).astimezone()
    far_from_now = str(
        (now.hour + 12) % 24
    )  # so that retention by hour does not open files during the test
    common = {"segment_bytes": SEGMENT_BYTES, "retention_hours": far_from_now}
    settings = common | WATERMARKS | settings
    chosen = StorageSettings(cluster=cluster, etcd=etcd_endpoint, data_dir=folder, **settings)  # type: ignore[arg-type]
    async with (
        EtcdSession(etcd_endpoint, cluster, Clock()) as etcd,
        serving_at(
            lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(offsets, server)
        ) as offsets_address,
        _app(chosen, Runtime("storage", chosen, etcd)) as (runtime, address),
        connect(address) as channel,
    ):
        node = RunningNode(
            pb_grpc.StorageServiceStub(channel),
            offsets,
            etcd,
            runtime,
            chosen,
            query_grpc.QueryServiceStub(channel),
            schedule_grpc.ScheduleServiceStub(channel),
        )
        peer = StoredNode(node_id="a", address=offsets_address, leader=True)
        revision = await etcd.put(etcd.key("nodes", "offsets", "a"), peer.SerializeToString())
        await node.put_topic()
        async with asyncio.timeout(TIMEOUT_S):
            await runtime.nodes.reached(revision)
        yield node


@asynccontextmanager
async def _app(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[tuple[Runtime, str]]:
    async with build(settings, runtime) as app, asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(loop()) for loop in (runtime.nodes.run, *app.loops)]
        async with serving_at(*app.servicers.values(), registry=runtime.registry) as address:
            yield runtime, address
        await app.drain()
        for task in loops:
            task.cancel()
