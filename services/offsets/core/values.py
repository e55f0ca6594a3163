"""The values that go into and come out of the rules of a queue's progress."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet


class Instant(NamedTuple):
    """One reading of both clocks, in milliseconds."""

    monotonic_ms: int
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on the state of one queue.

    Attributes:
        span_max: Largest number of messages by which the durable delivered offset is reserved
            ahead.
        ack_ranges_max: Delivery stops at this number of acked ranges above the committed offset.
        ack_bytes_max: Delivery stops at this stored size of those ranges, in bytes.
    """

    span_max: int = 2_000
    ack_ranges_max: int = 100_000
    ack_bytes_max: int = 1024 * 1024

    def used_ratio(self, acked: RangeSet) -> float:
        """Return the share of the ack window that these ranges use; 1 stops the delivery."""
        by_count = len(acked.runs) / self.ack_ranges_max
        return max(by_count, len(acked.encoded) / self.ack_bytes_max)


class FenceCondition(Enum):
    """The condition under which a fence succeeds (protocol 4); there is no unconditional one."""

    CLOSED_OR_DRAINED = "CLOSED_OR_DRAINED"
    SAME_HOLDER = "SAME_HOLDER"
    IDLE = "IDLE"
    FORCED = "FORCED"


class ProgressSource(IntEnum):
    """The last kind of change of a queue's progress; numbers as in the proto's `ProgressSource`."""

    NOTHING = 0
    FENCE = 1
    COMMIT = 2
    PULL = 3
    RESET = 4
    CLONE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceAttempt:
    """A conditional change of a queue's token and holder (protocol 4).

    Attributes:
        attempt: Id of the attempt, the same when repeated; not empty.
        expected_token: The token that the caller saw; 0 for a queue without progress.
        condition: The condition under which the fence succeeds.
        holder: The new holder; None for none: then the new token is closed from the start.
        resume: Offsets that the new holder still has in flight from an earlier token, under
            `reset_epoch`.
        idle_ms: For IDLE, the minimum time since the last accepted call, in milliseconds.
        token_min: The new token is greater than this.
        initial_offset: Committed offset of a queue without progress.
        forced_by: For FORCED, the operator.
        forced_reason: For FORCED, the operator's reason.
        subscription_generation: Generation that deliveries must name; 0 accepts any.
        topic_id: Id of the topic in which `initial_offset` was read; 0 for any.
        observed_delivered_offset: For CLOSED_OR_DRAINED, D by which the caller decided.
        observed_reset_epoch: The reset epoch by which it decided.
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
    observed_delivered_offset: int = 0
    observed_reset_epoch: int = 0


class DeliveryRange(NamedTuple):
    """The range `[first_offset, next_offset)` to be delivered, and its filter's generation.

    Attributes:
        advance_id: Id of the advance that is to begin, or to be extended; 0 for none.
        advance_to: Offset up to which to record in advance; not above `next_offset` for no more
            than there is.
    """

    first_offset: int
    next_offset: int
    subscription_generation: int = 0
    advance_id: int = 0
    advance_to: int = 0


class Advance(NamedTuple):
    """Offsets that are recorded as delivered before storage has read them (protocol 6.8).

    Attributes:
        id: Drawn by storage at random, for one advance.
        end_offset: One past the last of them.
    """

    id: int
    end_offset: int


class AdvanceSettlement(NamedTuple):
    """What was delivered in an advance that has ended: nothing at or above `sent_offset`."""

    advance_id: int
    sent_offset: int


class HolderPosition(NamedTuple):
    """How far a holder has received messages, by its own statement (protocol 6.8).

    Attributes:
        received_offset: The holder has received nothing at or above it, and has nothing in flight
            there from an earlier token.
        offsets_epoch: The holder uses no delivery that an older epoch recorded.
    """

    received_offset: int
    offsets_epoch: int


class HolderCall(NamedTuple):
    """What identifies a holder's call; `caller` is the number of its identity, 0 for none."""

    token: int
    caller: int = 0
    position: HolderPosition | None = None


class Acks(NamedTuple):
    """Acknowledged offsets: all below `committed_offset` and all in `acked`."""

    reset_epoch: int
    committed_offset: int
    acked: RangeSet


class FenceGrant(NamedTuple):
    """The state from which a new holder starts; `changed` is false for a repeated attempt."""

    token: int
    committed_offset: int
    acked: RangeSet
    maybe_seen: RangeSet
    reset_epoch: int
    changed: bool = True


class AckState(NamedTuple):
    """The acknowledged offsets of a queue: all below `committed_offset` and all in `acked`."""

    committed_offset: int
    acked: RangeSet = EMPTY

    def all_acked(self) -> RangeSet:
        """Return all acknowledged offsets as one set."""
        return RangeSet.of(0, self.committed_offset).union(self.acked)


class ResetEffect(NamedTuple):
    """The effect of a reset on one queue.

    Attributes:
        before: The acknowledged offsets before the reset.
        replayed_count: Offsets that were acknowledged before and are not any more.
        skipped_count: Offsets that were not acknowledged before and are now.
        reset_epoch: Reset epoch after the reset.
        token: Token after the reset.
    """

    before: AckState
    replayed_count: int
    skipped_count: int
    reset_epoch: int
    token: int


class Tombstone(NamedTuple):
    """The rest of a queue of a deleted topic or group, so that no token is issued twice."""

    token: int
    reset_epoch: int
    update_unix_ms: int


class TokenFloor(NamedTuple):
    """What a queue without progress and without a tombstone begins above.

    Attributes:
        token: No queue whose tombstone was removed had a greater token.
        reset_epoch: Nor a greater reset epoch.
    """

    token: int = 0
    reset_epoch: int = 0

    def raised(self, other: tuple[int, int]) -> TokenFloor:
        """Return the floor that covers both."""
        return TokenFloor(max(self.token, other[0]), max(self.reset_epoch, other[1]))


class DeliveryResult(NamedTuple):
    """The maybe-seen offsets of a recorded delivery; `changed` if the state must become durable.

    Attributes:
        advance_to: End of the advance of the delivery; 0 for none.
    """

    maybe_seen: RangeSet
    changed: bool
    advance_to: int = 0


class CommitResult(NamedTuple):
    """The committed offset after acks; `changed` is false if all of them were known."""

    committed_offset: int
    changed: bool
