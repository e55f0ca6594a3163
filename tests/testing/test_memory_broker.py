"""Goal: a program behaves on the in-memory broker as on a cluster, and the broker leaks nothing.

Method: the programs of a user, against `MemoryBroker`, in real and in virtual time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import Message
from batonmq._core.retries import dead_letter_topic
from batonmq._producer.producer import Producer
from batonmq.errors import (
    InvalidArgument,
    SubscriptionConflict,
    TopicNotFound,
)
from batonmq_server.testing import Faults, MemoryBroker, run_virtual
from batonmq_server.testing.processes import ServiceSpec
from tests.support.conditions import until

BACK = ConsumerSettings(consume_from="first", send_back=True)


class BadDisk(Exception):
    """The error of a broker that does not start."""


class FailingBroker(MemoryBroker):
    """A broker whose storage finds its disk damaged."""

    def _start(self, service: ServiceSpec) -> None:
        def build(_: object, __: object) -> NoReturn:
            raise BadDisk

        super()._start(replace(service, build=build) if service.kind == "storage" else service)


async def two_members(broker: MemoryBroker) -> list[tuple[str, bytes, float]]:
    """Return which member handled which message when, while a second member joins."""
    handled: list[tuple[str, bytes, float]] = []
    now = asyncio.get_running_loop().time

    async def member(name: str, stopped: asyncio.Event) -> None:
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(0.001)
            handled.append((name, message.body, now()))

        async with (
            broker.consumer("billing", {"orders": "*"}, client_id=name) as consumer,
            asyncio.TaskGroup() as running,
        ):
            running.create_task(consumer.run(handle))
            await stopped.wait()
            consumer.stop()

    await broker.create_topic("orders", queues=4)
    stopped = asyncio.Event()
    async with broker.producer() as producer, asyncio.TaskGroup() as tasks:
        tasks.create_task(member("a", stopped))
        for number in range(200):
            if number == 100:
                tasks.create_task(member("b", stopped))
            await producer.send("orders", b"%d" % number)
        await broker.settled("billing")
        stopped.set()
    return handled


async def test_no_message_is_lost_or_duplicated_while_a_member_joins() -> None:
    async with MemoryBroker() as broker:
        handled = await two_members(broker)
    assert Counter(body for _, body, _ in handled) == Counter(b"%d" % n for n in range(200))


def test_no_message_is_lost_in_virtual_time_with_network_faults() -> None:
    async def run() -> list[tuple[str, bytes, float]]:
        faults = Faults(loss=0.02, duplicate=0.05, slow=0.02)
        async with MemoryBroker(seed=3, faults=faults) as broker:
            return await two_members(broker)

    handled = run_virtual(run())
    assert {name for name, _, _ in handled} == {"a", "b"}
    assert Counter(body for _, body, _ in handled) == Counter(b"%d" % n for n in range(200))


def test_runs_with_one_seed_are_equal_to_the_millisecond() -> None:
    async def run(seed: int) -> list[tuple[str, bytes, float]]:
        async with MemoryBroker(seed=seed) as broker:
            return await two_members(broker)

    first = run_virtual(run(1))
    assert run_virtual(run(1)) == first
    assert run_virtual(run(2)) != first


def test_retries_end_in_a_dead_letter_in_virtual_time() -> None:
    async def run() -> tuple[list[float], list[ReceivedMessage]]:
        tries: list[float] = []
        now = asyncio.get_running_loop().time

        async def fail(_: ReceivedMessage) -> None:
            tries.append(now())
            raise ValueError("no such account")

        settings = ConsumerSettings(consume_from="first", send_back=True, retries_max=4)
        async with MemoryBroker() as broker:
            await broker.create_topic("orders")
            async with (
                broker.producer() as producer,
                broker.consumer("billing", {"orders": "*"}, settings) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run(fail))
                await producer.send("orders", b"1", keys=["order-1"])
                await broker.settled("billing")
                consumer.stop()
            return tries, await broker.messages(dead_letter_topic("billing"))

    tries, dead = run_virtual(run())
    waits = [after - before for before, after in pairwise(tries)]
    assert waits == pytest.approx([10, 30, 60, 120], abs=1)
    assert [one.body for one in dead] == [b"1"]
    assert "order-1" in dead[0].keys


def test_message_of_retry_later_is_redelivered_after_the_delay() -> None:
    async def run() -> list[float]:
        tries: list[float] = []
        now = asyncio.get_running_loop().time

        async def handle(_: ReceivedMessage) -> RetryLater | None:
            tries.append(now())
            return RetryLater(60_000) if len(tries) == 1 else None

        async with MemoryBroker() as broker:
            await broker.create_topic("orders", queues=1)
            async with (
                broker.producer() as producer,
                broker.consumer("billing", {"orders": "*"}, BACK) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run(handle))
                await producer.send("orders", b"1")
                await broker.settled("billing")
                consumer.stop()
        return tries

    first, second = run_virtual(run())
    assert second - first == pytest.approx(60, abs=1)


def test_scheduled_message_is_delivered_when_due() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("reminders")
            at_unix_ms = broker.clock.unix_ms() + 3_600_000
            await producer.send("reminders", b"call back", deliver_at_unix_ms=at_unix_ms)
            await asyncio.sleep(3_590)
            assert await broker.messages("reminders") == []
            await asyncio.sleep(20)
            (message,) = await broker.messages("reminders")
            assert at_unix_ms <= message.store_unix_ms <= at_unix_ms + 1_000

    run_virtual(run())


async def test_large_messages_arrive() -> None:
    """Clients and storage encode them in another way than small ones."""
    bodies = [bytes([number]) * 300_000 for number in range(4)]
    async with MemoryBroker() as broker, broker.producer() as producer:
        await broker.create_topic("orders", queues=1)
        await producer.send_many("orders", bodies)
        received: list[bytes] = []
        async with broker.consumer("billing", {"orders": "*"}) as consumer:
            async for message in consumer:
                received.append(message.body)
                if len(received) == len(bodies):
                    break
    assert received == bodies


async def test_other_subscription_is_rejected_with_both_clients_named() -> None:
    async with MemoryBroker() as broker:
        await broker.create_topic("orders")
        async with broker.consumer("billing", {"orders": "paid"}, client_id="a"):
            with pytest.raises(SubscriptionConflict, match="paid"):
                async with broker.consumer("billing", {"orders": "sent"}, client_id="b"):
                    pass


async def test_unacknowledged_message_is_redelivered_and_flagged() -> None:
    async with MemoryBroker() as broker, broker.producer() as producer:
        await broker.create_topic("orders", queues=1)
        await producer.send("orders", b"1")
        async with broker.consumer("billing", {"orders": "*"}) as consumer:
            async for message in consumer:
                assert not message.redelivered
                break
        async with broker.consumer("billing", {"orders": "*"}) as consumer:
            async for message in consumer:
                assert (message.body, message.redelivered) == (b"1", True)
                break


def test_disconnected_member_loses_its_queues_and_messages_in_flight() -> None:
    async def run() -> list[tuple[bytes, bool]]:
        handled: list[tuple[bytes, bool]] = []
        held, taken = asyncio.Event(), asyncio.Event()

        async def hold(_: ReceivedMessage) -> None:
            held.set()
            await asyncio.Event().wait()

        async def take(message: ReceivedMessage) -> None:
            handled.append((message.body, message.redelivered))
            taken.set()

        settings = ConsumerSettings(consume_from="first", drain_timeout_ms=0)
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("orders", queues=1)
            await producer.send("orders", b"1")
            async with (
                broker.consumer("billing", {"orders": "*"}, settings) as first,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(first.run(hold))
                await held.wait()
                with broker.cut_off(first):
                    async with broker.consumer("billing", {"orders": "*"}, settings) as second:
                        tasks.create_task(second.run(take))
                        async with asyncio.timeout(120):
                            await taken.wait()
                        await broker.settled("billing")
                        second.stop()
                first.stop()
        return handled

    assert run_virtual(run()) == [(b"1", True)]


@pytest.mark.parametrize("send_back", [False, True])
def test_failure_of_a_message_that_another_member_has_handled_causes_no_retry(
    send_back: bool,
) -> None:
    """Its handler began before its member was cut off, and ends when that is back."""

    async def run() -> list[tuple[str, int, bool]]:
        handled: list[tuple[str, int, bool]] = []
        begun, end = asyncio.Event(), asyncio.Event()

        async def fail(message: ReceivedMessage) -> None:
            handled.append(("first", message.attempts, message.redelivered))
            begun.set()
            await end.wait()
            raise ValueError("too late")

        async def take(message: ReceivedMessage) -> None:
            handled.append(("second", message.attempts, message.redelivered))

        settings = ConsumerSettings(consume_from="first", send_back=send_back)
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("orders", queues=1)
            await producer.send("orders", b"1")
            async with (
                broker.consumer("billing", {"orders": "*"}, settings) as first,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(first.run(fail))
                await begun.wait()
                with broker.cut_off(first):
                    async with broker.consumer("billing", {"orders": "*"}, settings) as second:
                        tasks.create_task(second.run(take))
                        await broker.settled("billing")
                        second.stop()
                await until(lambda: len(first.assignment) == 1 + send_back)
                end.set()
                await asyncio.sleep(60)
                first.stop()
        return handled

    assert run_virtual(run()) == [("first", 1, False), ("second", 1, True)]


async def started_anew(way: str, name: str) -> None:
    """Stop and restart a service while messages are sent and handled."""
    handled: list[bytes] = []

    async def handle(message: ReceivedMessage) -> None:
        handled.append(message.body)

    async with MemoryBroker(broker_count=2) as broker:
        await broker.create_topic("orders", queues=4)
        async with (
            broker.producer() as producer,
            broker.consumer("billing", {"orders": "*"}) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            sent = [await producer.submit("orders", Message(b"%d" % n)) for n in range(50)]
            await getattr(broker, way)(name)
            sent += [await producer.submit("orders", Message(b"%d" % n)) for n in range(50, 100)]
            for pending in sent:
                await pending
            await broker.settled("billing")
            consumer.stop()
        stored = [message.body for message in await broker.messages("orders")]
    assert Counter(stored) == Counter(handled) == Counter(b"%d" % n for n in range(100))


@pytest.mark.parametrize("name", ["storage", "offsets", "lockmgr", "nameserver", "broker-1"])
@pytest.mark.parametrize("way", ["restart", "kill"])
def test_clients_continue_after_a_service_restart(name: str, way: str) -> None:
    run_virtual(started_anew(way, name))


@pytest.mark.parametrize("way", ["restart", "kill"])
async def test_clients_continue_after_a_service_restart_in_real_time(way: str) -> None:
    await started_anew(way, "storage")


async def test_restart_of_an_unknown_service_is_rejected() -> None:
    async with MemoryBroker() as broker:
        with pytest.raises(InvalidArgument, match="broker-7"):
            await broker.restart("broker-7")


async def test_clients_of_the_code_under_test_reach_the_broker() -> None:
    async with MemoryBroker() as broker:
        await broker.create_topic("orders")
        async with Producer(broker.nameserver, environment=broker.environment) as producer:
            await producer.send("orders", b"1")
        consumer = Consumer(
            broker.nameserver, "billing", {"orders": "*"}, BACK, environment=broker.environment
        )
        async with consumer:
            assert (await anext(consumer)).body == b"1"


async def test_messages_are_returned_in_the_order_of_their_store_time() -> None:
    async with MemoryBroker() as broker, broker.producer() as producer:
        await broker.create_topic("orders", queues=3)
        assert await broker.messages("orders") == []
        for number in range(20):
            await producer.send("orders", b"%d" % number, tag="new")
        messages = await broker.messages("orders")
        assert sorted(int(one.body) for one in messages) == list(range(20))
        assert [one.store_unix_ms for one in messages] == sorted(
            one.store_unix_ms for one in messages
        )
        with pytest.raises(TopicNotFound):
            await broker.messages("bills")


def test_settled_times_out_with_what_is_left() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("orders", queues=1)
            async with broker.consumer("billing", {"orders": "*"}):
                await producer.send("orders", b"1")
                with pytest.raises(TimeoutError, match="orders/broker-0/0"):
                    await broker.settled("billing", timeout_s=0.2)

    run_virtual(run())


async def test_settled_reports_a_state_that_could_not_be_read() -> None:
    async with MemoryBroker() as broker:
        with pytest.raises(TimeoutError, match="not known"):
            await broker.settled("billing", timeout_s=1e-9)


async def test_admin_sees_a_cluster_of_four_services() -> None:
    async with MemoryBroker(broker_count=2) as broker, broker.admin() as admin:
        nodes = (await admin.cluster()).nodes
    assert sorted(node.node_id for node in nodes) == [
        "broker-0",
        "broker-1",
        "lockmgr-0",
        "nameserver-0",
        "offsets-0",
    ]


async def test_settings_of_a_service_apply_and_an_unknown_service_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="brokers"):
        MemoryBroker(settings={"brokers": {}})
    settings = {"nameserver": {"auto_create_topics": True}}
    async with MemoryBroker(settings=settings) as broker, broker.producer() as producer:
        await producer.send("orders", b"1")
        assert len(await broker.messages("orders")) == 1


async def test_service_that_does_not_start_raises_its_error() -> None:
    with pytest.raises(BadDisk):
        async with FailingBroker():
            pass


async def test_real_time_is_that_of_the_machine() -> None:
    clock = Clock()
    async with MemoryBroker() as broker:
        before_ms = clock.unix_ms()
        assert before_ms <= broker.clock.unix_ms() <= clock.unix_ms()


def used(folder: Path) -> tuple[int, list[threading.Thread], int, list[str]]:
    """Return the open descriptors, threads, tasks, and files in the working directory."""
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  iterating opens one more
    return descriptors, threading.enumerate(), len(asyncio.all_tasks()), os.listdir(folder)  # noqa: PTH208


async def test_closed_broker_leaves_no_descriptor_thread_task_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()  # otherwise objects of earlier tests could be freed in between
    before = used(tmp_path)
    async with MemoryBroker() as broker:
        handled = await two_members(broker)
        descriptors, threads, _, files = used(tmp_path)
        assert (descriptors, threads, files) == (before[0], before[1], [])
        await broker.restart("storage")
        await broker.kill("storage")
    assert len(handled) == 200
    assert used(tmp_path) == before


async def test_broker_is_garbage_collected_after_use() -> None:
    async with MemoryBroker() as broker:
        await two_members(broker)
    del broker
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, MemoryBroker)]


def test_broker_starts_fast() -> None:
    """The start needs little waiting and little CPU time, even on a busy machine."""

    async def run() -> tuple[float, float]:
        now, begin_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        async with MemoryBroker():
            there_s = now() - begin_s
        return there_s, now() - begin_s

    run_virtual(run())
    before = os.times()
    there_s, gone_s = run_virtual(run())
    after = os.times()
    assert there_s < 1
    assert gone_s < 2
    assert after.user + after.system - before.user - before.system < 1


def test_consumer_of_a_deleted_topic_releases_its_other_queues() -> None:
    """Its handlers end, their messages are acknowledged, and another member goes on at once."""

    def owned(consumer: Consumer, *topics: str) -> int:
        return sum(queue.topic in topics for queue in consumer.assignment)

    async def run() -> tuple[list[bytes], float]:
        handled: list[bytes] = []

        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(1)
            handled.append(message.body)

        async with MemoryBroker() as broker:
            await broker.create_topic("orders", 4)
            await broker.create_topic("notes", 1)
            async with broker.producer() as producer, broker.admin() as admin:
                with pytest.raises(TopicNotFound):
                    async with (
                        broker.consumer("billing", {"orders": "*", "notes": "*"}) as consumer,
                        asyncio.TaskGroup() as tasks,
                    ):
                        tasks.create_task(consumer.run(handle))
                        await until(lambda: owned(consumer, "orders", "notes") == 5)
                        await producer.send("orders", b"before")
                        await admin.delete_topic("notes")
                began_s = asyncio.get_running_loop().time()
                async with broker.consumer("billing", {"orders": "*"}) as other:
                    await until(lambda: owned(other, "orders") == 4, timeout_s=60)
                    return handled, asyncio.get_running_loop().time() - began_s

    handled, took_s = run_virtual(run())
    assert handled == [b"before"]
    assert took_s < 5
