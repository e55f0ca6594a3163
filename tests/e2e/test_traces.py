"""Goal: a collector receives one trace of a message, from producer, broker and consumer.

Method: a real cluster; the SDK's OTLP exporter sends to a gRPC server with OTLP's own service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from batonmq import Admin, Consumer, ConsumerSettings, OpenTelemetry, Producer, ReceivedMessage
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.support.cluster import SEGMENT_BYTES, fork_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TOPIC = "orders"
SETTINGS = ConsumerSettings(consume_from="first", send_back=False, retry_first_ms=10)


class Collector(TraceServiceServicer):
    """Keeps the spans that it receives, by the name of their service."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        for of_resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            spans = self.spans.setdefault(names["service.name"], [])
            for scope in of_resource.scope_spans:
                spans += scope.spans
        return pb.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Run a collector; yield it and its address."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def exporting(service: str, address: str) -> Iterator[OpenTelemetry]:
    """Export the spans of the block."""
    provider = TracerProvider(resource=Resource({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address, insecure=True)))
    yield OpenTelemetry(provider)
    provider.shutdown()


async def send_and_handle(nameserver: str, address: str) -> None:
    async def handle(message: ReceivedMessage) -> None:
        if message.attempts == 1:
            raise ConnectionError("busy")
        consumer.stop()

    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 1)
    with exporting("shop", address) as telemetry:
        async with Producer(nameserver, telemetry=telemetry) as producer:
            await producer.send(TOPIC, b"one")
    with exporting("billing", address) as telemetry:
        async with Consumer(
            nameserver, "billing", {TOPIC: "*"}, SETTINGS, telemetry=telemetry
        ) as consumer:
            await consumer.run(handle)


async def test_collector_receives_one_trace_from_producer_through_broker_to_consumer(
    tmp_path: Path,
) -> None:
    options = ClusterOptions(settings={"storage": {"segment_bytes": SEGMENT_BYTES}})
    with collecting() as (collector, address):
        async with (
            LocalCluster(tmp_path, options, start=fork_server().start) as cluster,
            asyncio.timeout(60),
        ):
            await send_and_handle(cluster.nameserver, address)
    (sent,), processed = collector.spans["shop"], collector.spans["billing"]
    assert (sent.name, sent.kind) == (f"send {TOPIC}", Span.SPAN_KIND_PRODUCER)
    assert [span.name for span in processed] == [f"process {TOPIC}"] * 2
    assert {span.trace_id for span in processed} == {sent.trace_id}
    assert {span.parent_span_id for span in processed} == {sent.span_id}
    codes = [span.status.code for span in processed]
    assert codes == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]
    systems = {
        one.value.string_value
        for span in (sent, *processed)
        for one in span.attributes
        if one.key == "messaging.system"
    }
    assert systems == {"batonmq"}
