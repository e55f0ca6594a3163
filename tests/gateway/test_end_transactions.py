"""The look-up of the broker that the id of a transaction names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._core.transactions import TransactionState, broker_of
from batonmq._producer.producer import Producer
from batonmq.errors import Unreachable
from batonmq_server.gateway.statuses import Refused
from batonmq_server.gateway.transactions import BROKERS_INTERVAL_MS, Transactions
from tests.support.clock import MovableClock

ID = "broker-a-1"


class Brokers(Directory):
    """Answers late, and fails at first if it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.lookups, self._failures = 0, failures
        self.up = {broker_of(ID)}

    async def brokers(self) -> set[str]:
        """Override."""
        self.lookups += 1
        await asyncio.sleep(0.01)
        if self.lookups <= self._failures:
            raise Unreachable("no nameserver answered")
        return self.up


class Ends(Producer):
    """Notes the transactions that were ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def end_transaction(
        self, transaction_id: str, state: TransactionState, *, topic: str = ""
    ) -> Any:
        """Override."""
        self.ended.append(transaction_id)


async def test_calls_at_the_same_time_wait_for_one_look_up() -> None:
    brokers, producer = Brokers(), Ends()
    transactions = Transactions(producer, brokers, Clock())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(transactions.end("orders", ID, pb.COMMIT))
    assert (len(producer.ended), brokers.lookups) == (10, 1)


async def test_failed_look_up_is_no_unknown_transaction() -> None:
    producer = Ends()
    transactions = Transactions(producer, Brokers(failures=1), Clock())
    with pytest.raises(Unreachable):
        await transactions.end("orders", ID, pb.COMMIT)
    await transactions.end("orders", ID, pb.COMMIT)
    assert producer.ended == [ID]


async def test_broker_that_is_down_is_still_known() -> None:
    brokers, producer, clock = Brokers(), Ends(), MovableClock()
    transactions = Transactions(producer, brokers, clock)
    await transactions.end("orders", ID, pb.COMMIT)
    brokers.up = set()
    clock.ahead_ms += BROKERS_INTERVAL_MS
    with pytest.raises(Unreachable):
        await transactions.end("orders", "nowhere-1", pb.COMMIT)
    await transactions.end("orders", ID, pb.COMMIT)
    assert producer.ended == [ID, ID]


async def test_transaction_of_a_broker_that_was_never_seen_may_exist() -> None:
    """The gateway may have started after its broker went down."""
    brokers, producer, clock = Brokers(), Ends(), MovableClock()
    brokers.up = set()
    transactions = Transactions(producer, brokers, clock)
    with pytest.raises(Unreachable, match="is registered"):
        await transactions.end("orders", ID, pb.COMMIT)
    with pytest.raises(Refused, match="not the id"):
        await transactions.end("orders", "broker", pb.COMMIT)
    brokers.up = {broker_of(ID)}
    clock.ahead_ms += BROKERS_INTERVAL_MS
    await transactions.end("orders", ID, pb.COMMIT)
    assert producer.ended == [ID]


async def test_unknown_brokers_are_looked_up_at_intervals() -> None:
    brokers = Brokers()
    transactions = Transactions(Ends(), brokers, Clock())
    for number in range(5):
        with pytest.raises(Unreachable):
            await transactions.end("orders", f"nowhere-{number}-1", pb.COMMIT)
    assert brokers.lookups == 1
