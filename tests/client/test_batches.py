"""Handlers of lists of messages.

Goal: a list is a run of one queue in order, within `messages_max`; a result applies to its message
alone, an error or a timeout to the whole list; a message that has failed before is in a list of its
own; with the order of the queue no message overtakes a failed one.
Method: a real cluster; handlers record their lists and fail on purpose.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import pytest

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_adapters import BatchHandler
from batonmq._consumer.handler_results import MessageFailed, RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq.errors import InvalidArgument
from tests.client.group import QUICK, Scene, scene
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

BACK = replace(QUICK, send_back=None)
IN_ORDER = replace(QUICK, order="queue")
TEN = [str(number) for number in range(10)]


@asynccontextmanager
async def running_batches(
    at: Scene, handler: BatchHandler, settings: ConsumerSettings = QUICK, messages_max: int = 1_000
) -> AsyncIterator[Consumer]:
    """Run a member that calls `handler` with lists until the block ends."""
    async with at.consumer("a", settings=settings) as consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run_batches(handler, messages_max=messages_max))
        yield consumer
        consumer.stop()


def bodies_of(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


async def handled_all(at: Scene) -> bool:
    return await at.lag() == 0


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_lists_are_runs_of_one_queue_within_messages_max(
    nameserver: str, plain: bool
) -> None:
    async with scene(nameserver, queue_count=2) as at:
        for queue_id in range(2):
            await at.send([f"{queue_id}-{number}" for number in range(50)], queue_id=queue_id)
        lists: list[Sequence[ReceivedMessage]] = []

        async def handle(messages: MessageBatch) -> None:
            lists.append(messages)

        def handle_in_thread(messages: MessageBatch) -> None:
            lists.append(messages)

        async with running_batches(at, handle_in_thread if plain else handle, messages_max=20):
            await until(lambda: handled_all(at))
        for queue_id in range(2):
            own = [each for each in lists if each[0].queue_id == queue_id]
            assert {message.queue_id for each in own for message in each} == {queue_id}
            assert [body for each in own for body in bodies_of(each)] == [
                f"{queue_id}-{number}" for number in range(50)
            ]
        assert max(map(len, lists)) == 20


async def test_results_apply_to_each_message_and_only_failed_ones_are_retried(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(TEN)
        lists: list[list[str]] = []

        async def handle(messages: MessageBatch) -> list[object]:
            lists.append(bodies_of(messages))
            return [
                RetryLater(0) if message.body in (b"3", b"7") and message.attempts == 1 else None
                for message in messages
            ]

        async with running_batches(at, handle, BACK):
            await until(lambda: sum(map(len, lists)) == 12)
            await until(lambda: handled_all(at))
        again = [each for each in lists if each in (["3"], ["7"])]
        assert sorted(again) == [["3"], ["7"]]
        assert sorted(chain.from_iterable(lists)) == sorted([*TEN, "3", "7"])


async def test_raised_error_fails_the_list_and_each_message_is_retried_alone(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(TEN)
        lists: list[list[str]] = []
        taken: list[str] = []

        async def handle(messages: MessageBatch) -> None:
            lists.append(bodies_of(messages))
            if "5" in lists[-1] and messages[0].attempts < 3:
                raise ValueError("no five")
            taken.extend(lists[-1])

        async with running_batches(at, handle, messages_max=10):
            await until(lambda: handled_all(at))
        first = next(each for each in lists if "5" in each)
        assert len(first) > 1
        assert [each for each in lists if "5" in each] == [first, ["5"], ["5"]]
        assert sorted(taken) == TEN, "a message failed more than once"


async def test_result_of_the_wrong_length_fails_the_list(
    nameserver: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["1", "2"])
        attempts: list[int] = []

        async def handle(messages: MessageBatch) -> list[None] | None:
            attempts.extend(message.attempts for message in messages)
            return None if messages[0].attempts > 1 else [None] * (len(messages) + 1)

        async with running_batches(at, handle):
            await until(lambda: handled_all(at))
        assert sorted(attempts) == [1, 1, 2, 2]
        assert "returned [None" in caplog.text


async def test_list_of_an_ordered_queue_counts_only_up_to_the_first_failure(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(TEN)
        lists: list[list[tuple[str, int]]] = []

        async def handle(messages: MessageBatch) -> list[object]:
            lists.append([(message.body.decode(), message.attempts) for message in messages])
            return [
                RetryLater(10) if message.body == b"4" and message.attempts < 3 else None
                for message in messages
            ]

        async with running_batches(at, handle, IN_ORDER):
            await until(lambda: handled_all(at))
        index = next(i for i, each in enumerate(lists) if ("4", 1) in each)
        tail = [body for body, _ in lists[index]]
        behind = tail[tail.index("4") + 1 :]
        assert lists[index + 1 : index + 3] == [[("4", 2)], [("4", 3)]]
        rest = lists[index + 3 : index + 3 + len(behind)]
        assert rest == [[(body, 2)] for body in behind]


async def test_handle_timeout_is_for_the_list_and_any_message_extends_it(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(TEN)
        ended: list[str] = []

        async def handle(messages: MessageBatch) -> None:
            if messages[0].attempts == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("cancelled")
            messages[-1].extend(60_000)
            await asyncio.sleep(0.3)
            ended.extend(bodies_of(messages))

        settings = replace(QUICK, handle_timeout_ms=100, concurrency=1)
        async with running_batches(at, handle, settings, messages_max=10):
            await until(lambda: handled_all(at))
        assert sorted(one for one in ended if one != "cancelled") == TEN


async def test_list_of_a_thread_that_hangs_is_retried(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["1", "2", "3"])
        let_go, taken = threading.Event(), list[str]()

        def handle(messages: MessageBatch) -> None:
            if messages[0].attempts == 1:
                let_go.wait(30)
                return
            taken.extend(bodies_of(messages))

        # Longer than any machine delays a thread that ends in time.
        async with running_batches(at, handle, replace(QUICK, handle_timeout_ms=3_000)):
            await until(lambda: handled_all(at))
            let_go.set()
        assert sorted(taken) == ["1", "2", "3"]


async def test_consumer_that_stops_on_a_failure_acknowledges_nothing_of_the_list(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(TEN)

        async def fail(_: MessageBatch) -> None:
            raise ValueError("on purpose")

        settings = replace(IN_ORDER, retries_max=1, exhausted="stop")
        async with at.consumer("a", settings=settings) as consumer:
            with pytest.raises(MessageFailed, match="on purpose"):
                await consumer.run_batches(fail)
        taken: list[ReceivedMessage] = []

        async def take(messages: MessageBatch) -> None:
            taken.extend(messages)

        async with running_batches(at, take, settings):
            await until(lambda: handled_all(at))
        assert bodies_of(taken) == TEN
        assert taken[0].redelivered


async def test_messages_max_of_zero_is_refused() -> None:
    async def handle(_: MessageBatch) -> None:
        pass

    consumer = Consumer("127.0.0.1:1", "g", {"t": "*"})
    with pytest.raises(InvalidArgument, match="messages_max must be at least 1, got 0"):
        await consumer.run_batches(handle, messages_max=0)
