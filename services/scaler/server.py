"""Translates KEDA's contract."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from batonmq.errors import Overloaded
from batonmq_server.scaler.core.trigger import metric_of, trigger_of
from batonmq_server.scaler.demand_reader import DemandReader
from keda.externalscaler import externalscaler_pb2 as pb
from keda.externalscaler import externalscaler_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
OPEN_ENDED = frozenset({"IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"})
"""KEDA sets no deadline. Reads of the cluster have their own."""
Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Serves KEDA.

    Args:
        refresh_ms: Time between two looks at the group of a stream.
        streams_max: Streams at once.
    """

    def __init__(self, reader: DemandReader, *, refresh_ms: int, streams_max: int) -> None:
        self._reader, self._refresh_s, self._streams_max = reader, refresh_ms / 1_000, streams_max
        self._streams = 0

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        """Return whether the group needs a member."""
        return pb.IsActiveResponse(result=await self._active(request))

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Send whether the group needs a member, at once and after each change."""
        if self._streams >= self._streams_max:
            raise Overloaded(
                f"{self._streams} streams are open; that is the limit",
                remedy="Raise BATON_SCALER_STREAMS_MAX, or use the trigger type `external`.",
            )
        self._streams += 1
        try:
            sent: bool | None = None
            while True:
                active = await self._active(request)
                if active != sent:
                    yield pb.IsActiveResponse(result=active)
                    sent = active
                await asyncio.sleep(self._refresh_s)
        finally:
            self._streams -= 1

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> pb.GetMetricSpecResponse:
        """Return the target of one member, of each metric."""
        targets = trigger_of(request.scalerMetadata).targets
        return pb.GetMetricSpecResponse(
            metricSpecs=[
                pb.MetricSpec(
                    metricName=metric, targetSize=math.ceil(target), targetSizeFloat=target
                )
                for metric, target in targets.items()
            ]
        )

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Context
    ) -> pb.GetMetricsResponse:
        """Return the lag of the group, within what its queues can use."""
        trigger = trigger_of(request.scaledObjectRef.scalerMetadata)
        metric = metric_of(trigger, request.metricName)
        value = (await self._reader.read(trigger.group)).value(trigger, metric)
        return pb.GetMetricsResponse(
            metricValues=[
                pb.MetricValue(
                    metricName=metric, metricValue=math.ceil(value), metricValueFloat=value
                )
            ]
        )

    async def _active(self, request: pb.ScaledObjectRef) -> bool:
        trigger = trigger_of(request.scalerMetadata)
        return (await self._reader.read(trigger.group)).active(trigger)
