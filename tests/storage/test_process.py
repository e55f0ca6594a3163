"""Goal: a killed node loses no acknowledged message; a stopped node leaves no call waiting.

Method: real storage processes, a real etcd, the offsets twin. T2 and
T5 of the standing test list.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import connect
from batonmq._core.records import check_batch, decode_records
from batonmq.errors import BatonError, NotServing
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.storage.batches import TOPIC, TOPIC_ID, batch
from tests.storage.offsets_twin import OffsetsTwin
from tests.storage.running_node import WATERMARKS, pull_request
from tests.support.cluster import fork_server
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
TIMEOUT_S = 20

ROUNDS = 4
QUEUES = 4


@dataclass
class ProcessSite:
    """Runs storage processes of one cluster, one after the other.

    Attributes:
        data: Their data directory.
    """

    folder: Path
    data: Path
    etcd: EtcdSession
    env: dict[str, str]
    processes: list[ChildProcess] = field(default_factory=list)

    def start(self, *arguments: str, **env: str) -> ChildProcess:
        """Start `python -m batonmq_server.storage` with these arguments and variables."""
        return self.start_python("-m", "batonmq_server.storage", *arguments, **env)

    def start_python(self, *arguments: str, **env: str) -> ChildProcess:
        """Start Python with these arguments and variables; a module is run in a forked process."""
        return self.start_command(sys.executable, *arguments, **env)

    def start_command(self, *command: str, **env: str) -> ChildProcess:
        """Start a program with the variables of the site and these."""
        name = f"storage-{len(self.processes)}"
        program = Program(
            name=name,
            command=command,
            env=self.env | env,
            drop=("BATON_",),
            log_path=self.folder / f"{name}.log",
            is_ready=self._is_registered,
        )
        process = ChildProcess(program, fork_server().start)
        self.processes.append(process)
        process.spawn()
        return process

    async def _is_registered(self) -> bool:
        return await self.etcd.get(self.etcd.key("nodes", "storage", "broker-a")) is not None

    async def serving(self, after_unix_ms: int = 0) -> StoredNode:
        """Wait for a serving process that started after `after_unix_ms`; return its entry."""
        node = StoredNode()

        async def registered() -> bool:
            stored = await self.etcd.get(self.etcd.key("nodes", "storage", "broker-a"))
            node.ParseFromString(stored.value if stored else b"")
            return node.start_unix_ms > after_unix_ms

        await until(registered, timeout_s=40)
        return node


@asynccontextmanager
async def process_site(etcd_endpoint: str, folder: Path) -> AsyncIterator[ProcessSite]:
    cluster = secrets.token_hex(8)
    twin = OffsetsTwin()  # type: ignore[abstract]
    data = folder / "data"
    env = {
        "BATON_STORAGE_CLUSTER": cluster,
        "BATON_STORAGE_ETCD": etcd_endpoint,
        "BATON_STORAGE_DATA_DIR": str(data),
        "BATON_STORAGE_SEGMENT_BYTES": str(64 * 1024),
    }
    env |= {f"BATON_STORAGE_{name.upper()}": str(value) for name, value in WATERMARKS.items()}
    async with (
        EtcdSession(etcd_endpoint, cluster, Clock()) as etcd,
        serving_at(
            lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(twin, server)
        ) as address,
    ):
        peer = StoredNode(node_id="a", address=address, leader=True)
        await etcd.put(etcd.key("nodes", "offsets", "a"), peer.SerializeToString())
        spread = [nameserver_pb.QueueSpread(broker="broker-a", queue_count=QUEUES)]
        topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread)
        await etcd.put(etcd.key("topics", TOPIC), topic.SerializeToString())
        site = ProcessSite(folder, data, etcd, env)
        try:
            yield site
        finally:
            for process in site.processes:
                process.kill_now()


async def output(process: ChildProcess) -> str:
    """Wait until the process has ended; return the end of its output."""
    await process.ended()
    return "\n".join(process.last_lines(100))


async def send(
    stub: pb_grpc.StorageServiceAsyncStub, queue_id: int, bodies: list[bytes]
) -> pb.AppendReceipt:
    """Append the next batch of a queue; return its receipt or raise the error of the call."""
    body = b"%d-%d" % (queue_id, len(bodies))
    raw = batch(body, b"x" * 500, queue_id=queue_id, producer=(9, 1), sequence=2 * len(bodies))
    try:
        answer = await stub.Append(pb.AppendRequest(batches=[raw]), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    (outcome,) = answer.outcomes
    if outcome.HasField("error"):
        raise error_from_pb(outcome.error)
    bodies.append(body)
    return outcome.receipt


async def send_until_dead(
    stub: pb_grpc.StorageServiceAsyncStub, queue_id: int, bodies: list[bytes]
) -> None:
    try:
        while True:
            receipt = await send(stub, queue_id, bodies)
            assert receipt.first_offset == 2 * (len(bodies) - 1)
            assert receipt.durability == pb.DURABILITY_FSYNCED
    except BatonError as error:
        assert error.kind == "UNAVAILABLE", error


async def read(stub: pb_grpc.StorageServiceAsyncStub, queue_id: int) -> list[bytes]:
    """Return the first body of each batch of a queue."""
    bodies: list[bytes] = []
    offset = 0
    while True:
        request = pull_request(queue_id=queue_id, offset=offset)
        answer = await stub.Pull(request, timeout=TIMEOUT_S)
        if answer.next_offset == offset:
            return bodies
        for raw in answer.batches:
            header = check_batch(raw, stamped=True)
            assert header.first_offset == 2 * len(bodies)
            bodies += [one.body for one in decode_records(raw, header, [0])]
        offset = answer.next_offset


async def test_kill_9_under_load_loses_and_duplicates_nothing(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    sent_bodies: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(QUEUES)}
    async with process_site(etcd_endpoint, tmp_path) as site:
        started_ms = 0
        for number in range(ROUNDS):
            process = site.start()
            node = await site.serving(started_ms)
            started_ms = node.start_unix_ms
            assert node.epoch == number + 1
            async with connect(node.address) as channel, asyncio.TaskGroup() as tasks:
                stub = pb_grpc.StorageServiceStub(channel)
                for queue_id, bodies in sent_bodies.items():
                    tasks.create_task(send_until_dead(stub, queue_id, bodies))
                goal = (number + 1) * 40
                await until(lambda goal=goal: len(sent_bodies[0]) >= goal, 60)  # type: ignore[misc]
                process.kill_now()
        site.start()
        node = await site.serving(started_ms)
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            for queue_id, bodies in sent_bodies.items():
                await send(stub, queue_id, bodies)  # again, if the last result was unknown
                assert await read(stub, queue_id) == bodies
        report = json.loads((site.data / "recovery.json").read_text())
        assert report["epoch"] == ROUNDS + 1
        assert report["batches"] >= ROUNDS * 40


async def test_sigterm_ends_long_polls_and_keeps_everything(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        process = site.start()
        node = await site.serving()
        bodies: list[bytes] = []
        async with connect(node.address) as channel, asyncio.TaskGroup() as tasks:
            stub = pb_grpc.StorageServiceStub(channel)
            await send(stub, 0, bodies)
            long_poll = tasks.create_task(held_pull(stub))

            async def waits() -> bool:
                described = await stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)
                return bool(described.long_poll_count)

            await until(waits)
            process.send(signal.SIGTERM)
            assert isinstance(await long_poll, NotServing)
        assert await process.ended() == 0
        site.start()
        again = await site.serving(node.start_unix_ms)
        async with connect(again.address) as channel:
            assert await read(pb_grpc.StorageServiceStub(channel), 0) == bodies
        report = json.loads((site.data / "recovery.json").read_text())
        assert report["truncated_bytes"] == 0


async def held_pull(stub: pb_grpc.StorageServiceAsyncStub) -> BatonError | None:
    try:
        await stub.Pull(pull_request(queue_id=1, hold_ms=30_000), timeout=60)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_second_process_does_not_get_the_directory(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        first = site.start()
        await site.serving()
        second = site.start()
        assert f"is used by process {first.pid}" in await output(second)
        assert second.returncode == 1
        assert first.returncode is None


async def test_damage_of_acknowledged_batches_fails_the_start_with_a_remedy(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        process = site.start()
        node = await site.serving()
        async with connect(node.address) as channel:
            await send(pb_grpc.StorageServiceStub(channel), 0, [])
        process.kill_now()
        with (site.data / "log" / f"{0:020d}").open("r+b") as file:
            file.seek(100)
            file.write(b"????")
        process = site.start()
        assert "acknowledged messages are damaged" in await output(process)
        assert process.returncode == 1
        site.start(BATON_STORAGE_ACCEPT_LOSS="true")
        await site.serving(node.start_unix_ms)


async def test_settings_are_printed_and_misspelt_ones_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        process = site.start("--print-config", BATON_STORAGE_FLUSH="async")
        printed = json.loads(await output(process))
        assert (printed["flush"], printed["node_id"]) == ("async", "broker-a")
        process = site.start(BATON_STORAGE_FLUSHH="async")
        assert "BATON_STORAGE_FLUSHH" in await output(process)
        assert process.returncode == 2
