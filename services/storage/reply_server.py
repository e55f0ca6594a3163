"""The servicer of ReplyService: passes replies from responders to the inboxes of requesters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import blake2b
from random import Random
from typing import Any

import grpc.aio

from baton.storage.v1 import reply_service_pb2 as pb
from baton.storage.v1 import reply_service_pb2_grpc as pb_grpc
from batonmq._common.aio import wait_until
from batonmq._core.requests import (
    REPLY_REQUEST_BYTES_MAX,
    REPLY_REQUEST_INBOXES_MAX,
)
from batonmq_server.storage.core.reply_inboxes import (
    INBOX_ID_BYTES,
    REPLY_OVERHEAD_BYTES,
    ReplyInboxes,
    ReplyStatus,
)
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.validation import check_limit

SILENCE_MS_MAX = 5_000
"""A stream sends a response at least this often, if need be without replies."""
Context = grpc.aio.ServicerContext[Any, Any]
_STATUSES = {
    ReplyStatus.DELIVERED: pb.REPLY_STATUS_DELIVERED,
    ReplyStatus.LATE: pb.REPLY_STATUS_LATE,
    ReplyStatus.INBOX_FULL: pb.REPLY_STATUS_INBOX_FULL,
}


class ReplyServicer(pb_grpc.ReplyServiceServicer):
    """Serves ReplyService; see the proto. It needs no data directory, and no leadership."""

    def __init__(self, node_id: str, metrics: StorageMetrics, random: Random) -> None:
        self._node_id, self._metrics = node_id, metrics

        def new_id() -> bytes:  # hashed, so that inbox ids do not reveal the state of `random`
            return blake2b(random.randbytes(32), digest_size=INBOX_ID_BYTES).digest()

        self._inboxes: ReplyInboxes[pb.RequestReply] = ReplyInboxes(new_id)
        metrics.reply_inboxes.set_function(lambda: len(self._inboxes))

    async def WatchReplies(
        self, request: pb.WatchRepliesRequest, context: Context
    ) -> AsyncIterator[pb.WatchRepliesResponse]:
        """See the proto."""
        arrived = asyncio.Event()
        inbox = self._inboxes.open(arrived.set)
        address = pb.InboxAddress(node_id=self._node_id, inbox_id=inbox.inbox_id)
        try:
            yield pb.WatchRepliesResponse(inbox=address)
            while True:
                await wait_until(arrived, SILENCE_MS_MAX)
                arrived.clear()
                yield pb.WatchRepliesResponse(replies=self._inboxes.take(inbox))
        finally:
            self._inboxes.close(inbox)

    async def Reply(self, request: pb.ReplyRequest, context: Context) -> pb.ReplyResponse:
        """See the proto."""
        check_limit("inboxes", len(request.inboxes), REPLY_REQUEST_INBOXES_MAX)
        check_limit("bytes", request.ByteSize(), REPLY_REQUEST_BYTES_MAX)
        return pb.ReplyResponse(outcomes=[self._put(entry) for entry in request.inboxes])

    def _put(self, entry: pb.InboxReplies) -> pb.ReplyOutcome:
        count = len(entry.replies)
        size = entry.ByteSize() + count * REPLY_OVERHEAD_BYTES
        status = self._inboxes.put(entry.inbox_id, map(_copy, entry.replies), size)
        self._metrics.replies.labels(status.value).inc(count)
        return pb.ReplyOutcome(status=_STATUSES[status])


def _copy(reply: pb.RequestReply) -> pb.RequestReply:
    """Return a reply that does not keep the memory of its whole request."""
    copy = pb.RequestReply()
    copy.CopyFrom(reply)
    return copy
