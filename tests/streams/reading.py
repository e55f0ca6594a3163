"""What tests of the streams share: a cluster in memory that streams, and what its topic has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq_server.testing import MemoryBroker

SERVICES = ("nameserver", "lockmgr", "offsets", "storage")


def streaming(**settings: dict[str, object]) -> MemoryBroker:
    """A cluster whose services publish; `settings` by service, besides."""
    chosen = {name: {"metrics_stream": True} | settings.get(name, {}) for name in SERVICES}
    return MemoryBroker(settings=chosen)


async def batches(broker: MemoryBroker) -> list[pb.MetricBatch]:
    """Every stored batch, as stored."""
    return [pb.MetricBatch.FromString(one.body) for one in await broker.messages(METRICS_TOPIC)]


def by_kind(found: Iterable[pb.MetricBatch]) -> dict[str, list[pb.MetricEvent]]:
    """Events by the name of their kind."""
    events: dict[str, list[pb.MetricEvent]] = defaultdict(list)
    for batch in found:
        for event in batch.events:
            events[event.WhichOneof("kind") or ""].append(event)
    return events
