"""Goal: a producer uses the other broker while one is down, without loss or duplicates, and uses
the first one again after its restart.

Method: a real cluster with two storage nodes; a producer that keeps sending numbered messages, with
and without ordering keys; kill -9 of one node in the middle. Afterwards both nodes are read from
the first message on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq._consumer.puller import Puller
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import PendingReceipt, Receipt
from batonmq.admin.admin import Admin
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TOPIC = "numbers"
VICTIM = "broker-1"


def is_free(number: int) -> bool:
    """Return whether the message has no ordering key."""
    return number % 10 != 0


class BrokerTraffic:
    """Sends continuously, with a limited number of messages without a receipt.

    Attributes:
        count: Number of submitted messages.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._ends = asyncio.Event()
        self.count = 0
        self.pending: dict[int, PendingReceipt] = {}
        self.receipts: dict[int, Receipt] = {}

    def at(self, broker: str) -> int:
        """Return the number of messages without a key that have a receipt of this broker."""
        return sum(r.queue.broker == broker for n, r in self.receipts.items() if is_free(n))

    def has_all(self, begin: int, end: int) -> bool:
        """Return whether all messages without a key among these numbers have receipts."""
        return all(n in self.receipts for n in range(begin, end) if is_free(n))

    def end(self) -> None:
        self._ends.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._ends.is_set():
                await until(lambda: len(self.pending) < 5_000, timeout_s=60)
                for number in range(self.count, self.count + 20):
                    key = None if is_free(number) else f"key-{number % 50}"
                    message = Message(b"%d" % number)
                    self.pending[number] = await self._producer.submit(
                        TOPIC, message, ordering_key=key
                    )
                    tasks.create_task(self._note(number))
                self.count += 20
                await asyncio.sleep(0.005)

    async def _note(self, number: int) -> None:
        self.receipts[number] = await self.pending[number]
        del self.pending[number]


async def stored(nameserver: str) -> Counter[int]:
    """Return how often each number is stored."""
    counts: Counter[int] = Counter()
    async with Puller(nameserver) as puller:
        queues = await puller.queues(TOPIC)
        await puller.assign(queues)
        missing = sum([await puller.seek(queue, "end") for queue in queues])
        for queue in queues:
            assert await puller.seek(queue, "begin") == 0
        while missing:
            for messages in (await puller.poll(10_000)).values():
                counts.update(int(message.body) for message in messages)
                missing -= len(messages)
    return counts


@pytest.mark.long
async def test_kill_9_of_one_of_two_brokers_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    clock = Clock()
    settings = ProducerSettings(compression="lz4", compression_bytes_min=0)
    async with local_cluster(tmp_path, brokers=2, auto_restart=False) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, 8)
        async with Producer(cluster.nameserver, settings) as producer, asyncio.TaskGroup() as tasks:
            sending = BrokerTraffic(producer)
            tasks.create_task(sending.run())
            await until(lambda: min(map(sending.at, ("broker-0", VICTIM))) > 500, timeout_s=30)

            await cluster.kill("storage-1")
            killed_ms, at_other = clock.monotonic_ms(), sending.at("broker-0")
            await until(lambda: sending.at("broker-0") > at_other + 500, timeout_s=30)
            begin = sending.count
            await until(lambda: sending.has_all(begin, begin + 2_000), timeout_s=30)
            assert clock.monotonic_ms() - killed_ms < 10_000, "sends were interrupted"

            await cluster.start("storage-1")
            at_victim = sending.at(VICTIM)
            await until(lambda: sending.at(VICTIM) > at_victim + 500, timeout_s=80)
            sending.end()
        receipts = sending.receipts
        counts = await stored(cluster.nameserver)
    assert not sending.pending
    assert set(receipts) <= set(counts), "a message with a receipt was lost"
    assert set(counts) <= set(receipts), "a message without a receipt was stored"
    assert max(counts.values()) == 1, "a message was stored twice"
    for key in range(0, 50, 10):
        of_key = [receipts[n] for n in sorted(receipts) if not is_free(n) and n % 50 == key]
        assert len({receipt.queue for receipt in of_key}) == 1
        assert [r.offset for r in of_key] == sorted(r.offset for r in of_key)


@pytest.mark.long
async def test_cluster_of_two_brokers_restarts_with_both(tmp_path: Path) -> None:
    queues: set[QueueRef] = set()
    async with local_cluster(tmp_path, brokers=2) as cluster:
        assert cluster.addresses.keys() == {
            "etcd", "offsets", "storage", "storage-1", "lockmgr", "nameserver",
        }  # fmt: skip
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, 2)
        async with Producer(cluster.nameserver) as producer:
            queues = {(await producer.send(TOPIC, b"%d" % n)).queue for n in range(2)}
    assert {queue.broker for queue in queues} == {"broker-0", VICTIM}
    async with local_cluster(tmp_path, brokers=2) as cluster:
        assert await stored(cluster.nameserver) == {0: 1, 1: 1}
