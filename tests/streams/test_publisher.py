"""Goal: batches are sent in order, and retried with the same number; if they can't be stored,
events are dropped and counted, and publishing an event never waits. What a service can't publish
before it stops, its next incarnation publishes first.

Method: the publisher with a sender that fails when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry import event_hub as events
from batonmq._telemetry import metrics_publisher as publishing
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.metrics_publisher import MetricsPublisher, StreamStart
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


class Record:
    """A record between incarnations, in memory.

    Attributes:
        kept: Batches for the next incarnation.
        works: Whether batches can be kept.
    """

    def __init__(self, kept: Sequence[bytes] = (), *, works: bool = True) -> None:
        self.kept, self.works = list(kept), works

    async def take(self) -> StreamStart:
        return StreamStart(tuple(self.kept), pb.MetricEvent(process_started=pb.ProcessStarted()))

    def last_event(self) -> pb.MetricEvent:
        return pb.MetricEvent(process_stopped=pb.ProcessStopped())

    async def forget_batches(self) -> None:
        self.kept = []

    def keep(self, batches: Sequence[bytes]) -> bool:
        self.kept = list(batches) if self.works else []
        return self.works


def kinds(batches: Sequence[pb.MetricBatch]) -> list[tuple[int, int, list[str]]]:
    """Return incarnation, number and kinds of each batch."""
    return [
        (one.incarnation_id, one.seq, [str(event.WhichOneof("kind")) for event in one.events])
        for one in batches
    ]


def decoded(record: Record) -> list[tuple[int, int, list[str]]]:
    return kinds([pb.MetricBatch.FromString(one) for one in record.kept])


async def live(wire: Wire, record: Record, incarnation_id: int, *, at_once: bool) -> bool:
    """Run an incarnation with one event until it has stopped; return whether it is complete.

    Args:
        at_once: Whether it does not publish its last events itself.
    """
    hub = EventHub("storage/a", incarnation_id, Clock())
    publisher = MetricsPublisher(hub, wire.opened, record)
    publisher.listen()
    hub.publish(event(1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publisher.run())
        tries = wire.tries
        await until(lambda: wire.tries > tries)
        await until(lambda: wire.away or kinds(wire.stored)[-1][0] == incarnation_id)
        hub.publish(event(2))
        publisher.stop()
        if at_once:
            running.cancel()
    return publisher.complete


async def test_service_that_can_publish_marks_its_last_batch() -> None:
    wire, record = Wire(), Record()
    assert await live(wire, record, 7, at_once=False)
    assert kinds(wire.stored) == [
        (7, 1, ["appended", "process_started"]),
        (7, 2, ["appended", "process_stopped"]),
    ]
    assert record.kept == []


async def test_next_incarnation_publishes_what_is_kept_before_its_own_batches() -> None:
    wire, record = Wire(), Record()
    assert await live(wire, record, 7, at_once=True)
    assert decoded(record) == [(7, 2, ["appended", "process_stopped"])]
    assert await live(wire, record, 8, at_once=True)
    assert [name[:2] for name in kinds(wire.stored)] == [(7, 1), (7, 2), (8, 1)]
    assert decoded(record) == [(8, 2, ["appended", "process_stopped"])]


async def test_batches_of_incarnations_that_never_reach_the_topic_pile_up_in_order() -> None:
    wire, record = Wire(), Record()
    wire.away = wire.stores_anyway = True
    for incarnation_id in (7, 8):
        assert await live(wire, record, incarnation_id, at_once=True)
    assert [name[:2] for name in decoded(record)] == [(7, 1), (7, 2), (8, 1)]
    wire.away = False
    assert await live(wire, record, 9, at_once=False)
    assert record.kept == []
    names = [name[:2] for name in kinds(wire.stored)]
    assert names.count((7, 1)) > 1, "a batch with an unknown outcome is stored again"
    assert sorted(set(names)) == [(7, 1), (7, 2), (8, 1), (9, 1), (9, 2)]


async def test_service_that_can_neither_publish_nor_keep_is_not_complete() -> None:
    wire = Wire()
    wire.away = True
    assert not await live(wire, Record(works=False), 7, at_once=True)
    wire.away = False
    assert await live(wire, Record(works=False), 8, at_once=False)


async def test_cancelled_publisher_keeps_nothing_and_is_not_complete() -> None:
    left = pb.MetricBatch(source="storage/a", incarnation_id=7, seq=3).SerializeToString()
    wire, record, hub = Wire(), Record([left]), new_hub()
    wire.away = True
    publisher = MetricsPublisher(hub, wire.opened, record)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publisher.run())
        await until(lambda: wire.tries > 0)
        running.cancel()
    assert not publisher.complete
    assert record.kept == [left], "the file stays as the incarnation before has left it"
