"""What the nameserver has offsets forget."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc.aio
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc

from batonmq.common.errors import BatonError, OffsetsUnreachable, Unreachable
from batonmq.common.rpc import from_rpc_error

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0


class Progress:
    """The groups' progress at offsets.

    Args:
        offsets: A stub for the leader of offsets; raises `Unreachable` if there is none.
    """

    def __init__(self, offsets: Callable[[], pb_grpc.OffsetsServiceAsyncStub]) -> None:
        self._offsets = offsets
        self._epoch = 0

    async def forget(self, topic: str, topic_id: int) -> None:
        """End the progress on earlier topics of a name, before one is created as `topic_id`.

        Repeating it, early or late, does no harm.

        Raises:
            OffsetsUnreachable: not known whether it has ended.
        """
        request = pb.DeleteTopicRequest(topic=topic, offsets_epoch=self._epoch, topic_id=topic_id)
        try:
            answer = await self._offsets().DeleteTopic(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(topic, from_rpc_error(error)) from error
        except Unreachable as error:
            raise _unreachable(topic, error) from error
        if answer.offsets_epoch < self._epoch:
            raise OffsetsUnreachable(
                f"offsets answered with epoch {answer.offsets_epoch} after {self._epoch}",
                retry_after_ms=500,
            )
        self._epoch = answer.offsets_epoch
        if answer.queue_count:
            log.info("progress forgotten topic=%s queues=%d", topic, answer.queue_count)


def _unreachable(topic: str, error: BatonError) -> OffsetsUnreachable:
    return OffsetsUnreachable(
        f"topic {topic} is not created: offsets did not say that it has forgotten an earlier one: "
        f"{error.message}",
        retry_after_ms=500,
    )
