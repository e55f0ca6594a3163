"""Goal: kill -9 of producers and of storage in the middle of transactions breaks no promise.

Method: a real cluster; processes that book numbers in a database and send each in a transaction
(tests/e2e/transaction_shop.py). They and the storage node are killed again and again. Afterwards
the messages in the topic are exactly the booked numbers, each once. Each shop is killed before the
next one starts, so a number that a checker does not find is one that nobody will book.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

import pytest

from batonmq._consumer.puller import Puller
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.admin.transactions import Transactions
from tests.e2e.transaction_shop import Ledger, state_of
from tests.support.cluster import REPO, local_cluster
from tests.support.conditions import until

ROUNDS = int(os.environ.get("BATON_KILL_ROUNDS", "12"))  # noqa: TID251  a longer run by hand
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + 10 * ROUNDS)]

TOPIC, GROUP, QUEUES = "numbers", "shop", 4
FAST = {"transaction_check_first_ms": 1_000, "transaction_check_interval_ms": 2_000}


async def messages(nameserver: str) -> Counter[int]:
    """Count the messages of the topic by number."""
    found: Counter[int] = Counter()
    async with Admin(nameserver) as admin, Puller(nameserver) as puller:
        queues = await puller.queues(TOPIC)
        ends, problems = await admin.extents(queues)
        assert not problems
        await puller.assign(queue for queue, (_, end) in ends.items() if end)
        for queue in puller.assignment:
            await puller.seek(queue, "begin")
        left = sum(end for _, end in ends.values())
        while sum(found.values()) < left:
            for batch in (await puller.poll()).values():
                found.update(int(one.body) for one in batch)
    return found


def _has_booked(ledger: Ledger, count: int) -> bool:
    return len(ledger.booked()) >= count


async def test_kill_9_of_producers_and_storage_leaves_exactly_the_booked_messages(
    tmp_path: Path,
) -> None:
    random = Random(35)
    path = tmp_path / "ledger"
    async with local_cluster(tmp_path / "cluster", storage=FAST) as cluster:
        nameserver = cluster.nameserver
        async with Admin(nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        with closing(Ledger(path)) as ledger:
            for number in range(ROUNDS):
                shop = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.e2e.transaction_shop",
                    nameserver, str(path), TOPIC, GROUP,
                    cwd=REPO,
                )  # fmt: skip
                try:
                    begun = len(ledger.booked())
                    goal = begun + random.randint(20, 200)
                    await until(partial(_has_booked, ledger, goal), timeout_s=60)
                    if number % 3 == 2:
                        await cluster.kill("storage")
                        if number % 2:
                            await cluster.serving("storage")
                finally:
                    shop.kill()
                    await shop.wait()
            await cluster.serving("storage")

            async def check(pending: PendingTransaction) -> TransactionState:
                return state_of(ledger, pending)

            async with (
                Producer(nameserver, group=GROUP, transaction_checker=check),
                Admin(nameserver) as admin,
            ):

                async def all_ended() -> bool:
                    found, open_count, problems = await Transactions(admin).find()
                    return not (found or open_count or problems)

                await until(all_ended, timeout_s=60)
            booked = ledger.booked()
            found = await messages(nameserver)
    assert len(booked) >= 20 * ROUNDS
    assert set(found) - booked == set(), "messages of numbers that are not booked"
    assert booked - set(found) == set(), "booked numbers without a message"
    assert found.total() == len(found), "messages that are stored twice"
