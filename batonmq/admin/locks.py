"""Locks of queues: describe one lock, and release queues from their owners."""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import error_from_pb
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.operation import Operation
from batonmq.admin.reports import Lock, lock_from_pb, queue_from_pb, queue_to_pb
from batonmq.errors import BatonError


@dataclass(frozen=True, slots=True)
class Denial:
    """A request for the lock that was denied `age_ms` ago."""

    client_id: str
    error: BatonError
    age_ms: int


@dataclass(frozen=True, slots=True)
class LockDetail:
    """A lock with all its details.

    Attributes:
        term: Term of the lock manager's leader that answered.
        lease_left_ms: Time until the owner's lease expires; 0 if there is no valid lease.
        pending_step: Step of the current hand-over: fence, persist or release; empty if there is
            no hand-over.
        pending_attempt: Id of the hand-over's fence attempt.
        offsets_token: Last known token of the queue at offsets; None if it was never queried.
        owner_evicted: Whether the owner is no longer a member of the group.
        denials: The last denied requests, newest first.
    """

    lock: Lock
    term: int
    lease_left_ms: int
    pending_step: str
    pending_attempt: str
    offsets_token: int | None
    owner_evicted: bool
    denials: tuple[Denial, ...]


@dataclass(frozen=True, slots=True)
class ForcedRelease:
    """The result of a forced release.

    Attributes:
        client_id: The previous owner; None if the queue had none.
        token: The new fencing token of the queue.
        maybe_seen_count: Messages that may have been in flight at the previous owner. If they are
            delivered again, they are flagged as redelivered.
    """

    client_id: str | None
    incarnation_id: int | None
    token: int
    maybe_seen_count: int


@dataclass(frozen=True, slots=True)
class ReleasedQueues:
    """The queues of a client that were released.

    Attributes:
        incarnation_ids: Incarnations of the client that owned queues.
        kept: Group and queue of each lock that was not released, because its owner has not closed
            the queue. The lock stays until the owner closes the queue or its lease expires.
    """

    incarnation_ids: tuple[int, ...]
    released_count: int
    kept: tuple[tuple[str, QueueRef], ...]


class Locks:
    """Describes and releases locks. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def describe(self, group: str, queue: QueueRef) -> LockDetail:
        """Return one lock; a queue that never had an owner is free and has token 0."""
        request = pb.DescribeRequest(queue=_group_queue(group, queue))

        async def ask(limit_s: float) -> pb.DescribeResponse:
            stub = await self._admin.directory.lockmgr()
            return await stub.Describe(request, timeout=limit_s)

        return _detail_from_pb(await self._admin.ask(ask))

    async def force_release(
        self, group: str, queue: QueueRef, operation: Operation
    ) -> ForcedRelease:
        """Release a queue from its owner without waiting for the owner.

        The owner is fenced: its acknowledgements are rejected. The next owner receives the messages
        in flight again, flagged as redelivered, while the old owner may still handle them. If the
        queue is still assigned to the old owner, that owner acquires it again at once.

        Raises:
            UnknownQueue: The queue never had an owner.
        """
        request = pb.ForceReleaseRequest(
            queue=_group_queue(group, queue),
            op_id=operation.op_id,
            by=operation.by,
            reason=operation.reason,
        )

        async def ask(limit_s: float) -> pb.ForceReleaseResponse:
            stub = await self._admin.directory.lockmgr()
            return await stub.ForceRelease(request, timeout=limit_s)

        answer = await self._admin.ask(ask)
        owned = answer.HasField("previous_owner")
        return ForcedRelease(
            answer.previous_owner.client_id if owned else None,
            answer.previous_owner.incarnation_id if owned else None,
            answer.token,
            answer.maybe_seen_count,
        )

    async def release_all(self, client_id: str, group: str = "") -> ReleasedQueues:
        """Release the queues that a client has closed but not released, as after a crash.

        Queues that the client has not closed stay locked, so a running client loses nothing.

        Args:
            group: Only this group; empty for all groups.
        """
        lives = sorted(
            {
                lock.incarnation_id or 0
                async for page in self._admin.lock_pages(group)
                for lock in page
                if lock.client_id == client_id
            }
        )
        released_count = 0
        kept: list[tuple[str, QueueRef]] = []
        for incarnation_id in lives:
            request = pb.ReleaseAllRequest(
                incarnation=queue_pb2.Incarnation(
                    client_id=client_id, incarnation_id=incarnation_id
                ),
                group=group,
                by="operator",
            )
            answer = await self._release_all(request)
            released_count += answer.released_count
            kept += ((left.group, queue_from_pb(left.queue)) for left in answer.kept)
        return ReleasedQueues(tuple(lives), released_count, tuple(sorted(kept)))

    async def _release_all(self, request: pb.ReleaseAllRequest) -> pb.ReleaseAllResponse:
        async def ask(limit_s: float) -> pb.ReleaseAllResponse:
            stub = await self._admin.directory.lockmgr()
            return await stub.ReleaseAll(request, timeout=limit_s)

        return await self._admin.ask(ask)


def _group_queue(group: str, queue: QueueRef) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group, queue=queue_to_pb(queue))


def _detail_from_pb(detail: pb.DescribeResponse) -> LockDetail:
    return LockDetail(
        lock=lock_from_pb(detail.entry),
        term=detail.term,
        lease_left_ms=detail.lease_left_ms,
        pending_step=detail.pending_step,
        pending_attempt=detail.pending_attempt,
        offsets_token=detail.offsets_token or None,
        owner_evicted=detail.owner_evicted,
        denials=tuple(
            Denial(d.client_id, error_from_pb(d.error), d.age_ms) for d in detail.denials
        ),
    )
