"""Goal: with `order="key"` messages of a key are handled in order, and no key delays another.

Method: the in-memory broker in virtual time; handlers sleep, fail or hang by the key of a message.
A ledger records each call with its begin and end, and tells whether two calls of a key overlapped.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq import Consumer, ConsumerSettings, ReceivedMessage, RetryLater
from batonmq._consumer.handler_results import MessageFailed
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.records import Message
from batonmq._core.reset_targets import ToOffset
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.admin.locks import Locks
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Resets, ResetScope
from batonmq.errors import InvalidArgument
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

GROUP, TOPIC = "billing", "orders"
BY_KEY = ConsumerSettings(consume_from="first", order="key", queue_concurrency=8)

Handler = Callable[[ReceivedMessage], Coroutine[Any, Any, object]]


@dataclass
class Ledger:
    """The handler calls of a run.

    Attributes:
        started: Body of each call, in the order of the starts.
        handled: Time and body of each success, in order.
        overlaps: Keys of which two messages were handled at once.
        most: Most calls at once.
    """

    handler: Handler
    started: list[str] = field(default_factory=list)
    handled: list[tuple[float, str]] = field(default_factory=list)
    overlaps: set[str] = field(default_factory=set)
    most: int = 0
    _running: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    async def handle(self, message: ReceivedMessage) -> object:
        body, key = message.body.decode(), message.ordering_key
        self.started.append(body)
        name = body if key is None else key
        self._running[name] += 1
        self.most = max(self.most, sum(self._running.values()))
        if self._running[name] > 1:
            self.overlaps.add(name)
        try:
            result = await self.handler(message)
        finally:
            self._running[name] -= 1
        if result is None:
            self.handled.append((asyncio.get_running_loop().time(), body))
        return result

    def of(self, key: str) -> list[str]:
        """Return the bodies of a key that were handled, in order."""
        return [body for _, body in self.handled if body.startswith(f"{key}:")]

    def at(self, body: str) -> float:
        """Return when a message was handled."""
        return next(at for at, handled in self.handled if handled == body)


async def send(broker: MemoryBroker, bodies: Sequence[str]) -> None:
    """Send messages in order; `a:1` has the ordering key a, a body without colon has none."""
    async with broker.producer() as producer:
        for body in bodies:
            key, colon, _ = body.partition(":")
            await producer.send(TOPIC, body.encode(), ordering_key=key if colon else None)


@asynccontextmanager
async def consuming(
    broker: MemoryBroker,
    ledger: Ledger,
    settings: ConsumerSettings = BY_KEY,
    client_id: str = "worker-1",
) -> AsyncIterator[Consumer]:
    async with (
        broker.consumer(GROUP, {TOPIC: "*"}, settings, client_id=client_id) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(ledger.handle))
        yield consumer
        consumer.stop()


@asynccontextmanager
async def broker_with(bodies: Sequence[str]) -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker() as broker:
        await broker.create_topic(TOPIC, 1)
        await send(broker, bodies)
        yield broker


async def at_once(_: ReceivedMessage) -> None:
    await asyncio.sleep(0.01)


def slow(key: str, seconds: float = 60) -> Handler:
    async def handle(message: ReceivedMessage) -> None:
        await asyncio.sleep(seconds if message.ordering_key == key else 0.01)

    return handle


def failing(key: str, times: int) -> Handler:
    """Return a handler that fails so often with the first message of a key."""

    async def handle(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.01)
        if message.body.decode() == f"{key}:0" and message.attempts <= times:
            raise ValueError("not yet")

    return handle


def bodies_of(keys: str, count: int) -> list[str]:
    """Return messages of keys by turns: a:0, b:0, a:1, b:1 ..."""
    return [f"{key}:{number}" for number in range(count) for key in keys]


def test_slow_key_delays_only_its_own_messages() -> None:
    async def run() -> Ledger:
        ledger = Ledger(slow("a"))
        async with broker_with(bodies_of("abcd", 5)) as broker, consuming(broker, ledger):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    for key in "abcd":
        assert ledger.of(key) == [f"{key}:{number}" for number in range(5)]
    assert ledger.overlaps == set()
    assert max(ledger.at(f"{key}:4") for key in "bcd") < ledger.at("a:0")
    assert ledger.at("a:4") - ledger.at("a:0") >= 4 * 60


def test_keys_are_handled_side_by_side_up_to_the_limit() -> None:
    async def run() -> Ledger:
        ledger = Ledger(at_once)
        settings = replace(BY_KEY, queue_concurrency=3)
        async with (
            broker_with(bodies_of("abcdef", 20)) as broker,
            consuming(broker, ledger, settings),
        ):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert ledger.most == 3
    assert ledger.overlaps == set()


def test_messages_without_a_key_wait_for_no_other() -> None:
    async def run() -> Ledger:
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(60 if message.body == b"first" else 0.01)

        ledger = Ledger(handle)
        async with (
            broker_with(["first", "second", "a:0", "third"]) as broker,
            consuming(broker, ledger),
        ):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert {body for _, body in ledger.handled[:3]} == {"second", "a:0", "third"}
    assert ledger.handled[3][1] == "first"


def test_empty_key_is_a_key() -> None:
    async def run() -> Ledger:
        ledger = Ledger(slow("", 1))
        async with broker_with([":0", ":1", ":2"]) as broker, consuming(broker, ledger):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert [body for _, body in ledger.handled] == [":0", ":1", ":2"]
    assert ledger.most == 1


def test_failing_key_waits_with_its_retries_and_others_go_on() -> None:
    async def run() -> Ledger:
        ledger = Ledger(failing("a", times=4))
        # One call at once: a key that waits for its retry must not take the only one.
        async with (
            broker_with(bodies_of("abc", 40)) as broker,
            consuming(broker, ledger, replace(BY_KEY, queue_concurrency=1)),
        ):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert ledger.started.count("a:0") == 5
    for key in "abc":
        assert ledger.of(key) == [f"{key}:{number}" for number in range(40)]
    assert ledger.at("c:39") < ledger.at("a:0")
    assert ledger.at("a:0") >= 1 + 2 + 4 + 8, "the delay doubles with each failure"


def test_dead_letter_frees_its_key() -> None:
    async def run() -> tuple[Ledger, list[ReceivedMessage]]:
        ledger = Ledger(failing("a", times=99))
        async with broker_with(bodies_of("ab", 3)) as broker:
            async with consuming(broker, ledger, replace(BY_KEY, retries_max=2)):
                await broker.settled(GROUP)
            return ledger, await broker.messages(f"%DLQ%{GROUP}")

    ledger, letters = run_virtual(run())
    assert ledger.started.count("a:0") == 3
    assert ledger.of("a") == ["a:1", "a:2"]
    assert [letter.body for letter in letters] == [b"a:0"]
    assert letters[0].ordering_key == "a", "a redriven dead letter has its key"


def test_consumer_that_stops_at_a_failure_leaves_the_key_to_the_next_member() -> None:
    async def run() -> tuple[Ledger, list[str]]:
        ledger = Ledger(failing("a", times=1))
        settings = replace(BY_KEY, retries_max=0, exhausted="stop")
        async with broker_with(bodies_of("ab", 3)) as broker:
            async with broker.consumer(GROUP, {TOPIC: "*"}, settings) as consumer:
                with pytest.raises(MessageFailed):
                    await consumer.run(ledger.handle)
            stopped = ledger.of("a")
            ledger.handler = at_once
            async with consuming(broker, ledger, client_id="worker-2"):
                await broker.settled(GROUP)
        return ledger, stopped

    ledger, stopped = run_virtual(run())
    assert stopped == []
    for key in "ab":
        assert ledger.of(key) == [f"{key}:{number}" for number in range(3)]


def test_handler_that_takes_too_long_is_repeated_before_later_messages_of_its_key() -> None:
    async def run() -> Ledger:
        async def handle(message: ReceivedMessage) -> None:
            hangs = message.body == b"a:0" and message.attempts < 3
            await asyncio.sleep(3_600 if hangs else 0.01)

        ledger = Ledger(handle)
        settings = replace(BY_KEY, handle_timeout_ms=10_000)
        async with (
            broker_with(bodies_of("ab", 3)) as broker,
            consuming(broker, ledger, settings),
        ):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert ledger.started.count("a:0") == 3
    assert ledger.of("a") == ["a:0", "a:1", "a:2"]
    assert ledger.at("b:2") < ledger.at("a:0")
    assert ledger.overlaps == set()


def test_result_that_asks_for_a_retry_keeps_the_key() -> None:
    async def run() -> Ledger:
        async def handle(message: ReceivedMessage) -> RetryLater | None:
            return RetryLater(30_000) if message.attempts == 1 else None

        ledger = Ledger(handle)
        async with broker_with(bodies_of("ab", 2)) as broker, consuming(broker, ledger):
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert ledger.of("a") == ["a:0", "a:1"]
    assert ledger.at("a:1") - ledger.at("a:0") > 29.9


def test_other_keys_go_on_until_the_span_is_reached_and_then_too_after_the_retry() -> None:
    async def run() -> tuple[Ledger, int]:
        ledger = Ledger(failing("a", times=5))
        settings = replace(BY_KEY, span_max=50, retry_first_ms=60_000, retry_ms_max=60_000)
        async with (
            broker_with(["a:0", *(f"{number}:0" for number in range(200))]) as broker,
            consuming(broker, ledger, settings) as consumer,
        ):
            await asyncio.sleep(50)
            handled = len(ledger.handled)
            assert list(consumer.flow.values()) == ["span"]
            await broker.settled(GROUP)
        return ledger, handled

    ledger, handled = run_virtual(run())
    assert handled == 49, "all within the span but the failed message"
    assert len(ledger.handled) == 201


def test_messages_that_wait_for_a_key_do_not_keep_others_from_being_fetched() -> None:
    """A few keys of a buffer are slow: there is credit for more although many messages wait."""

    async def run() -> Ledger:
        ledger = Ledger(slow("a", 1_000))
        waiting = [f"a:{number}" for number in range(12)]
        others = [f"{number}:0" for number in range(100)]
        settings = replace(BY_KEY, buffer_messages_max=16)
        async with (
            broker_with([*waiting, *others]) as broker,
            consuming(broker, ledger, settings),
        ):
            await asyncio.sleep(3)
        return ledger

    ledger = run_virtual(run())
    assert len(ledger.handled) == 100


def test_hand_over_waits_for_running_keys_and_keeps_the_order() -> None:
    async def run() -> tuple[Ledger, list[str]]:
        ledger = Ledger(slow("a", 5))
        async with broker_with(bodies_of("abc", 10)) as broker:
            async with consuming(broker, ledger):
                await asyncio.sleep(7)  # a:1 is in its handler
            left = list(ledger.started)
            async with consuming(broker, ledger, client_id="worker-2"):
                await broker.settled(GROUP)
        return ledger, left

    ledger, left = run_virtual(run())
    assert left.count("a:1") == 1
    for key in "abc":
        assert ledger.of(key) == [f"{key}:{number}" for number in range(10)]
    assert len(ledger.started) == 30, "nothing was handled twice"


def test_key_that_waits_for_a_retry_does_not_delay_a_hand_over() -> None:
    async def run() -> tuple[Ledger, float]:
        ledger = Ledger(failing("a", times=1))
        settings = replace(BY_KEY, retry_first_ms=3_600_000, retry_ms_max=3_600_000)
        async with broker_with(bodies_of("ab", 3)) as broker:
            async with consuming(broker, ledger, settings):
                await asyncio.sleep(10)
                begin = asyncio.get_running_loop().time()
            took = asyncio.get_running_loop().time() - begin
            async with consuming(broker, ledger, settings, client_id="worker-2"):
                await asyncio.sleep(10)
                assert ledger.of("a") == [], "its only attempt has failed, as for a new member"
                await broker.settled(GROUP)
        return ledger, took

    ledger, took = run_virtual(run())
    assert took < 5
    assert ledger.of("a") == ["a:0", "a:1", "a:2"]
    assert ledger.overlaps == set()


def test_order_of_a_key_survives_a_member_that_disappears() -> None:
    async def run() -> Ledger:
        ledger = Ledger(slow("a", 2))
        async with (
            broker_with(bodies_of("abc", 10)) as broker,
            consuming(broker, ledger) as first,
        ):
            await asyncio.sleep(5)
            with broker.cut_off(first):
                async with consuming(broker, ledger, client_id="worker-2"):
                    await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    for key in "abc":
        first_time = list(dict.fromkeys(ledger.of(key)))
        assert first_time == [f"{key}:{number}" for number in range(10)]


def test_reset_back_while_a_key_is_handled_begins_the_key_again() -> None:
    async def run() -> tuple[Ledger, list[str]]:
        ledger = Ledger(slow("a", 100))
        async with (
            broker_with(bodies_of("ab", 3)) as broker,
            broker.admin() as admin,
            consuming(broker, ledger),
        ):
            await asyncio.sleep(150)  # a:0 is handled, a:1 is in its handler
            resets = Resets(admin)
            plan = await resets.plan(GROUP, ToOffset(0), ResetScope())
            await resets.reset(plan, Operation("operator", "again"))
            before = list(ledger.started)
            await broker.settled(GROUP)
        return ledger, before

    ledger, before = run_virtual(run())
    assert sorted(before) == ["a:0", "a:1", "b:0", "b:1", "b:2"]
    assert ledger.of("a") == ["a:0", "a:0", "a:1", "a:2"]
    assert ledger.overlaps == set()


def test_forced_release_keeps_the_key_of_a_handler_that_still_runs() -> None:
    async def run() -> Ledger:
        ledger = Ledger(slow("a", 30))
        async with (
            broker_with(bodies_of("ab", 4)) as broker,
            broker.admin() as admin,
            consuming(broker, ledger) as consumer,
        ):
            await asyncio.sleep(10)
            (queue,) = consumer.assignment
            await Locks(admin).force_release(GROUP, queue, Operation("operator", "test"))
            await broker.settled(GROUP)
        return ledger

    ledger = run_virtual(run())
    assert ledger.overlaps == set()
    assert ledger.of("a") == [f"a:{number}" for number in range(4)]


def test_paused_queue_starts_no_retry() -> None:
    async def run() -> tuple[int, Ledger]:
        ledger = Ledger(failing("a", times=1))
        async with (
            broker_with(["a:0", "a:1"]) as broker,
            consuming(broker, ledger) as consumer,
        ):
            await asyncio.sleep(0.5)
            (queue,) = consumer.assignment
            consumer.pause(queue)
            await asyncio.sleep(60)
            paused = len(ledger.started)
            consumer.resume(queue)
            await broker.settled(GROUP)
        return paused, ledger

    paused, ledger = run_virtual(run())
    assert paused == 1
    assert ledger.of("a") == ["a:0", "a:1"]


def test_iteration_handles_one_message_at_a_time() -> None:
    async def run() -> list[bytes]:
        received = []
        async with (
            broker_with(bodies_of("ab", 3)) as broker,
            broker.consumer(GROUP, {TOPIC: "*"}, BY_KEY) as consumer,
        ):
            async for message in consumer:
                received.append(message.body)
                if len(received) == 6:
                    consumer.stop()
        return received

    assert run_virtual(run()) == [body.encode() for body in bodies_of("ab", 3)]


async def test_broadcasting_member_keeps_the_order_of_keys(tmp_path: Path) -> None:
    ledger = Ledger(failing("a", times=2))
    settings = replace(
        BY_KEY, model="broadcasting", offsets_file=tmp_path / "offsets", retry_first_ms=200
    )
    async with broker_with(bodies_of("ab", 3)) as broker, consuming(broker, ledger, settings):
        await until(lambda: len(ledger.handled) == 6)
    assert [body for _, body in ledger.handled] == ["b:0", "b:1", "b:2", "a:0", "a:1", "a:2"]


def test_batches_are_refused() -> None:
    async def run() -> None:
        async with (
            broker_with([]) as broker,
            broker.consumer(GROUP, {TOPIC: "*"}, BY_KEY) as consumer,
        ):
            with pytest.raises(InvalidArgument, match="run_batches is not possible"):
                await consumer.run_batches(lambda _: None)

    run_virtual(run())


def test_unknown_order_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="order must be none, queue or key, got 'keys'"):
        ConsumerSettings(order="keys")  # type: ignore[arg-type]


def test_every_way_to_send_stores_the_ordering_key() -> None:
    async def run() -> list[ReceivedMessage]:
        async with broker_with([]) as broker:
            async with broker.producer() as producer:
                await producer.send(TOPIC, b"send", ordering_key="k")
                await (await producer.submit(TOPIC, Message(b"submit"), ordering_key="k"))
                await producer.send_one_way(TOPIC, b"one way", ordering_key="k")
                await producer.send_many(TOPIC, [b"many", b"more"], ordering_key="k")
                await producer.send_many(
                    TOPIC, [b"keyed"], tag="t", keys=["index"], ordering_key="k"
                )
                await producer.send(TOPIC, b"later", ordering_key="k", delay_ms=1_000)
                await producer.send(TOPIC, b"none")
            await asyncio.sleep(5)
            return await broker.messages(TOPIC)

    messages = run_virtual(run())
    assert {one.body for one in messages if one.ordering_key is None} == {b"none"}
    keyed = [one for one in messages if one.ordering_key == "k"]
    assert {one.body for one in keyed} == {
        b"send", b"submit", b"one way", b"many", b"more", b"keyed", b"later"
    }  # fmt: skip
    assert all(one.properties == {ORDERING_KEY: "k"} for one in keyed)
    assert [(one.tag, one.keys) for one in keyed if one.body == b"keyed"] == [("t", ("index",))]


def test_why_stuck_names_the_key_that_hangs_and_the_key_that_fails() -> None:
    async def run() -> tuple[Any, Any]:
        async def handle(message: ReceivedMessage) -> None:
            if message.ordering_key == "hangs":
                await asyncio.sleep(1_000)
            if message.ordering_key == "fails":
                raise ValueError("not yet")

        ledger = Ledger(handle)
        settings = replace(BY_KEY, retry_first_ms=50_000, retry_ms_max=50_000)
        settings = replace(settings, handle_timeout_ms=None)
        async with (
            broker_with(["hangs:0", "fails:0", "other:0"]) as broker,
            broker.admin() as admin,
            consuming(broker, ledger, settings),
        ):
            await asyncio.sleep(120)
            (first,) = await admin.why_stuck(GROUP, TOPIC)
            await asyncio.sleep(1_000)
            (second,) = await admin.why_stuck(GROUP, TOPIC)
        return first, second

    first, second = run_virtual(run())
    assert (first.reason, second.reason) == ("HEAD_OF_LINE", "HEAD_OF_LINE")
    assert "worker-1 has been handling offset 0" in first.message
    assert "of ordering key 'hangs'" in first.message
    assert "the handler of worker-1 has failed" in second.message
    assert "with offset 1" in second.message
    assert "of ordering key 'fails'" in second.message
    assert int(second.evidence["running_failed_count"]) > 10


def test_metrics_count_the_keys_that_later_messages_wait_for() -> None:
    async def run() -> dict[str, float]:
        registry = CollectorRegistry()

        async def handle(message: ReceivedMessage) -> None:
            if message.ordering_key == "a":
                await asyncio.sleep(100)
            if message.ordering_key in ("b", "c"):
                raise ValueError("not yet")

        settings = replace(BY_KEY, retry_first_ms=50_000, retry_ms_max=50_000)
        async with broker_with(bodies_of("abcd", 2)) as broker:
            consumer = Consumer(
                broker.nameserver,
                GROUP,
                {TOPIC: "*"},
                settings,
                metrics=ClientMetrics(registry),
                environment=broker.environment,
            )
            async with consumer, asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run(handle))
                await asyncio.sleep(20)
                found = {
                    sample.labels["state"]: sample.value
                    for metric in registry.collect()
                    for sample in metric.samples
                    if sample.name == "baton_consumer_ordering_keys"
                }
                consumer.stop()
        assert not [
            sample
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "baton_consumer_ordering_keys"
        ]
        return found

    assert run_virtual(run()) == {"handling": 1, "retrying": 2}
