"""What the nameserver has offsets forget: topics at every set, a group at the one that keeps it."""

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
    """The groups' progress at offsets.

    Args:
        offsets: A stub for the leader of a set; raises `Unreachable` if there is none.
    """

    def __init__(
        self, offsets: Callable[[str], pb_grpc.OffsetsServiceAsyncStub], places: GroupPlacements
    ) -> None:
        self._offsets, self._places = offsets, places
        self._epochs: dict[str, int] = defaultdict(int)

    async def delete_topic(self, topic: str, topic_id: int) -> None:
        """End the progress on earlier topics of a name, before one is created as `topic_id`.

        Repeating it, early or late, does no harm.

        Raises:
            OffsetsUnreachable: not known whether it has ended.
        """
        sets = sorted(self._places.sets()) or [self._places.set_of("")]
        counts = await run_concurrently(
            [partial(self._forget, name, topic, topic_id) for name in sets]
        )
        if sum(counts):
            log.info("progress forgotten topic=%s queues=%d", topic, sum(counts))

    async def delete_group(self, group: str) -> int:
        """End the progress of a deleted group; the number of queues that had some.

        Repeating it, early or late, does no harm: offsets looks whether the group exists.

        Raises:
            GroupInUse: it does, as it was created again.
            OffsetsUnreachable: not known whether the progress has ended.
        """
        name = self._places.set_of(group)
        request = pb.DeleteGroupRequest(group=group, offsets_epoch=self._epochs[name])
        answer = await self._call(
            name, lambda stub: stub.DeleteGroup(request, timeout=CALL_TIMEOUT_S)
        )
        return answer.queue_count

    async def _forget(self, name: str, topic: str, topic_id: int) -> int:
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
                f"offsets answered with epoch {answer.offsets_epoch} after {self._epochs[name]}",
                retry_after_ms=500,
            )
        self._epochs[name] = answer.offsets_epoch
        return answer


def _unreachable(error: BatonError) -> OffsetsUnreachable:
    return OffsetsUnreachable(
        f"offsets did not say that it has forgotten: {error.message}",
        remedy="Try again: it is safe to repeat.",
        retry_after_ms=500,
    )
