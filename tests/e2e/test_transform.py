"""Goal: kill -9 of transformers, storage leader and offsets leader leaves each output exactly once.

Method: a real cluster; a producer that sends numbers, and processes that make two outputs of each
(tests/e2e/transformer.py). One of them, the storage leader or the offsets leader is killed, at
random. Afterwards both output topics have exactly the numbers of the input topic, once each.
BATON_KILL_ROUNDS sets the number of kills; long runs have three nodes of storage and of offsets.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest

from batonmq._consumer.puller import Puller
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster
from tests.e2e.leadership import in_sync, leader
from tests.support.cluster import REPO, local_cluster
from tests.support.conditions import until

ROUNDS = int(os.environ.get("BATON_KILL_ROUNDS", "6"))  # noqa: TID251  a longer run by hand
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240 + 15 * ROUNDS)]

AVAILABLE = ROUNDS > 50
VICTIMS = ("transformer", "transformer", "storage", "offsets")
NUMBERS, OUTPUTS, GROUP, QUEUES, TRANSFORMERS = "numbers", ("items", "audit"), "spreader", 6, 3
LEASE = {"lock_lease_ms": 6_000}


class Pipeline:
    """The transformers, and the services, of which one after the other is killed.

    Attributes:
        kills: Number of kills of each victim.
    """

    def __init__(self, cluster: LocalCluster, admin: Admin) -> None:
        self._cluster, self._admin = cluster, admin
        self._running: list[Process] = []
        self.kills: Counter[str] = Counter()

    async def start(self) -> None:
        """Start a transformer."""
        self._running.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.e2e.transformer",
                self._cluster.nameserver, GROUP, NUMBERS, *OUTPUTS,
                cwd=REPO,
            )
        )  # fmt: skip

    async def fail(self, victim: str, random: Random) -> None:
        """Kill a victim, and let it come back."""
        self.kills[victim] += 1
        if victim == "transformer":
            process = self._running.pop(random.randrange(len(self._running)))
            process.kill()
            await process.wait()
            await self.start()
        elif not AVAILABLE:
            await self._cluster.kill(victim)
            await self._cluster.serving(victim)
        else:
            broker = await self._broker() if victim == "storage" else ""
            name = await leader(self._admin, self._cluster, victim, broker=broker)
            await self._cluster.kill(name)
            await leader(self._admin, self._cluster, victim, name, broker)
            await self._cluster.serving(name)
            await in_sync(self._admin, victim, broker)

    async def _broker(self) -> str:
        nodes = (await self._admin.cluster()).nodes
        return next(node.replica_set for node in nodes if node.service == "storage")

    async def end(self) -> None:
        """Kill the transformers."""
        for process in self._running:
            process.kill()
            await process.wait()


async def bodies(nameserver: str, topic: str) -> Counter[bytes]:
    """Return how often each message of a topic is stored."""
    found: Counter[bytes] = Counter()
    async with Admin(nameserver) as admin, Puller(nameserver) as puller:
        queues = await puller.queues(topic)
        ends, problems = await admin.extents(queues)
        assert not problems
        await puller.assign(queue for queue, (_, end) in ends.items() if end)
        for queue in puller.assignment:
            await puller.seek(queue, "begin")
        while found.total() < sum(end for _, end in ends.values()):
            for messages in (await puller.poll()).values():
                found.update(one.body for one in messages)
    return found


async def produce(producer: Producer, ended: asyncio.Event) -> None:
    """Send numbers until the end."""
    number = 0
    while not ended.is_set():
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(20):
                    number += 1
                    key = f"key-{number % 50}"
                    tasks.create_task(producer.send(NUMBERS, b"%d" % number, ordering_key=key))
        except* BatonError as errors:
            print(f"producer: {errors.exceptions[0]}", file=sys.stderr)
        await asyncio.sleep(0.1)


@pytest.mark.long
async def test_kill_9_of_transformer_storage_and_offsets_leaves_each_output_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A long run kills a node more often than a cluster lets it end.
    monkeypatch.setattr("batonmq_server.local.supervisor.DEATHS_MAX", 5 + ROUNDS)
    random, ended = Random(17), asyncio.Event()
    async with (
        local_cluster(tmp_path / "cluster", available=AVAILABLE, lockmgr=LEASE) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        for topic in (NUMBERS, *OUTPUTS):
            await admin.create_topic(topic, QUEUES)
        pipeline = Pipeline(cluster, admin)
        try:
            for _ in range(TRANSFORMERS):
                await pipeline.start()
            async with Producer(cluster.nameserver) as producer, asyncio.TaskGroup() as tasks:
                tasks.create_task(produce(producer, ended))
                goal = 0
                for number in range(ROUNDS):
                    goal += random.randint(1, 400)
                    await until(partial(has_stored, admin, goal), timeout_s=120)
                    short = VICTIMS[number % len(VICTIMS)]
                    await pipeline.fail(random.choice(VICTIMS) if AVAILABLE else short, random)
                ended.set()
            await until(lambda: is_done(admin), timeout_s=180)
        finally:
            await pipeline.end()
        inputs = await bodies(cluster.nameserver, NUMBERS)
        outputs = [await bodies(cluster.nameserver, topic) for topic in OUTPUTS]
    print(f"kills {dict(pipeline.kills)}, inputs {inputs.total()}, "
          f"outputs {[one.total() for one in outputs]}")  # fmt: skip
    assert inputs.total() > 20 * ROUNDS
    assert outputs == [inputs, inputs]


async def stored_count(admin: Admin, topic: str) -> int:
    """Return the number of messages of a topic, as far as its broker answers."""
    detail = await admin.describe_topic(topic)
    return sum(one.next_offset or 0 for one in detail.queues)


async def has_stored(admin: Admin, count: int) -> bool:
    try:
        return await stored_count(admin, OUTPUTS[0]) >= count
    except BatonError:
        return False


async def is_done(admin: Admin) -> bool:
    """Return whether every input is acknowledged."""
    try:
        progress = await admin.group_progress(GROUP)
    except BatonError:
        return False
    return not progress.problems and all(
        queue.committed_offset is not None and not queue.lag for queue in progress.queues
    )
