"""Goal: while the disk is full, changes are rejected and reads answered; later both work again.

Method: the real service on its real disk; the test decides how much is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import DiskFull
from batonmq_server.offsets import group_commit
from batonmq_server.offsets.disk import FREE_BYTES_MIN, LmdbDisk
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.offsets.running_service import service_on
from tests.offsets.service_calls import (
    TERM,
    Service,
    call,
    queue,
)
from tests.support.conditions import until


class Room:
    """The free space of the disk."""

    free_bytes = FREE_BYTES_MIN

    def __call__(self, folder: Path) -> int:
        return self.free_bytes


@asynccontextmanager
async def serving_in(folder: Path, room: Room) -> AsyncIterator[Service]:
    etcd = EtcdSession("127.0.0.1:1", "unused", Clock())
    with LmdbDisk(folder, free_bytes=room) as disk:
        async with service_on(disk, etcd, "readers") as service:
            yield service


def commit(committed_offset: int, queue_id: int = 3) -> pb.CommitRequest:
    item = pb.CommitItem(queue=queue(queue_id=queue_id), token=1, committed_offset=committed_offset)
    return pb.CommitRequest(items=[item])


CHANGES: dict[str, Any] = {
    "Announce": pb.AnnounceRequest(term=TERM + 1),
    "Fence": pb.FenceRequest(term=TERM),
    "RecordDelivered": pb.RecordDeliveredRequest(),
    "Commit": commit(5, queue_id=4),
    "Close": pb.CloseRequest(),
    "Reset": pb.ResetRequest(),
    "Clone": pb.CloneRequest(),
    "DeleteGroup": pb.DeleteGroupRequest(group="readers"),
    "DeleteTopic": pb.DeleteTopicRequest(topic="news", topic_id=1),
}


async def test_full_disk_rejects_changes_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RETRY_MS", 10)
    room = Room()
    async with serving_in(tmp_path, room) as service:
        await service.start_owner(queue_id=3)
        await service.start_owner(queue_id=4)
        room.free_bytes -= 1
        commits = service.offsets.commits
        async with asyncio.TaskGroup() as tasks:
            pending = tasks.create_task(call(service, "Commit", commit(5)))
            await until(lambda: commits.disk_full is not None)
            assert service.registry.get_sample_value("baton_offsets_disk_full") == 1
            for method, request in CHANGES.items():
                code, error = await rejected(service, method, request)
                assert (code, error) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL"), method
            touch = pb.TouchRequest(items=[pb.TouchItem(queue=queue(queue_id=4), token=1)])
            assert not (await call(service, "Touch", touch)).outcomes[0].HasField("error")
            query = pb.QueryRequest(queues=[queue(queue_id=4)])
            progress = (await call(service, "Query", query)).outcomes[0].progress
            assert progress.committed_offset == 0
            assert not pending.done(), "an applied change is answered once it is durable"
            room.free_bytes += 1
        assert pending.result().outcomes[0].committed.committed_offset == 5
        assert service.registry.get_sample_value("baton_offsets_disk_full") == 0
        answer = await call(service, "Commit", commit(6))
        assert answer.outcomes[0].committed.committed_offset == 6


async def rejected(service: Service, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    before, count = service.stored(), len(service.offsets.table)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(service, method, request)
    assert (service.stored(), len(service.offsets.table)) == (before, count)
    return raised.value.code(), from_rpc_error(raised.value).reason


async def test_changes_that_were_not_durable_on_a_full_disk_are_gone_after_a_restart(
    tmp_path: Path,
) -> None:
    room = Room()
    async with serving_in(tmp_path, room) as service:
        await service.start_owner()
        room.free_bytes = 0
        async with asyncio.TaskGroup() as tasks:
            pending = tasks.create_task(call(service, "Commit", commit(5)))
            await until(lambda: service.offsets.commits.disk_full is not None)
            await service.offsets.commits.drain()
            pending.cancel()
    async with serving_in(tmp_path, room) as service:
        query = pb.QueryRequest(queues=[queue()])
        progress = (await call(service, "Query", query)).outcomes[0].progress
        assert progress.committed_offset == 0, "the service starts although the disk is full"


async def test_write_that_leaves_too_little_free_is_rejected(tmp_path: Path) -> None:
    room = Room()
    with LmdbDisk(tmp_path, free_bytes=room) as disk:
        room.free_bytes -= 1
        with pytest.raises(DiskFull) as raised:
            await disk.write([(b"a", b"1")])
        assert raised.value.facts["limit"] == str(FREE_BYTES_MIN)
        assert not list(disk.read())
        room.free_bytes += 1
        await disk.write([(b"a", b"1")])
        assert list(disk.read()) == [(b"a", b"1")]
