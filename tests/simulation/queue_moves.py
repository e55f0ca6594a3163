"""A run in which queues move between brokers, with faults drawn from a seed, and its checks.

Producers send numbers: some at once, some for later, some in a transaction. Two groups handle
them. An operator moves queues between brokers, closes brokers, and changes the number of queues;
retiring queues are removed once they are read. Members, brokers and the other services are killed
and frozen; the network loses and delays calls.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.queue_moves import move_queues, spread_queues
from batonmq.errors import BatonError
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.member_processes import MemberProcesses, bury
from tests.simulation.run_record import RunRecord
from tests.support.conditions import until

TOPIC, GROUPS, SHOP = "numbers", ("readers", "auditors"), "shop"
BROKERS, MEMBERS, KEYS, QUEUES = 3, 2, 9, 6
FAULTS_S, END_S = 30, 600
PRODUCER = ProducerSettings(request_timeout_ms=1_500)
FAULTS = Faults(loss=0.01, slow=0.02, slow_ms_max=6_000)
"""Some calls arrive after their producer has given them up."""
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "storage": {
        "segment_bytes": 65_536,
        "transaction_check_first_ms": 1_000,
        "transaction_check_interval_ms": 2_000,
    },
    "nameserver": {"shrink_interval_ms": 300},
}


class Refused(Exception):
    """A number that is not booked."""


@dataclass(slots=True)
class MovesRun(RunRecord):
    """What is known of a run outside the cluster.

    Attributes:
        plain: Numbers that were sent without a transaction.
        booked: Numbers whose transactions are to be committed.
        sent: Numbers whose sending or commit was confirmed.
        places: Queues and offsets of each number that was handled.
        handled: Times that a group has handled a number, flagged as redelivered or not.
    """

    plain: set[int] = field(default_factory=set)
    booked: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    places: defaultdict[int, set[tuple[QueueRef, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    handled: dict[str, defaultdict[int, list[bool]]] = field(default_factory=dict)

    def note_handled(self, group: str, message: ReceivedMessage) -> None:
        """Note that a handler has got a message."""
        number = int(message.body)
        self.handled[group][number].append(message.redelivered)
        self.places[number].add((message.queue, message.offset))

    def judge(self) -> None:
        """Compare what was handled with what was sent."""
        for number, places in sorted(self.places.items()):
            if len(places) > 1:
                self.fail("stored once", f"{number} is at {places}")
            if number not in self.plain | self.booked:
                self.fail("rolled back", f"{number} was not booked, and is at {places}")
        for group, handled in self.handled.items():
            for number in sorted(self.sent - handled.keys()):
                self.fail("handled", f"{number} was stored, and {group} has not handled it")
            for number, times in sorted(handled.items()):
                if times.count(False) > 1:
                    self.fail("once", f"{number} came {times} to {group}")
            self.counts["handled"] += len(handled)
        self.counts["sent"] += len(self.sent)

    def state_of(self, pending: PendingTransaction) -> TransactionState:
        """Answer a check."""
        booked = int(pending.message.body) in self.booked
        return TransactionState.COMMIT if booked else TransactionState.ROLLBACK


def _members(run: MovesRun, broker: MemoryBroker, random: Random, group: str) -> MemberProcesses:
    settings = ConsumerSettings(
        consume_from="first",
        queue_concurrency=random.choice((1, 4)),
        pull_messages_max=20,
        commit_interval_ms=1_000,
        keep_alive_ms=2_000,
        drain_timeout_ms=random.choice((500, 5_000)),
    )
    run.handled[group] = defaultdict(list)

    async def work(consumer: Consumer, draws: Random) -> None:
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(draws.choice((0, 0, 0.01, 0.2)) * draws.random())
            run.note_handled(group, message)

        await consumer.run(handle)

    return MemberProcesses(
        broker,
        seed=run.seed,
        group=group,
        topic=TOPIC,
        settings=settings,
        usual_count=MEMBERS,
        run=work,
    )


def play_moves(seed: str) -> MovesRun:
    """Play the run of a seed."""
    run, random = MovesRun(seed), Random(seed)
    brokers = MemoryBroker(broker_count=BROKERS, seed=seed, faults=FAULTS, settings=SETTINGS)
    run_virtual(_play(run, random, brokers))
    return run


async def _play(run: MovesRun, random: Random, brokers: MemoryBroker) -> None:
    async with brokers as broker:
        await broker.create_topic(TOPIC, QUEUES)
        groups = [_members(run, broker, random, group) for group in GROUPS]
        async with broker.admin() as admin:
            for members in groups:
                members.start()
            await until(lambda: _all_known(admin))
            end_s = asyncio.get_running_loop().time() + FAULTS_S
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_produce(run, broker, end_s))
                tasks.create_task(_move(run, admin, Random(f"{run.seed}/operator"), end_s))
                tasks.create_task(_disturb_services(run, broker, random, end_s))
                for number, members in enumerate(groups):
                    draws = Random(f"{run.seed}/members/{number}")
                    tasks.create_task(_disturb_members(run, members, draws, end_s))
            for members in groups:
                members.settle()
            async with _producer(run, broker):
                await _settle(run, broker, admin)
        for members in groups:
            await members.end()
            run.counts["starts that failed"] += members.failed_starts
        run.judge()
    await bury(*groups)


async def _settle(run: MovesRun, broker: MemoryBroker, admin: Admin) -> None:
    """Wait until everything is handled, and the retiring queues are removed."""
    try:
        for group in GROUPS:
            await broker.settled(group, timeout_s=END_S)
    except TimeoutError as error:
        run.fail("settled", str(error))
    try:
        await until(lambda: _all_removed(admin), timeout_s=END_S)
    except TimeoutError:
        run.fail("removed", f"queues are retiring after {END_S} s")


async def _all_known(admin: Admin) -> bool:
    """Return whether each group has progress on each queue, so that it counts as a reader."""
    try:
        return all([len(await admin.progress(group)) >= QUEUES for group in GROUPS])
    except BatonError:
        return False


async def _all_removed(admin: Admin) -> bool:
    try:
        topic = (await admin.describe_topic(TOPIC)).topic
    except BatonError:
        return False
    return topic.queue_counts == topic.writable_counts


def _producer(run: MovesRun, broker: MemoryBroker) -> Producer:
    return broker.producer(PRODUCER, group=SHOP, transaction_checker=run.state_of)


async def _produce(run: MovesRun, broker: MemoryBroker, end_s: float) -> None:
    draws = Random(f"{run.seed}/producer")
    async with _producer(run, broker) as producer, asyncio.TaskGroup() as tasks:
        while asyncio.get_running_loop().time() < end_s:
            tasks.create_task(_send(run, producer, draws))
            await asyncio.sleep(draws.choice((0, 0.02, 0.2)))


async def _send(run: MovesRun, producer: Producer, draws: Random) -> None:
    number, kind = run.next_number(), draws.random()
    body, wait_s = b"%d" % number, draws.choice((0, 0.01, 1))
    try:
        if not 0.15 <= kind < 0.25:
            run.plain.add(number)
        if kind < 0.15:
            await producer.send(TOPIC, body, delay_ms=draws.randrange(1, 40_000))
            run.counts["scheduled"] += 1
        elif kind < 0.25:
            async with producer.transaction(TOPIC, body):
                await asyncio.sleep(wait_s)
                if draws.random() < 0.2:
                    raise Refused
                run.booked.add(number)
            run.counts["transactions"] += 1
        else:
            key = f"key-{draws.randrange(KEYS)}" if kind < 0.5 else None
            await producer.send(TOPIC, body, ordering_key=key)
        run.sent.add(number)
    except Refused:
        run.counts["refused"] += 1
    except BatonError:
        run.counts["send errors"] += 1


async def _move(run: MovesRun, admin: Admin, draws: Random, end_s: float) -> None:
    """Change the spread of the queues now and then."""
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(draws.uniform(0.5, 6))
        kind = draws.random()
        source, target = draws.sample([f"broker-{number}" for number in range(BROKERS)], 2)
        try:
            if kind < 0.2:
                await move_queues(admin, TOPIC, source, target, 1, by="operator")
            elif kind < 0.45:
                await move_queues(admin, TOPIC, source, target, by="operator")
            elif kind < 0.55:
                await spread_queues(admin, TOPIC, by="operator")
            elif kind < 0.65:
                await admin.update_topic(TOPIC, queue_count=draws.randrange(BROKERS, 2 * QUEUES))
            else:
                await move_queues(admin, TOPIC, source, target, by="operator")
                await asyncio.sleep(draws.uniform(1, 4))  # less than the delay of some requests
                await move_queues(admin, TOPIC, target, source, by="operator")
            run.counts["moves"] += 1
        except BatonError:
            run.counts["moves that failed"] += 1


async def _disturb_members(
    run: MovesRun, members: MemberProcesses, random: Random, end_s: float
) -> None:
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(random.uniform(0.5, 8))
        run.counts[await members.disturb(random)] += 1


async def _disturb_services(
    run: MovesRun, broker: MemoryBroker, random: Random, end_s: float
) -> None:
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(random.uniform(1, 12))
        kind = random.choice(("offsets", "nameserver", "lockmgr", "broker", "broker", "broker"))
        name = f"broker-{random.randrange(BROKERS)}" if kind == "broker" else kind
        await broker.kill(name)
        run.counts[f"{kind} kills"] += 1
