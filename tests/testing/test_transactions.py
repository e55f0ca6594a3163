"""Goal: a message of a transaction is delivered if, and only if, the transaction is committed.

Method: producers with and without checkers on `MemoryBroker` in virtual time; the broker is killed
and producers die in the middle of transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from itertools import pairwise
from typing import Any

import pytest

from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.records import Message
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.errors import (
    BatonError,
    InvalidArgument,
    InvalidName,
    TopicNotFound,
    TransactionEnded,
    TransactionNotFound,
    WrongBroker,
)
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC, GROUP = "orders", "payments"
COMMIT, ROLLBACK, UNKNOWN = TransactionState


class Checker:
    """A transaction checker that records the checks, and when they came."""

    def __init__(self, answer: Callable[[PendingTransaction], TransactionState]) -> None:
        self.checks: list[PendingTransaction] = []
        self.times_s: list[float] = []
        self._answer = answer

    async def __call__(self, pending: PendingTransaction) -> TransactionState:
        self.checks.append(pending)
        self.times_s.append(asyncio.get_running_loop().time())
        return self._answer(pending)


def always(state: TransactionState) -> Checker:
    """Return a checker with one answer."""
    return Checker(lambda _: state)


async def bodies(broker: MemoryBroker, topic: str = TOPIC) -> list[bytes]:
    """Return the bodies of the messages that consumers see."""
    return [one.body for one in await broker.messages(topic)]


async def left_open(producer: Producer, body: bytes, **options: Any) -> str:
    """Begin a transaction as a producer that dies at once; return its id."""
    async with producer.transaction(TOPIC, body, **options) as tx:
        tx.leave_open()
    return tx.transaction_id


async def error_of(call: Coroutine[Any, Any, object]) -> BatonError:
    """Return the error of a call."""
    with pytest.raises(BatonError) as raised:
        await call
    return raised.value


def in_broker(
    scene: Callable[[MemoryBroker], Coroutine[Any, Any, None]],
    settings: Mapping[str, object] | None = None,
    broker_count: int = 1,
) -> None:
    """Run a scene with a topic."""

    async def run() -> None:
        storage = {"storage": settings} if settings else None
        async with MemoryBroker(broker_count=broker_count, settings=storage) as broker:
            await broker.create_topic(TOPIC, broker_count)
            await scene(broker)

    run_virtual(run())


def test_message_is_visible_after_the_commit_and_not_before() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            await producer.send(TOPIC, b"before")
            async with producer.transaction(
                TOPIC, b"paid", tag="eu", keys=["order-1"], properties={"total": "7"}
            ) as tx:
                begun_unix_ms = broker.clock.unix_ms()
                await asyncio.sleep(3)
                await producer.send(TOPIC, b"between")
                assert await bodies(broker) == [b"before", b"between"]
            assert tx.receipt is not None
            assert (tx.receipt.offset, tx.receipt.duplicate) == (2, False)
            assert tx.receipt.queue == tx.queue
        paid = (await broker.messages(TOPIC))[-1]
        assert (paid.body, paid.tag, paid.keys, paid.offset) == (b"paid", "eu", ("order-1",), 2)
        assert paid.properties["total"] == "7"
        assert paid.born_unix_ms <= begun_unix_ms < paid.store_unix_ms - 2_900

    in_broker(scene)


def test_messages_of_an_ordering_key_are_in_the_order_of_their_commits() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            first, second = [
                await producer.begin_transaction(TOPIC, Message(body), ordering_key="k")
                for body in (b"begun first", b"begun second")
            ]
            await second.commit()
            await first.commit()
        found = await broker.messages(TOPIC)
        assert [one.body for one in found] == [b"begun second", b"begun first"]
        assert {one.ordering_key for one in found} == {"k"}
        assert found[0].queue == found[1].queue

    in_broker(scene)


def test_error_in_the_block_rolls_back_and_reaches_the_caller() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(TOPIC, b"never"):
                    raise ZeroDivisionError
        await asyncio.sleep(3_600)
        assert await bodies(broker) == []

    in_broker(scene)


def test_commit_twice_is_one_message_and_the_other_end_is_refused() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            tx = await producer.begin_transaction(TOPIC, Message(b"paid"))
            first = await tx.commit()
            again = await producer.end_transaction(tx.transaction_id, COMMIT, topic=TOPIC)
            assert again == first._replace(duplicate=True)
            assert await tx.commit() == first
            late = await error_of(tx.rollback())
            assert isinstance(late, TransactionEnded)
            assert late.facts["outcome"] == "committed"

            tx = await producer.begin_transaction(TOPIC, Message(b"never"))
            await tx.rollback()
            await tx.rollback()
            late = await error_of(tx.commit())
            assert isinstance(late, TransactionEnded)
            assert late.facts["outcome"] == "rolled_back"

            ended = tx.transaction_id
            await broker.kill("storage")
            late = await error_of(producer.end_transaction(ended, COMMIT))
            assert isinstance(late, TransactionEnded)
        assert await bodies(broker) == [b"paid"]

    in_broker(scene)


def test_bad_requests_are_refused_with_a_reason() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer() as producer:
            assert isinstance(
                await error_of(producer.begin_transaction(TOPIC, Message(b""))), InvalidArgument
            )
        with pytest.raises(InvalidName):
            broker.producer(group="not good")
        with pytest.raises(InvalidArgument):
            broker.producer(transaction_checker=always(COMMIT))
        async with broker.producer(group=GROUP) as producer:
            for transaction_id, kind in {
                "broker-0-ffff": TransactionNotFound,
                "none": InvalidArgument,
                "broker-0-x": InvalidArgument,
                "broker-0-" + "f" * 16: InvalidArgument,
            }.items():
                error = await error_of(producer.end_transaction(transaction_id, COMMIT))
                assert type(error) is kind, transaction_id
            missing = producer.begin_transaction("missing", Message(b""))
            assert isinstance(await error_of(missing), TopicNotFound)
            tx = await producer.begin_transaction(TOPIC, Message(b""))
        assert isinstance(await error_of(tx.commit()), ProducerClosed)

    in_broker(scene)


@pytest.mark.parametrize(("answer", "wanted"), [(COMMIT, [b"paid"]), (ROLLBACK, [])])
def test_another_producer_of_the_group_answers_for_a_dead_one(
    answer: TransactionState, wanted: list[bytes]
) -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            transaction_id = await left_open(producer, b"paid", keys=["order-1"])
        checker = always(answer)
        async with broker.producer(group=GROUP, transaction_checker=checker):
            await asyncio.sleep(10)
            assert await bodies(broker) == wanted
            await asyncio.sleep(100)
        (check,) = checker.checks
        assert (check.transaction_id, check.topic, check.check) == (transaction_id, TOPIC, 1)
        assert (check.message.body, check.message.keys) == (b"paid", ("order-1",))
        assert await bodies(broker) == wanted

    in_broker(scene)


def test_checks_come_after_6_s_then_every_30_s_and_then_the_message_is_found() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checker = always(UNKNOWN)
        async with broker.producer(group=GROUP, transaction_checker=checker) as producer:
            begin_s = asyncio.get_running_loop().time()
            name = await left_open(producer, b"lost", tag="eu", keys=["k"], properties={"a": "b"})
            await asyncio.sleep(600)
            assert [check.check for check in checker.checks] == list(range(1, 16))
            gaps = [after - before for before, after in pairwise([begin_s, *checker.times_s])]
            assert 6 <= gaps[0] <= 8
            assert all(30 <= gap <= 32 for gap in gaps[1:])
            late = await error_of(producer.end_transaction(name, COMMIT))
            assert isinstance(late, TransactionEnded)
            assert late.facts["outcome"] == "discarded"
        assert await bodies(broker) == []
        (found,) = await broker.messages(UNRESOLVED_TOPIC)
        assert (found.body, found.tag, found.keys) == (b"lost", "eu", ("k",))
        assert found.properties == {
            "a": "b",
            "baton.transaction_topic": TOPIC,
            "baton.transaction_queue": "0",
            "baton.transaction_group": GROUP,
            "baton.transaction_id": name,
            "baton.transaction_reason": "no answer to 15 checks",
        }

    in_broker(scene)


def test_transaction_without_a_live_producer_waits_and_is_discarded_at_its_age() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            await left_open(producer, b"lost")
            await asyncio.sleep(1_800)
            with pytest.raises(TopicNotFound):
                await bodies(broker, UNRESOLVED_TOPIC)
            kept = await left_open(producer, b"kept")
            await asyncio.sleep(2_000)
        (found,) = await broker.messages(UNRESOLVED_TOPIC)
        assert found.body == b"lost"
        assert found.properties["baton.transaction_reason"] == "no end within 3600 s"
        checker = always(COMMIT)
        async with broker.producer(group=GROUP, transaction_checker=checker):
            await asyncio.sleep(30)
        assert [(check.transaction_id, check.check) for check in checker.checks] == [(kept, 1)]
        assert await bodies(broker) == [b"kept"]

    in_broker(scene, {"transaction_age_ms_max": 3_600_000})


def test_checks_are_not_repeated_within_the_interval_by_a_broker_that_restarts() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checkers = [always(UNKNOWN), always(UNKNOWN)]
        async with (
            broker.producer(group=GROUP, transaction_checker=checkers[0]) as producer,
            broker.producer(group=GROUP, transaction_checker=checkers[1]),
        ):
            await left_open(producer, b"lost")
            for _ in range(40):
                await asyncio.sleep(9)
                await broker.kill("storage")
            await asyncio.sleep(600)
        times = sorted(checkers[0].times_s + checkers[1].times_s)
        assert all(after - before >= 30 for before, after in pairwise(times))
        numbers = [check.check for one in checkers for check in one.checks]
        assert len(numbers) == len(set(numbers)) <= 15
        assert await bodies(broker, UNRESOLVED_TOPIC) == [b"lost"]

    in_broker(scene)


def test_producers_of_a_group_are_all_asked_and_those_of_other_groups_never() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checkers = [always(COMMIT) for _ in range(3)]
        stranger = always(ROLLBACK)
        async with (
            broker.producer(group=GROUP, transaction_checker=checkers[0]) as producer,
            broker.producer(group=GROUP, transaction_checker=checkers[1]),
            broker.producer(group=GROUP, transaction_checker=checkers[2]),
            broker.producer(group="strangers", transaction_checker=stranger),
        ):
            for number in range(30):
                await left_open(producer, b"%d" % number)
            await asyncio.sleep(12)
        asked = [len(one.checks) for one in checkers]
        assert sum(asked) == 30
        assert min(asked) >= 5
        assert stranger.checks == []
        assert sorted(map(int, await bodies(broker))) == list(range(30))

    in_broker(scene, broker_count=1)


def test_failing_checker_leaves_the_transaction_open() -> None:
    async def scene(broker: MemoryBroker) -> None:
        outcomes: list[Any] = [RuntimeError("no database"), "commit", UNKNOWN, COMMIT]

        def answer(_: PendingTransaction) -> TransactionState:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome  # type: ignore[no-any-return]

        async with broker.producer(group=GROUP, transaction_checker=Checker(answer)) as producer:
            await left_open(producer, b"paid")
            await asyncio.sleep(70)
            assert await bodies(broker) == []
            await asyncio.sleep(40)
        assert await bodies(broker) == [b"paid"]

    in_broker(scene)


def test_cancelled_block_is_decided_by_the_checker() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checker = always(COMMIT)
        async with broker.producer(group=GROUP, transaction_checker=checker) as producer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), producer.transaction(TOPIC, b"paid"):
                    await asyncio.sleep(60)
            assert await bodies(broker) == []
            await asyncio.sleep(10)
        assert await bodies(broker) == [b"paid"]

    in_broker(scene)


def test_every_outcome_survives_killed_brokers() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checker = Checker(lambda one: COMMIT if one.message.body.startswith(b"keep") else ROLLBACK)
        committed: list[bytes] = []

        async def work(producer: Producer, number: int) -> None:
            body = (b"keep-%d" if number % 2 else b"drop-%d") % number
            async with producer.transaction(TOPIC, body, keys=[str(number)]) as tx:
                await asyncio.sleep(number % 7)
                if number % 5 == 0:
                    tx.leave_open()
                elif not number % 2:
                    await tx.rollback()
            if number % 2:
                committed.append(body)

        async with broker.producer(group=GROUP, transaction_checker=checker) as producer:
            async with asyncio.TaskGroup() as tasks:
                for number in range(200):
                    tasks.create_task(work(producer, number))
                    await asyncio.sleep(0.1)
                    if number % 20 == 0:
                        await broker.kill(f"broker-{number % 3}")
            await asyncio.sleep(60)
        found = await bodies(broker)
        assert len(found) == len(set(found))
        assert set(found) == set(committed)
        assert len(found) == 100

    in_broker(scene, broker_count=3)


def test_commit_to_a_deleted_topic_is_refused_and_the_message_is_found() -> None:
    async def scene(broker: MemoryBroker) -> None:
        checker = always(COMMIT)
        async with (
            broker.producer(group=GROUP, transaction_checker=checker) as producer,
            broker.admin() as admin,
        ):
            tx = await producer.begin_transaction(TOPIC, Message(b"late"))
            await admin.delete_topic(TOPIC)
            assert isinstance(await error_of(tx.commit()), TopicNotFound)
            await asyncio.sleep(600)
        assert await bodies(broker, UNRESOLVED_TOPIC) == [b"late"]

    in_broker(scene)


def test_transaction_of_another_broker_is_refused_by_a_broker() -> None:
    async def scene(broker: MemoryBroker) -> None:
        async with broker.producer(group=GROUP) as producer:
            error = await error_of(producer.end_transaction("elsewhere-1", COMMIT))
            assert not isinstance(error, WrongBroker)  # no such broker is registered
        assert await bodies(broker) == []

    in_broker(scene)
