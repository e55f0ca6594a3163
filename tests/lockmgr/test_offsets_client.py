"""Goal: Announce returns the tokens of all queues, or fails.

Method: an offsets twin behind a real channel that answers in pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._core.queues import GroupQueue
from batonmq.errors import Unreachable
from batonmq_server.lockmgr.offsets_client import OffsetsChannels, OffsetsClient
from batonmq_server.runtime.group_placements import GroupPlacements
from tests.support.grpc_server import serving

Context = grpc.aio.ServicerContext[Any, Any]


class Parts(pb_grpc.OffsetsServiceServicer):
    """An offsets twin that answers Announce with one page for each of two groups.

    Attributes:
        epochs: The epochs of the next answers.
    """

    def __init__(self, epochs: Sequence[int]) -> None:
        self.epochs = list(epochs)
        self.after_groups: list[str] = []

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        self.after_groups.append(request.after_group)
        group = "second" if request.after_group else "first"
        queues = [
            pb.QueueToken(
                queue=queue_pb2.GroupQueue(
                    group=group,
                    queue=queue_pb2.QueueRef(topic="t", broker="b", queue_id=queue_id),
                ),
                token=queue_id + 1,
            )
            for queue_id in range(2)
        ]
        return pb.AnnounceResponse(
            offsets_epoch=self.epochs.pop(0), queues=queues, more=group == "first"
        )


class OnePeer:
    """The channel to the twin."""

    def __init__(self, stub: pb_grpc.OffsetsServiceAsyncStub) -> None:
        self._stub = stub

    def stub(self, replica_set: str) -> pb_grpc.OffsetsServiceAsyncStub:
        return self._stub


@asynccontextmanager
async def term(twin: Parts) -> AsyncIterator[OffsetsClient]:
    async with (
        serving(
            lambda server: pb_grpc.add_OffsetsServiceServicer_to_server(twin, server)
        ) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        peers = OnePeer(pb_grpc.OffsetsServiceStub(channel))
        offsets = OffsetsClient(cast(OffsetsChannels, peers), cast(GroupPlacements, None), 7)
        running = tasks.create_task(offsets.run())
        yield offsets
        running.cancel()


async def test_announce_reads_all_pages() -> None:
    twin = Parts(epochs=[3, 3])  # type: ignore[abstract]
    async with term(twin) as offsets:
        tokens = await offsets.announce("offsets")
    assert tokens == {
        GroupQueue(group, "t", "b", queue_id): queue_id + 1
        for group in ("first", "second")
        for queue_id in range(2)
    }
    assert twin.after_groups == ["", "first"]


async def test_announce_fails_if_the_pages_come_from_two_leaders() -> None:
    twin = Parts(epochs=[3, 4, 4, 4])  # type: ignore[abstract]
    async with term(twin) as offsets:
        with pytest.raises(Unreachable):
            await offsets.announce("offsets")
        assert len(await offsets.announce("offsets")) == 4
    assert twin.after_groups == ["", "first", "", "first"]
