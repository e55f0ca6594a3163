"""The publisher of a process's events to the topic BATON_SYS_METRICS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._connection.directory import ClientEnvironment
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import METRICS_PRODUCER
from batonmq._telemetry.metrics_publisher import IncarnationRecord, MetricsPublisher
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.service_runtime import Runtime


def event_publisher(runtime: Runtime, record: IncarnationRecord) -> MetricsPublisher:
    """Return the publisher; it finds the nameservers in etcd.

    Args:
        record: The record between the incarnations of the node.
    """
    environment = ClientEnvironment(
        clock=runtime.clock, random=runtime.random, connect=runtime.connect
    )

    @asynccontextmanager
    async def opened() -> AsyncIterator[Producer]:
        addresses = await nameserver_addresses(runtime.nodes)
        async with Producer(addresses, METRICS_PRODUCER, environment=environment) as producer:
            yield producer

    return MetricsPublisher(runtime.hub, opened, record)


async def nameserver_addresses(nodes: EtcdMirror) -> str:
    """Wait until a nameserver is registered; return the addresses of all, separated by commas."""
    addresses: set[str] = set()
    async with aclosing(nodes.watch()) as changes:
        async for _ in changes:
            known = (StoredNode.FromString(one.value) for one in nodes.values.values())
            addresses = {
                node.address for node in known if node.service == pb.SERVICE_KIND_NAMESERVER
            }
            if addresses:
                break
    return ",".join(sorted(addresses))
