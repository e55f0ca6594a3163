"""What callers ask of a queue's progress, and what they get: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet


class Instant(NamedTuple):
    """One reading of both clocks."""

    monotonic_ms: int
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on the state of one queue.

    Attributes:
        span_max: How far ahead of deliveries the delivered offset is made durable, in messages.
        ack_ranges_max: Acked ranges above the committed offset beyond which delivery stops.
        ack_bytes_max: Their stored size beyond which delivery stops.
    """

    span_max: int = 2_000
    ack_ranges_max: int = 100_000
    ack_bytes_max: int = 1024 * 1024


class FenceCondition(Enum):
    """When a fence passes (protocol 4). There is no unconditional one."""

    CLOSED_OR_DRAINED = "CLOSED_OR_DRAINED"
    SAME_HOLDER = "SAME_HOLDER"
    IDLE = "IDLE"
    FORCED = "FORCED"


class ProgressSource(IntEnum):
    """What changed the progress of a queue; numbers as in `ProgressSource` of the contract."""

    NOTHING = 0
    FENCE = 1
    COMMIT = 2
    PULL = 3
    RESET = 4
    CLONE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceAttempt:
    """A wish to pass a queue on (protocol 4).

    Attributes:
        attempt: Id of the attempt; the same when repeated; not empty.
        expected_token: The token the caller saw; 0 for a queue without progress.
        holder: None passes the queue to nobody: the new token is closed from the start.
        resume: What the new holder, as an earlier one, still has in hand under `reset_epoch`.
        idle_ms: For IDLE.
        token_min: The new token is greater.
        initial_offset: CommitResult offset of a queue that has no progress yet.
        forced_by: For FORCED: who, and `forced_reason` why.
        subscription_generation: Deliveries have to name it; 0 lets any pass.
        topic_id: Of the topic in which `initial_offset` was found; 0 for any.
    """

    attempt: str
    expected_token: int
    condition: FenceCondition
    holder: Incarnation | None
    resume: RangeSet = EMPTY
    reset_epoch: int = 0
    idle_ms: int = 0
    token_min: int = 0
    initial_offset: int = 0
    forced_by: str = ""
    forced_reason: str = ""
    subscription_generation: int = 0
    topic_id: int = 0


class DeliveryRange(NamedTuple):
    """`[first_offset, next_offset)` that is about to leave, and the filter it went through."""

    first_offset: int
    next_offset: int
    subscription_generation: int = 0


class Acks(NamedTuple):
    """What a holder has handled: all below `committed_offset` and all in `acked`."""

    reset_epoch: int
    committed_offset: int
    acked: RangeSet


class FenceGrant(NamedTuple):
    """What a new holder starts from. `changed` is false for a repeated attempt."""

    token: int
    committed_offset: int
    acked: RangeSet
    maybe_seen: RangeSet
    reset_epoch: int
    changed: bool = True


class AckState(NamedTuple):
    """Where a queue stands: all below `committed_offset` and all in `acked` is handled."""

    committed_offset: int
    acked: RangeSet = EMPTY

    def handled(self) -> RangeSet:
        """All of it."""
        return RangeSet.of(0, self.committed_offset).union(self.acked)


class ResetEffect(NamedTuple):
    """What a reset did to one queue.

    Attributes:
        replayed_count: Offsets that were handled before and are not any more.
        skipped_count: Offsets that were not handled before and count as handled now.
        reset_epoch: After; and so is `token`.
    """

    before: AckState
    replayed_count: int
    skipped_count: int
    reset_epoch: int
    token: int


class Tombstone(NamedTuple):
    """What stays of a queue whose topic or group was deleted: no token is issued twice."""

    token: int
    reset_epoch: int
    update_unix_ms: int


class DeliveryResult(NamedTuple):
    """A recorded delivery: the maybe-seen offsets in it. `changed` asks for durability."""

    maybe_seen: RangeSet
    changed: bool


class CommitResult(NamedTuple):
    """Progress after acks. `changed` is false if they told nothing new."""

    committed_offset: int
    changed: bool
