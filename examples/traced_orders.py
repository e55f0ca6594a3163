"""Traces: each order is one trace, from the shop through the broker to both attempts of its bill.

    baton up                                   # in another terminal
    python examples/traced_orders.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. The spans are kept in memory;
in production an OTLP exporter sends them to a collector.

Needs: pip install 'batonmq[opentelemetry]' opentelemetry-sdk
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, defaultdict

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from batonmq import Admin, Consumer, ConsumerSettings, OpenTelemetry, Producer, ReceivedMessage

TOPIC, GROUP, ORDERS = "traced-orders", "traced-billing", 20
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
EXPECTED = Counter({"checkout": 1, f"send {TOPIC}": 1, f"process {TOPIC}": 2})
SETTINGS = ConsumerSettings(consume_from="first", send_back=False, retry_first_ms=10)


def names_of_traces(exporter: InMemorySpanExporter) -> list[Counter[str]]:
    """Return the names of the spans of each trace."""
    traces: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for span in exporter.get_finished_spans():
        traces[span.context.trace_id][span.name] += 1
    return list(traces.values())


async def main(nameserver: str = NAMESERVER) -> None:
    """Send and bill orders; the first attempt of each bill fails."""
    exporter, provider, billed = InMemorySpanExporter(), TracerProvider(), Counter[bytes]()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry, tracer = OpenTelemetry(provider), provider.get_tracer("shop")
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    async with (
        asyncio.timeout(60),
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS, telemetry=telemetry) as consumer,
        asyncio.TaskGroup() as tasks,
    ):

        async def bill(message: ReceivedMessage) -> None:
            billed[message.body] += 1
            if message.attempts == 1:
                raise ConnectionError("the bank is busy")
            if len(billed) == ORDERS and min(billed.values()) == 2:
                consumer.stop()

        tasks.create_task(consumer.run(bill))
        async with Producer(nameserver, telemetry=telemetry) as producer:
            for number in range(ORDERS):
                with tracer.start_as_current_span("checkout"):
                    await producer.send(TOPIC, b"order-%d" % number)
    if (found := names_of_traces(exporter)) != [EXPECTED] * ORDERS:
        sys.exit(f"the traces are {found}")
    print(f"{ORDERS} orders are {ORDERS} traces: checkout, send, and two attempts of the bill")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
