"""A run with small segments that leave the local disk at once, and its checks.

Producers send, and note each receipt. Groups begin at the first message while the run goes on, so
their deliveries read from the object store. The store fails often. Brokers are killed; in runs with
a replica set its leader is killed, frozen or cut off. At the end one more group reads everything:
each message at the offset of its receipt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, NoQuorum, OffsetsUnreachable, Unreachable
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.broker_set import BrokerSet
from tests.support.conditions import until

TOPIC = "clicks"
BROKERS, QUEUES, PRODUCERS = 2, 2, 2
FAULTS_S, READ_S = 20, 300
SEGMENT_BYTES = 4_096
PRODUCER = ProducerSettings(request_timeout_ms=2_000)
CONSUMER = ConsumerSettings(
    consume_from="first", buffer_messages_max=50, commit_interval_ms=500, keep_alive_ms=2_000
)
FAULTS = Faults(loss=0.01, duplicate=0.02, slow=0.01, slow_ms_max=4_000)
Place = tuple[QueueRef, int]


@dataclass
class TierRun:
    """What a run did, and which promises it saw broken."""

    seed: str
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    sent: dict[Place, bytes] = field(default_factory=dict)


def play_tiers(seed: str, *, replicated: bool = False) -> TierRun:
    """Play the run of a seed, with two brokers or with a replica set."""
    run, random = TierRun(seed), Random(seed)
    storage: dict[str, object] = {
        "segment_bytes": SEGMENT_BYTES,
        "retention_ms": 0,
        "disk_interval_ms": 2_000,
        "tier_url": "memory",
        "tier_local_age_ms": random.choice((0, 1_000)),
        "tier_interval_ms": random.choice((100, 700)),
    }
    broker = (
        BrokerSet(seed, random, storage)
        if replicated
        else MemoryBroker(
            broker_count=BROKERS, seed=seed, faults=FAULTS, settings={"storage": storage}
        )
    )
    run_virtual(_Scenario(run, random, broker).play())
    return run


class _Scenario:
    def __init__(self, run: TierRun, random: Random, broker: MemoryBroker) -> None:
        self._run, self._random, self._broker = run, random, broker
        self._store_draws = Random(f"{run.seed}/store")
        self._failure_rate = 0.0

    async def play(self) -> None:
        """Execute the run."""
        async with self._broker as broker, broker.admin() as admin:
            objects = broker._environment.objects
            objects.before = self._fail_sometimes
            await self._create(admin)
            async with asyncio.TaskGroup() as tasks:
                for number in range(PRODUCERS):
                    tasks.create_task(self._send(number))
                tasks.create_task(self._disturb())
                tasks.create_task(self._read_early())
            broker._environment.network.faults = broker._quiet
            self._failure_rate = 0.0
            found = await self._read_all("last", READ_S)
            self._check(found)
            for node in broker._environment.nodes.values():
                remote = node.store.log.stored_bytes_count
                self._run.counts["remote segments"] += remote // SEGMENT_BYTES
            if broker._environment.errors:
                self._run.violations.append(f"a process failed: {broker._environment.errors[:2]}")

    def _fail_sometimes(self, operation: str, name: str) -> None:
        self._run.counts[f"store {operation}"] += 1
        if self._store_draws.random() < self._failure_rate:
            self._run.counts["store failures"] += 1
            raise ConnectionError("the store does not answer")

    async def _create(self, admin: Admin) -> None:
        while True:
            try:
                await admin.create_topic(TOPIC, QUEUES)
            except (NoQuorum, OffsetsUnreachable, Unreachable):
                continue
            return

    async def _send(self, number: int) -> None:
        draws, end_s = Random(f"{self._run.seed}/producer-{number}"), _time_s() + FAULTS_S
        count = 0
        async with self._broker.producer(PRODUCER) as producer:
            while _time_s() < end_s:
                body = b"%d-%d-" % (number, count) + bytes(draws.choice((50, 900)))
                try:
                    receipt = await producer.send(TOPIC, body)
                except BatonError:
                    self._run.counts["send errors"] += 1
                    await asyncio.sleep(0.1)
                    continue
                count += 1
                self._run.sent[receipt.queue, receipt.offset] = body
                await asyncio.sleep(draws.choice((0, 0.05, 0.3)))

    async def _disturb(self) -> None:
        """Let services and the store fail."""
        random, counts, end_s = self._random, self._run.counts, _time_s() + FAULTS_S
        while _time_s() < end_s:
            self._failure_rate = random.choice((0.0, 0.1, 0.4))
            await asyncio.sleep(random.uniform(1, 5))
            if isinstance(self._broker, BrokerSet):
                counts[await self._broker.fail()] += 1
            else:
                await self._broker.kill(f"broker-{random.randrange(BROKERS)}")
                counts["broker kills"] += 1

    async def _read_early(self) -> None:
        """Let groups begin at the first message, while services and the store fail."""
        for number in range(3):
            await asyncio.sleep(self._random.uniform(3, 6))
            found = await self._read_all(f"early-{number}", 3)
            self._run.counts["early messages"] += len(found)
            for place in found.keys() & self._run.sent.keys():
                if found[place] != self._run.sent[place]:
                    self._run.violations.append(f"{place} has another message")

    async def _read_all(self, group: str, time_s: float) -> dict[Place, bytes]:
        """Return what a new group gets until it has all that is confirmed, or for a time."""
        found: dict[Place, bytes] = {}
        wanted = set(self._run.sent)

        async def handle(message: ReceivedMessage) -> None:
            found[message.queue, message.offset] = message.body

        consumer: Any = self._broker.consumer(group, {TOPIC: "*"}, CONSUMER)
        try:
            async with consumer, asyncio.TaskGroup() as tasks:
                running = tasks.create_task(consumer.run(handle))
                with suppress(TimeoutError):
                    await until(lambda: wanted <= found.keys(), timeout_s=time_s)
                running.cancel()
        except* BatonError:
            self._run.counts["consumer errors"] += 1
        return found

    def _check(self, found: dict[Place, bytes]) -> None:
        lost = [place for place in self._run.sent if place not in found]
        wrong = [place for place in found.keys() & self._run.sent.keys()
                 if found[place] != self._run.sent[place]]  # fmt: skip
        if lost:
            self._run.violations.append(f"{len(lost)} messages are lost, the first is {lost[0]}")
        if wrong:
            self._run.violations.append(f"{wrong[0]} has another message")
        self._run.counts["messages"] += len(self._run.sent)


def _time_s() -> float:
    return asyncio.get_running_loop().time()
