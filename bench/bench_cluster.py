"""The measured processes: a local cluster, and an echo service as the reference."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._connection.channels import connect
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import ChildProcess, Program, start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.setup import TOPIC

BROKER = "broker-0"
TIMEOUT_S = 60
_TERM = 1 << 60
_READY_S = 20


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """A local cluster with stubs of its services; `echo` is a storage service that does nothing."""

    local: LocalCluster
    storage: storage_grpc.StorageServiceAsyncStub
    offsets: offsets_grpc.OffsetsServiceAsyncStub
    echo: storage_grpc.StorageServiceAsyncStub

    @property
    def log_folder(self) -> Path:
        """Folder of the segments of the storage node."""
        return self.local.data_dir / "storage" / "log"

    async def own(self, group: str, queue_count: int) -> int:
        """Fence every queue for `group`; return the token.

        The bench acts as the lock manager, with a term higher than that of any election.
        """
        await self.offsets.Announce(offsets_pb.AnnounceRequest(term=_TERM), timeout=TIMEOUT_S)
        items = [
            offsets_pb.FenceItem(
                queue=group_queue(group, queue_id),
                attempt=f"{group}-{queue_id}",
                condition=offsets_pb.FENCE_CONDITION_CLOSED_OR_DRAINED,
                holder=queue_pb2.Incarnation(client_id="bench", incarnation_id=1),
            )
            for queue_id in range(queue_count)
        ]
        request = offsets_pb.FenceRequest(term=_TERM, items=items)
        answer = await self.offsets.Fence(request, timeout=TIMEOUT_S)
        tokens = {outcome.fenced.token for outcome in answer.outcomes}
        assert len(tokens) == 1 and tokens != {0}, answer
        return tokens.pop()


def group_queue(group: str, queue_id: int) -> queue_pb2.GroupQueue:
    """Return the key of a queue of the benchmarks' topic for a group."""
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
    return queue_pb2.GroupQueue(group=group, queue=queue)


@asynccontextmanager
async def bench_cluster(
    folder: Path, *, queue_count: int, **settings: Mapping[str, object]
) -> AsyncIterator[BenchCluster]:
    """Start a cluster with a topic of `queue_count` queues; storage flushes asynchronously.

    Args:
        settings: Settings by service that replace the defaults.
    """
    settings = {"storage": {"flush": "async"} | dict(settings.pop("storage", {}))} | settings
    options = ClusterOptions(settings=settings, auto_restart=False, log_level="WARNING")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(folder / "cluster", options, start=start_program)
        )
        await cluster.stop("lockmgr")
        echo = await _start_echo(folder)
        stack.callback(echo.kill_now)
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, queue_count)
        port = (folder / "echo.port").read_text()
        channels = [
            await stack.enter_async_context(connect(address))
            for address in (
                cluster.addresses["storage"],
                cluster.addresses["offsets"],
                f"127.0.0.1:{port}",
            )
        ]
        yield BenchCluster(
            cluster,
            storage_grpc.StorageServiceStub(channels[0]),
            offsets_grpc.OffsetsServiceStub(channels[1]),
            storage_grpc.StorageServiceStub(channels[2]),
        )


async def _start_echo(folder: Path) -> ChildProcess:
    port_file = folder / "echo.port"

    async def is_ready() -> bool:
        return port_file.exists()

    child = ChildProcess(
        Program(
            name="echo",
            command=[sys.executable, "-m", "bench.echo", str(port_file)],
            log_path=folder / "echo.log",
            is_ready=is_ready,
        )
    )
    child.spawn()
    await child.ready(_READY_S)
    return child
