"""A run in which groups live, are deleted, and begin again under the same name, and its checks.

A topic has numbers. A life of a group begins at the first message. Its members handle numbers until
they stop or are killed; then the group is deleted. Offsets forgets the group soon after that, and
the lock manager removes its locks, while calls of the last life are still on their way: the network
is slow, the services are killed, and the last commits of each life come once more in the next one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import answered
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, GroupNotFound
from batonmq_server.offsets.codec import META
from batonmq_server.offsets.persistence import HOLDS
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.other_tasks import cancel_other_tasks
from tests.simulation.run_record import RunRecord
from tests.support.conditions import until

TOPIC, QUEUES, NUMBERS = "numbers", 3, 60
GROUPS: dict[str, Literal["on", "off"]] = {"owners": "on", "sharers": "off"}
"""The ownership of each group."""
FAULTS_S, END_S = 60, 300
FAULTS = Faults(loss=0.01, slow=0.01, slow_ms_max=20_000)
"""Late calls arrive in a later life of their group."""
SETTINGS = {
    "nameserver": {"member_lease_ms": 3_000, "heartbeat_interval_ms": 1_000},
    "lockmgr": {"lock_lease_ms": 5_000},
}
CONSUMER = ConsumerSettings(
    consume_from="first",
    queue_concurrency=2,
    pull_messages_max=5,
    commit_interval_ms=300,
    keep_alive_ms=2_000,
    drain_timeout_ms=500,
)


@dataclass(slots=True)
class LivesRun(RunRecord):
    """What is known of a run outside the cluster.

    Attributes:
        handled: Numbers that each group has handled in its present life, each with whether it was
            flagged as redelivered, once per call.
        granted: Member that was granted a token, by group, queue and token.
    """

    handled: dict[str, defaultdict[int, list[bool]]] = field(default_factory=dict)
    granted: dict[tuple[str, QueueRef, int], str] = field(default_factory=dict)

    def note_handled(self, group: str, message: ReceivedMessage) -> None:
        """Note that a handler has got a message."""
        self.handled[group][int(message.body)].append(message.redelivered)

    def note_granted(self, group: str, member: str, event: OwnershipEvent) -> None:
        """Check that no token of a queue is used twice (V2)."""
        if event.kind != "granted" or not event.token:  # without ownership it is 0
            return
        self.counts["grants"] += 1
        place = group, event.queue, event.token
        if self.granted.setdefault(place, member) != member:
            text = f"{place} belongs to {self.granted[place]} and to {member}"
            self.fail("token", text)

    def begin_life(self, group: str) -> None:
        """Begin a life: every number is to be handled anew."""
        self.handled[group] = defaultdict(list)

    async def judge_life(self, group: str) -> None:
        """Wait until a life has come to the end of the topic, and check it."""
        handled = self.handled[group]
        try:
            await until(lambda: len(handled) == NUMBERS, timeout_s=END_S)
        except TimeoutError:
            missing = sorted(set(range(NUMBERS)) - handled.keys())
            self.fail("handled", f"{group} has not handled {missing} in this life")
        for number, flags in handled.items():
            if GROUPS[group] == "on" and flags.count(False) > 1:
                self.fail("once", f"{number} came {flags} to {group}")
        self.counts["lives judged"] += 1


class _Life:
    """One life of a group: its members, and its end."""

    def __init__(self, run: LivesRun, broker: MemoryBroker, group: str, number: int) -> None:
        self._run, self._broker, self._group, self._number = run, broker, group, number
        self._members: list[SimulatedProcess] = []

    def join(self) -> None:
        """Start a member."""
        name = f"{self._group}-{self._number}-{len(self._members)}"
        process = SimulatedProcess(self._broker._environment, name, 0)
        self._members.append(process)
        process.run(partial(self._consume, process, Random(f"{self._run.seed}/{name}")))

    async def _consume(self, process: SimulatedProcess, draws: Random) -> None:
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(draws.choice((0, 0, 0.01, 0.5)) * draws.random())
            self._run.note_handled(self._group, message)

        while not process.stopping.is_set():
            consumer = Consumer(
                self._broker.nameserver,
                self._group,
                {TOPIC: "*"},
                CONSUMER,
                client_id=process.name,
                on_ownership=partial(self._run.note_granted, self._group, process.name),
                environment=process.client_environment(),
            )
            try:
                async with consumer, asyncio.TaskGroup() as tasks:
                    tasks.create_task(_stop(process, consumer))
                    await consumer.run(handle)
                    process.stopping.set()
            except BatonError:
                self._run.counts["starts that failed"] += 1

    async def end(self, draws: Random) -> None:
        """Stop the members, or kill them."""
        for process in self._members:
            if draws.random() < 0.5:
                process.kill(noticed=draws.random() < 0.7)
                self._run.counts["kills"] += 1
            else:
                process.stop()
                await process.ended()

    def bury(self) -> None:
        """Thaw the hosts of killed members, so that the loop can close."""
        for process in self._members:
            process.host.thaw()


async def _stop(process: SimulatedProcess, consumer: Consumer) -> None:
    await process.stopping.wait()
    consumer.stop()


def play_lives(seed: str) -> LivesRun:
    """Play the run of a seed."""
    run = LivesRun(seed)
    run_virtual(_play(run, MemoryBroker(seed=seed, faults=FAULTS, settings=SETTINGS)))
    return run


async def _play(run: LivesRun, brokers: MemoryBroker) -> None:
    lives: list[_Life] = []
    async with brokers as broker:
        await broker.create_topic(TOPIC, QUEUES)
        async with broker.producer() as producer:
            for number in range(NUMBERS):
                await producer.send(TOPIC, b"%d" % number)
        async with broker.admin() as admin, asyncio.TaskGroup() as tasks:
            end_s = asyncio.get_running_loop().time() + FAULTS_S
            for group in GROUPS:
                history = _History(run, broker, admin, group, tasks)
                tasks.create_task(history.play(end_s, lives))
            tasks.create_task(_disturb(run, broker, end_s))
        await _check_nothing_is_left(run, broker)
        for life in lives:
            life.bury()
    await cancel_other_tasks()


@dataclass(slots=True)
class _History:
    """A group that lives again and again."""

    run: LivesRun
    broker: MemoryBroker
    admin: Admin
    group: str
    tasks: asyncio.TaskGroup

    async def play(self, end_s: float, lives: list[_Life]) -> None:
        """Play its lives until a time; the last one comes to the end of the topic.

        Args:
            lives: Gets each of them.
        """
        run, group = self.run, self.group
        draws, last = Random(f"{run.seed}/{group}"), False
        run.begin_life(group)
        while not last:
            last = asyncio.get_running_loop().time() >= end_s
            await _repeat(lambda: self.admin.update_group(group, ownership=GROUPS[group]))
            life = _Life(run, self.broker, group, len(lives))
            lives.append(life)
            for _ in range(draws.randrange(1, 3)):
                life.join()
            if last or draws.random() < 0.4:
                await run.judge_life(group)
            else:
                await asyncio.sleep(draws.uniform(0.5, 6))
            await life.end(draws)
            late = await _last_commits(self.admin, group)
            await _delete(self.admin, group)
            run.begin_life(group)
            run.counts["lives"] += 1
            await asyncio.sleep(draws.choice((0, 2, 12)) * draws.random())
            if late and not last:
                self.tasks.create_task(self._send_late(late, draws.uniform(0, 6)))

    async def _send_late(self, items: list[pb.CommitItem], after_s: float) -> None:
        """Send the commits of the last life in the next one; offsets refuses them."""
        await asyncio.sleep(after_s)
        try:
            stub = await self.admin.directory.offsets(self.group)
            request = pb.CommitRequest(items=items)
            answer = await answered(stub.Commit(request, timeout=CALL_TIMEOUT_S))
            self.run.counts["late commits"] += len(answer.outcomes)
        except BatonError:
            self.run.counts["late commits that failed"] += 1


async def _last_commits(admin: Admin, group: str) -> list[pb.CommitItem]:
    """Return the commits by which a life has come to its progress."""
    request, items = pb.QueryGroupRequest(group=group), list[pb.CommitItem]()

    async def query() -> None:
        stub = await admin.directory.offsets(group)
        answer = await answered(stub.QueryGroup(request, timeout=CALL_TIMEOUT_S))
        for one in answer.queues:
            token = one.token if GROUPS[group] == "on" else 0
            item = pb.CommitItem(
                queue=one.queue,
                token=token,
                reset_epoch=one.reset_epoch,
                committed_offset=one.committed_offset,
            )
            items.append(item)

    await _repeat(query)
    return items


async def _delete(admin: Admin, group: str) -> None:
    async def delete() -> None:
        try:
            await admin.delete_group(group)
        except GroupNotFound:
            return  # the answer of an earlier call was lost

    await _repeat(delete)


async def _repeat(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call until it is answered."""

    async def done() -> bool:
        try:
            await call()
        except BatonError:
            await asyncio.sleep(0.2)
            return False
        return True

    await until(done, timeout_s=END_S)


async def _disturb(run: LivesRun, broker: MemoryBroker, end_s: float) -> None:
    draws = Random(f"{run.seed}/services")
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(draws.uniform(2, 12))
        kind = draws.choice(("offsets", "offsets", "lockmgr", "nameserver"))
        await broker.kill(kind)
        run.counts[f"{kind} kills"] += 1


async def _check_nothing_is_left(run: LivesRun, broker: MemoryBroker) -> None:
    """All groups are deleted: etcd has no lock, and offsets nothing but the floor."""
    environment = broker._environment

    def left() -> list[object]:
        locks = [one.key for one in environment.etcd.get_tree("locks")]
        (disk,) = environment.offsets_disks.values()
        return locks + [key for key, _ in disk.read() if not key.startswith(META) or HOLDS in key]

    try:
        await until(lambda: not left(), timeout_s=END_S)
    except TimeoutError:
        run.fail("left", f"{left()}")
