"""A producer that continues to send while the leader of its broker crashes.

Goal: every receipt is true under the next leader, every message is stored once and in order, and
the producer finds the next leader by itself.
Method: the real producer, a real nameserver, and a storage replica set (tests/storage/replicas.py);
its leader crashes twice.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq._producer.receipts import Receipt
from tests.nameserver.replica import replica
from tests.storage.batches import TOPIC
from tests.storage.replicas import BROKER, replica_set
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)


async def test_producer_sees_only_a_pause_during_a_failover(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    cluster = f"test-{secrets.token_hex(8)}"
    receipts: list[Receipt] = []
    stopping = asyncio.Event()
    settings = ProducerSettings(durability=Durability.REPLICATED)
    async with (
        replica_set(etcd_endpoint, cluster, tmp_path) as scene,
        replica(etcd_endpoint, cluster) as nameserver,
    ):
        await scene.start("a", "b", "c")
        await scene.wait_in_sync("a", "b", "c")
        async with Producer(nameserver.address, settings) as producer, asyncio.TaskGroup() as tasks:

            async def send() -> None:
                while not stopping.is_set():
                    body = b"%d" % len(receipts)
                    receipts.append(
                        await producer.send(TOPIC, body, queue=QueueRef(TOPIC, BROKER, 0))
                    )

            tasks.create_task(send())
            for _ in range(2):
                leader, before = await scene.leader(), len(receipts)
                await _more(receipts, before + 20)
                await leader.crash()
                before = len(receipts)
                await _more(receipts, before + 20)
                await scene.start(leader.name)
                await scene.wait_in_sync("a", "b", "c")
            stopping.set()
        last = await scene.leader()
        stored = await last.bodies()
        await scene.wait_equal()
    assert stored == [b"%d" % number for number in range(len(receipts))]
    assert [receipt.offset for receipt in receipts] == list(range(len(receipts)))
    assert {receipt.durability for receipt in receipts} <= {
        Durability.REPLICATED,
        Durability.FSYNCED,
    }


async def _more(receipts: list[Receipt], count: int) -> None:
    await until(lambda: len(receipts) >= count, timeout_s=60)
