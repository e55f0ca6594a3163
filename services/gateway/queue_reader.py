"""The calls of clients that read queues by themselves: no member, no lease, nothing in flight.

Such a client names stored queues: the broker and the number of each. Its group has ownership off,
as that of a native puller, so its commits can't move progress behind the back of an owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import query_route, queues_of
from batonmq._consumer.batch_decoder import decode_batch
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.reader_calls import FetchLimits, ReaderCalls, ReadProgress
from batonmq._core.queues import QueueRef
from batonmq._core.subscription import parse_filter
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupNotFound,
    ModeChanged,
    QueueNotFound,
    Retry,
    TopicNotFound,
)
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.message_proto import UNIX_MS_MAX, timestamp_ms
from batonmq_server.gateway.statuses import OK, Refused
from batonmq_server.gateway.telemetry import expression_of

PULL_BYTES = 1024 * 1024
"""Bytes of one pull, about."""
GROUPS_MAX = 1_000
QUEUES_MAX = 10_000
EPOCHS_MAX = 100_000
"""Groups, queues and reads of offsets that are remembered, at most; the oldest are forgotten."""
_NEW_TRIES = 3
_MAY_BE_NEW = (GroupNotFound, ModeChanged, QueueNotFound, TopicNotFound)
"""Refusals of a storage node that has not learnt yet of a group or topic that was just created."""


K = TypeVar("K")
V = TypeVar("V")


class PulledMessages(NamedTuple):
    """The messages of one pull.

    Attributes:
        next_offset: Where to pull next.
        lost_count: Messages from the requested offset on that are no longer kept.
    """

    messages: Sequence[ReceivedMessage]
    next_offset: int
    lost_count: int


class QueueReader:
    """Reads queues, and reads and commits offsets, for remote clients."""

    def __init__(self, directory: Directory, environment: ClientEnvironment) -> None:
        self._directory, self._environment = directory, environment
        self._calls: dict[str, ReaderCalls] = {}
        self._known: dict[QueueRef, None] = {}
        self._epochs: dict[tuple[str, str, QueueRef], int] = {}

    async def pull(
        self, caller: Caller, request: service_pb2.PullMessageRequest, wait_ms: int
    ) -> PulledMessages:
        """Return the next messages of a queue; none if none arrives within `wait_ms`.

        Raises:
            Refused, BatonError: The call is refused.
        """
        group = caller.group(request.group)
        if request.offset < 0:
            raise Refused(pb.ILLEGAL_OFFSET, f"offset must not be negative, got {request.offset}")
        wanted = parse_filter(expression_of(request.filter_expression))
        queue = await self._queue(caller, request.message_queue)
        limits = FetchLimits(PULL_BYTES, request.batch_size)
        clock = self._environment.clock
        end_ms = clock.monotonic_ms() + wait_ms
        offset, lost_count, failures = request.offset, 0, 0
        while True:
            left_ms = max(0, end_ms - clock.monotonic_ms())
            try:
                fetched = await self._of(group).pull(queue, offset, wanted, limits, left_ms)
            except BatonError as error:
                if isinstance(error, TopicNotFound | QueueNotFound):
                    self._known.pop(queue, None)
                if not left_ms or _is_final(error, failures):
                    raise
                await self._directory.pause(error, failures)
                failures += 1
                continue
            lost_count += fetched.lost_count
            messages = [
                ReceivedMessage(queue, 0, header, record, redelivered=False)
                for raw in fetched.batches
                for header, record in decode_batch(raw, offset, fetched.next_offset, wanted)
            ]
            offset = fetched.next_offset
            if messages or lost_count or not left_ms:
                return PulledMessages(messages, offset, lost_count)
            await asyncio.sleep(0)  # a filter that drops everything leaves others their turn

    async def query_offset(
        self, caller: Caller, request: service_pb2.QueryOffsetRequest
    ) -> service_pb2.QueryOffsetResponse:
        """Return the first offset of a queue, the one behind its end, or that of a time.

        Raises:
            Refused, BatonError: The call is refused.
        """
        queue = await self._queue(caller, request.message_queue)
        calls, policy = self._of(""), request.query_offset_policy
        if policy == pb.TIMESTAMP:
            if not request.HasField("timestamp"):
                raise Refused(pb.BAD_REQUEST, "the policy TIMESTAMP needs timestamp")
            unix_ms = timestamp_ms(request.timestamp)
            if not 0 <= unix_ms <= UNIX_MS_MAX:
                raise Refused(pb.BAD_REQUEST, f"timestamp must be from 1970 on, got {unix_ms} ms")
            offset = await calls.search(queue, unix_ms)
        elif policy in (pb.BEGINNING, pb.END):
            kept = await calls.kept(queue)
            offset = kept.first_offset if policy == pb.BEGINNING else kept.next_offset
        else:
            raise Refused(
                pb.BAD_REQUEST,
                f"query_offset_policy {policy} is unknown; use BEGINNING, END or TIMESTAMP",
            )
        return service_pb2.QueryOffsetResponse(status=OK, offset=offset)

    async def get_offset(
        self, caller: Caller, request: service_pb2.GetOffsetRequest
    ) -> service_pb2.GetOffsetResponse:
        """Return the committed offset of a group on a queue.

        Raises:
            Refused, BatonError: The call is refused; 40404 if the group has no progress there.
        """
        group = caller.group(request.group)
        queue = await self._queue(caller, request.message_queue)
        offset = (await self._committed(caller, group, queue)).committed_offset
        if offset is None:
            raise Refused(
                pb.OFFSET_NOT_FOUND,
                f"group {group} has no progress on queue {queue}; begin with QueryOffset",
            )
        return service_pb2.GetOffsetResponse(status=OK, offset=offset)

    async def update_offset(
        self, caller: Caller, request: service_pb2.UpdateOffsetRequest
    ) -> service_pb2.UpdateOffsetResponse:
        """Commit that a group has handled every message of a queue below an offset.

        Raises:
            Refused, BatonError: The call is refused, and has changed nothing.
        """
        group, offset = caller.group(request.group), request.offset
        queue = await self._queue(caller, request.message_queue)
        calls = self._of(group)
        kept = await calls.kept(queue)
        if not 0 <= offset <= kept.next_offset:
            raise Refused(
                pb.ILLEGAL_OFFSET,
                f"offset must be from 0 to {kept.next_offset}, the end of queue {queue}, "
                f"got {offset}",
            )
        epoch = self._epochs.get((caller.client_id, group, queue))
        if epoch is None:
            epoch = (await self._committed(caller, group, queue)).reset_epoch
        try:
            (committed,) = await calls.commit([(queue, ReadProgress(offset, epoch))])
        except Fenced as error:
            raise Refused(
                pb.ILLEGAL_OFFSET,
                f"an operator moved the progress of group {group} on queue {queue}. Call "
                "GetOffset, and continue there",
            ) from error
        if committed > offset:
            raise Refused(
                pb.ILLEGAL_OFFSET,
                f"the committed offset of group {group} on queue {queue} is {committed} already; "
                f"committed progress never goes back. Run baton group reset-offsets {group}",
            )
        return service_pb2.UpdateOffsetResponse(status=OK)

    async def _committed(self, caller: Caller, group: str, queue: QueueRef) -> ReadProgress:
        progress = await self._of(group).committed(queue)
        _remember(self._epochs, (caller.client_id, group, queue), progress.reset_epoch, EPOCHS_MAX)
        return progress

    async def _queue(self, caller: Caller, named: pb.MessageQueue) -> QueueRef:
        """Return the stored queue that a client means.

        Raises:
            Refused: There is no such queue.
            TopicNotFound: The topic does not exist.
        """
        queue = QueueRef(caller.topic(named.topic), named.broker.name, named.id)
        if queue not in self._known:
            if queue not in queues_of(await query_route(self._directory, queue.topic)):
                raise Refused(
                    pb.NOT_FOUND,
                    f"queue {named.broker.name[:64]!r} {named.id} of topic {queue.topic} does not "
                    "exist. Name a stored queue: QueryRoute answers them to clients whose settings "
                    "have the client type PULL_CONSUMER",
                )
            _remember(self._known, queue, None, QUEUES_MAX)
        return queue

    def _of(self, group: str) -> ReaderCalls:
        calls = self._calls.get(group)
        if calls is None:
            calls = ReaderCalls(self._directory, self._environment, group)
            _remember(self._calls, group, calls, GROUPS_MAX)
        return calls


def _remember(entries: dict[K, V], key: K, value: V, count_max: int) -> None:
    if key not in entries and len(entries) >= count_max:
        del entries[next(iter(entries))]
    entries[key] = value


def _is_final(error: BatonError, failures: int) -> bool:
    if isinstance(error, _MAY_BE_NEW):
        return failures >= _NEW_TRIES
    return error.retry is Retry.NEVER
