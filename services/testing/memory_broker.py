"""A whole cluster in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar
from weakref import WeakKeyDictionary

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq._connection.directory import CALL_TIMEOUT_S, ClientEnvironment
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller, PullerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.transactions import TransactionChecker
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.reports import CreatedTopic
from batonmq.errors import BatonError, InvalidArgument, Retry
from batonmq_server.storage.node import StorageNode
from batonmq_server.testing import services
from batonmq_server.testing.memory_etcd import NAME as ETCD
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.processes import (
    MemoryEnvironment,
    ServiceSpec,
    SimulatedProcess,
    SimulatedService,
)

Client = TypeVar("Client", Admin, Consumer, Producer, Puller)
T = TypeVar("T")
START_TIMEOUT_S = 30
COMMIT_INTERVAL_MS = 50
"""Commit interval of consumers in real time; it is short, so that `settled` returns soon."""


class MemoryBroker:
    """A cluster without processes, sockets and files: the real services in one event loop.

    Only the disks, the network and etcd are simulated. Ownership, subscription checks, retries and
    rejections are those of a real cluster. Use it as an async context manager, in a test or in a
    fixture. All clients must run in the same event loop, so blocking clients, which have their own
    event loops, can't be used.

    In the event loop of `run_virtual` waiting takes no time, and two runs with the same seed are
    equal. In any other event loop time is real.

    Args:
        broker_count: Storage nodes, named `broker-0` and so on.
        seed: Seed of all random decisions.
        faults: Faults of the network after the start; by default messages are delayed in virtual
            time, and are not delayed in real time.
        settings: Further settings by service (`nameserver`, `lockmgr`, `offsets`, `storage`), such
            as `{"nameserver": {"auto_create_topics": True}}`.

    Attributes:
        nameserver: Address for clients, together with `environment`.
    """

    nameserver = "nameserver-0:1"

    def __init__(
        self,
        *,
        broker_count: int = 1,
        seed: int | str = 0,
        faults: Faults | None = None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self._seed, self._faults = str(seed), faults
        self._brokers = [f"broker-{number}" for number in range(broker_count)]
        self._settings = settings or {}
        if unknown := sorted(self._settings.keys() - services.SETTINGS.keys()):
            raise InvalidArgument(f"unknown service {unknown[0]}", facts={"field": "settings"})
        self._clients: WeakKeyDictionary[Admin | Consumer | Producer | Puller, SimulatedProcess] = (
            WeakKeyDictionary()
        )

    async def __aenter__(self) -> Self:
        """Start all services, and wait until they are registered."""
        environment = self._environment = _BrokerEnvironment(self._seed)
        environment.network.faults = self._quiet = _no_faults(delays=environment.virtual)
        self._running: dict[str, SimulatedService] = {}
        self._client_count = 0
        self._own = SimulatedProcess(environment, "client", 0)
        self._admin = Admin(self.nameserver, environment=self.environment)
        try:
            for service in services.cluster(environment, self._brokers, self._settings):
                self._start(service)
            async with timeouts.timeout(START_TIMEOUT_S):
                await self._registered()
            environment.network.faults = self._faults or self._quiet
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all services gracefully.

        Raises:
            BaseExceptionGroup: services have failed.
        """
        self._environment.network.faults = self._quiet
        try:
            await self._stop(["nameserver", "lockmgr", "storage"])
            await self._stop(["offsets"])
        finally:
            await self._end()
        if self._environment.errors:
            raise BaseExceptionGroup("services have failed", self._environment.errors)

    # ---- clients

    @property
    def environment(self) -> ClientEnvironment:
        """For clients that the code under test makes, with the address `nameserver`."""
        return self._own.client_environment()

    @property
    def clock(self) -> Clock:
        """Clock of the cluster; virtual time starts at 2023-11-14 22:13:20 UTC."""
        return self._own.clock

    def producer(
        self,
        settings: ProducerSettings | None = None,
        *,
        group: str = "",
        transaction_checker: TransactionChecker | None = None,
    ) -> Producer:
        """Return a producer; enter it with `async with`. See `Producer` for the arguments."""
        process = self._client()
        return self._known(
            Producer(
                self.nameserver,
                settings,
                group=group,
                transaction_checker=transaction_checker,
                environment=process.client_environment(),
            ),
            process,
        )

    def consumer(
        self,
        group: str,
        subscriptions: Mapping[str, str],
        settings: ConsumerSettings | None = None,
        *,
        client_id: str = "",
    ) -> Consumer:
        """Return a consumer, a member of a group; enter it with `async with`.

        Args:
            settings: By default those of production with two changes: a new group starts at the
                first message, because a test may send before queues are assigned; and in real time
                it commits every 50 ms.
        """
        if settings is None:
            settings = ConsumerSettings(consume_from="first")
            if not self._environment.virtual:
                settings = replace(settings, commit_interval_ms=COMMIT_INTERVAL_MS)
        process = self._client()
        consumer = Consumer(
            self.nameserver,
            group,
            subscriptions,
            settings,
            client_id=client_id or process.name,
            environment=process.client_environment(),
        )
        return self._known(consumer, process)

    def puller(
        self,
        group: str = "",
        settings: PullerSettings | None = None,
        *,
        filters: Mapping[str, str] | None = None,
    ) -> Puller:
        """Return a puller; enter it with `async with`."""
        process = self._client()
        environment = process.client_environment()
        return self._known(
            Puller(self.nameserver, group, settings, filters=filters, environment=environment),
            process,
        )

    def admin(self) -> Admin:
        """Return a client for topics, groups and queries; enter it with `async with`."""
        process = self._client()
        return self._known(
            Admin(self.nameserver, environment=process.client_environment()), process
        )

    # ---- operations for tests

    async def create_topic(self, name: str, queues: int = 0) -> CreatedTopic:
        """See `Admin.create_topic`."""
        return await _retry(lambda: self._admin.create_topic(name, queues))

    async def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return all messages of a topic, in the order of their store time.

        Scheduled messages are included only after their delivery time.

        Raises:
            TopicNotFound: there is no such topic.
        """
        stored: list[ReceivedMessage] = []
        async with Puller(self.nameserver, environment=self.environment) as puller:
            queues = await _retry(lambda: puller.queues(topic))
            ends = await self._ends(queues)
            await puller.assign(queue for queue, end in ends.items() if end)
            for queue in puller.assignment:
                await _retry(partial(puller.seek, queue, "begin"))
            left = dict.fromkeys(puller.assignment)
            while left:
                for queue, messages in (await puller.poll()).items():
                    stored += [one for one in messages if one.offset < ends[queue]]
                for queue in list(left):
                    if await puller.position(queue) >= ends[queue]:
                        del left[queue]
        return sorted(stored, key=lambda one: (one.store_unix_ms, one.queue, one.offset))

    async def settled(self, group: str, *, timeout_s: float = 0) -> None:
        """Wait until a group has handled all messages, including scheduled ones.

        Not for broadcasting groups: their members keep their progress to themselves.

        Args:
            timeout_s: Limit in seconds; 0 for 20 s in real time, and one day in virtual time.

        Raises:
            TimeoutError: messages are left; the text says which.
            GroupNotFound: the group has never had a member.
        """
        virtual = self._environment.virtual
        limit_s = timeout_s or (86_400 if virtual else 20)
        pause_s, pause_s_max = 0.01, 30 if virtual else 0.1
        left = "not known"
        try:
            async with timeouts.timeout(limit_s):
                while left := await self._left(group):
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, pause_s_max)
        except TimeoutError as error:
            raise TimeoutError(
                f"group {group} has not settled after {limit_s} s: {left}"
            ) from error

    async def restart(self, name: str) -> None:
        """Stop a service gracefully, and start it again.

        Args:
            name: `nameserver`, `lockmgr`, `offsets` or `storage`, or one node of it: `broker-0`.
        """
        await self._restart(name, self._stop)

    async def kill(self, name: str) -> None:
        """Kill a service at any point of its work, as `kill -9` does, and start it again.

        Its disk is kept. Clients see their connections reset; a repeated call takes effect once.

        Args:
            name: See `restart`.
        """
        await self._restart(name, self._kill)

    @contextmanager
    def cut_off(self, client: Admin | Consumer | Producer | Puller) -> Iterator[None]:
        """Disconnect a client from all services until the end of the block.

        A consumer that is disconnected for about 40 s loses its queues to other members, which get
        its unacknowledged messages, flagged as redelivered. All calls and answers are lost, so in
        real time the client notices by timeouts only.

        Args:
            client: A client that this broker has created.
        """
        with self._disconnected(self._clients[client].name):
            yield

    # ---- services

    def _start(self, service: ServiceSpec) -> None:
        before = self._running.get(service.name)
        life = 1 if before is None else before.life + 1
        self._running[service.name] = SimulatedService(self._environment, service, life)

    async def _registered(self) -> None:
        """Wait until every service is registered as a leader."""
        missing = set(self._running)
        while missing:
            if self._environment.errors:
                raise self._environment.errors.pop()
            stub = self._admin.directory.nameserver()
            try:
                answer = await stub.DescribeCluster(
                    pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                pass  # the nameserver is still starting
            else:
                leaders = {node.address for node in answer.nodes if node.leader}
                missing = {name for name in self._running if f"{name}:1" not in leaders}
            if missing:
                await asyncio.sleep(0.005)

    async def _restart(self, name: str, end: Callable[[list[str]], Awaitable[None]]) -> None:
        chosen = [p for p in self._running.values() if name in (p.name, p.service.kind)]
        if not chosen:
            raise InvalidArgument(f"unknown service {name}", facts={"field": "name"})
        await end([process.name for process in chosen])
        for process in chosen:
            self._start(process.service)
        await self._registered()

    async def _stop(self, names: list[str]) -> None:
        chosen = [p for p in self._running.values() if {p.name, p.service.kind} & set(names)]
        for process in chosen:
            process.stop()
        for process in chosen:
            await process.ended()

    async def _kill(self, names: list[str]) -> None:
        for name in names:
            self._environment.crash_disk(name)
            await self._running[name].abort()

    async def _end(self) -> None:
        environment = self._environment
        environment.network.end()
        for process in self._running.values():
            await process.abort()
        await self._admin.close()
        environment.etcd.close()

    # ---- clients and their progress

    def _client(self) -> SimulatedProcess:
        self._client_count += 1
        return SimulatedProcess(self._environment, f"client-{self._client_count}", 0)

    def _known(self, client: Client, process: SimulatedProcess) -> Client:
        self._clients[client] = process
        return client

    @contextmanager
    def _disconnected(self, name: str) -> Iterator[None]:
        others = {ETCD, *self._running} - {name}
        pairs = {(name, other) for other in others} | {(other, name) for other in others}
        cut = self._environment.network.cut
        cut |= pairs
        try:
            yield
        finally:
            cut -= pairs

    async def _ends(self, queues: tuple[QueueRef, ...]) -> dict[QueueRef, int]:
        """Return the next offset of each queue."""
        problems: tuple[str, ...] = ("not read yet",)
        while problems:
            extents, problems = await self._admin.extents(queues)
        return {queue: next_offset for queue, (_, next_offset) in extents.items()}

    async def _left(self, group: str) -> str:
        """Return what is not handled yet, as text; empty if nothing is left."""
        if delayed := sum(
            len(node.store.schedule.waiting) for node in self._environment.nodes.values()
        ):
            return f"{delayed} scheduled messages are not delivered yet"
        progress = await _retry(lambda: self._admin.group_progress(group))
        for queue in progress.queues:
            if queue.committed_offset is None and queue.log_end_offset:
                return f"no member has started {queue.topic}/{queue.broker}/{queue.queue_id}"
            if queue.lag:
                place = f"{queue.topic}/{queue.broker}/{queue.queue_id}"
                return f"{queue.lag} messages of {place} are not acknowledged"
        return ", ".join(progress.problems)


class _BrokerEnvironment(MemoryEnvironment):
    """An environment that records the storage nodes and the failures of services."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.nodes: dict[str, StorageNode] = {}
        self.errors: list[BaseException] = []

    def storage_opened(self, node_id: str, node: StorageNode) -> None:
        """Override."""
        self.nodes[node_id] = node

    def failed(self, process: str, error: BaseException) -> None:
        """Override."""
        super().failed(process, error)
        self.errors.append(error)


async def _retry(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until it succeeds or fails for good, and return its answer."""
    while True:
        try:
            return await ask()
        except BatonError as error:
            if error.retry is Retry.NEVER:
                raise
            await asyncio.sleep(0.01)


def _no_faults(*, delays: bool) -> Faults:
    return Faults() if delays else Faults(delay_ms_min=0, delay_ms_max=0)
