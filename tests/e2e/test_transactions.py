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
from batonmq_server.local.cluster import LocalCluster
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
    return ledger.booked_count() >= count


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


class Shop:
    """The processes of a shop, and the storage nodes, that are killed in turn.

    Attributes:
        kills: Number of kills of each victim.
    """

    def __init__(self, cluster: LocalCluster, admin: Admin, ledger: Ledger, path: Path) -> None:
        self._cluster, self._admin, self._ledger, self._path = cluster, admin, ledger, path
        self._running: dict[str, Process] = {}
        self.kills: Counter[str] = Counter()

    async def start(self, *roles: str) -> None:
        """Start a process for each role."""
        for role in roles:
            arguments = ("check",) if role == "checker" else ()
            self._running[role] = await started(self._cluster.nameserver, self._path, *arguments)

    async def kill(self, *roles: str) -> None:
        """Kill the processes of roles, as far as they run."""
        for role in roles:
            if (process := self._running.pop(role, None)) is not None:
                await killed(process)

    async def fail(self, victim: str) -> None:
        """Kill a victim in the middle of transactions, and let it come back."""
        self.kills[victim] += 1
        if victim == "producer":
            await self.kill("producer")
            await self.start("producer")
        elif victim == "checker":
            asked = self._ledger.asked_count()
            await self.kill("producer")
            await until(partial(_has_answered, self._ledger, asked), timeout_s=60)
            await self.kill("checker")
            await self.start("checker", "producer")
        elif REPLICAS == 1:
            await self._cluster.kill("storage")
            await self._cluster.serving("storage")
        else:
            await self._replace_leader()

    async def _replace_leader(self) -> None:
        nodes = (await self._admin.cluster()).nodes
        broker = next(node.replica_set for node in nodes if node.service == "storage")
        name = await leader(self._admin, self._cluster, "storage", broker=broker)
        await self._cluster.kill(name)
        await leader(self._admin, self._cluster, "storage", name, broker)
        await self._cluster.serving(name)
        await in_sync(self._admin, "storage", broker)


async def test_kill_9_of_producer_storage_leader_and_checker_leaves_exactly_the_booked_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A long run kills a node more often than a cluster lets it end.
    monkeypatch.setattr("batonmq_server.local.supervisor.DEATHS_MAX", 5 + ROUNDS)
    random = Random(35)
    path = tmp_path / "ledger"
    async with (
        local_cluster(tmp_path / "cluster", storage_replicas=REPLICAS, storage=FAST) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, QUEUES)
        with closing(Ledger(path)) as ledger:
            shop = Shop(cluster, admin, ledger, path)
            try:
                await shop.start("producer", "checker")
                for number in range(ROUNDS):
                    goal = ledger.booked_count() + random.randint(20, 200)
                    await until(partial(_has_booked, ledger, goal), timeout_s=60)
                    await shop.fail(VICTIMS[number % 3])
            finally:
                await shop.kill("producer", "checker")
            await _all_ended(admin, cluster.nameserver, ledger)
            booked, checks = ledger.booked(), ledger.asked_count()
        found = await messages(cluster.nameserver)
    assert len(booked) >= 20 * ROUNDS
    assert checks >= ROUNDS // 3, "too few checks to prove anything"
    assert set(found) - booked == set(), "messages of numbers that are not booked"
    assert booked - set(found) == set(), "booked numbers without a message"
    assert found.total() == len(found), "messages that are stored twice"
    print(f"kills {dict(shop.kills)}, booked {len(booked)}, checks {checks}")


async def _all_ended(admin: Admin, nameserver: str, ledger: Ledger) -> None:
    """Answer checks until no transaction is open."""

    async def answer(pending: PendingTransaction) -> TransactionState:
        return state_of(ledger, pending)

    async def none_open() -> bool:
        found, open_count, problems = await Transactions(admin).find()
        return not (found or open_count or problems)

    async with Producer(nameserver, group=GROUP, transaction_checker=answer):
        await until(none_open, timeout_s=60)
