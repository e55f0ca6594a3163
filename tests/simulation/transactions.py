"""A run of transactions with faults drawn from a seed, and its checks.

Shops book numbers in a database that outlives them, and send each in a transaction. Shops die at
any step, brokers are killed at any moment, and the network loses, repeats and delays calls. Some
local transactions are forgotten: their state stays unknown for ever. Segments are small, and half
messages that are older than 5 s are written again. In runs with a replica set the leader of storage
is killed, frozen or cut off, and a follower takes over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.transactions import CommitReceipt, PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.transactions import Transactions
from batonmq.errors import BatonError, TopicNotFound, TransactionEnded
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.simulation.broker_set import FAULTS, BrokerSet
from tests.simulation.run_record import RunRecord
from tests.support.conditions import until

TOPIC, GROUP = "numbers", "shop"
BROKERS, SHOPS, WORKERS = 2, 3, 3
CHECKS_MAX, INTERVAL_MS = 10, 2_000
"""20 s, which is longer than a lost call takes with `PRODUCER`."""
FAULTS_S, END_S = 30, 600
FIRST_MS = 1_000
SETTINGS: Mapping[str, object] = {
    "transaction_check_first_ms": FIRST_MS,
    "transaction_check_interval_ms": INTERVAL_MS,
    "transaction_checks_max": CHECKS_MAX,
    "segment_bytes": 16_384,
    "retention_ms": 10_000,
}
"""Half messages are written again at half of the retention time; nothing is removed, because the
wall clock of a run is never at the hour of retention."""
PRODUCER = ProducerSettings(request_timeout_ms=2_000)


class Refused(Exception):
    """A number that its shop does not book."""


@dataclass(slots=True)
class TransactionRun(RunRecord):
    """What is known of a run outside the cluster.

    Attributes:
        booked: Numbers in the database of the shops.
        running: Numbers of blocks of living shops.
        confirmed: Receipts of commits, by number.
        refused: Numbers whose rollback was confirmed.
        forgotten: Numbers for which checkers never know the state.
        asked: Checks by transaction: number of the check, and time.
    """

    booked: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    confirmed: dict[int, CommitReceipt] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def answer(
        self, pending: PendingTransaction, now_ms: int, now_unix_ms: int
    ) -> TransactionState:
        """Answer a check from the database, and note it.

        The network may delay a check, but a check is never sent before its time.
        """
        number = int(pending.message.body)
        self.counts["checks"] += 1
        due_unix_ms = pending.begin_unix_ms + FIRST_MS + (pending.check - 1) * INTERVAL_MS
        if now_unix_ms < due_unix_ms:
            text = f"check {pending.check} comes {due_unix_ms - now_unix_ms} ms too early"
            self.fail("interval", f"{pending.transaction_id}: {text}")
        self.asked.setdefault(pending.transaction_id, []).append((pending.check, now_ms))
        if number not in self.booked and (number in self.running or number in self.forgotten):
            return TransactionState.UNKNOWN
        self.counts["answers"] += 1
        booked = number in self.booked
        return TransactionState.COMMIT if booked else TransactionState.ROLLBACK

    def judge(self, found: Mapping[int, list[tuple[str, int, int]]], lost: Counter[int]) -> None:
        """Compare the messages in the topic and the unresolved ones with the promises.

        Args:
            found: Broker, queue and offset of each message, by number.
            lost: Unresolved messages, by number.
        """
        for number, places in sorted(found.items()):
            if len(places) > 1:
                self.fail("once", f"{number} is stored at {places}")
            if number in self.refused:
                self.fail("rolled back", f"{number} was rolled back, and is stored at {places}")
            elif number not in self.booked:
                self.fail("booked", f"{number} was not booked, and is stored at {places}")
        for number, receipt in sorted(self.confirmed.items()):
            place = receipt.queue.broker, receipt.queue.queue_id, receipt.offset
            if found.get(number) != [place]:
                self.fail("confirmed", f"{number} was confirmed at {place}: {found.get(number)}")
        for number in sorted(self.booked - self.forgotten - found.keys()):
            self.fail("booked", f"{number} was booked, and has no message")
        for number, count in sorted(lost.items()):
            if number not in self.forgotten or count > 1 or number in found:
                self.fail("limit", f"{number} was discarded {count} times")
        for name, checks in self.asked.items():
            numbers = [number for number, _ in checks]
            if len(numbers) != len(set(numbers)) or max(numbers) > CHECKS_MAX:
                self.fail("checks", f"{name} was asked {checks}")


def play_transactions(seed: str, *, replicated: bool = False) -> TransactionRun:
    """Play the run of a seed, with two brokers or with a replica set."""
    run, random = TransactionRun(seed), Random(seed)
    settings = {"storage": SETTINGS}
    brokers = (
        BrokerSet(seed, random, SETTINGS)
        if replicated
        else MemoryBroker(broker_count=BROKERS, seed=seed, faults=FAULTS, settings=settings)
    )
    run_virtual(_play(run, random, brokers))
    return run


async def _fail(run: TransactionRun, broker: MemoryBroker, random: Random) -> None:
    """Let one node fail."""
    if isinstance(broker, BrokerSet):
        run.counts[await broker.fail()] += 1
        run.counts["broker kills"] += 1
        return
    await broker.kill(f"broker-{random.randrange(BROKERS)}")
    run.counts["broker kills"] += 1


async def _play(run: TransactionRun, random: Random, brokers: MemoryBroker) -> None:
    async with brokers as broker:
        await broker.create_topic(TOPIC, 2 * BROKERS)
        async with asyncio.TaskGroup() as tasks:
            for number in range(SHOPS):
                tasks.create_task(_shops(run, broker, Random(f"{run.seed}/{number}")))
            end_s = asyncio.get_running_loop().time() + FAULTS_S
            while asyncio.get_running_loop().time() < end_s:
                await asyncio.sleep(random.uniform(0.5, 5))
                await _fail(run, broker, random)
        async with (
            _producer(run, broker),
            broker.admin() as admin,
        ):
            try:
                await until(lambda: _all_ended(admin), timeout_s=END_S)
            except TimeoutError:
                run.fail("limit", f"transactions are open after {END_S} s")
                return
        found: dict[int, list[tuple[str, int, int]]] = {}
        for one in await broker.messages(TOPIC):
            place = one.queue.broker, one.queue.queue_id, one.offset
            found.setdefault(int(one.body), []).append(place)
        try:
            lost = Counter(int(one.body) for one in await broker.messages(UNRESOLVED_TOPIC))
        except TopicNotFound:
            lost = Counter()
        if isinstance(broker, BrokerSet):
            run.counts["takeovers"] += broker.takeovers
        run.counts["messages"] += len(found)
        run.counts["discarded"] += len(lost)
        run.judge(found, lost)


async def _all_ended(admin: Admin) -> bool:
    try:
        found, open_count, problems = await Transactions(admin).find()
    except BatonError:
        return False
    return not (found or open_count or problems)


def _producer(run: TransactionRun, broker: MemoryBroker) -> Producer:
    return broker.producer(PRODUCER, group=GROUP, transaction_checker=_Checker(run, broker))


class _Checker:
    def __init__(self, run: TransactionRun, broker: MemoryBroker) -> None:
        self._run, self._clock = run, broker.clock

    async def __call__(self, pending: PendingTransaction) -> TransactionState:
        now_ms = int(asyncio.get_running_loop().time() * 1_000)
        return self._run.answer(pending, now_ms, self._clock.unix_ms())


async def _shops(run: TransactionRun, broker: MemoryBroker, random: Random) -> None:
    """Run one shop after the other; each dies after a while, at any step."""
    end_s = asyncio.get_running_loop().time() + FAULTS_S
    while asyncio.get_running_loop().time() < end_s:
        shop = asyncio.timeout(random.uniform(1, 12))
        try:
            async with (
                shop,
                _producer(run, broker) as producer,
                asyncio.TaskGroup() as tasks,
            ):
                for number in range(WORKERS):
                    draws = Random(random.getrandbits(32) + number)
                    tasks.create_task(_sell(run, producer, draws))
        except TimeoutError:
            run.counts["shop deaths"] += 1


async def _sell(run: TransactionRun, producer: Producer, random: Random) -> None:
    """Book numbers until the shop dies."""
    while True:
        number = run.next_number()
        run.running.add(number)
        key = str(random.randrange(5)) if random.random() < 0.5 else None
        try:
            async with producer.transaction(TOPIC, b"%d" % number, ordering_key=key) as tx:
                await asyncio.sleep(random.choice((0, 0, 0.01, 0.5, 3)))
                if random.random() < 0.2:
                    raise Refused
                if random.random() < 0.1:
                    run.forgotten.add(number)
                    tx.leave_open()
                    continue
                run.booked.add(number)
                await asyncio.sleep(random.choice((0, 0, 0.01, 0.5)))
            assert tx.receipt is not None
            run.confirmed[number] = tx.receipt
            run.counts["confirmed"] += 1
        except Refused:
            run.counts["refused"] += 1
            run.refused.add(number)
        except TransactionEnded:
            run.counts["ended otherwise"] += 1
        except BatonError:
            run.counts["errors"] += 1
        finally:
            run.running.discard(number)
