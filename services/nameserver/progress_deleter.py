"""Deletion of progress at the offsets service: of topics at every set, of a group at its set."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import grpc.aio

from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, GroupInUse, OffsetsUnreachable, Unreachable
from batonmq_server.nameserver.compare_and_swap import run_concurrently
from batonmq_server.runtime.group_placements import GroupPlacements

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
Answer = TypeVar("Answer", pb.DeleteTopicResponse, pb.DeleteGroupResponse)


class ProgressDeleter:
    """Deletes progress of topics and groups.

    Repeated and late calls do no harm: offsets compares topic ids, and checks whether the group
    exists.

    Args:
        offsets: Returns a stub for the leader of a set; raises `Unreachable` if there is none.
    """

    def __init__(
        self, offsets: Callable[[str], pb_grpc.OffsetsServiceAsyncStub], placements: GroupPlacements
    ) -> None:
        self._offsets, self._placements = offsets, placements
        self._epochs: dict[str, int] = defaultdict(int)

    async def delete_topic(self, topic: str, topic_id: int) -> None:
        """Delete the progress on the topics of a name whose id is less than `topic_id`.

        Raises:
            OffsetsUnreachable: it is unknown whether the progress is deleted.
        """
        sets = sorted(self._placements.sets()) or [self._placements.set_of("")]
        counts = await run_concurrently(
            [partial(self._delete_topic_at, name, topic, topic_id) for name in sets]
        )
        if sum(counts):
            log.info("progress deleted topic=%s queues=%d", topic, sum(counts))

    async def delete_group(self, group: str) -> int:
        """Delete the progress of a deleted group; return the number of queues that had progress.

        Raises:
            GroupInUse: the group was created again.
            OffsetsUnreachable: it is unknown whether the progress is deleted.
        """
        name = self._placements.set_of(group)
        request = pb.DeleteGroupRequest(group=group, offsets_epoch=self._epochs[name])
        answer = await self._call(
            name, lambda stub: stub.DeleteGroup(request, timeout=CALL_TIMEOUT_S)
        )
        return answer.queue_count

    async def _delete_topic_at(self, name: str, topic: str, topic_id: int) -> int:
        request = pb.DeleteTopicRequest(
            topic=topic, offsets_epoch=self._epochs[name], topic_id=topic_id
        )
        answer = await self._call(
            name, lambda stub: stub.DeleteTopic(request, timeout=CALL_TIMEOUT_S)
        )
        return answer.queue_count

    async def _call(
        self, name: str, call: Callable[[pb_grpc.OffsetsServiceAsyncStub], Awaitable[Answer]]
    ) -> Answer:
        try:
            answer = await call(self._offsets(name))
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            raise (error if isinstance(error, GroupInUse) else _unreachable(error)) from failure
        except Unreachable as error:
            raise _unreachable(error) from error
        if answer.offsets_epoch < self._epochs[name]:
            raise OffsetsUnreachable(
                f"offsets set {name} answered with epoch {answer.offsets_epoch}, older than "
                f"{self._epochs[name]}",
                retry_after_ms=500,
            )
        self._epochs[name] = answer.offsets_epoch
        return answer


def _unreachable(error: BatonError) -> OffsetsUnreachable:
    return OffsetsUnreachable(
        f"unknown whether the progress was deleted: {error.message}",
        remedy="Try again: it is safe to repeat.",
        retry_after_ms=500,
    )
