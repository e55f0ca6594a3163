"""Requests that fence a queue: of a client, of an operator, or of the lock manager itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq_server.lockmgr.core.lock_entry import LockRecord, Requester
from batonmq_server.lockmgr.lock_proto import incarnation_to_pb, key_to_pb
from batonmq_server.lockmgr.lock_store import LockWrite
from batonmq_server.runtime.etcd.session import Compare
from batonmq_server.runtime.group_gates import GATES_PREFIX, GroupGate


@dataclass(frozen=True, slots=True)
class QueueRequest:
    """One queue that a client requests.

    Attributes:
        resume: Offsets that are in flight at the client since it was the owner before.
        reset_epoch: Reset epoch to which `resume` belongs.
        initial_offset: Where to start if the group has no progress on the queue.
        topic_id: Id of the topic in which `initial_offset` was found; 0 for any.
        gate: The group's gate by which the client was admitted. etcd must still have it when the
            grant is persisted.
    """

    key: GroupQueue
    requester: Requester
    resume: Sequence[queue_pb2.OffsetRange] = ()
    reset_epoch: int = 0
    initial_offset: int = 0
    topic_id: int = 0
    gate: GroupGate | None = None

    @property
    def subscription_generation(self) -> int:
        """The subscription generation that pulls under the grant must name; 0 for any."""
        gate = self.gate
        return gate.subscription_generation if gate is not None and gate.bound else 0

    def write(self, lock: LockRecord, revision: int) -> LockWrite:
        """Return the write of the granted lock over the entry of `revision`."""
        assert self.gate is not None, "only an admitted request is granted"
        unchanged = Compare(GATES_PREFIX + self.key.group, mod_revision=self.gate.revision)
        return LockWrite(self.key, lock, revision, unchanged)

    def fence_item(self) -> pb.FenceItem:
        """Return the part that all fences for this request have in common."""
        return pb.FenceItem(
            queue=key_to_pb(self.key),
            holder=incarnation_to_pb(self.requester.incarnation),
            resume=self.resume,
            reset_epoch=self.reset_epoch,
            initial_offset=self.initial_offset,
            topic_id=self.topic_id,
            subscription_generation=self.subscription_generation,
        )


@dataclass(frozen=True, slots=True)
class ForceRequest:
    """A queue that an operator takes from its owner; a repetition has the same `op_id`."""

    key: GroupQueue
    op_id: str
    by: str
    reason: str

    @property
    def attempt(self) -> str:
        """Id of the fence attempt, derived from the operation."""
        return f"force-{self.op_id}"

    def fence_item(self) -> pb.FenceItem:
        """Return the part that all fences for this request have in common."""
        return pb.FenceItem(queue=key_to_pb(self.key), forced_by=self.by, forced_reason=self.reason)


@dataclass(frozen=True, slots=True)
class ClearRequest:
    """A queue that is freed because it is to have no owner."""

    key: GroupQueue

    def fence_item(self) -> pb.FenceItem:
        """Return the part that all fences for this request have in common."""
        return pb.FenceItem(queue=key_to_pb(self.key))


FenceRequest: TypeAlias = QueueRequest | ForceRequest | ClearRequest
