"""The live stream of a process's events, over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2_grpc as pb_grpc
from batonmq._telemetry.events import EventHub


class MetricsServicer(pb_grpc.MetricsServiceServicer):
    """The live stream of a service's events."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub

    async def Watch(
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse],
    ) -> AsyncIterator[pb.WatchResponse]:
        """See the proto."""
        async for batch in self._hub.watch():
            yield pb.WatchResponse(batch=batch)


def add_event_stream(hub: EventHub, server: grpc.aio.Server) -> None:
    """Add the stream to a server."""
    pb_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(hub), server)
