"""The live stream of a service's events.

Goal: publishing never waits; a slow watcher loses the oldest events and gets their number; watchers
are independent.
Method: the hub itself, then its servicer behind a real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import grpc.aio
import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2_grpc as pb_grpc
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._telemetry import event_hub as events
from batonmq._telemetry.event_hub import EVENTS_MAX, WATCHERS_MAX, EventHub
from batonmq.errors import Overloaded
from batonmq_server.runtime.event_stream_server import add_event_stream
from tests.support.conditions import until
from tests.support.grpc_server import serving


class SetClock(Clock):
    def unix_ms(self) -> int:
        return 1_234


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BATCH_INTERVAL_S", 0.01)


def new_hub() -> EventHub:
    return EventHub("storage/broker-a", 77, SetClock())


def event(number: int) -> pb.MetricEvent:
    return pb.MetricEvent(appended=pb.Appended(message_count=number))


class Watcher:
    """Reads batches in the background."""

    def __init__(self, hub: EventHub, tasks: asyncio.TaskGroup) -> None:
        self.batches: list[pb.MetricBatch] = []
        self.task = tasks.create_task(self._read(hub))

    async def _read(self, hub: EventHub) -> None:
        async for batch in hub.watch():
            self.batches.append(batch)

    def numbers(self) -> list[int]:
        return [one.appended.message_count for batch in self.batches for one in batch.events]


@asynccontextmanager
async def watched(hub: EventHub) -> AsyncIterator[Watcher]:
    """A watcher of all events from now on."""
    async with asyncio.TaskGroup() as tasks:
        watcher = Watcher(hub, tasks)
        await until(lambda: hub.watched)
        yield watcher
        watcher.task.cancel()


async def test_events_arrive_in_order_with_source_and_time() -> None:
    hub = new_hub()
    async with watched(hub) as watcher:
        for number in range(3):
            hub.publish(event(number))
        await until(lambda: watcher.batches)
    (batch,) = watcher.batches
    assert watcher.numbers() == [0, 1, 2]
    assert (batch.source, batch.incarnation_id) == ("storage/broker-a", 77)
    assert (batch.seq, batch.dropped_count) == (1, 0)
    assert {one.unix_ms for one in batch.events} == {1_234}


async def test_watcher_gets_no_earlier_events() -> None:
    hub = new_hub()
    hub.publish(event(1))
    async with watched(hub) as watcher:
        hub.publish(event(2))
        await until(lambda: watcher.batches)
    assert watcher.numbers() == [2]


async def test_watcher_gets_no_counts_of_an_earlier_one() -> None:
    hub, counts = new_hub(), list[int]()

    def gathered() -> Iterator[pb.MetricEvent]:
        found = counts.copy()
        counts.clear()
        return map(event, found)

    hub.gatherers.append(gathered)
    async with watched(hub):
        pass
    counts.append(1)  # as by an action just before the end of that watcher
    async with watched(hub) as watcher:
        counts.append(2)
        await until(lambda: watcher.batches)
    assert watcher.numbers() == [2]


async def test_oldest_events_beyond_the_limit_are_dropped_and_counted() -> None:
    hub = new_hub()
    async with watched(hub) as watcher:
        for number in range(EVENTS_MAX + 7):
            hub.publish(event(number))
        await until(lambda: watcher.batches)
    assert watcher.numbers() == list(range(7, EVENTS_MAX + 7))
    assert watcher.batches[0].dropped_count == 7


async def test_batches_are_numbered_and_dropped_events_counted_since_the_start() -> None:
    hub = new_hub()
    async with watched(hub) as watcher:
        for number in range(EVENTS_MAX + 1):
            hub.publish(event(number))
        await until(lambda: len(watcher.batches) == 1)
        for number in range(EVENTS_MAX + 2):
            hub.publish(event(number))
        await until(lambda: len(watcher.batches) == 2)
    assert [batch.seq for batch in watcher.batches] == [1, 2]
    assert [batch.dropped_count for batch in watcher.batches] == [1, 3]


async def test_events_beyond_the_byte_limit_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "EVENT_BYTES_MAX", 3 * event(1).ByteSize() + 30)
    hub = new_hub()
    with hub.listen() as listener:
        for number in range(1, 101):
            hub.publish(event(number))
        remaining = listener.take(1 << 20)
    assert [one.appended.message_count for one in remaining][-1] == 100
    assert 0 < len(remaining) < 10
    assert listener.dropped_count == 100 - len(remaining)


async def test_batch_ends_at_its_limit_and_holds_one_long_event() -> None:
    hub = new_hub()
    with hub.listen() as listener:
        long = pb.MetricEvent(delivered=pb.DeliveredRange(runs=[1 << 40] * 100_000))
        for one in (event(1), long, event(2)):
            hub.publish(one)
        batches = [hub.batch(seq, listener) for seq in (1, 2, 3)]
    assert [len(batch.events) for batch in batches] == [1, 1, 1]
    assert not listener.waiting


async def test_counters_are_collected_only_while_there_is_a_watcher() -> None:
    hub, counts = new_hub(), [3]

    def gatherer() -> list[pb.MetricEvent]:
        return [event(counts.pop())] if counts else []

    hub.gatherers.append(gatherer)
    assert counts == [3]
    async with watched(hub) as watcher:
        await until(lambda: watcher.batches)
    assert watcher.numbers() == [3]


async def test_two_watchers_do_not_double_the_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "BATCH_INTERVAL_S", 1_000.0)
    hub, collections = new_hub(), [0]

    def gatherer() -> list[pb.MetricEvent]:
        collections[0] += 1
        return []

    hub.gatherers.append(gatherer)
    hub.gather()
    await hub.gather_if_due()
    assert collections == [1]


async def test_many_events_are_gathered_in_steps() -> None:
    hub, count = new_hub(), 10 * STEP_ITEMS
    hub.gatherers.append(lambda: map(event, range(count)))
    seen = [0]
    with hub.listen() as listener:
        async with asyncio.TaskGroup() as tasks:
            gathering = tasks.create_task(hub.gather_if_due())
            while not gathering.done():
                await asyncio.sleep(0)
                seen.append(len(listener._events))
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= STEP_ITEMS
    assert sum(steps) == count


async def test_reader_helps_another_one_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BATCH_INTERVAL_S", 20.0)  # not due again on a slow machine
    hub, count = new_hub(), 3 * STEP_ITEMS
    hub.gatherers.append(lambda: map(event, range(count)))
    with hub.listen() as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hub.gather_if_due())
            await asyncio.sleep(0)
            assert 0 < len(listener._events) < count
            await hub.gather_if_due()
            numbers = [one.appended.message_count for one in listener.take(1 << 20)]
    assert numbers == list(range(count))


async def test_gathering_that_is_interrupted_is_finished_by_the_next_one() -> None:
    hub, numbers = new_hub(), list(range(STEP_ITEMS + 10))

    def gatherer() -> Iterator[pb.MetricEvent]:
        taken, numbers[:] = numbers[:], []
        yield from map(event, taken)

    hub.gatherers.append(gatherer)
    with hub.listen() as listener:
        async with asyncio.TaskGroup() as tasks:
            gathering = tasks.create_task(hub.gather_if_due())
            await asyncio.sleep(0)
            gathering.cancel()
        numbers.append(1_000)
        hub.gather()
        gathered = [one.appended.message_count for one in listener.take(1 << 20)]
    assert gathered == [*range(STEP_ITEMS + 10), 1_000]


async def test_each_watcher_gets_all_events() -> None:
    hub = new_hub()
    async with watched(hub) as first, watched(hub) as second:
        await until(lambda: len(hub._watchers) == 2)
        hub.publish(event(1))
        await until(lambda: first.batches and second.batches)
    assert first.numbers() == second.numbers() == [1]


async def test_watcher_beyond_the_limit_is_rejected_until_another_leaves() -> None:
    hub = new_hub()
    async with asyncio.TaskGroup() as tasks:
        watchers = [Watcher(hub, tasks) for _ in range(WATCHERS_MAX)]
        await until(lambda: len(hub._watchers) == WATCHERS_MAX)
        with pytest.raises(Overloaded) as refused:
            await anext(hub.watch())
        watchers[0].task.cancel()
        await until(watchers[0].task.done)
        late = Watcher(hub, tasks)
        await until(lambda: len(hub._watchers) == WATCHERS_MAX)
        hub.publish(event(1))
        await until(lambda: late.batches)
        for watcher in [*watchers, late]:
            watcher.task.cancel()
    assert refused.value.facts == {"limit": str(WATCHERS_MAX)}


async def test_hub_is_unwatched_after_the_last_watcher_left() -> None:
    hub = new_hub()
    async with watched(hub):
        assert hub.watched
    await until(lambda: not hub.watched)


async def test_stream_over_the_wire_ends_with_its_call() -> None:
    hub = new_hub()
    async with serving(partial(add_event_stream, hub)) as channel:
        call = pb_grpc.MetricsServiceStub(channel).Watch(pb.WatchRequest())
        await until(lambda: hub.watched)
        hub.publish(event(5))
        answer = await call.read()
        assert isinstance(answer, pb.WatchResponse)
        assert [one.appended.message_count for one in answer.batch.events] == [5]
        call.cancel()
        await until(lambda: not hub.watched)


async def test_watcher_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reader nobody gathers the counts, and they would grow without a limit."""
    monkeypatch.setattr(events, "UNREAD_S_MAX", 0.05)
    hub = new_hub()
    watching = hub.watch()
    received: list[pb.MetricBatch] = []

    async def read_one() -> None:
        received.append(await anext(aiter(watching)))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read_one())
        await until(lambda: hub.watched)
        hub.publish(event(1))
    assert len(received[0].events) == 1
    await until(lambda: not hub.watched)
    assert not hub._watchers, "another watcher may take its place"
    with pytest.raises(Overloaded, match="has not read a batch"):
        await anext(aiter(watching))


async def test_stream_that_is_not_read_ends_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "UNREAD_S_MAX", 0.2)
    hub = new_hub()
    large = pb.MetricEvent(operator_called=pb.OperatorCalled(request="x" * 200_000))
    async with serving(partial(add_event_stream, hub)) as channel:
        call = pb_grpc.MetricsServiceStub(channel).Watch(pb.WatchRequest())
        await until(lambda: hub.watched)

        def dropped() -> bool:
            hub.publish(pb.MetricEvent.FromString(large.SerializeToString()))
            return not hub.watched

        await until(dropped)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    assert from_rpc_error(refused.value).reason == "OVERLOADED"
