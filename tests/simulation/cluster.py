"""A whole cluster in one event loop: real services and clients, each on a simulated host.

    etcd            in memory, never fails
    ns-a ns-b       nameserver, two replicas
    lock-a lock-b   lock manager, leader and standby
    offsets         one node, on a disk that outlives it; or
    offsets, offsets-far   two replica sets of one node each, between which the group moves; or
    offsets-a b c   three of them, a replica set
    broker-a        storage, likewise; or
    broker-a-0 1 2  two or three of them, a replica set
    c1 c2 ...       consumers of one group
    producer
    stranger        writes under the ids of the producer

A process can be killed, frozen and restarted at any event. A killed process executes nothing more;
its disk and its messages in the network remain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_adapters import Handler
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, read_header
from batonmq._core.subscription import TagFilter
from batonmq.errors import BatonError
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.session import KeyValue
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.node import StorageNode
from batonmq_server.testing import processes
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryOffsetsDisk
from batonmq_server.testing.memory_network import MemoryCall
from batonmq_server.testing.processes import ServiceSpec, SimulatedProcess
from batonmq_server.testing.services import lockmgr, nameserver, offsets, storage
from tests.simulation import named_callers
from tests.simulation.checker import Checker
from tests.simulation.offsets_replica_checks import LEADER_KEY, SET_KEY
from tests.simulation.options import RunOptions
from tests.simulation.storage_replica_checks import LEADER_KEY as STORE_LEADER_KEY
from tests.simulation.storage_replica_checks import SET_KEY as STORE_SET_KEY
from tests.simulation.trace import Trace

GROUP, TOPIC, BROKER, PRODUCER = "readers", "orders", "broker-a", "producer"
OFFSETS = "offsets"
"""The only node of a cluster with one offsets set."""
FAR = "offsets-far"
"""The node of the second set; both nodes have the name of their set."""
REPLICAS = ("offsets-a", "offsets-b", "offsets-c")
STORES = ("broker-a-0", "broker-a-1", "broker-a-2")
NAMESERVERS = "ns-a:1,ns-b:1"
LEASE_MS = 12_000
"""Lease of a lock; short, so that many leases expire in a run. Margins are those of production."""
LEADER_LEASE_MS, REPLICA_LAG_MS = 4_000, 1_500
LOCKMGR_KEY = "elections/lockmgr"
WRITE_MS_MAX = 8
SLOW_WRITE_MS_MAX = 400
_SLOW = 0.02


class SimulatedCluster(processes.MemoryEnvironment):
    """The environment that all processes of a run share, and its checker.

    Attributes:
        sent: The last batch of the producer by queue.
        knowing_identities: Services that identify their callers, from their next start on.
    """

    def __init__(self, seed: str, *, kept_max: int | None = 4_000) -> None:
        super().__init__(seed)
        self.trace = Trace(self.now_ms, kept_max=kept_max)
        self.sent: dict[int, Header] = {}
        self.knowing_identities: set[str] = set()
        self.checker = Checker(GROUP, TOPIC, LEASE_MS, self.trace, self.now_ms, self.leader)
        for checks in (self.checker.replicas, self.checker.stores):
            checks.deposed = self.deposed
        self.checker.replicas.drained = partial(self.drained, LEADER_KEY)
        self.checker.stores.drained = partial(self.drained, STORE_LEADER_KEY)
        self._deposed: dict[str, int] = {}
        self.etcd.on_put.append(self.checker.etcd.written)
        self.etcd.on_put.append(self._put)
        self.etcd.on_change.append(partial(self.checker.etcd.changed, self.etcd.get_tree))
        self.loop.set_exception_handler(self._unexpected)

    def leader(self, key: str) -> str:
        """Return the holder of an election key in etcd; empty without one."""
        stored = self.etcd.get(key)
        return stored.value.decode() if stored is not None else ""

    def drained(self, key: str, name: str) -> bool:
        """Return whether etcd excludes a node from the election of this key."""
        return self.etcd.get(f"{key}/drained/{name}") is not None

    def end_lease(self, key: str) -> None:
        """End the lease of the leader of an election, which runs and is not notified."""
        stored = self.etcd.get(key)
        assert stored is not None
        self._deposed[stored.value.decode()] = self.now_ms() + LEADER_LEASE_MS
        self.etcd.revoke(stored.lease_id)

    def deposed(self, name: str) -> bool:
        """Return whether a node may still act as the leader, because its lease was ended early."""
        return self.now_ms() < self._deposed.get(name, 0)

    def offsets_disk_of(self, node_id: str) -> MemoryOffsetsDisk:
        """See base; a write of a node without followers counts at once."""
        exists = node_id in self.offsets_disks
        disk = super().offsets_disk_of(node_id)
        if not exists and node_id in (OFFSETS, FAR):
            disk.on_write.append(self.checker.offsets.written)
        elif not exists:
            self.checker.replicas.watch_disk(node_id, disk)
        return disk

    def lose_offsets_disk(self, node_id: str) -> None:
        """Replace the disk of a node by an empty one at its next start."""
        del self.offsets_disks[node_id]
        self.offsets_disk_of(node_id)

    def lose_store_disk(self, node_id: str) -> None:
        """Replace the disk of a storage node by an empty one at its next start."""
        self.storage_disks[node_id] = MemoryDisk()
        self.checker.stores.lost(node_id)

    def write_s(self, random: Random) -> float:
        """Return the duration of a disk write; sometimes very long."""
        longest = SLOW_WRITE_MS_MAX if random.random() < _SLOW else WRITE_MS_MAX
        return random.uniform(0.5, longest) / 1000

    def called(self, call: MemoryCall, request: Any) -> None:
        self.trace.called(call, request)
        if call.source == PRODUCER and isinstance(request, storage_pb.AppendRequest):
            for header in map(read_header, request.batches):
                self.sent[header.queue_id] = header
        self.checker.answers.called(call.source, request)
        self.checker.stores.called(call, request)

    def answered(self, call: MemoryCall, request: Any, answer: Any) -> None:
        self.checker.answers.answered(call.target, request, answer)
        self.checker.replicas.answered(call, answer)
        self.checker.stores.served(call, request, answer)

    def told(self, call: MemoryCall, answer: Any) -> None:
        self.trace.told(call, answer)

    def offsets_opened(self, offsets: OffsetsEpoch) -> None:
        if self.checker.replicas.opened(offsets):
            self.checker.watch_leadership(offsets)
        else:
            near = offsets.disk is self.offsets_disks.get(OFFSETS)
            self.checker.offsets.watch_table(offsets.table, OFFSETS if near else FAR)

    def storage_opened(self, node_id: str, node: StorageNode) -> None:
        if node_id == BROKER:
            self.checker.watch_store(node.store, BROKER)
        else:
            self.checker.watch_copy(node_id, node)

    def thawed(self) -> None:
        self.checker.forget_pause()

    def failed(self, process: str, error: BaseException) -> None:
        self.checker.expected.fail("unexpected", f"process {process} ends with {error!r}")

    def _put(self, stored: KeyValue) -> None:
        if stored.key == SET_KEY:
            self.checker.replicas.standing_written(stored)
        elif stored.key == STORE_SET_KEY:
            self.checker.stores.standing_written(stored)

    def _unexpected(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.checker.expected.fail(
            "unexpected", f"{context.get('message')} {context.get('exception')!r}"
        )


class ConsumerProcess(SimulatedProcess):
    """One incarnation of a member; it leaves gracefully when it is stopped.

    Attributes:
        expression: Its subscription.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        client_id: str,
        life: int,
        expression: str,
        settings: ConsumerSettings,
        handle: Callable[[SimulatedProcess, ReceivedMessage], Awaitable[object]],
    ) -> None:
        super().__init__(cluster, client_id, life)
        self._trace, self._checker = cluster.trace, cluster.checker
        self.expression, self._asked = expression, TagFilter.parse(expression)
        self._settings, self._handle = settings, handle
        self._consumer: Consumer | None = None
        self.run(self._consume)

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """The queues that it owns."""
        return () if self._consumer is None else self._consumer.assignment

    async def _consume(self) -> None:
        while not self.stopping.is_set():
            consumer = self._consumer = Consumer(
                NAMESERVERS,
                GROUP,
                {TOPIC: self.expression},
                self._settings,
                client_id=self.name,
                on_ownership=self._on_ownership,
                environment=self.client_environment(),
            )
            try:
                async with consumer, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._stop(consumer))
                    await consumer.run(self._handler())
                    self.stopping.set()
            except BatonError as error:
                # Rejected, for example because the previous incarnation still uses the client id.
                self._trace.note(self.name, "starts anew", error)
                await asyncio.sleep(1)

    async def _stop(self, consumer: Consumer) -> None:
        await self.stopping.wait()
        consumer.stop()

    def _handler(self) -> Handler:
        async def handler(message: ReceivedMessage) -> object:
            checks = self._checker.clients
            checks.started(self.name, self._asked, message)
            checks.running(self.name, message)
            try:
                result = await self._handle(self, message)
            finally:
                checks.ended_running(message)
            if result is None:
                checks.finished(self.name, message)
            else:
                checks.failed(self.name, message)
            return result

        return handler

    def _on_ownership(self, event: OwnershipEvent) -> None:
        consumer, checks = self._consumer, self._checker.clients
        assert consumer is not None
        if event.kind == "granted":
            incarnation_id = consumer._session.incarnation.incarnation_id
            checks.granted(self.name, incarnation_id, event.queue, event.token)
            checks.watch_commits(self.name, consumer._queues[event.queue])
            return
        checks.ended(self.name, event.kind, event.queue, event.token)
        if event.kind == "fenced":
            queue = consumer._queues[event.queue]
            if queue.lease.deadline_ms <= event.monotonic_ms:
                checks.deadline_passed(self.name, event.queue)


def _with_identities(spec: ServiceSpec, knowing: Container[str]) -> ServiceSpec:
    """Return a service that identifies its callers by their names, as with access control.

    Args:
        knowing: The services that do, at their next start.
    """

    @asynccontextmanager
    async def build(settings: Any, runtime: Runtime) -> AsyncIterator[App]:
        if spec.name in knowing:
            named_callers.turn_on(runtime.guard)
        async with spec.build(settings, runtime) as app:
            yield app

    return replace(spec, build=build)


def services(cluster: SimulatedCluster, random: Random, options: RunOptions) -> list[ServiceSpec]:
    """Return the services of the cluster in the order of their start."""
    common: dict[str, Any] = {"cluster": "sim", "node_lease_ms": 6_000, "metrics_stream": False}
    span_max = random.choice([8, 50])

    def names(node_id: str) -> ServiceSpec:
        return nameserver(
            NameserverSettings(
                node_id=node_id, member_lease_ms=10_000, heartbeat_interval_ms=3_000, **common
            )
        )

    def locks(node_id: str) -> ServiceSpec:
        return lockmgr(LockmgrSettings(node_id=node_id, lock_lease_ms=LEASE_MS, **common))

    def progress(node_id: str, **more: Any) -> ServiceSpec:
        settings = OffsetsSettings(
            node_id=node_id, data_dir=Path("unused"), span_max=span_max, **common, **more
        )
        return offsets(cluster, settings)

    def log(node_id: str, **more: Any) -> ServiceSpec:
        settings = StorageSettings(
            node_id=node_id, segment_bytes=16_384, touch_interval_ms=3_000, **common, **more
        )
        return storage(cluster, settings)

    log_replicated: dict[str, Any] = {
        "broker": BROKER,
        "replicas": ",".join(STORES[: options.stores]),
        "min_in_sync": min(options.min_in_sync, options.stores),
        "leader_lease_ms": LEADER_LEASE_MS,
        "replica_lag_ms_max": REPLICA_LAG_MS,
        "memory_window_bytes": options.memory_window_bytes,
    }
    replicated: dict[str, Any] = {
        "replicas": ",".join(REPLICAS),
        "min_in_sync": options.min_in_sync,
        "leader_lease_ms": LEADER_LEASE_MS,
        "replica_lag_ms_max": REPLICA_LAG_MS,
        "replica_kept_bytes_max": options.kept_bytes_max,
    }
    specs = [
        names("ns-a"),
        names("ns-b"),
        *(
            (progress(name, **replicated) for name in REPLICAS)
            if options.replicated
            else (progress(OFFSETS),)
        ),
        *((progress(FAR, replica_set=FAR),) if options.moves else ()),
        *(
            (log(name, **log_replicated) for name in STORES[: options.stores])
            if options.stores > 1
            else (log(BROKER),)
        ),
        locks("lock-a"),
        locks("lock-b"),
    ]
    if options.identities:
        cluster.knowing_identities |= {spec.name for spec in specs}
    return [_with_identities(spec, cluster.knowing_identities) for spec in specs]
