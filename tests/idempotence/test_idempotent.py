"""Goal: a message is handled at most once, unless its handler failed or died before it was done.

Method: several deliveries of one message, one after the other or at once, with a store in memory
and in virtual time, where claims expire exactly. A killed process leaves its claim in the store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from batonmq._consumer.handler_results import RetryLater, Suspend
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.retries import Origin
from batonmq.errors import InvalidArgument
from batonmq.idempotence import MemoryStore, Store, by_key, by_origin, idempotent
from batonmq_server.testing.virtual_time import VirtualTimeLoop
from tests.idempotence.messages import message

CLAIM_MS, DONE_MS = 1_000, 60_000


class Books:
    """A handler that books the offsets of its messages.

    Attributes:
        take_s: Duration of a call.
        failures: Number of calls that raise, before the first one that succeeds.
        result: Result of a successful call.
    """

    def __init__(self, *, take_s: float = 0, failures: int = 0, result: object = "booked") -> None:
        self.take_s, self.failures, self.result = take_s, failures, result
        self.begun: list[int] = []
        self.booked: list[int] = []

    async def book(self, message: ReceivedMessage) -> object:
        self.begun.append(message.offset)
        await asyncio.sleep(self.take_s)
        if len(self.begun) <= self.failures:
            raise ConnectionError("no bank")
        self.booked.append(message.offset)
        return self.result


def once(books: Books, store: Store) -> Callable[[ReceivedMessage], Coroutine[Any, Any, object]]:
    """Return the handler of `books` with the decorator under test."""
    return idempotent(books.book, store, claim_ms=CLAIM_MS, done_ms=DONE_MS)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `scene` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scene())


def test_done_message_is_not_handled_again() -> None:
    async def scene() -> None:
        books, store = Books(), MemoryStore()
        handle = once(books, store)
        assert await handle(message()) == "booked"
        assert await handle(message()) is None
        assert await handle(message(1)) == "booked"
        assert books.booked == [0, 1]

    play(scene)


def test_done_message_is_handled_again_after_done_ms_and_not_before() -> None:
    async def scene() -> None:
        books, store = Books(), MemoryStore()
        handle = once(books, store)
        await handle(message())
        await asyncio.sleep(DONE_MS / 1000 - 0.001)
        await handle(message())
        assert books.booked == [0]
        await asyncio.sleep(0.001)
        await handle(message())
        assert books.booked == [0, 0]

    play(scene)


def test_handler_that_raises_releases_its_claim() -> None:
    async def scene() -> None:
        books, store = Books(failures=1), MemoryStore()
        handle = once(books, store)
        with pytest.raises(ConnectionError, match="no bank"):
            await handle(message())
        assert await handle(message()) == "booked"
        assert books.booked == [0]

    play(scene)


@pytest.mark.parametrize("result", [RetryLater(5), Suspend()])
def test_handler_that_returns_a_retry_result_releases_its_claim(result: object) -> None:
    async def scene() -> None:
        books, store = Books(result=result), MemoryStore()
        handle = once(books, store)
        assert await handle(message()) == result
        assert await handle(message()) == result
        assert len(store) == 0

    play(scene)


def test_second_delivery_during_the_first_is_retried_later() -> None:
    async def scene() -> None:
        books, store = Books(take_s=0.5), MemoryStore()
        handle = once(books, store)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(handle(message()))
            second = tasks.create_task(handle(message()))
        assert first.result() == "booked"
        refused = second.result()
        assert isinstance(refused, RetryLater)
        assert "payments/broker-0/3/0" in refused.reason
        assert books.booked == [0]
        assert await handle(message()) is None

    play(scene)


def test_message_of_a_crashed_process_is_handled_when_its_claim_expires() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await store.put(by_origin(message()), "dead", "dead", CLAIM_MS)
        books = Books()
        handle = once(books, store)
        await asyncio.sleep(CLAIM_MS / 1000 - 0.001)
        assert isinstance(await handle(message()), RetryLater)
        assert books.begun == []
        await asyncio.sleep(0.001)
        assert await handle(message()) == "booked"

    play(scene)


def test_handler_is_cancelled_when_its_claim_expires() -> None:
    async def scene() -> None:
        slow, fast, store = Books(take_s=10), Books(), MemoryStore()
        with pytest.raises(TimeoutError):
            await once(slow, store)(message())
        assert await once(fast, store)(message()) == "booked"
        assert (slow.begun, slow.booked) == ([0], [])

    play(scene)


def test_cancelled_handler_releases_its_claim() -> None:
    async def scene() -> None:
        slow, fast, store = Books(take_s=0.5), Books(), MemoryStore()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await once(slow, store)(message())
        assert await once(fast, store)(message()) == "booked"
        assert slow.booked == []

    play(scene)


class SuspendedStore:
    """A store that delays marking messages as done, as in a process that was suspended.

    Attributes:
        resumed: No message is marked as done until it is set.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.resumed = store, asyncio.Event()

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        if value != owner:
            await self.resumed.wait()
        return await self._store.put(key, owner, value, keep_ms)

    async def remove(self, key: str, owner: str) -> None:
        await self._store.remove(key, owner)


def test_late_owner_can_not_mark_a_message_done_that_another_has_claimed() -> None:
    async def scene() -> None:
        late, other, store = Books(), Books(take_s=0.5, failures=1), MemoryStore()
        suspended = SuspendedStore(store)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(once(late, suspended)(message()))
            await asyncio.sleep(CLAIM_MS / 1000)
            second = tasks.create_task(fails(once(other, store)(message())))
            await asyncio.sleep(0.1)
            suspended.resumed.set()
            assert isinstance(await first, RetryLater)
            await second
        # The second owner failed, so the message is only done if the late owner marked it.
        assert await once(other, store)(message()) == "booked"

    play(scene)


def test_late_owner_marks_a_message_done_that_no_other_has_claimed() -> None:
    async def scene() -> None:
        late, other, store = Books(), Books(), MemoryStore()
        suspended = SuspendedStore(store)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(once(late, suspended)(message()))
            await asyncio.sleep(CLAIM_MS / 1000)
            suspended.resumed.set()
            assert await first == "booked"
        assert await once(other, store)(message()) is None

    play(scene)


async def fails(call: Coroutine[Any, Any, object]) -> None:
    """Assert that the call raises the error of `Books`."""
    with pytest.raises(ConnectionError):
        await call


class Unreachable(MemoryStore):
    """A store that fails to release claims."""

    async def remove(self, key: str, owner: str) -> None:
        raise OSError("no network")


def test_claim_that_can_not_be_released_expires_and_hides_no_failure() -> None:
    async def scene() -> None:
        books, store = Books(failures=1), Unreachable()
        handle = once(books, store)
        with pytest.raises(ConnectionError):
            await handle(message())
        assert isinstance(await handle(message()), RetryLater)
        await asyncio.sleep(CLAIM_MS / 1000)
        assert await handle(message()) == "booked"

    play(scene)


class Silent(MemoryStore):
    """A store whose first answer does not arrive.

    Attributes:
        wait_s: How long the caller waits for it, until the connection breaks.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s, self.calls = wait_s, 0

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        self.calls += 1
        answer = await super().put(key, owner, value, keep_ms)
        if self.calls == 1:
            await asyncio.sleep(self.wait_s)
            raise OSError("the connection broke")
        return answer


@pytest.mark.parametrize("wait_s", [0, 0.5], ids=["breaks", "is cancelled"])
def test_claim_whose_answer_was_lost_is_released_when_the_connection(wait_s: float) -> None:
    async def scene() -> None:
        books, store = Books(), Silent(wait_s)
        handle = once(books, store)
        with pytest.raises((OSError, TimeoutError)):
            async with asyncio.timeout(0.1):
                await handle(message())
        assert await handle(message()) == "booked"

    play(scene)


async def test_plain_function_runs_in_another_thread() -> None:
    threads = []
    handle = idempotent(
        lambda _: threads.append(threading.get_ident()), MemoryStore(), claim_ms=10_000, done_ms=1
    )
    await handle(message())
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_coroutine_that_a_plain_function_returns_is_awaited() -> None:
    books, store = Books(), MemoryStore()

    def book(message: ReceivedMessage) -> object:
        return books.book(message)

    handle = idempotent(book, store, claim_ms=10_000, done_ms=10_000)
    assert await handle(message()) == "booked"
    assert books.booked == [0]


async def test_cancelled_plain_function_keeps_its_claim() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    store = MemoryStore()

    def slow(_: ReceivedMessage) -> None:
        begun.set()
        go_on.wait(20)
        ended.set()

    async with asyncio.TaskGroup() as tasks:
        handle = idempotent(slow, store, claim_ms=60_000, done_ms=1)
        running = tasks.create_task(handle(message()))
        await asyncio.to_thread(begun.wait, 20)
        running.cancel()
    try:
        assert isinstance(await once(Books(), store)(message()), RetryLater)
    finally:
        go_on.set()
    assert await asyncio.to_thread(ended.wait, 20)


# ---- keys


def test_origin_of_a_retried_message_is_that_of_its_first_delivery() -> None:
    again = message(9, topic="%RETRY%billing")
    again.origin = Origin(QueueRef("payments", "broker-0", 3), 0, message().message_id)
    assert by_origin(again) == by_origin(message())


def test_messages_of_a_recreated_topic_have_other_keys() -> None:
    assert by_origin(message(position=4_096)) != by_origin(message(position=8_192))


def test_second_send_with_the_same_key_is_the_same_message_for_by_key_only() -> None:
    assert by_key(message(0, "payment-1", "x")) == by_key(message(7, "payment-1")) == "payment-1"
    assert by_origin(message(0, "payment-1")) != by_origin(message(7, "payment-1"))


def test_by_key_rejects_a_message_without_a_key() -> None:
    with pytest.raises(InvalidArgument, match="has no key"):
        by_key(message())


@pytest.mark.parametrize(("claim_ms", "done_ms"), [(0, 1), (1, -1)])
def test_times_that_are_not_positive_are_rejected(claim_ms: int, done_ms: int) -> None:
    with pytest.raises(InvalidArgument, match="must be positive"):
        idempotent(Books().book, MemoryStore(), claim_ms=claim_ms, done_ms=done_ms)
