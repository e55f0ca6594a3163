"""A run of two clusters that mirror each other, with faults drawn from a seed, and its checks.

Producers send numbers to both clusters: some at once, some in batches, some for later, some in a
transaction. A group handles them in one cluster, and is a standby in the other. After a while it
fails over, in some runs with a plan and in others without; then it goes on in the other cluster,
and may come back. An operator adds queues. Mirrors, members and services of both clusters are
killed and frozen, mirrors are cut off from a cluster, and by mistake two run at a time; the
networks lose, repeat and delay calls. In runs with replica sets, leaders of storage fail.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from random import Random

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.mirror import Mirror, begin_standby, fail_over
from batonmq.errors import BatonError, InvalidArgument
from batonmq_server.testing import run_virtual
from tests.simulation.broker_set import BrokerSet
from tests.simulation.member_processes import MemberProcesses, bury
from tests.simulation.mirror_checks import (
    Handling,
    Log,
    MirrorsRun,
    handled_numbers,
    number_of,
)
from tests.simulation.mirror_clusters import (
    BROKERS,
    FAULTS,
    GROUP,
    SLOW_S,
    TOPIC,
    Cluster,
    make_cluster,
    read_lag,
    read_log,
    read_progress,
    repeat,
)
from tests.simulation.mirror_processes import MirrorProcesses

SHOP, NAMES = "shop", ("east", "west")
QUEUES, QUEUES_MAX, MEMBERS, KEYS = 3, 6, 2, 7
FAULTS_S, SETTLE_S = 20, 300
HELD, FAILING, FAILS_TWICE = 41, 53, 17
"""Of so many numbers one is held by its handler, or fails, until the last turn; or fails twice."""


class Refused(Exception):
    """A number that is not booked."""


def play_mirrors(seed: str, *, replicated: bool = False) -> MirrorsRun:
    """Play the run of a seed, with clusters of two brokers or of one replica set."""
    run, random = MirrorsRun(seed), Random(seed)
    clusters = [
        Cluster(name, make_cluster(seed, random, name, replicated=replicated)) for name in NAMES
    ]
    run_virtual(_Scenario(run, random, clusters).play())
    return run


class _Scenario:
    def __init__(self, run: MirrorsRun, random: Random, clusters: list[Cluster]) -> None:
        self._run, self._random, self._clusters = run, random, clusters
        self._turn, self._turns = 0, random.choice((1, 2, 2, 3))
        self._both = random.random() < 0.5
        self._concurrency = random.choice((1, 20, 50))
        self._is_last, self._due_s = False, 0.0
        self._failures: defaultdict[int, int] = defaultdict(int)

    async def play(self) -> None:
        """Execute the run."""
        run = self._run
        east, west = self._clusters
        async with (
            east.broker,
            west.broker,
            east.broker.admin() as here,
            west.broker.admin() as there,
        ):
            east.admin, west.admin = here, there
            for source, target in ((east, west), (west, east)):
                source.members = self._members_of(source)
                source.mirrors = MirrorProcesses(
                    run, (source.broker, target.broker),
                    f"{source.name}-{target.name}", TOPIC, GROUP,
                )  # fmt: skip
            await east.broker.create_topic(TOPIC, QUEUES)
            try:
                await self._take_turns()
                await self._judge_all()
            except TimeoutError as error:
                run.fail("settled", f"{error} in turn {self._turn}")
            except BatonError as error:
                run.fail("error", f"{error!r} in turn {self._turn}")
            for one in self._clusters:
                await one.mirrors.end()
                await one.members.end()
                run.counts["starts that failed"] += one.members.failed_starts
                if isinstance(one.broker, BrokerSet):
                    run.counts["takeovers"] += one.broker.takeovers
        for one in self._clusters:
            for process in one.mirrors.processes:
                process.host.thaw()
        await bury(*(one.members for one in self._clusters))

    async def _take_turns(self) -> None:
        """Let the group work in one cluster after the other."""
        active, passive = self._clusters
        for turn in range(self._turns):
            self._turn, self._is_last = turn, turn == self._turns - 1
            await self._work(active, passive)
            if self._is_last:
                await self._finish(active, passive)
                return
            if self._random.random() < 0.6:
                await self._stop_with_a_plan(active, passive)
            else:
                await self._lose(active, passive)
            await self._fail_over(active, passive)
            active, passive = passive, active

    # ---- a turn

    async def _work(self, active: Cluster, passive: Cluster) -> None:
        """Send, handle and mirror, with faults."""
        run, random = self._run, self._random
        self._set_faults(on=True)
        active.members.start()
        active.members.start()
        if not self._turn:
            await self._until("group", lambda: self._has_group(active))
        active.mirrors.start()
        if self._both and self._turn:
            passive.mirrors.start()
        end_s = _time_s() + FAULTS_S
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(passive))
            async with asyncio.TaskGroup() as work:
                for cluster in (active, passive) if self._turn or self._both else (active,):
                    work.create_task(self._produce(cluster, end_s, busy=cluster is active))
                    draws = Random(f"{run.seed}/{self._turn}/{cluster.name}")
                    work.create_task(self._disturb_services(cluster, draws, end_s))
                mirrors = [active.mirrors]
                if self._both and self._turn:
                    mirrors.append(passive.mirrors)
                for one in mirrors:
                    draws = Random(f"{run.seed}/{self._turn}/{one._name}")
                    work.create_task(self._disturb_mirrors(one, draws, end_s))
                work.create_task(self._disturb_members(active.members, random, end_s))
                if self._turn == 0:
                    work.create_task(self._add_queues(active, passive, end_s))
            watch.cancel()
        self._set_faults(on=False)

    def _set_faults(self, *, on: bool) -> None:
        """Let the networks lose, repeat and delay calls, or not."""
        for one in self._clusters:
            network = one.broker._environment.network
            network.faults = FAULTS if on else one.broker._quiet

    async def _produce(self, cluster: Cluster, end_s: float, *, busy: bool) -> None:
        draws = Random(f"{self._run.seed}/{self._turn}/{cluster.name}/producer")
        settings = ProducerSettings(
            request_timeout_ms=2_000, compression=draws.choice(("none", "lz4", "zstd"))
        )
        if not busy and not self._turn:
            await self._until_there(cluster, end_s)
        producer = cluster.broker.producer(
            settings, group=SHOP, transaction_checker=self._run.state_of
        )
        async with producer, asyncio.TaskGroup() as tasks:
            while _time_s() < end_s:
                tasks.create_task(self._send(cluster.name, producer, draws))
                await asyncio.sleep(draws.choice((0.02, 0.1, 0.3) if busy else (0.1, 1)))

    async def _until_there(self, cluster: Cluster, end_s: float) -> None:
        """Wait until a mirror has created the topic."""
        while _time_s() < end_s:
            with suppress(BatonError):
                await cluster.admin.describe_topic(TOPIC)
                return
            await asyncio.sleep(0.5)

    async def _send(self, cluster: str, producer: Producer, draws: Random) -> None:
        run, kind = self._run, draws.random()
        numbers = [run.next_number() for _ in range(draws.randrange(2, 30) if kind < 0.2 else 1)]
        bodies = [b"%d " % number + bytes(draws.choice((0, 0, 2_000))) for number in numbers]
        key = f"key-{draws.randrange(KEYS)}" if draws.random() < 0.5 else None
        tag, keys = draws.choice(("", "paid")), [f"k{number}" for number in numbers]
        properties = {"number": str(numbers[0])} if draws.random() < 0.5 else {}
        run.produced[cluster].update(numbers)
        try:
            if kind < 0.2:
                for part in await producer.send_many(TOPIC, bodies, tag=tag, keys=keys):
                    first = part.first_index
                    run.confirmed[cluster].update(numbers[first : first + part.message_count])
                return
            if kind < 0.3:
                delay_ms = draws.randrange(1, 30_000)
                self._due_s = max(self._due_s, _time_s() + delay_ms / 1000 + SLOW_S)
                await producer.send(
                    TOPIC, bodies[0], tag=tag, properties=properties, delay_ms=delay_ms
                )
                run.counts["scheduled"] += 1
            elif kind < 0.4:
                async with producer.transaction(TOPIC, bodies[0], tag=tag, keys=keys):
                    await asyncio.sleep(draws.choice((0, 0.01, 1)))
                    if draws.random() < 0.2:
                        raise Refused
                    run.booked.update(numbers)
                run.counts["transactions"] += 1
            else:
                await producer.send(TOPIC, bodies[0], tag=tag, keys=keys, properties=properties,
                                    ordering_key=key)  # fmt: skip
            run.confirmed[cluster].update(numbers)
        except Refused:
            run.counts["refused"] += 1
        except BatonError:
            run.counts["send errors"] += 1
        run.refused.update({*numbers} - run.booked)

    async def _add_queues(self, active: Cluster, passive: Cluster, end_s: float) -> None:
        """Add queues in both clusters, mostly first in the target, as the page says."""
        draws = Random(f"{self._run.seed}/queues")
        if draws.random() < 0.4:
            return
        await asyncio.sleep(draws.uniform(1, FAULTS_S * 0.7))
        await self._until_there(passive, end_s)
        if _time_s() >= end_s:
            return
        count = draws.randrange(QUEUES + 1, QUEUES_MAX + 1)
        for cluster in (passive, active):
            await repeat(partial(cluster.admin.update_topic, TOPIC, queue_count=count))
        self._run.counts["added queues"] += count - QUEUES

    # ---- members

    def _members_of(self, cluster: Cluster) -> MemberProcesses:
        settings = ConsumerSettings(
            consume_from="first",
            concurrency=200,
            queue_concurrency=self._concurrency,
            pull_messages_max=20,
            commit_interval_ms=1_000,
            keep_alive_ms=2_000,
            drain_timeout_ms=500,
            handle_timeout_ms=None,
        )

        async def work(consumer: Consumer, draws: Random) -> None:
            async def handle(message: ReceivedMessage) -> None:
                await self._handle(cluster.name, message, draws)

            await consumer.run(handle)

        return MemberProcesses(
            cluster.broker, seed=self._run.seed, group=GROUP, topic=TOPIC, settings=settings,
            usual_count=MEMBERS, run=work,
        )  # fmt: skip

    async def _handle(self, cluster: str, message: ReceivedMessage, draws: Random) -> None:
        number, run = number_of(message), self._run
        await asyncio.sleep(draws.choice((0, 0, 0.01, 0.2)) * draws.random())
        if number not in run.handled_s and not self._is_last:
            if number % HELD == 0 and self._concurrency > 1:
                await asyncio.Event().wait()
            if number % FAILING == 0:
                run.sent_back[cluster].add(number)
                raise RuntimeError("fails until the last turn")
        if number % FAILS_TWICE == 0 and self._failures[number] < 2 and number not in run.handled_s:
            self._failures[number] += 1
            run.sent_back[cluster].add(number)
            raise RuntimeError("fails twice")
        run.handled_s.setdefault(number, _time_s())
        sent_back = message.origin.queue != message.queue
        run.calls[number].append(Handling(cluster, _time_s(), sent_back))

    # ---- faults

    async def _disturb_services(self, cluster: Cluster, random: Random, end_s: float) -> None:
        broker, counts = cluster.broker, self._run.counts
        while _time_s() < end_s:
            await asyncio.sleep(random.uniform(1, 8))
            kind = random.choice(("offsets", "nameserver", "lockmgr", "broker", "broker", "broker"))
            if kind == "broker" and isinstance(broker, BrokerSet):
                counts[await broker.fail()] += 1
                continue
            await broker.kill(f"broker-{random.randrange(BROKERS)}" if kind == "broker" else kind)
            counts[f"{kind} kills"] += 1

    async def _disturb_mirrors(
        self, mirrors: MirrorProcesses, random: Random, end_s: float
    ) -> None:
        while _time_s() < end_s:
            await asyncio.sleep(random.uniform(0.1, 4))
            self._run.counts[await mirrors.disturb(random)] += 1

    async def _disturb_members(
        self, members: MemberProcesses, random: Random, end_s: float
    ) -> None:
        while _time_s() < end_s:
            await asyncio.sleep(random.uniform(1, 8))
            self._run.counts[f"member {await members.disturb(random)}"] += 1

    # ---- progress

    async def _watch(self, standby: Cluster) -> None:
        """Note each change of the progress of the standby."""
        while True:
            with suppress(BatonError):
                progress = await read_progress(standby.admin)
                self._run.note_progress(_time_s(), progress)
            await asyncio.sleep(0.5)

    # ---- the end of a turn

    async def _stop_with_a_plan(self, active: Cluster, passive: Cluster) -> None:
        """Stop producers, then members, and wait until the standby has everything."""
        active.mirrors.settle()
        active.members.settle()
        async with self._watched(passive):
            await self._until("handled", lambda: self._is_handled(active))
            await active.members.end()
            await self._until("progress", lambda: self._is_mirrored(active, passive))
            await self._judge_status(active, passive)
        self._run.counts["planned failovers"] += 1
        if self._random.random() < 0.7:
            active.mirrors.kill_all()

    async def _lose(self, active: Cluster, passive: Cluster) -> None:
        """End everything that uses the active cluster, at any point of its work."""
        if not await self._has_standby(passive):
            active.mirrors.settle()
            await self._until("standby", lambda: self._has_standby(passive))
        for process in active.members.alive():
            process.kill()
        active.mirrors.kill_all()
        passive.mirrors.kill_all()
        self._run.counts["sudden failovers"] += 1

    async def _fail_over(self, active: Cluster, passive: Cluster) -> None:
        """Make the standby the group in use, and the other group its standby."""
        progress = await repeat(lambda: read_progress(passive.admin))
        await repeat(lambda: self._end_standby(passive))
        logs = {one.name: await read_log(one) for one in self._clusters}
        numbers = handled_numbers(progress, logs[passive.name]) & self._run.handled_s.keys()
        self._run.failovers.append((passive.name, _time_s(), numbers))
        self._run.counts["failed over"] += len(numbers)
        self._run.judge_seen(passive.name, logs[passive.name])
        for source, target in ((active, passive), (passive, active)):
            self._run.judge_copies(source.name, logs, target.name, all_=False)
        await repeat(lambda: begin_standby(active.admin, GROUP, by="operator"))
        if not self._both:
            await active.mirrors.end()

    async def _end_standby(self, passive: Cluster) -> None:
        """Fail over; a repeated call is rejected if the first one was not answered."""
        try:
            await fail_over(passive.admin, GROUP, by="operator")
        except InvalidArgument:
            if (await passive.admin.describe_group(GROUP)).ownership != "on":
                raise

    async def _finish(self, active: Cluster, passive: Cluster) -> None:
        """Wait until both clusters have everything, and everything is handled."""
        active.mirrors.settle()
        active.members.settle()
        await self._until("standby", lambda: self._has_standby(passive))
        passive.mirrors.settle()
        async with self._watched(passive):
            await self._until("copied", lambda: self._is_copied(passive, active))
            await self._until("handled", lambda: self._is_handled(active))
            await self._until("progress", lambda: self._is_mirrored(active, passive))
            await active.members.end()
            await self._judge_status(active, passive)
        self._run.judge_seen(passive.name, await read_log(passive))

    @asynccontextmanager
    async def _watched(self, standby: Cluster) -> AsyncIterator[None]:
        """Note the progress of the standby, and answer checks of transactions, during the block."""
        async with AsyncExitStack() as stack:
            for cluster in self._clusters:
                await stack.enter_async_context(
                    cluster.broker.producer(group=SHOP, transaction_checker=self._run.state_of)
                )
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            watch = tasks.create_task(self._watch(standby))
            yield
            progress = await repeat(lambda: read_progress(standby.admin))
            self._run.note_progress(_time_s(), progress)
            watch.cancel()

    async def _until(self, name: str, condition: Callable[[], Awaitable[str | bool]]) -> None:
        """Wait until a condition is true."""
        answer: str | bool = False
        end_s = _time_s() + SETTLE_S
        while answer is not True:
            if _time_s() > end_s:
                self._run.fail(name, f"{answer} in turn {self._turn}")
                raise TimeoutError(name)
            with suppress(BatonError):
                answer = await condition()
            await asyncio.sleep(5)

    async def _has_group(self, active: Cluster) -> bool:
        return bool((await active.admin.describe_group(GROUP)).members)

    async def _has_standby(self, passive: Cluster) -> bool:
        try:
            group = await passive.admin.describe_group(GROUP)
        except BatonError:
            return False
        return group.ownership == "off" and group.pause is not None

    async def _is_handled(self, active: Cluster) -> str | bool:
        """Return whether everything in the active cluster is handled, but what is held or fails."""
        run, name = self._run, active.name
        log = await read_log(active)
        stored = {number_of(one) for queue in log.values() for one in queue}
        wanted = run.confirmed[name] | (run.booked & run.produced[name])
        if missing := wanted - stored or _time_s() < self._due_s:
            return f"not stored yet: {missing}"
        left = stored - run.handled_s.keys()
        if not self._is_last:
            left = {n for n in left if n % FAILING and (n % HELD or self._concurrency == 1)}
        if left:
            return f"not handled: {sorted(left)[:9]} of {len(left)}"
        lag = {queue: offsets for queue, offsets in (await read_lag(active.admin)).items()
               if not self._is_expected(offsets, log.get(queue))}  # fmt: skip
        return f"not acknowledged: {lag}" if lag else True

    def _is_expected(self, offsets: list[int], log: Sequence[ReceivedMessage] | None) -> bool:
        return log is not None and all(
            number_of(log[offset]) not in self._run.handled_s for offset in offsets
        )

    async def _is_copied(self, source: Cluster, target: Cluster) -> str | bool:
        produced = self._run.produced[source.name]
        here, there = await read_log(source), await read_log(target)
        copied = {number_of(one) for queue in there.values() for one in queue}
        missing = {number_of(one) for queue in here.values() for one in queue} & produced - copied
        return f"not copied: {sorted(missing)[:9]} of {len(missing)}" if missing else True

    async def _is_mirrored(self, active: Cluster, passive: Cluster) -> str | bool:
        """Return whether the standby has all messages and all progress."""
        copied = await self._is_copied(active, passive)
        if copied is not True:
            return copied
        here, there = await read_log(active), await read_log(passive)
        claimed = handled_numbers(await read_progress(passive.admin), there)
        both = {number_of(one) for queue in here.values() for one in queue}
        both &= {number_of(one) for queue in there.values() for one in queue}
        missing = (both & self._run.handled_s.keys()) - claimed
        return f"not translated: {sorted(missing)[:9]} of {len(missing)}" if missing else True

    # ---- what is judged at an end

    async def _judge_status(self, active: Cluster, passive: Cluster) -> None:
        """Check what the status says of a mirror that has copied and translated everything."""
        mirror = Mirror(active.admin, passive.admin, [TOPIC], [GROUP])
        status = await repeat(mirror.status)
        while status.problems:
            status = await repeat(mirror.status)
        log, progress = await read_log(passive), await repeat(lambda: read_progress(passive.admin))
        count = sum(map(len, log.values())) - len(handled_numbers(progress, log))
        (group,) = status.groups
        if (group.state, group.target_lag) != ("standby", count) or status.problems:
            self._run.fail("status", f"{group} with {status.problems}, and {count} are left")

    async def _judge_all(self) -> None:
        run = self._run
        for one in self._clusters:
            await one.mirrors.end()
        logs = {one.name: await read_log(one) for one in self._clusters}
        for one in self._clusters:
            run.judge_confirmed(one.name, logs[one.name])
        for source, target in (self._clusters, self._clusters[::-1]):
            run.judge_copies(source.name, logs, target.name, all_=True)
            await self._judge_maps(source, target, logs)
        run.judge_calls()
        run.judge_handled(logs.values())

    async def _judge_maps(self, source: Cluster, target: Cluster, logs: Mapping[str, Log]) -> None:
        """Check the maps of all mirrors, and that a new one copies nothing."""
        mirror = Mirror(source.admin, target.admin, [TOPIC], [GROUP])
        report = await mirror.run(once=True)
        if report.copied_count or report.problems or report.lag:
            self._run.fail("position", f"{report} when all was copied")
        for one in mirror._queues:
            await one.open(0)
        for each in (*source.mirrors.mirrors, mirror):
            for one in each._queues:
                here, there = logs[source.name][one.source], logs[target.name][one.target]
                self._run.judge_map(f"{one.source} forward", one.forward, here, there)
                self._run.judge_map(f"{one.source} own", one.own, here, there)


def _time_s() -> float:
    return asyncio.get_running_loop().time()
