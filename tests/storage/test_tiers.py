"""Goal: readers, followers and new leaders read what is only in the object store; kill -9 loses
nothing.

Method: whole nodes over gRPC, with a real etcd and a folder as the store; small segments that leave
the local disk at once. A process that kills itself between two steps of a move.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq._core.records import Message, check_batch, decode_records
from batonmq.errors import DataLoss, Unreachable
from batonmq_server.storage import checkpointer
from batonmq_server.storage.core.tier import LocalSegment
from batonmq_server.storage.core.tier_upload import SegmentComparison
from batonmq_server.storage.tier_mover import TierMover
from tests.storage.batches import TOPIC, batch
from tests.storage.replicas import BROKER, Replica, Scene
from tests.storage.running_node import TIMEOUT_S, RunningNode, running_node
from tests.storage.test_delivery_streams import streaming
from tests.storage.test_process import output, process_site, read, send
from tests.storage.test_purge import delete, purge, put, write
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(240)

SEGMENT_BYTES = 64 * 1024
COUNT = 60
"""Messages of 10 KB: nine segments are closed."""
RUN_WITH_KILL = """
import os, runpy, signal
from batonmq.admin.backup_store import FolderStore
from batonmq_server.storage.disk import RealDisk
point = os.environ["KILL_AT"]
write, replace_sparse = FolderStore.write, RealDisk.replace_sparse
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def written(self, name, content):
    kind = "part" if "/parts/" in name else "manifest"
    if point == f"before {kind}":
        kill()
    write(self, name, content)
    if point == f"after {kind}":
        kill()
def replaced(self, path, head, size):
    replace_sparse(self, path, head, size)
    if point == "after local file" and path.startswith("log/"):
        kill()
FolderStore.write, RealDisk.replace_sparse = written, replaced
runpy.run_module("batonmq_server.storage", run_name="__main__")
"""
KILL_POINTS = ("before part", "after part", "after manifest", "after local file")


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    """Return settings with which closed segments leave the local disk at once."""
    return {
        "segment_bytes": SEGMENT_BYTES,
        "tier_url": str(folder),
        "tier_local_age_ms": 0,
        "tier_interval_ms": 50,
        **more,
    }


def moved(data: Path) -> int:
    """Return how many segment files contain only a manifest."""
    folder = data / "log"
    # A follower that has copied nothing yet has no folder.
    # A file with another suffix is being replaced, and gone a moment later.
    entries = folder.iterdir() if folder.exists() else ()
    paths = [path for path in entries if path.name.isdecimal()]
    return sum(path.read_bytes()[:4] == b"BTNT" for path in paths)


def body(number: int) -> bytes:
    return b"%d-" % number + bytes(10_000)


async def _nothing_moved(mover: TierMover, local: Sequence[LocalSegment]) -> bool:
    return False


async def fill(append: Callable[[bytes], Any], begin: int = 0, count: int = COUNT) -> None:
    """Append messages to queue 0, each with a key."""
    for number in range(begin, begin + count):
        await append(batch(Message(body(number), keys=(f"key-{number}",))))


def queue(queue_id: int = 0) -> queue_pb2.QueueRef:
    return queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)


async def pulled(node: RunningNode, offset: int = 0) -> list[bytes]:
    """Pull queue 0 to its end."""
    bodies: list[bytes] = []
    while True:
        answer = await node.pull(offset=offset)
        if answer.next_offset == offset:
            return bodies
        assert answer.lost_count == 0
        for raw in answer.batches:
            header = check_batch(raw, stamped=True)
            bodies += [one.body for one in decode_records(raw, header, range(header.count))]
        offset = answer.next_offset


async def test_mover_waits_for_a_free_descriptor(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batonmq_server.storage.flusher.SHORTAGE_PAUSE_S", 0)
    shortages = iter(range(3))
    compare_next = SegmentComparison.compare_next

    def compare(comparison: SegmentComparison) -> bool:
        if next(shortages, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return compare_next(comparison)

    monkeypatch.setattr(SegmentComparison, "compare_next", compare)
    data = tmp_path / "data"
    async with running_node(etcd_endpoint, data, **tier(tmp_path / "store")) as node:
        await fill(node.append)
        await until(lambda: moved(data) == 9)
    assert next(shortages, None) is None


async def test_readers_read_what_is_only_in_the_store(etcd_endpoint: str, tmp_path: Path) -> None:
    data, store = tmp_path / "data", tmp_path / "store"
    expected = [body(number) for number in range(COUNT)]
    async with running_node(etcd_endpoint, data, **tier(store)) as node:
        await fill(node.append)
        await until(lambda: moved(data) == 9)
        assert await pulled(node) == expected
        async with streaming(node) as stream:
            await stream.start(bytes_limit=1 << 30)
            streamed: list[bytes] = []
            while len(streamed) < COUNT:
                streamed += await stream.bodies()
            assert streamed == expected
        found = await node.queries.FindByKey(
            query_pb.FindByKeyRequest(topic=TOPIC, key="key-7"), timeout=TIMEOUT_S
        )
        assert len(found.messages) == 1
        times = query_pb.SearchOffsetRequest(queue=queue(), unix_ms=1)
        assert (await node.queries.SearchOffset(times, timeout=TIMEOUT_S)).offset == 0
        registry = node.runtime.registry
        assert registry.get_sample_value("baton_storage_tier_remote_bytes") == 9 * SEGMENT_BYTES
        assert registry.get_sample_value("baton_storage_tier_waiting_segments") == 0
    cluster = node.settings.cluster
    assert sum(path.stat().st_blocks * 512 for path in (data / "log").iterdir()) < 3 * SEGMENT_BYTES
    # A restart has the segments too, and refuses to read what is damaged.
    parts = sorted((store / cluster / BROKER / "parts").iterdir())
    content = parts[0].read_bytes()
    async with running_node(etcd_endpoint, data, cluster=cluster, **tier(store)) as node:
        parts[0].write_bytes(content[:5_000] + b"!" + content[5_001:])
        with pytest.raises(DataLoss, match=f"{parts[0].name} of the store is damaged: block 0"):
            await node.pull()
        parts[0].rename(tmp_path / "hidden")
        with pytest.raises(DataLoss, match=f"{parts[0].name} of the store is missing"):
            await node.pull()
        parts[0].mkdir()
        with pytest.raises(Unreachable, match="IsADirectoryError"):
            await node.pull()
        parts[0].rmdir()
        parts[0].write_bytes(content)
        assert await pulled(node) == expected


@pytest.mark.long
async def test_new_leader_and_a_new_replica_have_what_is_only_in_the_store(
    scene: Scene, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    scene.settings |= tier(store)
    expected = [body(number) for number in range(COUNT)]
    await scene.start("a", "b", "c")
    await scene.wait_in_sync("a", "b", "c")
    leader = await scene.leader()
    await fill(leader.append)
    folders = [scene.folder / name for name in ("a", "b", "c")]
    await until(lambda: all(moved(folder) == 9 for folder in folders))
    parts = {path: path.stat().st_mtime_ns for path in store.rglob("*.00000")}
    assert len(parts) == 9
    await leader.crash()
    second = await scene.leader()
    assert await second.bodies() == expected
    await fill(second.append, COUNT, 10)
    expected += [body(number) for number in range(COUNT, COUNT + 10)]
    shutil.rmtree(leader.folder)
    await scene.start(leader.name)
    await scene.wait_in_sync("a", "b", "c")
    await until(lambda: moved(leader.folder) >= 9)
    assert await scene.nodes[leader.name].bodies() == expected
    # No node has stored a segment again that the first leader had stored.
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


async def test_new_leader_reads_no_purged_segment_from_the_store(
    scene: Scene,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The former leader has removed it; checkpoints of the new one are not due yet."""
    monkeypatch.setattr(checkpointer, "INTERVAL_S", 3_600)
    store, names = tmp_path / "store", ("a", "b", "c")
    scene.settings |= tier(store)
    await scene.start(*names)
    await scene.wait_in_sync(*names)
    leader = await scene.leader()
    await put(scene)
    await write(leader)
    await until(lambda: all(moved(scene.folder / name) == 3 for name in names))
    monkeypatch.setattr(TierMover, "_move_out", _nothing_moved)
    await delete(scene)
    assert (await purge(leader)).purged_segments == 2
    await until(lambda: len(list(store.rglob("*.00000"))) == 2)
    await leader.crash()
    second = await scene.leader()
    shutil.rmtree(leader.folder)
    await scene.start(leader.name)
    await scene.wait_in_sync(*names)
    assert await second.bodies() == [b"first", b"last"]
    assert "damaged" not in caplog.text


async def test_repeated_commit_of_a_message_in_the_store_gets_the_first_receipt(
    scene: Scene, tmp_path: Path
) -> None:
    scene.settings |= tier(tmp_path / "store")
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    begin = transaction_pb.BeginRequest(
        items=[transaction_pb.BeginItem(batch=batch(b"paid"), group="shop")]
    )
    (begun,) = (await leader.transactions.Begin(begin, timeout=TIMEOUT_S)).outcomes
    commit = transaction_pb.EndRequest(
        items=[
            transaction_pb.EndItem(
                transaction_id=begun.receipt.transaction_id,
                state=transaction_pb.TRANSACTION_STATE_COMMITTED,
                topic=TOPIC,
            )
        ]
    )
    (first,) = (await leader.transactions.End(commit, timeout=TIMEOUT_S)).outcomes
    await fill(leader.append)
    folders = [scene.folder / name for name in ("a", "b", "c")]
    await until(lambda: all(moved(folder) >= 9 for folder in folders))
    await leader.crash()
    second = await scene.leader()  # it has nothing of the segment in its cache
    (again,) = (await second.transactions.End(commit, timeout=TIMEOUT_S)).outcomes
    assert (first.receipt.first_offset, first.receipt.duplicate) == (0, False)
    assert (again.receipt.first_offset, again.receipt.duplicate) == (0, True), again


async def test_repeated_schedule_of_a_batch_in_the_store_gets_the_first_receipt(
    scene: Scene, tmp_path: Path
) -> None:
    scene.settings |= tier(tmp_path / "store")
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    deliver_unix_ms = Clock().unix_ms()
    once = batch(b"failed", producer=(7, 1))

    async def schedule(node: Replica, at_unix_ms: int) -> schedule_pb.ScheduleOutcome:
        item = schedule_pb.ScheduleItem(batch=once, deliver_unix_ms=at_unix_ms)
        request = schedule_pb.ScheduleRequest(items=[item])
        (outcome,) = (await node.scheduling.Schedule(request, timeout=TIMEOUT_S)).outcomes
        return outcome

    first = await schedule(leader, deliver_unix_ms)
    await fill(leader.append)
    folders = [scene.folder / name for name in ("a", "b", "c")]
    await until(lambda: all(moved(folder) >= 9 for folder in folders))
    await leader.crash()
    second = await scene.leader()  # it has nothing of the segment in its cache
    again = await schedule(second, deliver_unix_ms + 60_000)
    first.receipt.duplicate = True
    assert again == first, again


@pytest.mark.long
@pytest.mark.e2e
async def test_kill_between_the_steps_of_a_move_loses_nothing(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    store, bodies = tmp_path / "store", list[bytes]()
    async with process_site(etcd_endpoint, tmp_path) as site:
        site.env |= {
            f"BATON_STORAGE_{name.upper()}": str(value)
            for name, value in tier(store, tier_local_age_ms=3_600_000, node_lease_ms=2_000).items()
        }
        site.start()
        node = await site.serving()
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            while (await send(stub, 0, bodies)).position < 3 * SEGMENT_BYTES:
                pass
        site.processes[-1].kill_now()
        shutil.rmtree(store)
        site.env["BATON_STORAGE_TIER_LOCAL_AGE_MS"] = "0"
        for point in KILL_POINTS:
            process = site.start_python("-c", RUN_WITH_KILL, KILL_AT=point)
            assert "Traceback" not in await output(process)
            assert process.returncode == -9, point
        assert moved(site.data) == 1
        killed_unix_ms = Clock().unix_ms()
        site.start()
        node = await site.serving(killed_unix_ms)
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            await until(lambda: moved(site.data) == 3)
            assert await read(stub, 0) == bodies
