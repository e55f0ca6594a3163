"""An in-memory cluster that publishes metric events, and readers of its metrics topic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq_server.testing import MemoryBroker

SERVICES = ("nameserver", "lockmgr", "offsets", "storage")


def streaming(**settings: dict[str, object]) -> MemoryBroker:
    """Return a cluster whose services publish events, with further settings by service."""
    by_service = {name: {"metrics_stream": True} | settings.get(name, {}) for name in SERVICES}
    return MemoryBroker(settings=by_service)


async def batches(broker: MemoryBroker) -> list[pb.MetricBatch]:
    """Return all stored batches in the order of the log."""
    return [pb.MetricBatch.FromString(one.body) for one in await broker.messages(METRICS_TOPIC)]


def by_kind(batch_list: Iterable[pb.MetricBatch]) -> dict[str, list[pb.MetricEvent]]:
    """Return the events by the name of their kind."""
    events: dict[str, list[pb.MetricEvent]] = defaultdict(list)
    for batch in batch_list:
        for event in batch.events:
            events[event.WhichOneof("kind") or ""].append(event)
    return events
