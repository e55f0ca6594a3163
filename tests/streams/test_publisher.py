"""Goal: batches are sent in order, and retried with the same number; if they can't be stored,
events are dropped and counted, and publishing an event never waits.

Method: the publisher with a sender that fails when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry import event_hub as events
from batonmq._telemetry import metrics_publisher as publishing
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.metrics_publisher import MetricsPublisher
from batonmq.errors import Unreachable
from tests.support.conditions import until


class Wire:
    """A sender.

    Attributes:
        away: Whether sending fails.
        stores_anyway: Whether a batch is stored although sending fails.
    """

    def __init__(self) -> None:
        self.away = self.stores_anyway = False
        self.stored: list[pb.MetricBatch] = []
        self.tries = self.opened_count = 0

    async def send(self, topic: str, body: bytes, *, keys: tuple[str], ordering_key: str) -> None:
        assert (topic, keys, ordering_key) == (METRICS_TOPIC, ("storage/a",), "storage/a")
        self.tries += 1
        if not self.away or self.stores_anyway:
            self.stored.append(pb.MetricBatch.FromString(body))
        if self.away:
            raise Unreachable("away")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Wire]:
        self.opened_count += 1
        yield self


@asynccontextmanager
async def publishing_to(wire: Wire, hub: EventHub) -> AsyncIterator[MetricsPublisher]:
    publisher = MetricsPublisher(hub, wire.opened)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publisher.run())
        await until(lambda: hub.watched)
        yield publisher
        running.cancel()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "BATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(publishing, "RETRY_S", 0.01)


def new_hub() -> EventHub:
    return EventHub("storage/a", 77, Clock())


def event(number: int) -> pb.MetricEvent:
    return pb.MetricEvent(appended=pb.Appended(message_count=number))


def numbers(wire: Wire) -> list[int]:
    return [one.appended.message_count for batch in wire.stored for one in batch.events]


async def test_batches_are_numbered_from_one_and_name_their_source() -> None:
    wire, hub = Wire(), new_hub()
    async with publishing_to(wire, hub):
        for number in range(3):
            hub.publish(event(number))
            await until(lambda number=number: len(wire.stored) > number)  # type: ignore[misc]
    assert [batch.seq for batch in wire.stored] == [1, 2, 3]
    assert {(one.source, one.incarnation_id, one.vocabulary) for one in wire.stored} == {
        ("storage/a", 77, 1)
    }
    assert numbers(wire) == [0, 1, 2]


async def test_batch_with_an_unknown_outcome_is_sent_again_with_its_number() -> None:
    wire, hub = Wire(), new_hub()
    wire.away = wire.stores_anyway = True
    async with publishing_to(wire, hub):
        hub.publish(event(1))
        await until(lambda: wire.tries >= 3)
        wire.away = False
        hub.publish(event(2))
        await until(lambda: any(batch.seq == 2 for batch in wire.stored))
    first, *_, last = wire.stored
    assert {(one.incarnation_id, one.seq) for one in wire.stored[:-1]} == {(77, 1)}
    assert first == wire.stored[1]
    assert (last.seq, last.dropped_count) == (2, 0)
    assert wire.opened_count >= 3, "each attempt has a producer of its own"


async def test_events_beyond_the_limit_are_dropped_and_counted_during_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "EVENTS_MAX", 10)
    wire, hub = Wire(), new_hub()
    wire.away = True
    async with publishing_to(wire, hub) as publisher:
        hub.publish(event(0))
        await until(lambda: wire.tries >= 1)
        for number in range(1, 101):
            hub.publish(event(number))  # returns at once
        wire.away = False
        await until(lambda: len(wire.stored) == 2)
    assert numbers(wire) == [0, *range(91, 101)]
    assert [batch.dropped_count for batch in wire.stored] == [0, 90]
    assert publisher.dropped_count == 90


async def test_stop_publishes_the_remaining_events() -> None:
    wire, hub = Wire(), new_hub()
    hub.gatherers.append(lambda: [event(7)] if not wire.stored else [])
    publisher = MetricsPublisher(hub, wire.opened)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publisher.run())
        await until(lambda: hub.watched)
        publisher.stop()
        await running
    assert numbers(wire) == [7]


async def test_error_of_a_gatherer_ends_only_the_publisher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire, hub = Wire(), new_hub()

    def broken() -> list[pb.MetricEvent]:
        raise ValueError("broken")

    hub.gatherers.append(broken)
    publisher = MetricsPublisher(hub, wire.opened)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
    assert not hub.watched
    assert "publishing of metrics has ended by an error source=storage/a" in caplog.text
