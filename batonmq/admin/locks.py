"""Looking at one lock closely, and taking queues back from their owners."""

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
    """Somebody was refused a queue, `age_ms` ago."""

    client_id: str
    error: BatonError
    age_ms: int


@dataclass(frozen=True, slots=True)
class LockDetail:
    """A lock with everything known about it.

    Attributes:
        term: Of the leader that answers.
        lease_left_ms: Until the owner's lease ends; 0 if there is none, or it is over.
        pending_step: How far a hand-over is: fence, persist or release; empty if none is under way.
        pending_attempt: Id of the hand-over's fence attempt.
        offsets_token: Token at offsets when it was last looked at; None if it was not.
        owner_evicted: The owner is no member of the group any more.
        denials: The last refusals, newest first.
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
    """A queue that was taken from its owner.

    Attributes:
        client_id: The owner before; None if there was none.
        token: The token now.
        maybe_seen_count: Messages that may have been in its hands: if they are delivered again,
            they are flagged.
    """

    client_id: str | None
    incarnation_id: int | None
    token: int
    maybe_seen_count: int


@dataclass(frozen=True, slots=True)
class ReleasedQueues:
    """What a client gave back.

    Attributes:
        incarnation_ids: Lives of the client that owned queues.
        kept: Group and queue of what it has not closed: it stays until the owner has, or until its
            lease ends.
    """

    incarnation_ids: tuple[int, ...]
    released_count: int
    kept: tuple[tuple[str, QueueRef], ...]


class Locks:
    """Asks the lock manager; failures are the classes of `batonmq.errors`.

    Args:
        admin: Of the cluster; stays the caller's.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def describe(self, group: str, queue: QueueRef) -> LockDetail:
        """One lock; it is free with token 0 if nobody has ever owned the queue."""
        request = pb.DescribeRequest(queue=_group_queue(group, queue))

        async def ask(limit_s: float) -> pb.DescribeResponse:
            stub = await self._admin.directory.lockmgr()
            return await stub.Describe(request, timeout=limit_s)

        return _detail_from_pb(await self._admin.ask(ask))

    async def force_release(
        self, group: str, queue: QueueRef, operation: Operation
    ) -> ForcedRelease:
        """Take a queue from its owner, whatever it is doing.

        Its acknowledgements are refused from now on. Another owner gets what was in its hands
        again, flagged as redelivered, while the old one may still be at work on it. The same one,
        if it lives and is still dealt the queue, asks for it at once and goes on.

        Raises:
            UnknownQueue: nobody has ever owned it.
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
        """Give back what a client has closed and not released, as one that died in between.

        What it has not closed it keeps: nothing is taken from a client that is at work.

        Args:
            group: Only in this group; empty for all.
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


def _detail_from_pb(found: pb.DescribeResponse) -> LockDetail:
    return LockDetail(
        lock=lock_from_pb(found.entry),
        term=found.term,
        lease_left_ms=found.lease_left_ms,
        pending_step=found.pending_step,
        pending_attempt=found.pending_attempt,
        offsets_token=found.offsets_token or None,
        owner_evicted=found.owner_evicted,
        denials=tuple(Denial(d.client_id, error_from_pb(d.error), d.age_ms) for d in found.denials),
    )
