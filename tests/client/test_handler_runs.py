"""Handler calls that do not wait for anything are made in runs.

Goal: a run has the effects of single calls: order, acknowledgements, time limits, failures, pauses
and the own deadline of the lease.
Method: a queue with messages and a dispatcher, without servers; a failure with the in-memory
broker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton.common.v1 import queue_pb2
from batonmq import ClientMetrics, ConsumerSettings, Message, ReceivedMessage
from batonmq._common.clock import Clock
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.delivered_run import Delivery
from batonmq._consumer.handler_adapters import SingleMessageAdapter
from batonmq._consumer.handler_runs import RUN_MESSAGES_MAX, SINGLES_MAX, RunPace, StartedCall
from batonmq._consumer.message_dispatcher import MessageDispatcher
from batonmq._consumer.queue_acquirer import AcquiredQueue, GrantedLease
from batonmq._consumer.session import Session
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.ownership import OwnershipState
from batonmq._core.queue_progress import Acks, GrantedProgress
from batonmq._core.queues import QueueRef
from batonmq._core.records import BODY_FROM, BatchBuilder, encode_record, stamped_head
from batonmq._core.subscription import TagFilter
from batonmq._telemetry.client_metrics import ConsumerMetrics
from batonmq_server.testing import MemoryBroker, run_virtual

LEASE_MS = 30_000
COUNT = 2 * RUN_MESSAGES_MAX + 10
Handle = Callable[[ReceivedMessage], Any]


class BootClock(Clock):
    """A clock of which a handler lets time pass without waiting."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms

    def boot_s(self) -> float:
        return super().boot_s() + self.ahead_ms / 1000


def key_of(number: int, key_count: int) -> int:
    """Return the ordering key of a message: `key_count` of them go round, each twice in a row."""
    return number // 2 % key_count


def stored(count: int, key_count: int) -> bytes:
    """Return a batch of numbered messages."""
    builder = BatchBuilder()
    for number in range(count):
        message = Message(str(number).encode(), tag="odd" if number % 2 else "")
        message = with_ordering_key(message, str(key_of(number, key_count)) if key_count else None)
        builder.add(message, encode_record(message))
    raw = builder.encode(topic="orders", queue_id=0)
    head = stamped_head(raw, position=0, first_offset=0, store_unix_ms=1, topic_id=1, epoch=1)
    return head + raw[BODY_FROM:]


class Scene:
    """One owned queue with `COUNT` messages, and the handler of the test.

    Args:
        key_count: Number of ordering keys, whose order is kept; 0 for none.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        handler: Handle,
        *,
        inline: bool,
        key_count: int = 0,
        queue_concurrency: int = 1,
    ) -> None:
        self._key_count = key_count
        self.clock = BootClock()
        self.registry = CollectorRegistry()
        self.session = Session(
            group="billing",
            incarnation=queue_pb2.Incarnation(client_id="me"),
            settings=ConsumerSettings(
                handle_timeout_ms=1_000,
                send_back=False,
                order="key" if key_count else "none",
                queue_concurrency=queue_concurrency,
            ),
            directory=cast(Any, None),
            clock=self.clock,
            random=Random(1),
            on_ownership=lambda _: None,
            metrics=ConsumerMetrics(ClientMetrics(self.registry), "billing", "me"),
        )
        self.queue = AssignedQueue(self.session, QueueRef("orders", "broker-0", 0))
        lease = GrantedLease(self.clock.monotonic_ms(), LEASE_MS, 0)
        self.queue.begin(AcquiredQueue(GrantedProgress(7, 0, 0), lease))
        self.dispatcher = MessageDispatcher(
            self.session,
            SingleMessageAdapter(handler, inline=inline),
            cast(Any, None),
            cast(Any, None),
            tasks,
            cast(Any, None),
        )
        self.dispatcher.begin(self.queue)

    def deliver(self) -> None:
        queue = self.queue
        assert queue.progress is not None
        every = TagFilter(None)
        delivery = Delivery(queue.ref, 7, queue.lineage, [(0, COUNT)], every, None)
        queue.progress.receive(COUNT, [(0, COUNT)])
        for run in delivery.runs([StoredBatch(stored(COUNT, self._key_count))]):
            queue.buffer.add(run)
        queue.notify_arrived()

    @property
    def acks(self) -> Acks:
        assert self.queue.progress is not None
        return self.queue.progress.acks()


@asynccontextmanager
async def scene(handler: Handle, *, inline: bool = False, **how: int) -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as tasks:
        made = Scene(tasks, handler, inline=inline, **how)
        try:
            made.deliver()
            yield made
        finally:
            made.dispatcher.cancel(made.queue.ref)
            made.dispatcher.close()


def run_scene(handler: Handle, check: Callable[[Scene], Awaitable[None]], **how: int) -> None:
    async def run() -> None:
        async with scene(handler, **cast(Any, how)) as made:
            await check(made)

    run_virtual(run())


def test_all_messages_are_handled_in_order_and_acknowledged() -> None:
    seen, tasks = list[bytes](), set[object]()

    async def handle(message: ReceivedMessage) -> None:
        assert (message.attempts, message.token, message.redelivered) == (1, 7, False)
        assert message.tag == ("odd" if message.offset % 2 else "")
        seen.append(message.body)
        tasks.add(asyncio.current_task())

    async def check(made: Scene) -> None:
        await asyncio.sleep(1)
        assert seen == [str(number).encode() for number in range(COUNT)]
        assert made.acks.committed == COUNT
        assert len(made.queue.buffer) == made.queue.buffer.waiting_bytes.waiting == 0
        labels = {"group": "billing", "topic": "orders"}
        for name in ("handled_messages_total", "handler_seconds_count"):
            found = made.registry.get_sample_value(f"baton_consumer_{name}", labels)
            assert found == COUNT, name
        assert len(tasks) == 1

    run_scene(handle, check)


def test_other_tasks_run_between_two_runs() -> None:
    seen, at_turns = list[int](), list[int]()

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.offset)

    async def check(_: Scene) -> None:
        while len(seen) < COUNT:
            await asyncio.sleep(0)
            at_turns.append(len(seen))
        assert RUN_MESSAGES_MAX in at_turns

    run_scene(handle, check)


@pytest.mark.parametrize("key_count", [1, 3, RUN_MESSAGES_MAX + 7])
def test_messages_of_different_keys_are_handled_in_runs_and_those_of_a_key_in_order(
    key_count: int,
) -> None:
    seen, at_turns = list[int](), list[int]()

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.offset)

    async def check(made: Scene) -> None:
        while len(seen) < COUNT:
            await asyncio.sleep(0)
            at_turns.append(len(seen))
        await asyncio.sleep(1)
        assert min(key_count, RUN_MESSAGES_MAX) in at_turns
        for key in range(key_count):
            own = [offset for offset in seen if key_of(offset, key_count) == key]
            assert own == [one for one in range(COUNT) if key_of(one, key_count) == key]
        assert made.acks.committed == COUNT
        assert len(made.queue.buffer) == made.queue.buffer.waiting_bytes.waiting == 0

    run_scene(handle, check, key_count=key_count)


@pytest.mark.parametrize("slow", [0, 2, 4])
def test_call_that_waits_within_a_run_delays_only_its_own_key(slow: int) -> None:
    # When the calls before the slow one end, the second message of their key is ready; its offset
    # is lower than that of the slow one.
    seen, released = list[int](), asyncio.Event()
    keys = 5

    async def handle(message: ReceivedMessage) -> None:
        if message.offset == slow:
            await released.wait()
        seen.append(message.offset)

    async def check(made: Scene) -> None:
        await asyncio.sleep(0.5)
        own = [one for one in range(COUNT) if key_of(one, keys) == key_of(slow, keys)]
        assert sorted(seen) == sorted(set(range(COUNT)) - set(own))
        assert made.acks.committed == slow
        released.set()
        await asyncio.sleep(0.5)
        assert [offset for offset in seen if offset in own] == own
        assert made.acks.committed == COUNT

    run_scene(handle, check, key_count=keys, queue_concurrency=2)


def test_call_that_waits_has_the_progress_of_the_calls_before_and_continues_in_its_task() -> None:
    variable = ContextVar("variable", default=0)
    reached, go_on = asyncio.Event(), asyncio.Event()
    results = list[object]()

    async def handle(message: ReceivedMessage) -> None:
        if message.offset == 10:
            variable.set(10)
            task = asyncio.current_task()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asyncio.Event().wait()
            reached.set()
            await go_on.wait()
            results.append((variable.get(), asyncio.current_task() is task))

    async def check(made: Scene) -> None:
        await reached.wait()
        progress = made.queue.progress
        assert progress is not None
        assert made.acks.committed == 10
        assert progress.running == [(10, 11)]
        assert len(made.session.running) == 1
        go_on.set()
        await asyncio.sleep(1)
        assert results == [(10, True)]
        assert made.acks.committed == COUNT
        assert len(made.session.running) == 0

    run_scene(handle, check)


def test_time_limit_and_its_extension_hold_for_the_call_that_waits() -> None:
    ended = list[tuple[int, float]]()

    async def handle(message: ReceivedMessage) -> None:
        begin_s = asyncio.get_running_loop().time()
        if message.offset < 20:
            message.extend(60_000)  # has no effect on the call of offset 20
        if message.offset == 21:
            message.extend(500)
        if message.offset in (20, 21) and message.attempts == 1:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                took_s = asyncio.get_running_loop().time() - begin_s
                ended.append((message.offset, round(took_s, 3)))

    async def check(made: Scene) -> None:
        await asyncio.sleep(10)
        assert ended == [(20, 1.0), (21, 1.5)]

    run_scene(handle, check)


def test_no_message_starts_behind_the_own_deadline() -> None:
    seen = list[int]()

    async def check(made: Scene) -> None:
        await asyncio.sleep(1)
        assert seen == [0, 1, 2, 3, 4, 5]
        assert made.acks.committed == 6
        assert made.queue.state is OwnershipState.EXPIRED

    async def run() -> None:
        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.offset)
            if message.offset == 5:
                made.clock.ahead_ms += LEASE_MS

        async with scene(handle) as made:
            await check(made)

    run_virtual(run())


@pytest.mark.parametrize("how", ["pause", "end"])
def test_pause_and_stop_in_a_handler_hold_for_the_next_message(how: str) -> None:
    seen = list[int]()

    async def run() -> None:
        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.offset)
            if message.offset == 3:
                made.queue.pause() if how == "pause" else made.dispatcher.end()

        async with scene(handle) as made:
            await asyncio.sleep(1)
            assert seen == [0, 1, 2, 3]
            assert made.acks.committed == 4
            assert len(made.queue.buffer) == COUNT - 4
            if how == "pause":
                made.queue.resume()
                await asyncio.sleep(1)
                assert seen == list(range(COUNT))

    run_virtual(run())


def test_handler_that_ends_the_program_leaves_its_message_started() -> None:
    def handle(message: ReceivedMessage) -> None:
        if message.offset == 3:
            raise SystemExit

    async def run() -> None:
        async with scene(handle, inline=True) as made:
            made.dispatcher.cancel(made.queue.ref)  # its task has not begun
            with pytest.raises(SystemExit):
                runs = made.dispatcher._runs
                assert runs is not None
                runs.run(made.queue)
            progress = made.queue.progress
            assert progress is not None
            assert progress.running == [(3, 4)]
            assert made.acks.committed == 3

    run_virtual(run())


def test_plain_function_runs_inline_in_the_thread_of_the_loop() -> None:
    threads, awaited = set[int](), list[int]()

    async def later(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.1)
        awaited.append(message.offset)

    def handle(message: ReceivedMessage) -> Awaitable[None] | None:
        threads.add(threading.get_ident())
        return later(message) if message.offset in (5, 6) else None

    async def check(made: Scene) -> None:
        await asyncio.sleep(1)
        assert threads == {threading.get_ident()}
        assert awaited == [5, 6]
        assert made.acks.committed == COUNT

    run_scene(handle, check, inline=True)


@pytest.mark.parametrize("inline", [False, True])
def test_failure_within_a_run_is_retried_and_the_others_go_on(inline: bool) -> None:
    attempts = list[tuple[bytes, int]]()

    def handle(message: ReceivedMessage) -> None:
        attempts.append((message.body, message.attempts))
        if message.body == b"1" and message.attempts == 1:
            raise ValueError

    async def handle_async(message: ReceivedMessage) -> None:
        handle(message)

    async def run() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic("orders")
            settings = ConsumerSettings(consume_from="first")
            async with (
                broker.producer() as producer,
                broker.consumer("billing", {"orders": "*"}, settings) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                await producer.send_many("orders", [b"0", b"1", b"2"])
                handler = handle if inline else handle_async
                tasks.create_task(consumer.run(handler, inline=inline))
                await broker.settled("billing")
                consumer.stop()

    run_virtual(run())
    assert sorted(attempts) == [(b"0", 1), (b"1", 1), (b"1", 2), (b"2", 1)]


def test_calls_that_always_wait_are_made_singly_but_for_rare_attempts() -> None:
    waiting = StartedCall(cast(Any, None), cast(Any, None))
    waiting.waits_first = True
    pace, runs = RunPace(), 0
    for _ in range(10 * (SINGLES_MAX + 1)):
        if pace.is_run_due():
            runs += 1
            pace.note(waiting)
    assert runs < 20
    pace.note(True)
    assert pace.is_run_due()
