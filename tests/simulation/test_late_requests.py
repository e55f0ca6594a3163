"""Goal: a request that arrives after its queue was closed and opened again is not stored.

Method: the first request of a producer, or of a transformer, is held back at the broker. Its queue
is closed, so the message goes to another queue; the queue is opened again, and the request goes on.
Each mutant leaves out one step of the epochs of topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._producer import broker_sender
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.queue_moves import move_queues
from batonmq_server.nameserver import topic_store
from batonmq_server.storage import server, validation
from batonmq_server.storage.core import store
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check_takes
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

pytestmark = pytest.mark.sim

TOPIC = "numbers"
Sender = Callable[[MemoryBroker], AbstractAsyncContextManager[None]]


class HeldRequest:
    """The first request for the topic, which has not been answered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._append = append = server.StorageServicer.Append
        self._call: tuple[server.StorageServicer, Any, Any] | None = None

        async def hold_first(servicer: server.StorageServicer, request: Any, context: Any) -> Any:
            if self._call is None and TOPIC.encode() in request.batches[0]:
                self._call = servicer, request, context
                await asyncio.Event().wait()
            return await append(servicer, request, context)

        patch.setattr(server.StorageServicer, "Append", hold_first)

    def has_arrived(self) -> bool:
        return self._call is not None

    @property
    def broker(self) -> str:
        assert self._call is not None
        return self._call[0]._parts.broker

    async def go_on(self) -> None:
        assert self._call is not None
        await self._append(*self._call)


@asynccontextmanager
async def sending(broker: MemoryBroker) -> AsyncIterator[None]:
    """Send the message by a producer."""
    settings = ProducerSettings(request_timeout_ms=1_500)
    async with broker.producer(settings) as producer, asyncio.TaskGroup() as tasks:
        tasks.create_task(producer.send(TOPIC, b"1"))
        yield


@asynccontextmanager
async def transforming(broker: MemoryBroker) -> AsyncIterator[None]:
    """Store the message as the output of a transformer."""
    await broker.create_topic("inputs", 1)
    async with broker.producer() as producer:
        await producer.send("inputs", b"1")
    settings = ConsumerSettings(order="queue", consume_from="first")
    async with (
        broker.consumer("copiers", {"inputs": "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.transform(lambda message: message.body, to=TOPIC))
        yield
        consumer.stop()


SENDERS: tuple[Sender, ...] = (sending, transforming)


async def stored_count(patch: pytest.MonkeyPatch, send: Sender) -> int:
    """Return how often the message is stored."""
    held = HeldRequest(patch)
    async with MemoryBroker(broker_count=2) as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 2)

        async def is_stored() -> bool:
            return bool(await broker.messages(TOPIC))

        async with send(broker):
            await until(held.has_arrived)
            first = held.broker
            other = "broker-1" if first == "broker-0" else "broker-0"
            await move_queues(admin, TOPIC, first, other, by="operator")
            await until(is_stored)
        assert [one.queue.broker for one in await broker.messages(TOPIC)] == [other]
        await move_queues(admin, TOPIC, other, first, by="operator")
        async with broker.producer() as producer:
            assert (await producer.send(TOPIC, b"2")).queue.broker == first
        await held.go_on()
        return [message.body for message in await broker.messages(TOPIC)].count(b"1")


def count_of(patch: pytest.MonkeyPatch, send: Sender) -> int:
    counts: list[int] = []

    async def run() -> None:
        counts.append(await stored_count(patch, send))

    run_virtual(run())
    return counts[0]


@pytest.mark.parametrize("send", SENDERS, ids=lambda one: one.__name__)
def test_late_request_is_not_stored(monkeypatch: pytest.MonkeyPatch, send: Sender) -> None:
    assert count_of(monkeypatch, send) == 1


def nameservers_raise_no_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_store, "with_epochs", lambda _, after: after)


def producers_name_no_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker_sender, "epoch_to_name", lambda *_: None)


def brokers_read_no_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "parse_topic_epochs", lambda request: [None] * len(request.batches))


def brokers_compare_no_epochs(patch: pytest.MonkeyPatch) -> None:
    def compare(checked: CheckedBatch, topic: LocalTopic) -> None:
        check_takes(checked, replace(topic, opened_epoch=0))

    patch.setattr(store, "check_takes", compare)


@pytest.mark.parametrize(
    "break_it",
    [
        nameservers_raise_no_epoch,
        producers_name_no_epoch,
        brokers_read_no_epochs,
        brokers_compare_no_epochs,
    ],
    ids=lambda one: one.__name__,
)
def test_mutant_stores_the_message_twice(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert count_of(monkeypatch, sending) == 2
