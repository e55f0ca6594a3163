"""Goal: kill -9 of producer, storage leader and checker in the middle of transactions breaks no
promise.

Method: a real cluster; a process that books numbers in a database and sends each in a transaction,
and one that answers checks (tests/e2e/transaction_shop.py). They and the storage leader are killed
in turn: the checker between the decision and its answer too. Afterwards the messages in the topic
are exactly the booked numbers, each once. BATON_KILL_ROUNDS sets the number of kills; long runs
have three storage nodes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
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
from tests.e2e.leadership import in_sync, leader
from tests.e2e.transaction_shop import Ledger, state_of
from tests.support.cluster import REPO, local_cluster
from tests.support.conditions import until

ROUNDS = int(os.environ.get("BATON_KILL_ROUNDS", "12"))  # noqa: TID251  a longer run by hand
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + 10 * ROUNDS)]

REPLICAS = 3 if ROUNDS > 50 else 1
VICTIMS = ("producer", "storage leader", "checker")
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


def _has_answered(ledger: Ledger, count: int) -> bool:
    return ledger.asked_count() > count


async def started(nameserver: str, path: Path, *role: str) -> Process:
    """Start a process of the shop."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.transaction_shop",
        nameserver, str(path), TOPIC, GROUP, *role,
        cwd=REPO,
    )  # fmt: skip


async def killed(process: Process) -> None:
    process.kill()
    await process.wait()


async def test_kill_9_of_producer_storage_leader_and_checker_leaves_exactly_the_booked_messages(
    tmp_path: Path,
) -> None:
    random = Random(35)
    path = tmp_path / "ledger"
    async with local_cluster(
        tmp_path / "cluster", storage_replicas=REPLICAS, storage=FAST
    ) as cluster:
        nameserver = cluster.nameserver
        async with Admin(nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
            nodes = (await admin.cluster()).nodes
            broker = next(node.replica_set for node in nodes if node.service == "storage")
            with closing(Ledger(path)) as ledger:
                shop, checker = (
                    await started(nameserver, path),
                    await started(nameserver, path, "check"),
                )
                kills: Counter[str] = Counter()
                try:
                    for number in range(ROUNDS):
                        goal = len(ledger.booked()) + random.randint(20, 200)
                        await until(partial(_has_booked, ledger, goal), timeout_s=60)
                        victim = VICTIMS[number % 3]
                        kills[victim] += 1
                        if victim == "producer":
                            await killed(shop)
                            shop = await started(nameserver, path)
                        elif victim == "checker":
                            asked = ledger.asked_count()
                            await killed(shop)
                            await until(partial(_has_answered, ledger, asked), timeout_s=60)
                            await killed(checker)
                            checker = await started(nameserver, path, "check")
                            shop = await started(nameserver, path)
                        elif REPLICAS == 1:
                            await cluster.kill("storage")
                            await cluster.serving("storage")
                        else:
                            name = await leader(admin, cluster, "storage", broker=broker)
                            await cluster.kill(name)
                            await leader(admin, cluster, "storage", name, broker)
                            await cluster.serving(name)
                            await in_sync(admin, "storage", broker)
                finally:
                    await killed(shop)
                    await killed(checker)

                async def answer(pending: PendingTransaction) -> TransactionState:
                    return state_of(ledger, pending)

                async with Producer(nameserver, group=GROUP, transaction_checker=answer):

                    async def all_ended() -> bool:
                        found, open_count, problems = await Transactions(admin).find()
                        return not (found or open_count or problems)

                    await until(all_ended, timeout_s=60)
                booked, checks = ledger.booked(), ledger.asked_count()
                found = await messages(nameserver)
    assert len(booked) >= 20 * ROUNDS
    assert checks >= ROUNDS // 3, "too few checks to prove anything"
    assert set(found) - booked == set(), "messages of numbers that are not booked"
    assert booked - set(found) == set(), "booked numbers without a message"
    assert found.total() == len(found), "messages that are stored twice"
    print(f"kills {dict(kills)}, booked {len(booked)}, checks {checks}")
