"""A run of transformers with faults drawn from a seed, and its checks.

A producer sends numbers with ordering keys. Transformers make 1 to 3 outputs of each: the first
goes to the queue of the key, the others to any queue of another topic. The calls of half of the
transformers wait, those of the others are made in runs. Transformers are killed and
frozen at any moment and others take their place; brokers and offsets are killed; queues are added
to an output topic; the network loses, repeats and delays calls, so that batches of dead or fenced
owners arrive late. In runs with a replica set the leader of storage is killed, frozen or cut off.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings, MessageOrder
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.outputs import Output
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.errors import BatonError
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.broker_set import BrokerSet
from tests.simulation.member_processes import MemberProcesses, bury
from tests.simulation.run_record import RunRecord

NUMBERS, ITEMS, AUDIT, GROUP = "numbers", "items", "audit", "doubler"
BROKERS, MEMBERS, KEYS, QUEUES = 2, 3, 9, 6
FAULTS_S, END_S = 30, 240
PRODUCER = ProducerSettings(request_timeout_ms=2_000)
FAULTS = Faults(loss=0.01, duplicate=0.03, slow=0.02, slow_ms_max=6_000)
STORAGE: Mapping[str, object] = {"segment_bytes": 65_536}

Place = tuple[str, str, int]


@dataclass(slots=True)
class TransformRun(RunRecord):
    """What is known of a run outside the cluster."""

    order: MessageOrder = "none"

    def judge(
        self,
        inputs: Sequence[ReceivedMessage],
        items: Sequence[ReceivedMessage],
        audit: Sequence[ReceivedMessage],
    ) -> None:
        """Compare the outputs that are stored with the inputs."""
        expected = {(topic, body) for one in inputs for topic, body in made_of(int(one.body))}
        found = Counter((one.queue.topic, one.body) for one in [*items, *audit])
        for (topic, body), count in sorted(found.items()):
            if (topic, body) not in expected:
                self.fail("made", f"{body!r} in {topic} has no input")
            elif count > 1:
                self.fail("once", f"{body!r} is stored {count} times in {topic}")
        for topic, body in sorted(expected - found.keys()):
            self.fail("stored", f"{body!r} is not stored in {topic}, and its input is acknowledged")
        self._judge_order(inputs, items)
        self.counts["inputs"] += len(inputs)
        self.counts["outputs"] += found.total()

    def _judge_order(
        self, inputs: Sequence[ReceivedMessage], items: Sequence[ReceivedMessage]
    ) -> None:
        if self.order == "none":
            return
        rank = {int(one.body): (one.queue, one.offset) for one in inputs}
        last: dict[tuple[Place, str | None], tuple[object, int, int]] = {}
        for one in sorted(items, key=lambda one: (one.queue, one.offset)):
            number = int(one.body)
            if number not in rank:
                continue
            queue, offset = rank[number]
            place = (one.queue.topic, one.queue.broker, one.queue.queue_id), one.ordering_key
            before = last.get(place)
            if before is not None and before[0] == queue and before[1] > offset:
                self.fail("order", f"{number} of key {one.ordering_key} is behind {before[2]}")
            last[place] = queue, offset, number


def made_of(number: int) -> list[tuple[str, bytes]]:
    """Return topic and body of each output of a number."""
    others = [(AUDIT, b"%d/%d" % (number, other)) for other in range(number % 3)]
    return [(ITEMS, b"%d" % number), *others]


def transform(message: ReceivedMessage) -> list[Output]:
    """Return the outputs of a message."""
    return [
        Output(body, topic, ordering_key=message.ordering_key if topic == ITEMS else None)
        for topic, body in made_of(int(message.body))
    ]


def _members(run: TransformRun, broker: MemoryBroker, random: Random) -> MemberProcesses:
    """Return the transformers of a run."""
    settings = ConsumerSettings(
        consume_from="first",
        order=run.order,
        send_back=False,
        queue_concurrency=random.choice((1, 4)),
        buffer_messages_max=random.choice((5, 100)),
        pull_messages_max=20,
        span_max=60,
        commit_interval_ms=1_000,
        keep_alive_ms=2_000,
        drain_timeout_ms=random.choice((500, 5_000)),
        retry_first_ms=200,
        retry_ms_max=2_000,
    )

    async def work(consumer: Consumer, draws: Random) -> None:
        waits = draws.random() < 0.5

        async def handle(message: ReceivedMessage) -> list[Output]:
            if waits:
                await asyncio.sleep(draws.choice((0, 0, 0.01, 0.3)) * draws.random())
            else:
                run.counts["calls that do not wait"] += 1
            if draws.random() < 0.02:
                run.counts["handler errors"] += 1
                raise ValueError("a handler fails")
            return transform(message)

        await consumer.transform(handle, to=(ITEMS, AUDIT))

    return MemberProcesses(
        broker,
        seed=run.seed,
        group=GROUP,
        topic=NUMBERS,
        settings=settings,
        usual_count=MEMBERS,
        run=work,
    )


def play_transforms(seed: str, *, replicated: bool = False) -> TransformRun:
    """Play the run of a seed, with two brokers or with a replica set."""
    run, random = TransformRun(seed), Random(seed)
    run.order = random.choice(("none", "queue", "key"))
    settings = {"storage": STORAGE}
    broker = (
        BrokerSet(seed, random, STORAGE)
        if replicated
        else MemoryBroker(broker_count=BROKERS, seed=seed, faults=FAULTS, settings=settings)
    )
    run_virtual(_play(run, random, broker))
    return run


async def _play(run: TransformRun, random: Random, brokers: MemoryBroker) -> None:
    async with brokers as broker:
        for topic in (NUMBERS, ITEMS, AUDIT):
            await broker.create_topic(topic, QUEUES)
        members = _members(run, broker, random)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + FAULTS_S
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_produce(run, broker, end_s))
            tasks.create_task(_disturb_members(run, members, random, end_s))
            tasks.create_task(_disturb_services(run, broker, random, end_s))
        members.settle()
        try:
            await broker.settled(GROUP, timeout_s=END_S)
        except TimeoutError as error:
            run.fail("settled", str(error))
        await members.end()
        run.counts["starts that failed"] += members.failed_starts
        inputs, items, audit = [await broker.messages(name) for name in (NUMBERS, ITEMS, AUDIT)]
        run.judge(inputs, items, audit)
        if isinstance(broker, BrokerSet):
            run.counts["takeovers"] += broker.takeovers
    await bury(members)


async def _produce(run: TransformRun, broker: MemoryBroker, end_s: float) -> None:
    draws, number = Random(f"{run.seed}/producer"), 0
    async with broker.producer(PRODUCER) as producer:
        while asyncio.get_running_loop().time() < end_s:
            number += 1
            try:
                key = f"key-{draws.randrange(KEYS)}"
                await producer.send(NUMBERS, b"%d" % number, ordering_key=key)
            except BatonError:
                run.counts["send errors"] += 1
            await asyncio.sleep(draws.choice((0, 0.02, 0.2)))


async def _disturb_members(
    run: TransformRun, members: MemberProcesses, random: Random, end_s: float
) -> None:
    for _ in range(MEMBERS):
        members.start()
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(random.uniform(0.5, 8))
        run.counts[await members.disturb(random)] += 1


async def _disturb_services(
    run: TransformRun, broker: MemoryBroker, random: Random, end_s: float
) -> None:
    queues = QUEUES
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(random.uniform(1, 12))
        kind = random.random()
        if kind < 0.2:
            queues += BROKERS
            async with broker.admin() as admin:
                try:
                    await admin.update_topic(ITEMS, queue_count=queues)
                    run.counts["queues added"] += 1
                except BatonError:
                    run.counts["queues not added"] += 1
        elif kind < 0.4:
            await broker.kill("offsets")
            run.counts["offsets kills"] += 1
        elif isinstance(broker, BrokerSet):
            run.counts[await broker.fail()] += 1
            run.counts["broker kills"] += 1
        else:
            await broker.kill(f"broker-{random.randrange(BROKERS)}")
            run.counts["broker kills"] += 1
