"""Goal: what was acknowledged is at its receipt's offset, however often the node is killed.

Method: a real cluster. Producers send, and wait for each receipt, while the storage process is
killed with -9 and restarted 20 times; then a consumer reads everything. BATON_TEST_KILL_ROUNDS sets
the number of rounds. And a real process with syncs that begin to fail, those of the kernel or those
of a thread.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
from pathlib import Path
from random import Random

import pytest

from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability
from batonmq._producer.receipts import Receipt
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from tests.storage.test_process import output, process_site, read, send
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROUNDS = int(os.environ.get("BATON_TEST_KILL_ROUNDS", "20"))  # noqa: TID251  a test's own setting
TOPIC = "rounds"
QUEUES = 4
SENDERS = 16
RUN_WITH_FAILING_SYNC = """
import errno, os, runpy
from batonmq_server.storage import kernel_sync

def failing():
    return os.path.exists(os.environ["SYNC_FAILS_ONCE_THERE_IS"])

def by_thread(fd, sync=os.fdatasync):
    if failing():
        raise OSError(errno.EIO, "injected")
    sync(fd)

def by_kernel(kernel, begun, result, end=kernel_sync.KernelSync._end):
    end(kernel, begun, 2**64 - errno.EIO if failing() else result)

if os.environ["SYNC_BY"] == "thread":
    os.fdatasync, kernel_sync._MISSING = by_thread, "left out"
else:
    kernel_sync.KernelSync._end = by_kernel
runpy.run_module("batonmq_server.storage", run_name="__main__")
"""


class Senders:
    """Tasks that send until stopped; each message has its own body."""

    def __init__(self, producer: Producer, random: Random) -> None:
        self._producer, self._random = producer, random
        self._stopping = False
        self.receipts: dict[bytes, Receipt] = {}

    async def run(self, number: int) -> None:
        count = 0
        while not self._stopping:
            body = b"%d-%d-" % (number, count) + bytes(self._random.randrange(2_000))
            self.receipts[body] = await self._producer.send(TOPIC, body)
            count += 1

    async def acknowledged(self, more: int) -> None:
        """Wait until `count` more messages have their receipts."""
        goal = len(self.receipts) + more
        await until(lambda: len(self.receipts) >= goal, timeout_s=60)

    def stop(self) -> None:
        self._stopping = True


async def read_all(nameserver: str, count: int) -> dict[tuple[QueueRef, int], bytes]:
    """Return the first `count` messages, by queue and offset."""
    messages: dict[tuple[QueueRef, int], bytes] = {}
    settings = ConsumerSettings(consume_from="first")
    async with (
        asyncio.timeout(60),
        Consumer(nameserver, "readers", {TOPIC: "*"}, settings) as consumer,
    ):
        async for message in consumer:
            assert (message.queue, message.offset) not in messages
            messages[message.queue, message.offset] = message.body
            if len(messages) == count:
                break
    return messages


async def test_acknowledged_message_is_at_the_offset_of_its_receipt(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    random = Random(ROUNDS)
    async with local_cluster(
        tmp_path,
        etcd=etcd_endpoint,
        cluster=secrets.token_hex(8),
        auto_restart=False,
        report=lambda _: None,
        storage={"segment_bytes": 1 << 20},
    ) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with Producer(cluster.nameserver) as producer, asyncio.TaskGroup() as tasks:
            senders = Senders(producer, random)
            for number in range(SENDERS):
                tasks.create_task(senders.run(number))
            for _ in range(ROUNDS):
                await senders.acknowledged(random.randrange(1, 300))
                await cluster.kill("storage")
                await cluster.start("storage")
            await senders.acknowledged(1)
            senders.stop()
        receipts = senders.receipts
        messages = await read_all(cluster.nameserver, len(receipts))
        async with Admin(cluster.nameserver) as admin:
            extents = (await admin.describe_topic(TOPIC)).queues
    assert {receipt.durability for receipt in receipts.values()} == {Durability.FSYNCED}
    assert messages == {(one.queue, one.offset): body for body, one in receipts.items()}
    assert sum(extent.next_offset or 0 for extent in extents) == len(receipts)
    report = json.loads((tmp_path / "storage" / "recovery.json").read_text())
    assert report["epoch"] == ROUNDS + 1


@pytest.mark.parametrize("by", ["kernel", "thread"])
async def test_failed_sync_ends_the_process_and_acknowledges_nothing(
    by: str, etcd_endpoint: str, tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    async with process_site(etcd_endpoint, tmp_path) as site:
        process = site.start_python(
            "-c", RUN_WITH_FAILING_SYNC, SYNC_BY=by, SYNC_FAILS_ONCE_THERE_IS=str(trigger)
        )
        node = await site.serving()
        bodies: list[bytes] = []
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            await send(stub, 0, bodies)
            trigger.touch()
            with pytest.raises(BatonError) as refused:
                await send(stub, 0, bodies)
        assert refused.value.kind == "UNAVAILABLE"
        log = await output(process)
        assert process.returncode == 1
        assert "can't be written or synced" in log
        assert ("injected" if by == "thread" else os.strerror(errno.EIO)) in log
        trigger.unlink()
        site.start()
        node = await site.serving(node.start_unix_ms)
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            await send(stub, 0, bodies)  # retry: it is unknown whether the rejected batch is stored
            assert await read(stub, 0) == bodies
