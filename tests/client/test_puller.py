"""The puller: queues and offsets that the caller chooses.

Goal: messages are returned in order from the chosen offset, once, within the limits; progress
moves only when it is committed; an error says why a queue can't be read and what to do.
Method: pullers on a real cluster, or on `MemoryBroker`; for removed messages one prefetched queue,
fed by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from batonmq._connection.directory import Directory
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.prefetched_queue import (
    FetchedBatches,
    FetchSource,
    KeptOffsets,
    OutOfRangePolicy,
    PrefetchedQueue,
)
from batonmq._consumer.puller import AtTime, Puller, PullerSettings, SeekTarget
from batonmq._core.flow_control import ByteBudget, FlowLimits
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message, encode_record, stamped_head
from batonmq._core.subscription import Filter, TagFilter
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import (
    BatonError,
    Fenced,
    InvalidArgument,
    ModeChanged,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
)
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.client.group import Scene, handle_all, scene
from tests.client.test_group_settings import reset
from tests.support.conditions import until

Found = dict[QueueRef, list[ReceivedMessage]]
FIRST = PullerSettings(consume_from="first")


@asynccontextmanager
async def unowned_group(nameserver: str, queue_count: int = 2) -> AsyncIterator[Scene]:
    """Create a topic and a group without ownership."""
    async with scene(nameserver, queue_count) as at:
        async with Admin(nameserver) as admin:
            await admin.update_group(at.group, ownership="off")
        yield at


def puller(at: Scene, settings: PullerSettings = FIRST, **filters: str) -> Puller:
    return Puller(at.nameserver, at.group, settings, filters=filters)


def reader(at: Scene, settings: PullerSettings = FIRST) -> Puller:
    return Puller(at.nameserver, settings=settings)


async def poll_messages(reading: Puller, count: int, count_max: int = 7) -> list[ReceivedMessage]:
    """Return `count` messages, with as many polls as needed."""
    messages: list[ReceivedMessage] = []
    async with asyncio.timeout(40):
        while len(messages) < count:
            polled = await reading.poll(5_000, count_max)
            assert sum(map(len, polled.values())) <= count_max
            assert all(
                m.queue == queue for queue, queue_messages in polled.items() for m in queue_messages
            )
            messages += [
                message for queue_messages in polled.values() for message in queue_messages
            ]
    return messages


def bodies(messages: list[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


def numbers(*first_and_end: int) -> list[str]:
    return list(map(str, range(*first_and_end)))


# ---- with a group


@pytest.mark.e2e
async def test_messages_of_a_queue_are_returned_in_order_and_without_delay(
    nameserver: str,
) -> None:
    async with unowned_group(nameserver) as at, puller(at) as pulling:
        queues = await pulling.queues(at.topic)
        await pulling.assign(queues)
        assert pulling.assignment == queues
        await at.send(numbers(20), queue_id=0)
        await at.send(numbers(20, 40), queue_id=1)
        messages = await poll_messages(pulling, 40)
        for queue, expected in zip(queues, (numbers(20), numbers(20, 40)), strict=True):
            assert bodies([m for m in messages if m.queue == queue]) == expected
            assert await pulling.position(queue) == 20
        assert await pulling.poll(0) == {}
        await at.send(["late"])
        assert bodies(await poll_messages(pulling, 1)) == ["late"]


@pytest.mark.e2e
async def test_next_puller_continues_at_the_committed_offset(nameserver: str) -> None:
    async with unowned_group(nameserver, 1) as at:
        await at.send(numbers(10))
        async with puller(at) as pulling:
            (queue,) = await pulling.queues(at.topic)
            await pulling.assign([queue])
            assert await pulling.committed(queue) is None
            await poll_messages(pulling, 4, count_max=4)
            await pulling.commit()
            assert await pulling.committed(queue) == 4
            await poll_messages(pulling, 3, count_max=3)
        async with puller(at) as pulling:
            await pulling.assign([queue])
            assert bodies(await poll_messages(pulling, 6)) == numbers(4, 10)
            await pulling.commit({queue: 9})
            assert await pulling.committed(queue) == 9


@pytest.mark.e2e
async def test_commit_after_a_reset_is_refused_with_a_remedy(nameserver: str) -> None:
    async with unowned_group(nameserver, 1) as at, puller(at) as pulling:
        await at.send(numbers(10))
        (queue,) = await pulling.queues(at.topic)
        await pulling.assign([queue])
        await poll_messages(pulling, 10)
        await pulling.commit()
        await reset(at, 3)
        with pytest.raises(Fenced) as refused:
            await pulling.commit()
        assert "committed()" in refused.value.remedy
        committed = await pulling.committed(queue)
        assert committed == 3
        await pulling.seek(queue, committed)
        assert bodies(await poll_messages(pulling, 7)) == numbers(3, 10)
        await pulling.commit()
        assert await pulling.committed(queue) == 10


@pytest.mark.e2e
async def test_first_commit_after_a_seek_is_refused_if_a_reset_came_between(
    nameserver: str,
) -> None:
    async with unowned_group(nameserver, 1) as at:
        await at.send(numbers(10))
        async with puller(at) as pulling:
            (queue,) = await pulling.queues(at.topic)
            await pulling.commit({queue: 5})
        async with puller(at) as pulling:
            await pulling.assign([queue])
            await pulling.seek(queue, "begin")  # before the puller asked where to begin
            await poll_messages(pulling, 10)
            await reset(at, 3)
            with pytest.raises(Fenced):
                await pulling.commit()
            assert await pulling.committed(queue) == 3
            await pulling.assign([])
            await reset(at, 2, op_id="r2")
            await pulling.assign([queue])
            await pulling.seek(queue, "begin")  # newer than the reset
            await poll_messages(pulling, 10)
            await pulling.commit()
            assert await pulling.committed(queue) == 10


@pytest.mark.e2e
async def test_commit_of_an_unknown_queue_or_offset_is_refused_and_changes_nothing(
    nameserver: str,
) -> None:
    async with unowned_group(nameserver, 1) as at, puller(at) as pulling:
        await at.send(numbers(3))
        (queue,) = await pulling.queues(at.topic)
        for unknown in (QueueRef(at.topic, queue.broker, 9), QueueRef(at.topic, "unknown", 0)):
            with pytest.raises(QueueNotFound) as refused:
                await pulling.commit({queue: 1, unknown: 0})
            assert "queues()" in refused.value.remedy
        with pytest.raises(TopicNotFound):
            await pulling.commit({QueueRef("never-made", queue.broker, 0): 0})
        for assigned in ([], [queue]):
            await pulling.assign(assigned)
            with pytest.raises(OffsetAheadOfLog) as ahead:
                await pulling.commit({queue: 4})
            assert "after that of the last message" in ahead.value.remedy
        await pulling.seek(queue, 1_000)
        with pytest.raises(OffsetAheadOfLog):
            await pulling.commit()
        assert await pulling.committed(queue) is None
        await pulling.commit({queue: 3})
        assert await pulling.committed(queue) == 3


@pytest.mark.e2e
async def test_group_with_ownership_is_refused_with_the_remedy_command(nameserver: str) -> None:
    async with scene(nameserver, 1) as at:
        await at.send(["1"])
        async with handle_all(at, "a"):
            await until(lambda: bool(at.handled))
        async with puller(at) as pulling:
            (queue,) = await pulling.queues(at.topic)
            await pulling.assign([queue])
            with pytest.raises(ModeChanged) as refused:
                await pulling.poll(10_000)
            assert f"baton group update {at.group} --ownership off" in refused.value.remedy
            with pytest.raises(ModeChanged) as refused:
                await pulling.commit({queue: 1})
            assert "--ownership off" in refused.value.remedy


# ---- without a group


@pytest.mark.e2e
async def test_reader_seeks_by_offset_time_begin_and_end(nameserver: str) -> None:
    async with scene(nameserver, 1) as at, Producer(nameserver) as producer:
        times = [(await producer.send(at.topic, b"0")).store_unix_ms]
        while times[-1] == times[0] or len(times) < 5:
            receipt = await producer.send(at.topic, b"%d" % len(times))
            times.append(receipt.store_unix_ms)
        count, later = len(times), next(n for n, ms in enumerate(times) if ms > times[0])
        async with reader(at) as reading:
            (queue,) = await reading.queues(at.topic)
            await reading.assign([queue])
            assert bodies(await poll_messages(reading, count)) == numbers(count)
            assert await reading.seek(queue, 2) == 2
            assert bodies(await poll_messages(reading, count - 2)) == numbers(2, count)
            assert await reading.seek(queue, AtTime(times[later])) == later
            assert bodies(await poll_messages(reading, count - later)) == numbers(later, count)
            assert await reading.seek(queue, "begin") == 0
            assert await reading.position(queue) == 0
            assert await reading.seek(queue, "end") == count
            assert await reading.poll(0) == {}
            await producer.send(at.topic, b"new")
            assert bodies(await poll_messages(reading, 1)) == ["new"]
            with pytest.raises(InvalidArgument, match="no group"):
                await reading.commit()


@pytest.mark.e2e
@pytest.mark.parametrize("to", [-1, 1 << 63, AtTime(-1), AtTime(1 << 63), "start", 1.5, None])
async def test_invalid_seek_target_is_refused_and_reading_continues(
    nameserver: str, to: SeekTarget
) -> None:
    async with unowned_group(nameserver, 1) as at, puller(at) as pulling:
        await at.send(numbers(3))
        (queue,) = await pulling.queues(at.topic)
        await pulling.assign([queue])
        with pytest.raises(InvalidArgument):
            await pulling.seek(queue, to)
        if isinstance(to, int):
            with pytest.raises(InvalidArgument):
                await pulling.commit({queue: to})
        assert bodies(await poll_messages(pulling, 3)) == numbers(3)


@pytest.mark.e2e
async def test_filtered_messages_and_paused_queues_are_not_returned(nameserver: str) -> None:
    async with unowned_group(nameserver, 2) as at:
        await at.send([f"{'xy'[n % 2]}:{n}" for n in range(10)], queue_id=0)
        await at.send(["x:other"], queue_id=1)
        async with puller(at, FIRST, **{at.topic: "x"}) as pulling:
            one, two = await pulling.queues(at.topic)
            await pulling.assign([one, two])
            pulling.pause(two)
            assert bodies(await poll_messages(pulling, 5)) == [f"x:{n}" for n in range(0, 10, 2)]
            await until(lambda: _is_at(pulling, one, 10))  # filtered messages count
            assert await pulling.poll(0) == {}
            pulling.resume(two)
            assert bodies(await poll_messages(pulling, 1)) == ["x:other"]
            await pulling.assign([one])
            await at.send(["x:behind"], queue_id=1)
            await at.send(["x:more"], queue_id=0)
            assert bodies(await poll_messages(pulling, 1)) == ["x:more"]
            with pytest.raises(InvalidArgument, match="not assigned"):
                await pulling.position(two)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [puller, reader])
async def test_deleted_topic_and_unknown_queue_are_errors_of_poll(
    nameserver: str, kind: Callable[[Scene], Puller]
) -> None:
    async with unowned_group(nameserver, 1) as at, kind(at) as pulling:
        (queue,) = await pulling.queues(at.topic)
        none = QueueRef(at.topic, queue.broker, 9)
        await pulling.assign([none])
        with pytest.raises(QueueNotFound):
            await pulling.poll(10_000)
        await at.send(["1"])
        await pulling.assign([queue])
        assert bodies(await poll_messages(pulling, 1)) == ["1"]
        async with Admin(nameserver) as admin:
            await admin.delete_topic(at.topic)
        with pytest.raises(TopicNotFound):
            await pulling.poll(20_000)


def test_error_of_a_queue_is_raised_although_others_have_messages() -> None:
    async def polled() -> list[str]:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("t", queues=1)
            for number in range(3):
                await producer.send("t", b"%d" % number)
            async with broker.puller(settings=FIRST) as pulling:
                (queue,) = await pulling.queues("t")
                none = QueueRef("t", queue.broker, 9)
                await pulling.assign([queue, none])
                messages = await poll_messages(pulling, 1, count_max=1)
                with pytest.raises(QueueNotFound):
                    await pulling.position(none)
                with pytest.raises(QueueNotFound):
                    await pulling.poll(count_max=1)
                messages += await poll_messages(pulling, 2, count_max=1)
                with pytest.raises(QueueNotFound):
                    await pulling.poll()
        return bodies(messages)

    assert run_virtual(polled()) == numbers(3)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [puller, reader])
async def test_offset_beyond_the_end_follows_the_out_of_range_policy(
    nameserver: str, kind: Callable[[Scene, PullerSettings], Puller]
) -> None:
    async with unowned_group(nameserver, 1) as at:
        await at.send(numbers(3))
        (queue,) = await _queues(at)
        async with kind(at, PullerSettings(out_of_range="earliest")) as pulling:
            await pulling.assign([queue])
            await pulling.seek(queue, 1_000)
            assert bodies(await poll_messages(pulling, 3)) == numbers(3)
        async with kind(at, PullerSettings(out_of_range="latest")) as pulling:
            await pulling.assign([queue])
            await pulling.seek(queue, 1_000)
            await until(lambda: _is_at(pulling, queue, 3))
            await at.send(["new"])
            assert bodies(await poll_messages(pulling, 1)) == ["new"]
        async with kind(at, PullerSettings(out_of_range="error")) as pulling:
            await pulling.assign([queue])
            await pulling.seek(queue, 1_000)
            with pytest.raises(OffsetOutOfRange) as refused:
                await pulling.poll(10_000)
            assert "out_of_range" in refused.value.remedy
            await pulling.seek(queue, "begin")
            assert bodies(await poll_messages(pulling, 4)) == [*numbers(3), "new"]


async def _queues(at: Scene) -> tuple[QueueRef, ...]:
    async with reader(at) as reading:
        return await reading.queues(at.topic)


async def _is_at(pulling: Puller, queue: QueueRef, offset: int) -> bool:
    return await pulling.position(queue) == offset


# ---- one prefetched queue: messages that retention removed

QUEUE = QueueRef("t", "b", 0)


class KeptQueue:
    """A queue that holds [first, end); answers as storage does."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.fetched: list[int] = []
        self.source = FetchSource(self._begin, self._extent, self._fetch, 1)

    async def _begin(self, _: QueueRef) -> int:
        return 0

    async def _extent(self, _: QueueRef) -> KeptOffsets:
        return KeptOffsets(self.first, self.end)

    async def _fetch(
        self, _: QueueRef, offset: int, wanted: Filter, bytes_max: int
    ) -> FetchedBatches:
        self.fetched.append(offset)
        if offset > self.end:
            raise OffsetAheadOfLog(f"{offset} is beyond {self.end}")
        begin = max(offset, self.first)
        end = min(begin + 2, self.end)
        batches = tuple(map(_batch, range(begin, end)))
        return FetchedBatches(batches, end, begin - offset, KeptOffsets(self.first, self.end))


def _batch(offset: int) -> bytes:
    message, builder = Message(b"%d" % offset), BatchBuilder()
    builder.add(message, encode_record(message))
    raw = builder.encode(topic="t", queue_id=0)
    head = stamped_head(raw, position=0, first_offset=offset, store_unix_ms=1, topic_id=1, epoch=1)
    return head + raw[len(head) :]


@asynccontextmanager
async def lane(
    kept: KeptQueue, policy: OutOfRangePolicy, prefetch_max: int = 100
) -> AsyncIterator[tuple[PrefetchedQueue, ByteBudget]]:
    budget = ByteBudget(1_000)
    made = PrefetchedQueue(QUEUE, TagFilter(None), policy, budget, lambda: None)
    limits = FlowLimits(messages_max=prefetch_max, span_max=1)
    directory = Directory("127.0.0.1:1", Random(1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.run(kept.source, limits, directory))
        yield made, budget
        running.cancel()


async def test_earliest_counts_removed_messages_and_continues_with_kept_ones() -> None:
    kept = KeptQueue(5, 8)
    async with lane(kept, "earliest") as (made, _):
        await until(lambda: kept.fetched[-2:] == [8, 8])
        assert made.position == 0, "no message is taken yet"
        assert [m.offset for m in made.take(9)] == [5, 6, 7]
        assert (made.position, made.lost_count) == (8, 5)


async def test_latest_skips_to_the_end_and_counts_skipped_messages() -> None:
    async with lane(KeptQueue(5, 8), "latest") as (made, _):
        await until(lambda: made.position == 8)
        assert made.lost_count == 8
        assert made.take(9) == []


async def test_error_stops_at_removed_messages_until_a_move() -> None:
    async with lane(KeptQueue(5, 8), "error") as (made, _):
        await until(lambda: made.error is not None)
        error: BatonError | None = made.error
        assert isinstance(error, OffsetOutOfRange)
        assert error.facts == {"offset": "0", "first_offset": "5"}
        assert (made.position, made.lost_count) == (0, 0)
        made.move(6)
        await until(lambda: [m.offset for m in made.take(1)] == [6])


async def test_fetched_messages_are_returned_though_later_ones_were_removed() -> None:
    kept = KeptQueue(0, 10)
    async with lane(kept, "latest", prefetch_max=2) as (made, budget):
        await until(lambda: budget.total == 2)
        kept.first = 9
        assert [m.offset for m in made.take(1)] == [0]
        await until(lambda: made.lost_count == 8)
        assert [m.offset for m in made.take(9)] == [1]
        assert made.position == 10


async def test_ended_queue_returns_its_bytes_and_fails_waiting_callers() -> None:
    async with lane(KeptQueue(0, 10), "earliest") as (made, budget):
        await until(lambda: budget.total == 10)
        made.end()
        assert isinstance(made.error, InvalidArgument)
        assert made.known.is_set()
    assert (budget.total, budget.queue_count) == (0, 0)


async def test_queue_fetches_no_more_than_may_wait() -> None:
    kept = KeptQueue(0, 100)
    async with lane(kept, "earliest", prefetch_max=4) as (made, budget):
        await until(lambda: budget.total == 4)
        made.take(1)
        await until(lambda: len(kept.fetched) == 3)
        assert kept.fetched == [0, 2, 4]
