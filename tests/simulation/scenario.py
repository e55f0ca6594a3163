"""One run: a cluster starts, things happen to it, then it is left in peace and must finish."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.aio import unless
from batonmq.common.errors import BatonError
from batonmq.common.rpc import from_rpc_error
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.session import ConsumerSettings
from batonmq.core.records import Message
from batonmq.directory import CALL_TIMEOUT_S, Directory
from batonmq.producer import Producer, ProducerSettings
from tests.simulation.checker import Violation
from tests.simulation.cluster import (
    GROUP,
    NAMESERVERS,
    TOPIC,
    ConsumerProcess,
    Process,
    Service,
    ServiceProcess,
    World,
    services,
)
from tests.simulation.options import Options
from tests.support.network import Faults
from tests.support.virtual_time import run_virtual

TAGS = ("a", "b", "c")
SETTLE_S = 240
"""Once faults have ceased, everything must be done within this time."""
STOP_S = 30
"""A service that was told to stop is killed after this time, as a supervisor does."""
MEMBERS_MAX = 6
_Later = Coroutine[Any, Any, None] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to.

    Attributes:
        counts: How often which kind of event happened.
        lines: The transcript, as far as it was kept.
        violation: The first broken property.
    """

    seed: str
    options: Options
    counts: Mapping[str, int]
    lines: list[str]
    violation: Violation | None

    def check(self) -> None:
        """Raise the violation, with what is needed to play it again."""
        if self.violation is not None:
            raise Violation(f"seed {self.seed}, {self.options}\n{self.violation}")


def play(seed: str, options: Options, *, kept_max: int | None = 4_000) -> Outcome:
    """One run in virtual time.

    The garbage collector rests meanwhile: it would end abandoned generators at times of its own.
    """
    gc.disable()
    try:
        return run_virtual(_play(seed, options, kept_max))
    finally:
        gc.enable()


async def _play(seed: str, options: Options, kept_max: int | None) -> Outcome:
    world = World(seed, kept_max=kept_max)
    run = Run(world, options)
    logging.getLogger().addHandler(world.trace)
    try:
        await run.play()
    finally:
        logging.getLogger().removeHandler(world.trace)
        world.checker.watching = False
        counts = world.checker.counts + world.network.counts + run.counts
        lines = world.trace.lines()
        await _end(world)
    return Outcome(seed, options, counts, lines, world.checker.violation)


async def _end(world: World) -> None:
    """Unwind every process, also those that were killed: Python wants its tasks to end."""
    world.network.end()
    for host in world.hosts:
        host.thaw()
    this = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() if task is not this]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=5)


class Run:
    """The director of one run."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.options = world, options
        self.counts: Counter[str] = Counter()
        self._random = world.random("scenario")
        self._services = services(world, self._random)
        self._running: dict[str, ServiceProcess] = {}
        self._members: dict[str, ConsumerProcess] = {}
        self._lives: Counter[str] = Counter()
        self._later: list[asyncio.Task[None]] = []
        self._names = self._sent_count = 0
        self._unsettled: dict[str, None] = {}
        self._acked: dict[str, object] = {}
        self._sending: list[asyncio.Task[None]] = []
        self._producing = Process(world, "producer", 0)
        self._producer: Producer | None = None
        self._settings = ConsumerSettings(
            consume_from="first",
            queue_concurrency=options.parallel,
            buffer_messages_max=20,
            pull_messages_max=8,
            pull_hold_ms=5_000,
            span_max=40,
            commit_interval_ms=1_000,
            keep_alive_ms=2_000,
            drain_timeout_ms=2_000,
        )

    async def play(self) -> None:
        """The whole run; ends early at the first violation."""
        async with asyncio.TaskGroup() as tasks:
            await unless(self.world.checker.broken, self._direct(tasks))
            for task in self._later:
                task.cancel()

    # ---- what happens

    async def _direct(self, tasks: asyncio.TaskGroup) -> None:
        for service in self._services:
            self._start(service)
        self._producing.run(self._run_producer)
        await self._until(lambda: self._producer is not None, 60)
        for _ in range(self.options.consumers):
            self._join()
        self._burst()
        self.world.network.faults = self.options.faults
        actions = self._actions()
        for _ in range(self.options.steps):
            await asyncio.sleep(self._random.choice([0.01, 0.3, 2, 6]) * self._random.random())
            action = self._random.choices(list(actions), list(actions.values()))[0]
            later = action()
            if later is not None:
                self._later.append(tasks.create_task(later))
        await self._settle()

    def _actions(self) -> dict[Callable[[], _Later], int]:
        """What may happen, by weight; some of it goes on for a while."""
        options = self.options
        return {
            self._burst: 8,
            self._join: options.joins,
            self._leave: options.leaves,
            self._kill: options.kills,
            self._pause: options.pauses,
            self._kill_service: options.service_kills,
            self._pause_service: options.service_pauses,
            self._restart_service: options.service_restarts,
            self._cut: options.cuts,
            self._deafen: options.deaf,
            self._jump: options.jumps,
        }

    async def _settle(self) -> None:
        """Faults cease; what is left to be done gets done (L1, L2)."""
        world = self.world
        world.trace.note("director", "faults cease")
        world.network.faults = Faults()
        world.network.cut.clear()
        for process in (*self._running.values(), *self._members.values()):
            if process.alive:
                process.thaw()
        for service in self._services:
            if not self._running[service.name].alive:
                self._start(service)
        if not self._present():
            self._join()
        await self._until(self._done, SETTLE_S)
        world.checker.check_complete(self._acked)

    def _done(self) -> bool:
        return not self._unsettled and self.world.checker.complete()

    async def _until(self, condition: Callable[[], object], timeout_s: float) -> None:
        end_s = self.world.loop.time() + timeout_s
        while not condition() and self.world.loop.time() < end_s:  # noqa: ASYNC110  time costs nothing
            await asyncio.sleep(0.1)

    # ---- messages

    async def _run_producer(self) -> None:
        """The life of the producer: it makes topic and group, and sends what it is asked to."""
        surroundings = self._producing.surroundings()
        directory = Directory(NAMESERVERS, surroundings.random, surroundings.connect)
        topic = pb.CreateTopicRequest(topic=TOPIC, queue_count=self.options.queues)
        strategy = pb.Strategy.Value(f"STRATEGY_{self.options.strategy}")
        group = pb.UpdateGroupRequest(group=GROUP, strategy=strategy)
        while True:
            try:
                await directory.nameserver().CreateTopic(topic, timeout=CALL_TIMEOUT_S)
                await directory.nameserver().UpdateGroup(group, timeout=CALL_TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                await directory.pause(from_rpc_error(error), 0)
        settings = ProducerSettings(request_timeout_ms=3_000, batch_messages_max=4)
        async with Producer(NAMESERVERS, settings, surroundings=surroundings) as producer:
            self._producer = producer
            await asyncio.Event().wait()

    def _burst(self) -> None:
        """Some messages more."""
        count = self._random.randint(1, 12)
        bodies = [f"m{self._sent_count + index}" for index in range(count)]
        self._sent_count += count
        self._unsettled.update(dict.fromkeys(bodies))
        tags = [self._random.choice(TAGS) for _ in bodies]
        sending = self._send(dict(zip(bodies, tags, strict=True)))
        self._sending.append(self._producing.host.spawn(sending))

    async def _send(self, messages: Mapping[str, str]) -> None:
        assert self._producer is not None
        sent = {
            body: await self._producer.submit(TOPIC, Message(body.encode(), tag))
            for body, tag in messages.items()
        }
        for body, pending in sent.items():
            try:
                await pending
                self._acked[body] = True
            except BatonError as error:
                self.world.trace.note("producer", f"{body} may be lost", error)
            del self._unsettled[body]

    async def _handle(self, process: Process, _: ReceivedMessage) -> None:
        random = process.random
        if random.random() < self.options.slow_handlers:
            self.counts["slow handlers"] += 1
            await asyncio.sleep(random.uniform(1, 6))
        else:
            await asyncio.sleep(random.choice([0.002, 0.02, 0.2]) * random.random())

    # ---- members

    def _present(self) -> list[ConsumerProcess]:
        """Members that run and do not mean to leave."""
        return [
            member
            for member in self._members.values()
            if member.alive and not member.frozen and not member.stopping.is_set()
        ]

    def _join(self, name: str = "") -> None:
        if len(self._present()) >= MEMBERS_MAX:
            return
        if not name:
            self._names += 1
            name = f"c{self._names}"
        life = self._lives[name] = self._lives[name] + 1
        self._members[name] = ConsumerProcess(self.world, name, life, self._settings, self._handle)
        self._note(f"{name} joins", "joins")

    def _leave(self) -> None:
        if len(self._present()) > 1:
            member = self._random.choice(self._present())
            member.stop()
            self._note(f"{member.name} leaves", "leaves")

    def _kill(self) -> _Later:
        if not self._present():
            return None
        member = self._random.choice(self._present())
        member.kill(noticed=self._random.random() < 0.7)
        self.world.checker.crashed(member.name)
        self._note(f"{member.name} is killed", "kills")
        return self._come_back(member.name)

    async def _come_back(self, name: str) -> None:
        name = self._random.choice([name, ""])
        await asyncio.sleep(self._random.choice([0.1, 3, 20]) * self._random.random())
        self._join(name)

    def _pause(self) -> _Later:
        present = self._present()
        return self._paused(self._random.choice(present), "pauses") if present else None

    async def _paused(self, process: Process, kind: str) -> None:
        process.freeze()
        self._note(f"{process.name} is frozen", kind)
        await asyncio.sleep(self._time_s())
        if self._running.get(process.name) in (None, process):
            self._note(f"{process.name} goes on", "")
        process.thaw()

    # ---- services

    def _start(self, service: Service) -> None:
        self._lives[service.name] += 1
        life = self._lives[service.name]
        self._running[service.name] = ServiceProcess(self.world, service, life)
        self._note(f"{service.name} starts", "")

    def _up(self) -> list[ServiceProcess]:
        return [
            process
            for process in self._running.values()
            if process.alive and not process.frozen and not process.stopping.is_set()
        ]

    def _kill_service(self) -> _Later:
        if not self._up():
            return None
        process = self._random.choice(self._up())
        process.kill(noticed=self._random.random() < 0.7)
        self._note(f"{process.name} is killed", "service kills")
        if process.service.kind == "storage":
            self._crash_disk()
        return self._start_again(process)

    def _crash_disk(self) -> None:
        disk = self.world.storage_disk
        if self.options.power_cuts and self._random.random() < 0.5:
            survives = self._random.choice([0.0, 0.5, 1.0])
            self.world.storage_disk = disk.power_cut(
                lambda size: (
                    size if self._random.random() < survives else self._random.randint(0, size)
                )
            )
            self.counts["power cuts"] += 1
        else:
            self.world.storage_disk = disk.killed()

    async def _start_again(self, process: ServiceProcess) -> None:
        await asyncio.sleep(self._random.choice([0.2, 2, 10]) * self._random.random())
        if self._running[process.name] is process:
            self._start(process.service)

    def _pause_service(self) -> _Later:
        up = self._up()
        return self._paused(self._random.choice(up), "service pauses") if up else None

    def _restart_service(self) -> _Later:
        if not self._up():
            return None
        process = self._random.choice(self._up())
        process.stop()
        self._note(f"{process.name} is stopped", "service restarts")
        return self._replace(process)

    async def _replace(self, process: ServiceProcess) -> None:
        await self._until(lambda: not process.alive, STOP_S)
        if process.alive:
            process.kill()
            if process.service.kind == "storage":
                self._crash_disk()
        await self._start_again(process)

    # ---- the rest

    def _cut(self) -> _Later:
        names = ["etcd", *self._running, *self._members]
        one = self._random.choice(names)
        others = names if self._random.random() < 0.3 else [self._random.choice(names)]
        pairs = {(one, other) for other in others if other != one}
        if self._random.random() < 0.7:
            pairs |= {(other, one) for one, other in pairs}
        return self._apart(one, pairs)

    def _deafen(self) -> _Later:
        if not self._present():
            return None
        member = self._random.choice(self._present()).name
        unheard = ("lock-a", "lock-b", *self._random.choice([(), ("ns-a", "ns-b")]))
        pairs = {(member, one) for one in unheard} | {(one, member) for one in unheard}
        return self._apart(member, pairs)

    async def _apart(self, one: str, pairs: set[tuple[str, str]]) -> None:
        self.world.network.cut |= pairs
        self._note(f"{one} is cut off {sorted(pairs)}", "cuts")
        await asyncio.sleep(self._time_s())
        self.world.network.cut -= pairs

    def _jump(self) -> None:
        process = self._random.choice([*self._running.values(), *self._members.values()])
        process.clock.ahead_ms += self._random.choice([-1, 1]) * self._random.randint(1, 7_200_000)
        self._note(f"wall clock of {process.name} jumps", "jumps")

    def _time_s(self) -> float:
        """How long a pause or cut lasts; short ones are as likely as long ones."""
        longest = self._random.choice([500, 4_000, self.options.pause_ms_max])
        return min(longest, self.options.pause_ms_max) * self._random.uniform(0.3, 1) / 1000

    def _note(self, what: str, kind: str) -> None:
        self.world.trace.note("director", what)
        if kind:
            self.counts[kind] += 1
