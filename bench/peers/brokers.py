"""The brokers that are measured: their programs, their settings, their servers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from batonmq_server.local.child_process import ChildProcess, NotReady, Program, start_program
from batonmq_server.local.cluster import ClusterFailed, LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import HOST, keep_ports
from bench.peers.clients.task import PARTITIONS, TOPICS
from bench.peers.downloads import (
    PeerFailed,
    command,
    jars,
    last_lines,
    nats_server,
    python_libraries,
)
from bench.peers.steps import GROUPS

_READY_S = 240.0
_STOP_S = 15.0
_DISK_SHARE_MAX = 0.87
_CLUSTER_ID = "YmF0b25tcS1iZW5jaC1wZQ"
_JAVA = ("java", "-XX:+UseG1GC")


@dataclass(frozen=True, slots=True)
class Servers:
    """The running servers of a broker.

    Attributes:
        address: The address that clients connect to.
        pids: Ids of the processes; the processes that these have started count too.
    """

    address: str
    pids: tuple[int, ...]


class Broker(ABC):
    """A broker, and the Python library that its clients use.

    Attributes:
        name: Name of the column.
        library: Name of the client library.
        settings: Settings that differ from the defaults, for the report.
        client: Module of the client process.
        paths: Folders to add to the path of the client process; known after `prepare`.
    """

    name: str
    library: str
    settings: str
    client: str
    paths: tuple[Path, ...] = ()

    @abstractmethod
    async def prepare(self) -> None:
        """Download what is needed.

        Raises:
            PeerFailed: The broker can't be measured on this machine.
        """

    @abstractmethod
    def version(self) -> str:
        """Return the versions of servers and client library; call it after `prepare`."""

    @abstractmethod
    def serve(self, folder: Path, *, fsync: bool) -> AbstractAsyncContextManager[Servers]:
        """Run the servers inside `async with`.

        Args:
            folder: Empty folder for data and logs.
            fsync: Whether every receipt means that the message is on the disk.

        Raises:
            PeerFailed: The servers are not ready in time.
        """


class BatonMq(Broker):
    """This project."""

    name = "BatonMQ"
    library = "batonmq"
    settings = "one process per service and etcd; receipts from memory, or DURABILITY_FSYNCED"
    client = "bench.peers.clients.batonmq"

    async def prepare(self) -> None:
        """Return: everything is installed."""

    def version(self) -> str:  # noqa: D102
        return importlib.metadata.version("batonmq")

    @asynccontextmanager
    async def serve(self, folder: Path, *, fsync: bool) -> AsyncIterator[Servers]:  # noqa: D102
        # A producer chooses the durability, so the servers are the same for both.
        options = ClusterOptions(auto_restart=False, log_level="WARNING")
        try:
            async with LocalCluster(folder / "cluster", options, start=start_program) as cluster:
                pids = tuple(one.pid for one in cluster.endpoints() if one.pid is not None)
                yield Servers(cluster.nameserver, pids)
        except (ClusterFailed, NotReady) as error:
            raise PeerFailed(f"the local cluster failed: {error}") from error


class Kafka(Broker):
    """Apache Kafka with KRaft, one process."""

    name = "Kafka"
    library = "confluent-kafka"
    settings = (
        "-Xms1g -Xmx1g; acks=all, linger.ms=0 for one send at a time; "
        "fsync: log.flush.interval.messages=1"
    )
    client = "bench.peers.clients.kafka"

    async def prepare(self) -> None:  # noqa: D102
        self._jars = await jars("kafka")
        self.paths = (await python_libraries(),)

    def version(self) -> str:  # noqa: D102
        return f"{_jar_version(self._jars, 'kafka-clients')}, {_library(self)}"

    @asynccontextmanager
    async def serve(self, folder: Path, *, fsync: bool) -> AsyncIterator[Servers]:  # noqa: D102
        ports = keep_ports(folder / "ports.json", ("broker", "controller"))
        address = f"{HOST}:{ports['broker']}"
        config = _write(
            folder / "server.properties",
            {
                "process.roles": "broker,controller",
                "node.id": 1,
                "controller.quorum.voters": f"1@{HOST}:{ports['controller']}",
                "listeners": f"PLAINTEXT://{address},CONTROLLER://{HOST}:{ports['controller']}",
                "advertised.listeners": f"PLAINTEXT://{address}",
                "controller.listener.names": "CONTROLLER",
                "log.dirs": folder / "data",
                "offsets.topic.replication.factor": 1,
                "transaction.state.log.replication.factor": 1,
                "transaction.state.log.min.isr": 1,
                "group.initial.rebalance.delay.ms": 0,
                "log.flush.interval.messages": 1 if fsync else 9_223_372_036_854_775_807,
            },
        )
        java = (*_JAVA, "-Xms1g", "-Xmx1g", "-cp", f"{self._jars}/*")
        await command(
            *java, "kafka.tools.StorageTool", "format",
            "--cluster-id", _CLUSTER_ID, "--config", str(config),
            remedy="Install Java 17 or later.",
        )  # fmt: skip
        async with running("kafka", folder, (*java, "kafka.Kafka", str(config)), address) as pid:
            yield Servers(address, (pid,))


class RocketMq(Broker):
    """Apache RocketMQ: a name server, and a broker in the process of its proxy."""

    name = "RocketMQ"
    library = "rocketmq-python-client"
    settings = (
        "proxy in local mode, -Xms2g -Xmx2g; ASYNC_FLUSH, fsync: SYNC_FLUSH; "
        "the client has no call for several messages and receives 32 at a time"
    )
    client = "bench.peers.clients.rocketmq"

    async def prepare(self) -> None:  # noqa: D102
        self._jars = await jars("rocketmq")
        self.paths = (await python_libraries(),)

    def version(self) -> str:  # noqa: D102
        return f"{_jar_version(self._jars, 'rocketmq-broker')}, {_library(self)}"

    @asynccontextmanager
    async def serve(self, folder: Path, *, fsync: bool) -> AsyncIterator[Servers]:  # noqa: D102
        _check_disk(folder)
        ports = keep_ports(
            folder / "ports.json", ("names", "broker", "fast", "replication", "grpc", "remoting")
        )
        names, proxy = f"{HOST}:{ports['names']}", f"{HOST}:{ports['grpc']}"
        (folder / "conf").mkdir()
        broker = _write(
            folder / "conf" / "broker.conf",
            {
                "brokerClusterName": "bench",
                "brokerName": "broker-0",
                "brokerId": 0,
                "brokerIP1": HOST,
                "namesrvAddr": names,
                "listenPort": ports["broker"],
                "haListenPort": ports["replication"],
                "storePathRootDir": folder / "store",
                "storePathCommitLog": folder / "store" / "commitlog",
                "flushDiskType": "SYNC_FLUSH" if fsync else "ASYNC_FLUSH",
                "autoCreateTopicEnable": "false",
                "registerNameServerPeriod": 10_000,
            },
        )
        (folder / "conf" / "rmq-proxy.json").write_text(
            json.dumps(
                {
                    "rocketMQClusterName": "bench",
                    "namesrvAddr": names,
                    "grpcServerPort": ports["grpc"],
                    "remotingListenPort": ports["remoting"],
                }
            )
        )
        _write(folder / "conf" / "names.properties", {"listenPort": ports["names"]})
        _create_topics_and_groups(folder / "store")
        java = (*_JAVA, f"-Duser.home={folder}", "-cp", f"{self._jars}/*")
        env = {"ROCKETMQ_HOME": str(folder), "RMQ_PROXY_HOME": str(folder)}
        name_server = (
            *java, "-Xms256m", "-Xmx256m", "org.apache.rocketmq.namesrv.NamesrvStartup",
            "-c", str(folder / "conf" / "names.properties"),
        )  # fmt: skip
        proxy_server = (
            *java, "-Xms2g", "-Xmx2g", "org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local",
            "-n", names, "-bc", str(broker), "-pc", str(folder / "conf" / "rmq-proxy.json"),
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            pids = [
                await stack.enter_async_context(
                    running("name-server", folder, name_server, names, env)
                ),
                await stack.enter_async_context(running("proxy", folder, proxy_server, proxy, env)),
            ]
            yield Servers(proxy, tuple(pids))


def _check_disk(folder: Path) -> None:
    """Raise PeerFailed if the disk is too full for RocketMQ.

    From 90 % on its broker refuses every send and answers every receive call without a message; no
    setting raises that limit.
    """
    usage = shutil.disk_usage(folder)
    share = usage.used / (usage.used + usage.free)
    if share > _DISK_SHARE_MAX:
        raise PeerFailed(
            f"the disk of {folder} is {share:.0%} full, and RocketMQ stops at 90 %. Free some "
            "space, or choose a folder on another disk with --folder"
        )


def _create_topics_and_groups(folder: Path) -> None:
    """Write the files in which a RocketMQ broker keeps its topics and groups.

    The proxy refuses consumers of other groups, and RocketMQ's tool would be one JVM for each.
    """
    config = folder / "config"
    config.mkdir(parents=True)
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    topics = {
        topic: {
            "topicName": topic,
            "readQueueNums": PARTITIONS,
            "writeQueueNums": PARTITIONS,
            "perm": 6,
            "attributes": {"message.type": "NORMAL"},
        }
        for topic in TOPICS
    }
    groups = {group: {"groupName": group} for group in GROUPS}
    for file, table, entries in (
        ("topics.json", "topicConfigTable", topics),
        ("subscriptionGroup.json", "subscriptionGroupTable", groups),
    ):
        (config / file).write_text(json.dumps({"dataVersion": version, table: entries}))


class Nats(Broker):
    """NATS JetStream, one process."""

    name = "NATS"
    library = "nats-py"
    settings = (
        "file storage, one stream of 4 subjects; batches are fetched 1,000 at a time and "
        "acknowledged once; fsync: sync_interval=always"
    )
    client = "bench.peers.clients.nats"

    async def prepare(self) -> None:  # noqa: D102
        self._program = await nats_server()
        self._version = (await command(str(self._program), "--version")).split("v")[-1].strip()
        self.paths = (await python_libraries(),)

    def version(self) -> str:  # noqa: D102
        return f"{self._version}, {_library(self)}"

    @asynccontextmanager
    async def serve(self, folder: Path, *, fsync: bool) -> AsyncIterator[Servers]:  # noqa: D102
        port = keep_ports(folder / "ports.json", ("nats",))["nats"]
        config = folder / "nats.conf"
        sync = "always" if fsync else "2m"
        config.write_text(
            f'listen: "{HOST}:{port}"\n'
            f'jetstream {{ store_dir: "{folder / "data"}", sync_interval: {sync} }}\n'
        )
        address = f"{HOST}:{port}"
        program = (str(self._program), "--config", str(config))
        async with running("nats", folder, program, address) as pid:
            yield Servers(address, (pid,))


BROKERS: Mapping[str, Callable[[], Broker]] = {
    "batonmq": BatonMq,
    "kafka": Kafka,
    "rocketmq": RocketMq,
    "nats": Nats,
}


@asynccontextmanager
async def running(
    name: str,
    folder: Path,
    arguments: Sequence[str],
    address: str,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[int]:
    """Run a server inside `async with`, where it accepts connections; the value is its process id.

    Raises:
        PeerFailed: It is not ready in time; the message has the end of its log.
    """
    host, _, port = address.rpartition(":")

    async def accepts() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        return True

    log = folder / f"{name}.log"
    path = shutil.which(arguments[0])
    if path is None:
        raise PeerFailed(f"{arguments[0]} is not installed")
    program = Program(
        name=name,
        command=(path, *arguments[1:]),
        log_path=log,
        is_ready=accepts,
        env=env or {},
        folder=folder,
    )
    server = ChildProcess(program)
    server.spawn()
    try:
        try:
            await server.ready(_READY_S)
        except NotReady as error:
            said = last_lines(log.read_text(errors="replace"))
            raise PeerFailed(f"{error}; its log ends with: {said}") from error
        assert server.pid is not None
        yield server.pid
    finally:
        await server.stop(_STOP_S)


def _write(path: Path, properties: Mapping[str, object]) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    return path


def _jar_version(folder: Path, name: str) -> str:
    (jar,) = folder.glob(f"{name}-[0-9]*.jar")
    return jar.stem.removeprefix(f"{name}-")


def _library(broker: Broker) -> str:
    found = importlib.metadata.distributions(path=[str(path) for path in broker.paths])
    versions = {one.metadata["Name"].lower(): one.version for one in found}
    return f"{broker.library} {versions[broker.library]}"
