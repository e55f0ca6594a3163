"""Sends replies to the nodes with the inboxes of their requesters.

Replies to one node travel together: while a call is in flight, the next ones gather. A reply that
can't be sent is tried again for 10 s, or the timeout of its request if that is shorter; then it is
dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

import grpc.aio

from baton.storage.v1 import reply_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import Session
from batonmq._core.requests import (
    REPLY_ERROR_CHARACTERS_MAX,
    REPLY_REQUEST_INBOXES_MAX,
    Reply,
    request_header,
)
from batonmq.errors import BatonError, Retry

log = logging.getLogger(__name__)

CALL_BYTES_MAX = 2 * 1024 * 1024
"""A call with more bytes of bodies gets no more replies."""
WAITING_BYTES_MAX = 64 * 1024 * 1024
"""While more bytes wait for one node, further replies to it are dropped."""
RETRY_MS_MAX = 10_000
"""A node that is away for longer has lost its inboxes: they are in its memory only."""
_OUTCOMES = {
    pb.REPLY_STATUS_DELIVERED: "delivered",
    pb.REPLY_STATUS_LATE: "late",
    pb.REPLY_STATUS_INBOX_FULL: "inbox_full",
}


class _PendingReply(NamedTuple):
    """A reply that waits, or is being sent."""

    inbox_id: bytes
    topic: str
    reply: pb.RequestReply
    deadline_ms: int

    @property
    def size(self) -> int:
        return len(self.reply.body) + 4 * len(self.reply.error) + 64


class _NodeReplies:
    """The replies that wait for one node."""

    def __init__(self) -> None:
        self.waiting: deque[_PendingReply] = deque()
        self.waiting_bytes = 0
        self.is_sending = False


class ReplySender:
    """Sends the replies of one consumer.

    Args:
        spawn: Runs a coroutine until the consumer ends.
    """

    def __init__(
        self, session: Session, spawn: Callable[[Coroutine[object, object, None]], object]
    ) -> None:
        self._session, self._spawn = session, spawn
        self._nodes: dict[str, _NodeReplies] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def send(self, message: ReceivedMessage, reply: Reply) -> bool:
        """Start to send the reply to a request; return False if the message is no request."""
        header = request_header(message.properties)
        if header is None:
            return False
        name, node_id = message.queue.topic, header.address.node_id
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _NodeReplies()
        pending = _PendingReply(
            header.address.inbox_id,
            name,
            pb.RequestReply(
                correlation_id=header.correlation_id,
                body=reply.body,
                error=reply.error.encode(errors="replace").decode(),  # without lone surrogates
            ),
            self._session.clock.monotonic_ms() + min(header.timeout_ms, RETRY_MS_MAX),
        )
        if node.waiting_bytes + pending.size > WAITING_BYTES_MAX:
            self._count(name, "failed", 1)
            return True
        node.waiting.append(pending)
        node.waiting_bytes += pending.size
        if not node.is_sending:
            node.is_sending = True
            self._idle.clear()
            self._spawn(self._send_all(node_id, node))
        return True

    def fail(self, message: ReceivedMessage, error: str) -> None:
        """Start to send an error as the reply to a request that is not handled any more."""
        self.send(message, Reply(error=error[:REPLY_ERROR_CHARACTERS_MAX] or "the handler failed"))

    async def flush(self, timeout_s: float) -> None:
        """Wait until no reply waits, at most for `timeout_s`."""
        try:
            async with timeouts.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("replies were not sent before the consumer closed")

    async def _send_all(self, node_id: str, node: _NodeReplies) -> None:
        try:
            while node.waiting:
                await self._send_part(node_id, _take(node))
        finally:
            node.is_sending = False
            del self._nodes[node_id]
            if not self._nodes:
                self._idle.set()

    async def _send_part(self, node_id: str, part: Sequence[_PendingReply]) -> None:
        """Send replies, and again what has failed, until they are out of date."""
        directory, clock, failures = self._session.directory, self._session.clock, 0
        while part:
            now_ms = clock.monotonic_ms()
            late = [one for one in part if one.deadline_ms <= now_ms]
            self._count_all(late, "failed")
            part = [one for one in part if one.deadline_ms > now_ms]
            if not part:
                return
            groups: dict[tuple[bytes, str], list[_PendingReply]] = {}
            for one in part:
                groups.setdefault((one.inbox_id, one.topic), []).append(one)
            request = pb.ReplyRequest(
                inboxes=[
                    pb.InboxReplies(inbox_id=inbox, topic=topic, replies=[r.reply for r in replies])
                    for (inbox, topic), replies in groups.items()
                ]
            )
            try:
                stub = await directory.replies(node_id)
                answer = await stub.Reply(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except BatonError as failure:
                error = failure
            else:
                for outcome, replies in zip(answer.outcomes, groups.values(), strict=True):
                    self._settle(outcome, replies)
                return
            if error.retry is Retry.NEVER:
                log.warning("replies rejected node_id=%s error=%s", node_id, error)
                self._count_all(part, "failed")
                return
            await directory.pause(error, failures)
            failures += 1

    def _settle(self, outcome: pb.ReplyOutcome, replies: Sequence[_PendingReply]) -> None:
        if outcome.HasField("error"):
            error = error_from_pb(outcome.error)
            log.warning("replies rejected topic=%s error=%s", replies[0].topic, error)
        self._count_all(replies, _OUTCOMES.get(outcome.status, "failed"))

    def _count_all(self, replies: Sequence[_PendingReply], outcome: str) -> None:
        for topic, count in Counter(one.topic for one in replies).items():
            self._count(topic, outcome, count)

    def _count(self, topic: str, outcome: str, count: int) -> None:
        if self._session.metrics is not None:
            self._session.metrics.replied(topic, outcome, count)


def _take(node: _NodeReplies) -> list[_PendingReply]:
    """Return the replies of the next call."""
    part: list[_PendingReply] = []
    size = 0
    while node.waiting and len(part) < REPLY_REQUEST_INBOXES_MAX and size < CALL_BYTES_MAX:
        part.append(node.waiting.popleft())
        size += part[-1].size
    node.waiting_bytes -= size
    return part
