"""Retry, dead letters and timeouts, on a real cluster.

Goal: a failed message is redelivered with all its fields, then becomes a dead letter; it is never
lost, nor stored twice by two members, even if storage is killed; a handler that hangs delays no
other queue.
Method: real services; handlers fail on purpose and request short delays.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from batonmq._common.clock import Clock
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_adapters import Handler
from batonmq._consumer.handler_results import MessageFailed, RetryLater, Suspend
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.session import Session
from batonmq._core.retries import HandlingFailure, dead_letter_topic
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from tests.client.group import QUICK, Scene, scene
from tests.support.clock import WrongClock
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

BACK = replace(QUICK, send_back=None)
IN_ORDER = replace(QUICK, order="queue")
READ = replace(QUICK, drain_timeout_ms=1_000)


@asynccontextmanager
async def running_member(
    at: Scene, handler: Handler, settings: ConsumerSettings, client_id: str = "a"
) -> AsyncIterator[Consumer]:
    """Run a member with `handler` until the block ends."""
    async with (
        at.consumer(client_id, settings=settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handler))
        yield consumer
        consumer.stop()


async def dead_letters(at: Scene, count: int) -> list[ReceivedMessage]:
    """Return the first `count` dead letters of the group."""
    topic, letters = dead_letter_topic(at.group), list[ReceivedMessage]()

    async def is_there() -> bool:
        async with Admin(at.nameserver) as admin:
            return topic in {one.name for one in await admin.list_topics()}

    await until(is_there)
    group = f"g-{secrets.token_hex(4)}"
    async with Consumer(at.nameserver, group, {topic: "*"}, READ) as consumer:
        async for message in consumer:
            letters.append(message)
            if len(letters) == count:
                consumer.stop()
    return letters


async def bodies_until(at: Scene, topic: str, last: bytes) -> list[bytes]:
    """Read a topic of one queue up to a message."""
    bodies: list[bytes] = []
    group = f"g-{secrets.token_hex(4)}"
    async with Consumer(at.nameserver, group, {topic: "*"}, READ) as consumer:
        async for message in consumer:
            bodies.append(message.body)
            if message.body == last:
                consumer.stop()
    return bodies


async def test_message_that_always_fails_becomes_a_dead_letter_with_all_its_fields(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        seen: list[tuple[object, ...]] = []

        async def handle(message: ReceivedMessage) -> object:
            origin = message.origin
            seen.append(
                (message.attempts, message.topic, message.tag, message.keys, message.body,
                 dict(message.properties), origin.queue, origin.offset, origin.message_id)
            )  # fmt: skip
            if message.attempts == 3:
                raise ValueError("no\x01stock")
            return RetryLater(0)

        async with Producer(nameserver) as producer:
            sent = await producer.send(
                at.topic, b"body", tag="paid", keys=["k1", "k2"], properties={"a": "1"}
            )
        async with running_member(at, handle, replace(BACK, retries_max=2)):
            (dead,) = await dead_letters(at, 1)
        first = (at.topic, "paid", ("k1", "k2"), b"body", {"a": "1"})
        origin = (sent.queue, sent.offset, sent.message_id)
        assert seen == [(attempts, *first, *origin) for attempts in (1, 2, 3)]
        found_by = ("k1", "k2", sent.message_id)
        assert (dead.tag, dead.keys, dead.body) == ("paid", found_by, b"body")
        assert dead.properties == {
            "a": "1",
            "baton.origin": f"{at.topic}/{sent.queue.broker}/0/0",
            "baton.origin_id": sent.message_id,
            "baton.attempts": "3",
            "baton.reason": "failed",
            "baton.error": "ValueError: no stock",
            "baton.client": "a",
        }
        await until(lambda: _no_lag(at))


async def test_retry_waits_for_its_delay_although_the_clock_of_the_consumer_is_behind(
    nameserver: str,
) -> None:
    """Each attempt would be due at once, and a message would be a dead letter in a moment."""
    async with scene(nameserver, queue_count=1) as at:
        failed_unix_ms: list[int] = []
        stored_unix_ms: list[int] = []

        async def handle(message: ReceivedMessage) -> object:
            if message.attempts == 1:
                failed_unix_ms.append(Clock().unix_ms())
                return RetryLater(1_500)
            stored_unix_ms.append(message.store_unix_ms)
            return None

        async with Producer(nameserver) as producer:
            await producer.send(at.topic, b"body")
        environment = ClientEnvironment(clock=WrongClock(600_000))
        async with (
            Consumer(
                at.nameserver, at.group, {at.topic: "*"}, BACK, environment=environment
            ) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            await until(lambda: bool(stored_unix_ms))
            consumer.stop()
        assert stored_unix_ms[0] >= failed_unix_ms[0] + 1_500


async def _no_lag(at: Scene) -> bool:
    return await at.lag() == 0


async def test_handler_that_hangs_is_cancelled_and_progress_moves(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["hangs", "behind"])
        begun, ended = asyncio.Event(), list[str]()

        async def handle(message: ReceivedMessage) -> None:
            begun.set()
            if message.body == b"hangs":
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("cancelled")
            ended.append(message.body.decode())

        async with running_member(at, handle, replace(BACK, retries_max=0)) as consumer:
            await begun.wait()
            consumer.handle_timeout_ms = 100
            (dead,) = await dead_letters(at, 1)
            await until(lambda: "behind" in ended)
            await until(lambda: _no_lag(at))
        assert ended == ["cancelled", "behind"]
        assert dead.body == b"hangs"
        assert dead.properties["baton.reason"] == "timeout"


async def test_thread_that_hangs_delays_no_queue_and_its_result_is_ignored(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["hangs", "behind"])
        let_go, ended = threading.Event(), list[str]()

        def handle(message: ReceivedMessage) -> None:
            if message.body == b"hangs":
                let_go.wait(30)
            ended.append(message.body.decode())

        # Longer than any machine delays a thread that ends in time.
        settings = replace(BACK, retries_max=0, handle_timeout_ms=3_000)
        async with running_member(at, handle, settings):
            (dead,) = await dead_letters(at, 1)
            await until(lambda: ended == ["behind"])
            await until(lambda: _no_lag(at))
            let_go.set()
            await until(lambda: len(ended) == 2)
        assert dead.body == b"hangs"
        async with Producer(nameserver) as producer:
            await producer.send(dead_letter_topic(at.group), b"after")
        topic = dead_letter_topic(at.group)
        assert await bodies_until(at, topic, b"after") == [b"hangs", b"after"]


async def test_extended_handler_may_take_longer(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["slow", "behind"])
        failed_after: list[int] = []
        due_after: list[int] = []
        clock, loop = Clock(), asyncio.get_running_loop()

        async def handle(message: ReceivedMessage) -> None:
            if message.body == b"slow" and message.attempts == 1:
                begin_ms = clock.monotonic_ms()
                message.extend(700)
                loop.call_later(0.8, lambda: due_after.append(clock.monotonic_ms() - begin_ms))
                try:
                    await asyncio.Event().wait()
                finally:
                    failed_after.append(clock.monotonic_ms() - begin_ms)

        async with running_member(at, handle, replace(IN_ORDER, handle_timeout_ms=100)):
            await until(lambda: _no_lag(at))
        (after_ms,), (timer_ms,) = failed_after, due_after
        assert 790 <= after_ms < timer_ms + 1_000, "timers are exact to a second"


async def test_suspended_message_delays_only_its_own_queue(nameserver: str) -> None:
    async with scene(nameserver, queue_count=2) as at:
        await at.send(["head", "behind"], queue_id=0)
        await at.send(["other"], queue_id=1)
        order: list[str] = []

        async def handle(message: ReceivedMessage) -> object:
            order.append(message.body.decode())
            hold = message.body == b"head" and (message.attempts < 3 or "other" not in order)
            return Suspend(10) if hold else None

        settings = replace(IN_ORDER, queue_concurrency=8)
        async with running_member(at, handle, settings):
            await until(lambda: "behind" in order)
        own = [body for body in order if body != "other"]
        assert own[-1] == "behind"
        assert set(own[:-1]) == {"head"}
        assert len(own) >= 4


async def test_message_of_an_ordered_queue_that_fails_too_often_becomes_a_dead_letter(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["bad", "behind"])
        order: list[str] = []

        async def handle(message: ReceivedMessage) -> None:
            order.append(message.body.decode())
            if message.body == b"bad":
                raise ValueError

        async with running_member(at, handle, replace(IN_ORDER, retries_max=2)):
            (dead,) = await dead_letters(at, 1)
            await until(lambda: order == ["bad", "bad", "bad", "behind"])
        assert (dead.body, dead.properties["baton.attempts"]) == (b"bad", "3")


async def test_consumer_that_stops_on_a_failure_leaves_the_message_to_other_members(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["bad"])

        async def handle(message: ReceivedMessage) -> None:
            raise ValueError("on purpose")

        settings = replace(IN_ORDER, retries_max=1, exhausted="stop")
        async with at.consumer("a", settings=settings) as consumer:
            with pytest.raises(MessageFailed, match="on purpose"):
                await consumer.run(handle)
        again: list[ReceivedMessage] = []

        async def take(message: ReceivedMessage) -> None:
            again.append(message)

        async with running_member(at, take, settings, "b"):
            await until(lambda: again)
        assert again[0].redelivered


class RetryMember:
    """The part of a member that sends messages back, without the rest of a consumer."""

    def __init__(self, at: Scene, client_id: str, tasks: asyncio.TaskGroup) -> None:
        outside = ClientEnvironment()
        self.session = Session(
            group=at.group,
            incarnation=queue_pb2.Incarnation(client_id=client_id, incarnation_id=1),
            settings=BACK,
            directory=Directory(at.nameserver, outside.random),
            clock=outside.clock,
            random=outside.random,
            on_ownership=lambda _: None,
        )
        self.loops: list[asyncio.Task[None]] = []
        self._returns = RetrySender(
            self.session, lambda loop: self.loops.append(tasks.create_task(loop))
        )

    async def send(self, message: ReceivedMessage, delay_ms: int | None) -> bool:
        failure = HandlingFailure("failed", "on purpose")
        return await self._returns.send(RetryRequest(message, 0, failure, delay_ms, lambda: True))

    async def close(self) -> None:
        for loop in self.loops:
            loop.cancel()
        await self.session.directory.close()


@pytest.mark.long
@pytest.mark.parametrize("delay_ms", [1_000, None], ids=["retry", "dead letter"])
async def test_two_members_send_one_copy_back_though_storage_is_killed_in_between(
    tmp_path: Path, delay_ms: int | None
) -> None:
    async with local_cluster(tmp_path) as cluster, scene(cluster.nameserver, 1) as at:
        await at.send(["1", "2"])
        messages: list[ReceivedMessage] = []
        async with at.consumer(settings=READ) as consumer:
            async for message in consumer:
                messages.append(message)
                if len(messages) == 2:
                    consumer.stop()
        async with asyncio.TaskGroup() as tasks:
            old_owner, successor = (
                RetryMember(at, client_id, tasks) for client_id in ("old-owner", "successor")
            )
            try:
                assert await old_owner.send(messages[0], delay_ms)
                await cluster.kill("storage")
                assert await successor.send(messages[0], delay_ms)
                assert await successor.send(messages[1], delay_ms)
                assert await old_owner.send(messages[1], delay_ms)
            finally:
                await old_owner.close()
                await successor.close()
        topic = f"%{'DLQ' if delay_ms is None else 'RETRY'}%{at.group}"
        async with Producer(cluster.nameserver) as producer:
            await producer.send(topic, b"after", delay_ms=2_000)
        assert await bodies_until(at, topic, b"after") == [b"1", b"2", b"after"]
