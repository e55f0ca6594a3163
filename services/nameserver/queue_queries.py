"""Queries of the nameserver to the other services about queues.

A service that does not answer, or rejects the call, is a result too: no query raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.aio import in_steps
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.queues import GroupQueue, QueueRef
from batonmq._core.records import read_header
from batonmq.errors import BatonError, Unreachable
from batonmq_server.nameserver.core.evidence import (
    FilterScan,
    GatewayEvidence,
    HandlerEvidence,
    HeldState,
    LockEvidence,
    LogExtent,
    ProgressEvidence,
    RemoteMessage,
)

CALL_TIMEOUT_S = 4.0
CALLS_MAX = 32
"""Concurrent calls."""
QUEUES_MAX = 10_000
"""Queues in one call to a broker."""
COUNTS_MAX = 100_000
"""Offsets in one call from which messages are counted."""
_NOTHING: Mapping[QueueRef, Collection[int]] = {}
FILTER_READS_MAX = 4
"""Reads of one queue to find a message that passes a filter; each covers thousands of them."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class QueryResult(Generic[Value]):
    """The answer of a service, or the error instead of one.

    Both are None if the service answered that there is no such thing.
    """

    value: Value | None = None
    failure: BatonError | None = None

    @property
    def error(self) -> str:
        """The error as text; empty if there is none."""
        return f"{self.failure.reason}: {self.failure.message}" if self.failure else ""


@dataclass(frozen=True, slots=True)
class MessageStamp:
    """Offset, id and store time of a stored message."""

    offset: int
    message_id: str
    store_unix_ms: int


class NodeChannels:
    """Channels to the storage nodes and gateways, opened when needed.

    Args:
        brokers: Returns host:port by name of the live brokers.
        gateways: Returns host:port by node id of the live gateways.
        connect: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        brokers: Callable[[], Mapping[str, str]],
        gateways: Callable[[], Mapping[str, str]],
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._brokers, self._gateways, self._connect = brokers, gateways, connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    def storage(self, broker: str) -> storage_grpc.StorageServiceAsyncStub:
        """Return a stub of StorageService.

        Raises:
            Unreachable: the broker is not registered.
        """
        return storage_grpc.StorageServiceStub(self._broker(broker))

    def query(self, broker: str) -> query_grpc.QueryServiceAsyncStub:
        """Return a stub of QueryService; raises as `storage`."""
        return query_grpc.QueryServiceStub(self._broker(broker))

    def gateway_of(self, client_id: str) -> str:
        """Return the node id of the gateway that may be a member under this id; empty for none.

        A gateway is a member of its groups as `<node id>-<number>`.
        """
        node_id = client_id.rpartition("-")[0]
        return node_id if node_id in self._gateways() else ""

    def gateway(self, node_id: str) -> gateway_grpc.GatewayServiceAsyncStub:
        """Return a stub of GatewayService.

        Raises:
            Unreachable: the gateway is not registered.
        """
        address = self._gateways().get(node_id)
        if address is None:
            raise Unreachable(f"gateway {node_id} is not registered", facts={"service": "gateway"})
        return gateway_grpc.GatewayServiceStub(self._channel(address))

    async def close(self) -> None:
        """Close the channels; calls in progress are cancelled."""
        for channel in self._channels.values():
            await channel.close()
        self._channels = {}

    def _broker(self, broker: str) -> grpc.aio.Channel:
        address = self._brokers().get(broker)
        if address is None:
            raise Unreachable(f"broker {broker} is not registered", facts={"service": broker})
        return self._channel(address)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return self._channels[address]


class QueueQueries:
    """Queries with a deadline and bounded concurrency.

    Args:
        lockmgr: Returns a stub for the leading lock manager; raises `Unreachable` if there is none.
        offsets: Returns a stub for the leader of the set that keeps a group; raises likewise.
        nodes: Channels to the storage nodes and gateways.
        timeout_s: Deadline of each call.
    """

    def __init__(
        self,
        lockmgr: Callable[[], lockmgr_grpc.LockmgrServiceAsyncStub],
        offsets: Callable[[str], offsets_grpc.OffsetsServiceAsyncStub],
        nodes: NodeChannels,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._lockmgr, self._offsets, self._nodes = lockmgr, offsets, nodes
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(CALLS_MAX)

    async def locks(self, group: str) -> QueryResult[dict[GroupQueue, LockEvidence]]:
        """Return the lock entries of a group; of all groups if `group` is empty."""
        request = lockmgr_pb.ListRequest(group=group)
        locks: dict[GroupQueue, LockEvidence] = {}
        while True:
            answer = await self._query(
                lambda: self._lockmgr().List(request, timeout=self._timeout_s)
            )
            if answer.value is None:
                return QueryResult(failure=answer.failure)
            async for entry in in_steps(answer.value.entries):
                locks[_key(entry.queue)] = _lock(entry)
            request.page_token = answer.value.next_page_token
            if not request.page_token:
                return QueryResult(locks)

    async def lock(self, group: str, queue: QueueRef) -> QueryResult[LockEvidence]:
        """Return one lock entry with all details."""
        request = lockmgr_pb.DescribeRequest(queue=_group_queue(group, queue))
        answer = await self._query(
            lambda: self._lockmgr().Describe(request, timeout=self._timeout_s)
        )
        if answer.value is None:
            return QueryResult(failure=answer.failure)
        return QueryResult(_described(answer.value))

    async def progress(self, group: str) -> QueryResult[dict[QueueRef, ProgressEvidence]]:
        """Return the progress of a group, by queue."""
        request = offsets_pb.QueryGroupRequest(group=group)
        progress: dict[QueueRef, ProgressEvidence] = {}
        while True:
            answer = await self._query(
                lambda: self._offsets(group).QueryGroup(request, timeout=self._timeout_s)
            )
            if answer.value is None:
                return QueryResult(failure=answer.failure)
            async for entry in in_steps(answer.value.queues):
                progress[_queue_from_pb(entry.queue.queue)] = _progress(entry)
            request.page_token = answer.value.next_page_token
            if not request.page_token:
                return QueryResult(progress)

    async def logs(
        self,
        broker: str,
        queues: Sequence[QueueRef],
        counted: Mapping[QueueRef, Collection[int]] = _NOTHING,
    ) -> dict[QueueRef, QueryResult[LogExtent]]:
        """Return the offsets that queues of a broker have, each with its own result.

        Args:
            counted: Offsets from which to count the messages of a queue.
        """
        extents: dict[QueueRef, QueryResult[LogExtent]] = {}
        for first in range(0, len(queues), QUEUES_MAX):
            extents |= await self._logs(broker, queues[first : first + QUEUES_MAX], counted)
        return extents

    async def message_at(self, queue: QueueRef, offset: int) -> QueryResult[MessageStamp]:
        """Return the first message from an offset on; neither value nor failure without one."""
        answer = await self._read(queue, offset, "")
        if answer.value is None or not answer.value.batches:
            return QueryResult(failure=answer.failure)
        header = read_header(answer.value.batches[0])
        index = max(0, offset - header.first_offset)
        if index >= header.count:
            return QueryResult()
        message_id = f"{queue.broker}-{header.position:x}-{index:x}"
        stamp = MessageStamp(header.first_offset + index, message_id, header.store_unix_ms)
        return QueryResult(stamp)

    async def filtered(self, queue: QueueRef, offset: int, expression: str) -> FilterScan | None:
        """Return the number of messages from `offset` on, if none passes the filter.

        None if one passes, or if there are too many messages to read.
        """
        at = offset
        for _ in range(FILTER_READS_MAX):
            answer = await self._read(queue, at, expression)
            if answer.value is None or answer.value.batches:
                return None
            at = answer.value.next_offset
            if at >= answer.value.queue_next_offset:
                return FilterScan(at - offset)
        return None

    async def remote(self, group: str, queue: QueueRef, owner: str) -> GatewayEvidence | None:
        """Return what a gateway says about a queue; None if the owner is none, or if unknown."""
        gateway = self._nodes.gateway_of(owner)
        if not gateway:
            return None
        request = gateway_pb.ListHeldMessagesRequest(group=group, queue=_queue(queue), page_size=1)
        answer = await self._query(
            lambda: self._nodes.gateway(gateway).ListHeldMessages(request, timeout=self._timeout_s)
        )
        if answer.value is None or answer.value.member_client_id != owner:
            return None
        oldest = next(iter(answer.value.messages), None)
        return GatewayEvidence(
            gateway, answer.value.waiting_call_count, _remote(oldest) if oldest else None
        )

    async def _logs(
        self,
        broker: str,
        queues: Sequence[QueueRef],
        counted: Mapping[QueueRef, Collection[int]],
    ) -> dict[QueueRef, QueryResult[LogExtent]]:
        counts = (
            storage_pb.CountedOffset(queue_index=index, offset=offset)
            for index, queue in enumerate(queues)
            for offset in counted.get(queue, ())
        )
        request = storage_pb.QueryOffsetsRequest(
            queues=map(_queue, queues), counts=islice(counts, COUNTS_MAX)
        )
        answer = await self._query(
            lambda: self._nodes.storage(broker).QueryOffsets(request, timeout=self._timeout_s)
        )
        if answer.value is None:
            return dict.fromkeys(queues, QueryResult(failure=answer.failure))
        outcomes = in_steps(zip(queues, answer.value.outcomes, strict=True))
        return {queue: _log(outcome) async for queue, outcome in outcomes}

    async def _read(
        self, queue: QueueRef, offset: int, expression: str
    ) -> QueryResult[query_pb.ReadResponse]:
        """Read the first batch from `offset` on with a message that passes the filter."""
        request = query_pb.ReadRequest(
            queue=_queue(queue), offset=offset, expression=expression, bytes_max=1, messages_max=1
        )
        return await self._query(
            lambda: self._nodes.query(queue.broker).Read(request, timeout=self._timeout_s)
        )

    async def _query(self, call: Callable[[], Awaitable[Value]]) -> QueryResult[Value]:
        async with self._slots:
            try:
                return QueryResult(await call())
            except grpc.aio.AioRpcError as error:
                return QueryResult(failure=from_rpc_error(error))
            except BatonError as error:  # No node to call.
                return QueryResult(failure=error)


def _key(queue: queue_pb2.GroupQueue) -> GroupQueue:
    return GroupQueue(queue.group, queue.queue.topic, queue.queue.broker, queue.queue.queue_id)


def _queue_from_pb(queue: queue_pb2.QueueRef) -> QueueRef:
    return QueueRef(queue.topic, queue.broker, queue.queue_id)


def _queue(queue: QueueRef) -> queue_pb2.QueueRef:
    return queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def _group_queue(group: str, queue: QueueRef) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group, queue=_queue(queue))


def _lock(entry: lockmgr_pb.LockEntry) -> LockEvidence:
    pending = entry.state == lockmgr_pb.LOCK_STATE_PENDING
    return LockEvidence(
        owner=entry.owner.client_id,
        token=entry.token,
        held_ms=entry.held_ms,
        lease_age_ms=entry.lease_age_ms,
        waiters=tuple(entry.waiters),
        step="begun" if pending else "",
        running=_handler(entry.running) if entry.HasField("running") else None,
    )


def _handler(call: lockmgr_pb.RunningHandler) -> HandlerEvidence:
    return HandlerEvidence(
        _queue_from_pb(call.queue),
        call.offset,
        call.running_ms,
        abandoned=call.abandoned,
        ordering_key=call.ordering_key,
        failed_count=call.failed_count,
        failed_reason=call.failed_reason,
    )


def _remote(message: gateway_pb.HeldMessage) -> RemoteMessage:
    client = message.client
    where = f" on {client.host}" if client.host else ""
    library = f"{client.language} {client.version}".strip()
    state = gateway_pb.HeldState.Name(message.state).removeprefix("HELD_STATE_")
    return RemoteMessage(
        offset=message.offset,
        state=HeldState(state),
        attempt=message.attempt,
        client_id=client.client_id,
        client=f" ({library}{where})" if library else "",
        held_ms=message.held_ms,
        lease_left_ms=message.lease_left_ms,
        renewed=message.renewed,
    )


def _described(answer: lockmgr_pb.DescribeResponse) -> LockEvidence:
    lock = _lock(answer.entry)
    last = error_from_pb(answer.denials[0].error) if answer.denials else None
    return replace(
        lock,
        lease_left_ms=answer.lease_left_ms,
        step=answer.pending_step or lock.step,
        attempt=answer.pending_attempt,
        denial=f"{last.reason}: {last.message}" if last else "",
    )


def _log(outcome: storage_pb.QueryOffsetsOutcome) -> QueryResult[LogExtent]:
    if outcome.HasField("error"):
        return QueryResult(failure=error_from_pb(outcome.error))
    offsets = outcome.offsets
    counts = {one.offset: one.count for one in offsets.counts}
    return QueryResult(LogExtent(offsets.first_offset, offsets.next_offset, counts))


def _progress(progress: offsets_pb.Progress) -> ProgressEvidence:
    return ProgressEvidence(
        token=progress.token,
        committed_offset=progress.committed_offset,
        unacked_count=progress.unacked_count,
        unsure_count=progress.unacked_count - progress.unacked_count_min,
        acked_count=progress.acked_count,
        delivered_offset=progress.delivered_offset,
        acked_range_count=progress.acked_range_count,
        capped=progress.ack_capped,
        idle_ms=progress.idle_ms,
        reset_epoch=progress.reset_epoch,
        waiting_at=progress.waiting_at,
    )
