"""A run of pullers with faults drawn from a seed, and its checks.

A producer sends numbers. Programs divide the queues among themselves and read them with pullers of
one group without ownership, or without a group: they poll, seek, pause, commit, and end at any
moment, and a new program goes on. An operator resets the group. Services are killed; the network
loses, repeats and delays calls. In runs with a replica set the leader of storage is killed, frozen
or cut off, and a follower takes over. Nothing is removed, so a reader sees each offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from batonmq._consumer.puller import AtTime, Puller, PullerSettings, SeekTarget
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Resets
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupNotFound,
    ModeChanged,
    NoQuorum,
    NotLeader,
    NotServing,
    Retry,
    Unreachable,
)
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.broker_set import BrokerSet
from tests.simulation.run_record import RunRecord

T = TypeVar("T")
TOPIC, GROUP = "numbers", "readers"
BROKERS, PROGRAMS, QUEUES = 2, 2, 6
FAULTS_S, END_S, REPEAT_S = 30, 240, 10
PRODUCER = ProducerSettings(request_timeout_ms=2_000)
FAULTS = Faults(loss=0.01, duplicate=0.03, slow=0.02, slow_ms_max=6_000)
STORAGE: Mapping[str, object] = {"segment_bytes": 16_384}
LOST_CALL = (Unreachable, NotLeader, NotServing, NoQuorum)
"""What a call may raise, by its documentation, while nothing serves it."""


@dataclass(slots=True)
class QueueProgress:
    """What the outside knows of a group's progress on a queue.

    Attributes:
        floor: Lower bound of the committed offset.
        ceiling: Upper bound: the highest commit that was requested since the last reset began.
        resets: Number of the operator's resets that are confirmed.
        resetting: Whether one is under way.
    """

    floor: int = 0
    ceiling: int = 0
    resets: int = 0
    resetting: bool = False

    @property
    def begun(self) -> int:
        """Number of resets that a reader may have learnt of."""
        return self.resets + self.resetting


@dataclass(slots=True)
class PullerRun(RunRecord):
    """What is known of a run outside the cluster."""

    group: str = ""
    sent: dict[tuple[QueueRef, int], int] = field(default_factory=dict)
    read: dict[tuple[QueueRef, int], int] = field(default_factory=dict)
    progress: dict[QueueRef, QueueProgress] = field(default_factory=dict)

    def note_read(self, queue: QueueRef, offset: int, number: int) -> None:
        """Note a message; every reader gets the same one."""
        known = self.read.setdefault((queue, offset), number)
        if known != number:
            self.fail("same", f"{number} is at {queue}/{offset}, and {known} was")
        self.counts["reads"] += 1

    def judge_committed(self, queue: QueueRef, committed: int | None) -> None:
        """Check an offset that is committed now."""
        known, offset = self.progress[queue], committed or 0
        if not known.floor <= offset <= known.ceiling and not known.resetting:
            text = f"{offset} of {queue}, not from {known.floor} to {known.ceiling}"
            self.fail("committed", text)

    def judge(self, stored: Mapping[tuple[QueueRef, int], int]) -> None:
        """Compare what is stored with what was confirmed, and with what was read."""
        for rule, places in (("stored", self.sent), ("read", self.read)):
            for place, number in places.items():
                if stored.get(place) != number:
                    self.fail(rule, f"{number} at {place}, where {stored.get(place)} is stored")


class _Program:
    """A program that reads some queues until it ends."""

    def __init__(
        self, run: PullerRun, puller: Puller, queues: Sequence[QueueRef], random: Random
    ) -> None:
        self._run, self._puller, self._queues, self._random = run, puller, queues, random
        self._expected: dict[QueueRef, int] = {}
        self._learnt: dict[QueueRef, tuple[int, int]] = {}  # number of resets, from and to

    async def start(self) -> None:
        """Assign the queues; on some of them seek before the start is known."""
        before = {queue: replace(self._run.progress[queue]) for queue in self._queues}
        await self._puller.assign(self._queues)
        for queue in self._queues:
            if self._random.random() < 0.5:
                await self._seek(queue)
            else:
                await self._begin(queue, before[queue])
            # `assign`, or the first seek, has learnt of resets; later seeks don't.
            self._learnt[queue] = before[queue].resets, self._run.progress[queue].begun

    async def step(self) -> None:
        """Do one thing."""
        queue, draw = self._random.choice(self._queues), self._random.random()
        if draw < 0.06:
            await self._seek(queue)
        elif draw < 0.1:
            (self._puller.pause if self._random.random() < 0.5 else self._puller.resume)(queue)
        elif draw < 0.16 and self._run.group:
            await self._commit()
        elif draw < 0.2 and self._run.group:
            await self._ask(queue)
        else:
            await self.poll()

    async def poll(self) -> None:
        """Poll once, and check that no offset is left out or repeated."""
        timeout_ms = self._random.choice((0, 100, 1_000))
        try:
            found = await self._puller.poll(timeout_ms, self._random.choice((1, 20, 500)))
        except BatonError as error:
            self._run.fail("poll", repr(error))
            await asyncio.sleep(1)
            return
        for queue, messages in found.items():
            for one in messages:
                expected = self._expected[queue]
                if one.offset != expected:
                    self._run.fail("order", f"{one.offset} of {queue}, and not {expected}")
                self._expected[queue] = one.offset + 1
                self._run.note_read(queue, one.offset, int(one.body))
        await asyncio.sleep(self._random.choice((0, 0, 0.05)))

    async def read_to(self, ends: Mapping[QueueRef, int]) -> None:
        """Read until the ends of all queues."""
        for queue in self._queues:
            self._puller.resume(queue)
        while any(self._expected[queue] < ends[queue] for queue in self._queues):
            await self.poll()

    async def _begin(self, queue: QueueRef, before: QueueProgress) -> None:
        offset, known = await self._puller.position(queue), self._run.progress[queue]
        certain = not known.resetting and before.resets == known.resets
        if certain and not before.floor <= offset <= known.ceiling:
            text = f"at {offset} of {queue}, not from {before.floor} to {known.ceiling}"
            self._run.fail("begin", text)
        self._expected[queue] = offset

    async def _seek(self, queue: QueueRef) -> None:
        random, counts = self._random, self._run.counts
        read = [offset for place, offset in self._run.read if place == queue]
        target: SeekTarget = random.choice(
            ("begin", "end", AtTime(0), random.choice(read) if read else 0)
        )
        while True:
            try:
                self._expected[queue] = await self._served(self._puller.seek(queue, target))
            except LOST_CALL:
                counts["seeks that failed"] += 1
            else:
                break
        counts["seeks"] += 1

    async def _commit(self) -> None:
        asked = dict(self._expected)
        known = {queue: self._run.progress[queue] for queue in asked}
        for queue, offset in asked.items():
            known[queue].ceiling = max(known[queue].ceiling, offset)
        before = {queue: each.resets for queue, each in known.items()}
        outdated = [queue for queue in asked if self._learnt[queue][1] < before[queue]]
        call = self._puller.commit(None if self._random.random() < 0.5 else asked)
        try:
            await self._served(call)
        except LOST_CALL:
            self._run.counts["commits that failed"] += 1
            return
        except Fenced:
            self._run.counts["commits that were fenced"] += 1
            if all(each.begun <= self._learnt[queue][0] for queue, each in known.items()):
                self._run.fail("fenced", "without a reset")
            for queue in asked:
                await self._ask(queue, then_seek=True)
            return
        except BatonError as error:
            self._run.fail("commit", repr(error))
            return
        for queue in outdated:
            self._run.fail("fenced", f"a commit after a reset of {queue} is not refused")
        for queue, each in known.items():
            if each.resets == before[queue] and not each.resetting:
                each.floor = max(each.floor, asked[queue])
        self._run.counts["commits"] += 1

    async def _ask(self, queue: QueueRef, *, then_seek: bool = False) -> None:
        """Read what is committed; perhaps go on there."""
        while True:
            resets = self._run.progress[queue].resets
            try:
                committed = await self._served(self._puller.committed(queue))
            except LOST_CALL:
                self._run.counts["queries that failed"] += 1
                continue
            begun = self._run.progress[queue].begun
            if resets == self._run.progress[queue].resets:
                break
        self._run.judge_committed(queue, committed)
        if then_seek or begun > self._learnt[queue][0]:
            self._expected[queue] = await self._puller.seek(queue, committed or 0)
        self._learnt[queue] = resets, begun

    async def _served(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer of a call of the puller, which it repeats for some time."""
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        try:
            return await call
        except LOST_CALL as error:
            if clock() < begin_s + REPEAT_S:
                self._run.fail("repeated", f"{error!r} after {clock() - begin_s:.1f} s")
            raise


def play_pullers(seed: str, *, replicated: bool = False) -> PullerRun:
    """Play the run of a seed, with two brokers or with a replica set."""
    run, random = PullerRun(seed), Random(seed)
    run.group = random.choice((GROUP, GROUP, ""))
    broker = (
        BrokerSet(seed, random, STORAGE)
        if replicated
        else MemoryBroker(
            broker_count=BROKERS, seed=seed, faults=FAULTS, settings={"storage": STORAGE}
        )
    )
    run_virtual(_play(run, random, broker))
    return run


async def _play(run: PullerRun, random: Random, brokers: MemoryBroker) -> None:
    async with brokers as broker:
        queues: tuple[QueueRef, ...] = ()
        async with broker.admin() as admin:
            while not queues:
                queues = await _prepared(admin, broker)
        run.progress.update((queue, QueueProgress()) for queue in queues)
        end_s = asyncio.get_running_loop().time() + FAULTS_S
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_produce(run, broker, end_s))
            tasks.create_task(_disturb(run, broker, random, end_s))
            tasks.create_task(_reset(run, broker, Random(f"{run.seed}/operator"), end_s))
            for number in range(PROGRAMS):
                draws = Random(f"{run.seed}/{number}")
                tasks.create_task(_programs(run, broker, queues[number::PROGRAMS], draws, end_s))
        stored = {(one.queue, one.offset): int(one.body) for one in await broker.messages(TOPIC)}
        run.judge(stored)
        await _read_all(run, broker, queues, stored)
        if isinstance(broker, BrokerSet):
            run.counts["takeovers"] += broker.takeovers


async def _read_all(
    run: PullerRun,
    broker: MemoryBroker,
    queues: Sequence[QueueRef],
    stored: Mapping[tuple[QueueRef, int], int],
) -> None:
    """Read from what is committed to the ends: a puller gets everything without help."""
    ends = dict.fromkeys(queues, 0)
    for queue, offset in stored:
        ends[queue] = max(ends[queue], offset + 1)
    try:
        async with asyncio.timeout(END_S), _puller(run, broker) as puller:
            program = _Program(run, puller, queues, Random(run.seed))
            await program.start()
            await program.read_to(ends)
    except TimeoutError:
        run.fail("settled", f"the ends are not read after {END_S} s")


async def _programs(
    run: PullerRun, broker: MemoryBroker, queues: Sequence[QueueRef], random: Random, end_s: float
) -> None:
    """Run one program after the other; each ends after a while, at any step."""
    clock = asyncio.get_running_loop().time
    while clock() < end_s:
        with_timeout = asyncio.timeout(random.uniform(1, 15))
        try:
            async with with_timeout, _puller(run, broker) as puller:
                program = _Program(run, puller, queues, Random(random.getrandbits(32)))
                await program.start()
                while clock() < end_s:
                    await program.step()
        except TimeoutError:
            run.counts["program ends"] += 1


def _puller(run: PullerRun, broker: MemoryBroker) -> Puller:
    settings = PullerSettings(
        consume_from="first", prefetch_messages_max=50, pull_messages_max=20, pull_hold_ms=2_000
    )
    return broker.puller(run.group, settings)


async def _produce(run: PullerRun, broker: MemoryBroker, end_s: float) -> None:
    draws, number = Random(f"{run.seed}/producer"), 0
    async with broker.producer(PRODUCER) as producer:
        while asyncio.get_running_loop().time() < end_s:
            number += 1
            try:
                receipt = await producer.send(TOPIC, b"%d" % number)
            except BatonError:
                run.counts["send errors"] += 1
            else:
                run.sent[receipt.queue, receipt.offset] = number
            await asyncio.sleep(draws.choice((0, 0.02, 0.1)))


async def _disturb(run: PullerRun, broker: MemoryBroker, random: Random, end_s: float) -> None:
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(random.uniform(1, 8))
        if random.random() < 0.25:
            await broker.kill("offsets")
            run.counts["offsets kills"] += 1
        elif isinstance(broker, BrokerSet):
            run.counts[await broker.fail()] += 1
        else:
            await broker.kill(f"broker-{random.randrange(BROKERS)}")
            run.counts["broker kills"] += 1


async def _reset(run: PullerRun, broker: MemoryBroker, random: Random, end_s: float) -> None:
    """Reset a queue of the group now and then."""
    async with broker.admin() as admin:
        resets = Resets(admin)
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(random.uniform(0.5, 5))
            queue = random.choice(list(run.progress))
            progress, operation = run.progress[queue], Operation("operator", "a test")
            target, ceiling = random.randint(0, progress.ceiling), progress.ceiling
            progress.resetting, progress.ceiling = True, 0
            done = await _moved(run, resets, operation, queue, target)
            progress.resetting = False
            if done:
                progress.floor, progress.ceiling = target, max(target, progress.ceiling)
                progress.resets += 1
                run.counts["resets"] += 1
            else:
                progress.ceiling = max(ceiling, progress.ceiling)


async def _moved(
    run: PullerRun, resets: Resets, operation: Operation, queue: QueueRef, target: int
) -> bool:
    """Repeat a reset until it is answered; return whether it has moved the queue."""
    while True:
        try:
            plan = await resets.plan_offsets(GROUP, {queue: target}, operation.op_id)
            return bool((await resets.reset(plan, operation)).steps)
        except BatonError as error:
            if error.retry is Retry.NEVER:
                return False
            run.counts["resets without answer"] += 1
            await asyncio.sleep(0.5)


async def _prepared(admin: Admin, broker: MemoryBroker) -> tuple[QueueRef, ...]:
    """Create topic and group; return the queues, or none if a call failed.

    A service learns of a new group late if its connection to etcd is disturbed.
    """
    await broker.create_topic(TOPIC, QUEUES)
    try:
        await admin.update_group(GROUP, ownership="off")
        async with broker.puller(GROUP) as puller:
            queues = await puller.queues(TOPIC)
            await puller.assign(queues)
            await puller.poll(timeout_ms=2_000)
            await puller.commit(dict.fromkeys(queues, 0))
    except (*LOST_CALL, GroupNotFound, ModeChanged):
        return ()
    return queues
