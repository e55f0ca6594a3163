"""Goal: a report about all brokers does not leave out one that is starting again.

Method: the in-memory broker; a node is stopped, and its registration ends before it is asked.
"""

from __future__ import annotations

import asyncio

from batonmq import TransactionState
from batonmq.admin.outputs import remembered_outputs
from batonmq.admin.transactions import Transactions
from batonmq.cli.half_message import is_transaction_id
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC, ABSENT = "orders", "broker-0"


async def unknown(_: object) -> TransactionState:
    return TransactionState.UNKNOWN


def test_open_transactions_of_a_broker_that_starts_again_are_listed() -> None:
    async def main() -> None:
        async with MemoryBroker(broker_count=2) as broker, broker.admin() as admin:
            await broker.create_topic(TOPIC, 2)
            async with broker.producer(group="shop", transaction_checker=unknown) as producer:
                for _ in range(4):
                    async with producer.transaction(TOPIC, b"half") as transaction:
                        transaction.leave_open()
            all_open = await Transactions(admin).find()
            service = broker._running[ABSENT].service
            await broker._stop([ABSENT])
            assert await admin.directory.brokers() == {"broker-1"}
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(Transactions(admin).find())
                outputs = tasks.create_task(remembered_outputs(admin, "g"))
                known = tasks.create_task(is_transaction_id(admin, f"{ABSENT}-1f"))
                await asyncio.sleep(1)
                broker._start(service)
            assert asked.result()[1] == all_open[1] == 4
            assert {one.transaction_id for one in asked.result()[0]} == {
                one.transaction_id for one in all_open[0]
            }
            assert asked.result()[2] == outputs.result()[1] == ()
            assert known.result()

    run_virtual(main())
