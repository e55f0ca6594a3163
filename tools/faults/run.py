"""Run a real cluster under load, inject the scheduled faults, and collect the history."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from batonmq_server.local.child_process import NotReady
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.cluster_state import first_problem, leader_process
from batonmq_server.local.layout import ClusterOptions, highly_available
from batonmq_server.local.process_host import LOOPBACK, ProcessHost
from tests.support.cluster import REPO
from tests.support.member import now_us
from tools.faults.fault_injector import FaultInjector, replica_sets
from tools.faults.fault_schedule import (
    ETCD,
    GATEWAY,
    MEMBER,
    NETWORK,
    ONE_WAY,
    POWER,
    Fault,
    FaultGroup,
    FaultSchedule,
)
from tools.faults.history import FaultRecord, History, LoggedMessage
from tools.faults.load import HASTY, PATIENT, Load
from tools.faults.member import GROUP, TOPIC
from tools.faults.member_pool import MemberPool, member_pool
from tools.faults.named_schedules import NamedSchedule
from tools.faults.network import Network
from tools.faults.power import PowerDisks
from tools.faults.progress_monitor import ProgressMonitor, difference, read_all
from tools.faults.remote_clients import GATEWAY_SETTINGS, RemoteClients

QUEUES, GATEWAYS = 8, 2
SEGMENT_BYTES = 1024 * 1024
"""Small, so that logs roll often."""
PROCESS_FAULTS = "process-faults"
_HEAL_S = 90.0
_DONE_S = 120.0
_LOOK_S = 0.1
_WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The duration and the faults of a run.

    Attributes:
        duration_s: No fault starts later than this after the first one.
        groups: These faults instead of those drawn from the seed.
        schedule: Its faults and its cluster, instead of those drawn from all classes.
        churns: Whether members join and leave during the run.
    """

    seed: int
    duration_s: float
    groups: tuple[FaultGroup, ...] = ()
    schedule: NamedSchedule | None = None
    churns: bool = True


@dataclass(slots=True)
class FaultRun:
    """The cluster and its members while faults are injected."""

    cluster: LocalCluster
    admin: Admin
    pool: MemberPool
    injector: FaultInjector
    say: Callable[[str], None]
    sets: dict[str, list[str]]
    remote: RemoteClients | None
    records: list[FaultRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def make(self, group: FaultGroup) -> bool:
        """Inject the faults of a group; return whether the cluster has healed in time."""
        victims = [(one, await self._victim(one)) for one in group.faults]
        what = ", ".join(
            " ".join(filter(None, (one.kind, name, one.target))) for one, name in victims
        )
        self.say(f"{what} for {max(one.hold_ms for one in group.faults)} ms")
        kinds = [(one.kind, re.split("[ -]", one.part)[0]) for one in group.faults]
        record = FaultRecord(what=what, kinds=kinds, begin_us=now_us())
        self.records.append(record)
        async with asyncio.TaskGroup() as tasks:
            for fault, name in victims:
                tasks.create_task(self.injector.inject(fault, name))
        record.end_us = now_us()
        healed = await _within(_HEAL_S, self._is_whole)
        if not healed:
            still = await first_problem(self.admin, self.cluster)
            self.problems.append(f"not healed {_HEAL_S:g} s after: {what}; {still}")
            return False
        record.healed_us = now_us()
        await asyncio.sleep(group.rest_ms / 1000)
        return True

    async def _victim(self, fault: Fault) -> str:
        """Return the name of the process that is now at the rank of the part."""
        if fault.part == NETWORK:
            return ""
        if fault.kind == POWER:
            return fault.part
        if fault.kind == ONE_WAY and fault.part != MEMBER:
            return fault.part
        if fault.part == MEMBER:
            await _within(_HEAL_S, lambda: self.pool.pick(0) is not None)
            member = self.pool.pick(fault.rank)
            return member.client_id if member else ""
        names = self.sets[fault.part]
        if fault.part != ETCD:
            leaders = await self.leader(fault.part)
            names = [*leaders, *(name for name in names if name not in leaders)]
        return names[fault.rank % len(names)]

    async def leader(self, part: str) -> list[str]:
        """Return the name of the leader of a part; empty without a leader."""
        service, _, broker = part.partition(" ")
        with suppress(BatonError):
            name = await leader_process(self.admin, self.cluster, service, broker)
            return [name] if name is not None else []
        return []

    async def _is_whole(self) -> bool:
        """Return whether every process serves, each set has a leader and is in sync."""
        await self._restart_ended()
        return not await first_problem(self.admin, self.cluster)

    async def _restart_ended(self) -> None:
        """Restart every process that has ended by itself, and note the problem."""
        for endpoint in self.cluster.endpoints():
            if endpoint.pid is None:
                self.problems.append(f"{endpoint.name} ended by itself")
                with suppress(NotReady):
                    await self.cluster.start(endpoint.name)


async def play(
    plan: RunPlan, folder: Path, say: Callable[[str], None], network: Network | None = None
) -> History:
    """Run the plan in a folder of its own; return the history.

    Args:
        folder: `PROCESS_FAULTS` in it holds the fault file of each process.
        network: Gives each process an address; None: all are on loopback and cannot be cut.
    """
    (folder / PROCESS_FAULTS).mkdir(parents=True)
    place = network.place if network is not None else lambda _: LOOPBACK
    options = _options(place, plan)
    with ExitStack() as exits:
        disks = None
        if plan.schedule is not None and plan.schedule.power:
            names = [*_etcds(options), *options.names_of("storage"), *options.names_of("offsets")]
            folders = {name: folder / "cluster" / name for name in names}
            disks = exits.enter_context(PowerDisks(folder / "images", folders))
        return await _play(plan, options, folder, say, network, disks)


async def _play(
    plan: RunPlan,
    options: ClusterOptions,
    folder: Path,
    say: Callable[[str], None],
    network: Network | None,
    disks: PowerDisks | None,
) -> History:
    place = network.place if network is not None else lambda _: LOOPBACK
    async with LocalCluster(folder / "cluster", options, report=say) as cluster:
        say("the cluster serves")
        load, monitor = Load(cluster.nameserver), ProgressMonitor(cluster.nameserver)
        async with (
            Admin(cluster.nameserver) as admin,
            member_pool(cluster.nameserver, folder, place) as pool,
        ):
            await admin.create_topic(TOPIC, QUEUES)

            async def serves_since(at_us: int) -> bool:
                return _serves_since(load, monitor, at_us)

            faults = folder / PROCESS_FAULTS
            injector = FaultInjector(cluster, pool, network, faults, serves_since, disks)
            sets = replica_sets(cluster)
            remote = _remote_clients(cluster, load)
            run = FaultRun(cluster, admin, pool, injector, say, sets, remote)
            history = History(begin_us=now_us())
            async with asyncio.TaskGroup() as tasks:
                monitoring = [
                    tasks.create_task(one())
                    for one in (monitor.sample_progress, monitor.find_stuck_queues)
                ]
                if remote is not None:
                    monitoring.append(tasks.create_task(remote.consume()))
                await _work(plan, run, load)
                say("no more faults; waiting until all messages are handled")
                if not await _within(_DONE_S, lambda: _is_done(run)):
                    run.problems.append(
                        f"some messages were not handled {_DONE_S:g} s after the last fault"
                    )
                history.end_us = now_us()
                for task in monitoring:
                    task.cancel()
            await pool.leave_all()
            history.stored = await _read_copies(run)
            history.sends, history.samples = load.sends, monitor.samples
            history.stuck_reports = monitor.stuck_reports
            history.handler_calls, history.outages = pool.handler_calls(), pool.outages
            history.ownership_changes, history.faults = pool.ownership_changes(), run.records
            history.notes = injector.notes
            if remote is not None:
                history.remote = [*remote.ledgers.values()]
                history.gateway_outages = injector.gateway_outages
            history.problems = [*run.problems, *injector.problems, *pool.problems]
    history.problems += _differences(folder / "cluster", sets)
    return history


def _remote_clients(cluster: LocalCluster, load: Load) -> RemoteClients | None:
    """Return the remote clients; None without gateways."""
    names = cluster.options.names_of("gateway")
    return RemoteClients({name: cluster.addresses[name] for name in names}, load) if names else None


def _options(place: Callable[[str], ProcessHost], plan: RunPlan) -> ClusterOptions:
    layout = plan.schedule.layout if plan.schedule is not None else highly_available
    options = layout(
        ClusterOptions(
            settings={"storage": {"segment_bytes": SEGMENT_BYTES}, "gateway": GATEWAY_SETTINGS},
            gateways=GATEWAYS if plan.schedule is None else 0,
            auto_restart=False,
            programs="tools.faults.services",
            folder=REPO,
        )
    )
    names = (*_etcds(options), *options.names)
    return replace(options, hosts={name: place(name) for name in names})


def _etcds(options: ClusterOptions) -> list[str]:
    return [f"etcd-{number}" if number else ETCD for number in range(options.etcds)]


def _serves_since(load: Load, monitor: ProgressMonitor, at_us: int) -> bool:
    """Return whether every broker stored a message that was sent later, and progress rose."""
    brokers = {send.queue[0] for send in load.sends if send.queue is not None}
    stored = {
        send.queue[0] for send in load.sends if send.queue is not None and send.begin_us > at_us
    }
    samples = [sum(one.committed.values()) for one in monitor.samples if one.begin_us > at_us]
    return stored == brokers and len(samples) > 1 and samples[0] < samples[-1]


def _groups(plan: RunPlan, run: FaultRun) -> Iterator[FaultGroup]:
    """Yield the faults of a run."""
    random, cuts = Random(plan.seed), run.injector.network is not None
    if plan.groups:
        yield from plan.groups
    elif plan.schedule is not None:
        names = [one.name for one in run.cluster.endpoints()]
        yield from plan.schedule.groups(random, names)
    else:
        parts = [name for name in run.sets if name not in (ETCD, GATEWAY)]
        schedule = FaultSchedule(random, parts, cuts=cuts, gateways=GATEWAY in run.sets)
        while True:
            yield schedule.draw()


async def _read_copies(run: FaultRun) -> list[LoggedMessage] | None:
    """Read the topic from the leaders; the next leaders must have the same messages."""
    stored = await _read_all(run)
    leaders = {part: await run.leader(part) for part in run.sets if part.startswith("storage")}
    for names in leaders.values():
        for name in names:
            await run.cluster.stop(name)

    async def others_lead() -> bool:
        now = [await run.leader(part) for part in leaders]
        return all(now) and not any(one in leaders.values() for one in now)

    if not await _within(_HEAL_S, others_lead):
        run.problems.append(f"no leader of storage {_HEAL_S:g} s after the former leaders ended")
    elif sorted(await _read_all(run) or ()) != sorted(stored or ()):
        run.problems.append("the followers of storage have another log than their leaders")
    return stored


async def _read_all(run: FaultRun) -> list[LoggedMessage] | None:
    try:
        async with asyncio.timeout(_DONE_S):
            return await read_all(run.cluster.nameserver)
    except (TimeoutError, BatonError) as error:
        run.problems.append(f"the log could not be read to its end: {error!r}")
        return None


def _differences(data_dir: Path, sets: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the differences between the logs of the nodes of each broker, after they ended."""
    copies = [[data_dir / name for name in names] for part, names in sets.items() if " " in part]
    return [found for found in map(difference, copies) if found]


async def _work(plan: RunPlan, run: FaultRun, load: Load) -> None:
    """Send and handle messages while faults are injected; return when every send has an outcome."""
    schedule = plan.schedule
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.produce("keyed", PATIENT, keyed=True))
        tasks.create_task(load.produce("free", PATIENT, keyed=False))
        tasks.create_task(load.produce("hasty", HASTY, keyed=True))
        if run.remote is not None:
            tasks.create_task(run.remote.produce())
        churning = []
        if plan.churns:
            churning = [tasks.create_task(run.pool.churn(Random(f"{plan.seed}/members")))]
        if await _within(_HEAL_S, lambda: _has_begun(run, load)):
            before = await _epochs(run.admin)
            end_us = now_us() + int(plan.duration_s * 1_000_000)
            with _busy(schedule.busy if schedule is not None else 0):
                for group in _groups(plan, run):
                    if now_us() >= end_us or not await run.make(group):
                        break
            after = await _epochs(run.admin)
            changed = [one for one in before if after.get(one) != before[one]]
            run.injector.notes.append(f"leaders replaced: {', '.join(changed) or 'none'}")
            if changed and schedule is not None and not schedule.elects:
                run.problems.append(f"an election replaced the leaders of {', '.join(changed)}")
        else:
            run.problems.append(f"nothing was handled {_HEAL_S:g} s after the start")
        load.stop.set()
        for task in churning:
            task.cancel()


async def _epochs(admin: Admin) -> dict[str, tuple[str, int]]:
    """Return node and epoch of each leader, by service and set; empty if no nameserver answers."""
    try:
        nodes = (await admin.cluster()).nodes
    except BatonError:
        return {}
    return {
        f"{node.service} {node.replica_set}".strip(): (node.node_id, node.epoch)
        for node in nodes
        if node.leader
    }


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep the processors busy with `count` processes."""
    spinning = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _has_begun(run: FaultRun, load: Load) -> bool:
    if run.remote is not None and not run.remote.have_begun(_WARM_UP):
        return False
    return len(load.sends) >= _WARM_UP and len(run.pool.handler_calls()) >= _WARM_UP


async def _is_done(run: FaultRun) -> bool:
    try:
        queues = (await run.admin.group_progress(GROUP)).queues
        if run.remote is not None and not await _have_acknowledged_all(run.admin, run.remote):
            return False
    except BatonError:
        return False
    return len(queues) == QUEUES and all(queue.lag == 0 for queue in queues)


async def _have_acknowledged_all(admin: Admin, remote: RemoteClients) -> bool:
    for group in remote.ledgers:
        committed = {
            (one.queue.queue.broker, one.queue.queue.queue_id): one.committed_offset
            for one in await admin.progress(group)
            if one.queue.queue.topic == TOPIC
        }
        if not remote.have_acknowledged_all(group, committed):
            return False
    return True


async def _within(timeout_s: float, condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    """Return whether `condition` became true before the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = condition()
                if answer if isinstance(answer, bool) else await answer:
                    return True
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return False
