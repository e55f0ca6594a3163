"""A cluster on this machine: etcd and the processes of the services, supervised."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from batonmq._common import timeouts
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq_server.local.child_process import ChildProcess, NotReady, ProcessStarter, until
from batonmq_server.local.etcd import etcd_members, is_healthy
from batonmq_server.local.fork_server import ForkServer
from batonmq_server.local.layout import ClusterOptions, Layout
from batonmq_server.local.ports import is_free, lock_data_dir
from batonmq_server.local.supervisor import RestartLimitExceeded, Supervisor

_ETCD_WAIT_S = 5.0
_PORT_WAIT_S = 3.0
_REGISTERED_S = 30.0
_STOP_ORDER = ("gateway", "lockmgr", "nameserver", "storage", "offsets")
"""Gateways drain with the help of the others. Services without a data directory publish their last
events while they stop, for which they need the nameservers and storage."""


class ClusterFailed(Exception):
    """The cluster could not be started or kept running; all its processes are stopped."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A process of the cluster; `pid` is None if it is not running or is not the cluster's own."""

    name: str
    address: str
    metrics_address: str
    pid: int | None


def to_stderr(message: str) -> None:
    """Print a message for the user on standard error."""
    print(message, file=sys.stderr, flush=True)


class LocalCluster:
    """A cluster that runs inside `async with`; its services are ready and registered there.

    A process that ends unexpectedly is reported and, with `auto_restart`, started again. If it
    keeps ending, the cluster fails: the body of the `async with` is cancelled, and `ClusterFailed`
    is raised.

    The names of processes are those in `endpoints`: `etcd` and `ClusterOptions.names`.

    Args:
        data_dir: Created if it does not exist. Only one cluster may use it.
        report: Called with each message for the user.
        start: Starts a service; by default a fork server of the cluster's own.
    """

    def __init__(
        self,
        data_dir: Path,
        options: ClusterOptions | None = None,
        report: Callable[[str], None] = to_stderr,
        start: ProcessStarter | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.options = options or ClusterOptions()
        modules = {f"{self.options.programs}.{member.service}" for member in self.options.instances}
        self._fork_server = ForkServer(sorted(modules), self.options.folder or self.data_dir)
        self._start_process = start or self._fork_server.start
        self._forks = start is None
        self._processes = Supervisor(report, auto_restart=self.options.auto_restart)
        self._exits = AsyncExitStack()
        self._failure: ClusterFailed | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of the gRPC server of each process, and of etcd."""
        addresses = {name: self._layout.address(name) for name in self.options.names}
        return addresses | {"etcd": self._etcd}

    @property
    def remote_addresses(self) -> list[str]:
        """host:port of each gateway for clients of RocketMQ 5; with TLS if the cluster has it."""
        return list(map(self._layout.remote_address, self.options.names_of("gateway")))

    @property
    def nameserver(self) -> str:
        """host:port of the nameservers for clients, separated by commas."""
        return ",".join(map(self._layout.address, self.options.names_of("nameserver")))

    @property
    def security(self) -> Security | None:
        """TLS files of clients; None if the cluster has no TLS. Available after the start."""
        return self._layout.security()

    async def is_etcd_healthy(self, endpoint: str) -> bool:
        """Return whether the etcd of the cluster at `host:port` answers and has a leader."""
        own = None if self.options.etcd else self._layout.security("etcd")
        return await is_healthy(endpoint, own)

    def endpoints(self) -> list[Endpoint]:
        """Return all processes, etcd first."""
        rest = [
            Endpoint(n, self._layout.address(n), self._layout.metrics_address(n), self.pid(n))
            for n in self.options.names
        ]
        etcds = [
            Endpoint(_etcd(i), address, address, self.pid(_etcd(i)))
            for i, address in enumerate(self._etcd.split(","))
        ]
        return [*etcds, *rest]

    @property
    def auto_restart(self) -> bool:
        """Whether a process that ends unexpectedly is started again."""
        return self._processes.auto_restart

    @auto_restart.setter
    def auto_restart(self, wanted: bool) -> None:
        self._processes.auto_restart = wanted

    def pid(self, name: str) -> int | None:
        """Return the process id of a service or of etcd; None while it is not running."""
        return self._processes.pid(name)

    async def start(self, name: str) -> None:
        """Start a process that is not running, and wait until it is ready."""
        await self._processes.start(name)

    async def stop(self, name: str) -> None:
        """Stop a process; it is not started again until `start`."""
        await self._processes.stop(name)

    async def restart(self, name: str) -> None:
        """`stop`, then `start`."""
        await self.stop(name)
        await self.start(name)

    async def kill(self, name: str) -> None:
        """Kill a process and wait for its end, which counts as unexpected."""
        await self._processes.kill(name)

    async def serving(self, name: str) -> None:
        """Wait until a process is ready, for instance after it was killed."""
        await self._processes.serving(name)

    def pause(self, name: str) -> None:
        """Suspend a process with SIGSTOP; it keeps its memory and its sockets."""
        self._processes.send(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Resume a suspended process."""
        self._processes.send(name, signal.SIGCONT)

    async def __aenter__(self) -> Self:
        """Start all processes, and wait until they are ready and registered.

        Raises:
            ClusterDirInUse: another cluster uses the directory.
            PortInUse: another process uses the port of the nameserver.
            ClusterFailed: a process did not start; all are stopped.
        """
        async with AsyncExitStack() as exits:
            exits.enter_context(lock_data_dir(self.data_dir))
            if self.options.secure:  # also if it was created without TLS
                self.data_dir.chmod(0o700)
            if self._forks:
                exits.enter_context(self._fork_server)
            etcds = [_etcd(number) for number in range(self.options.etcds)]
            order = (*map(self.options.names_of, _STOP_ORDER), etcds)
            exits.push_async_callback(self._processes.stop_all, order)
            await self._start_all()
            tasks = await exits.enter_async_context(asyncio.TaskGroup())
            for name in self._processes:
                exits.callback(tasks.create_task(self._watch(name)).cancel)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._exits.aclose()
        finally:
            if self._failure is not None:
                raise self._failure from None

    async def _start_all(self) -> None:
        if port := self.options.nameserver_port:
            # A cluster on this directory that was killed a moment ago may still be ending.
            with suppress(NotReady):
                await _wait(lambda: _is_port_free(port), _PORT_WAIT_S, "")
        self._layout = Layout(self.data_dir, self.options)
        self._etcd = self.options.etcd
        try:
            if self._etcd:
                problem = f"etcd at {self._etcd} does not answer"
                await _wait(lambda: self.is_etcd_healthy(self._etcd), _ETCD_WAIT_S, problem)
            else:
                await self._start_etcd()
            await until(self._fork_server.is_ready)
            for member in self.options.instances:
                self._processes.add(
                    ChildProcess(self._layout.program(member, self._etcd), self._start_process)
                )
            for name in self.options.names:
                await self._processes.ready(name)
            await _wait(self._all_registered, _REGISTERED_S, "not every service is registered")
        except NotReady as error:
            raise ClusterFailed(str(error)) from error

    async def _start_etcd(self) -> None:
        layout, numbers = self._layout, range(self.options.etcds)
        etcds = etcd_members(
            [layout.etcd_dir(number) for number in numbers],
            [layout.log_path(_etcd(number)) for number in numbers],
            self.options.hosts,
            layout.security("etcd"),
            fsync=self.options.etcd_fsync,
        )
        self._etcd = ",".join(etcd.endpoint for etcd in etcds)
        for etcd in etcds:
            self._processes.add(etcd.child)
        for number in numbers:
            await self._processes.ready(_etcd(number))

    async def _all_registered(self) -> bool:
        """Return whether all processes are registered and every replica set has a leader."""
        async with connector(self.security)(self._layout.address("nameserver")) as channel:
            stub = nameserver_grpc.NameserverServiceStub(channel)
            request = nameserver_pb.DescribeClusterRequest()
            try:
                answer = await stub.DescribeCluster(request, timeout=2)
            except grpc.aio.AioRpcError:
                return False
        registered = {node.address for node in answer.nodes}
        sets = {(node.service, node.replica_set) for node in answer.nodes}
        led = {(node.service, node.replica_set) for node in answer.nodes if node.leader}
        return led == sets and registered.issuperset(map(self._layout.address, self.options.names))

    async def _watch(self, name: str) -> None:
        try:
            await self._processes.watch(name)
        except RestartLimitExceeded as error:
            self._failure = ClusterFailed(str(error))
            raise


def _etcd(number: int) -> str:
    """Return the name of an etcd process."""
    return f"etcd-{number}" if number else "etcd"


async def _is_port_free(port: int) -> bool:
    return is_free(port)


async def _wait(condition: Callable[[], Awaitable[bool]], timeout_s: float, otherwise: str) -> None:
    try:
        async with timeouts.timeout(timeout_s):
            await until(condition)
    except TimeoutError:
        raise NotReady(f"{otherwise} after {timeout_s:g} s") from None
