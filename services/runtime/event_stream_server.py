"""The gRPC service that streams the events of a process live."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2_grpc as pb_grpc
from batonmq._telemetry.event_hub import EventHub


class MetricsServicer(pb_grpc.MetricsServiceServicer):
    """Streams the events of the hub to each caller."""

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
    """Add the event stream of `hub` to a server."""
    pb_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(hub), server)
