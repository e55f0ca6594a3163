"""Errors that cross a service boundary.

Every error raised on purpose is a `BatonError`. Its class says why (`reason`, the name of a
`baton.common.v1.Reason` without the prefix), which kind of failure it is (`kind`, the name of
a gRPC status) and what the caller may do (`retry`). `batonmq._common.rpc` turns it into a status
and back into the same class; callers branch on `retry`, not on lists of classes.

Values that a caller's next step depends on are typed: `error.detail` of the classes that have one.
`error.facts` is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar


class Retry(Enum):
    """What a caller may do after the error."""

    NEVER = "NEVER"
    SAME_CALL = "SAME_CALL"
    REDO = "REDO"
    REFRESH_ROUTE = "REFRESH_ROUTE"


@dataclass(frozen=True, slots=True)
class Difference:
    """One point on which a refused newcomer and a live member of its group disagree."""

    topic: str
    setting: str
    newcomer_client_id: str
    newcomer_value: str
    member_client_id: str
    member_value: str


class FenceCause(Enum):
    """What made a token invalid."""

    UNSPECIFIED = "UNSPECIFIED"
    TAKEN = "TAKEN"
    CLOSED = "CLOSED"
    FORCED = "FORCED"
    RESET = "RESET"
    SUBSCRIPTION = "SUBSCRIPTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Base of the typed details; fields have the names of the messages in `error.proto`."""

    def facts(self) -> dict[str, str]:
        """Return every field that is known, as text for people."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value.value if isinstance(value, Enum) else str(value)
            for name, value in values.items()
            if value is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedDetail(Detail):
    """The tokens of a fenced call.

    Attributes:
        token: Token of the call.
        current: The queue's current token.
        reset_epoch: The queue's current reset epoch; None if not known.
        why: What fenced the call.
    """

    token: int = 0
    current: int = 0
    reset_epoch: int | None = None
    why: FenceCause = FenceCause.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMismatchDetail(Detail):
    """The token that a fence found in place of the expected one.

    Attributes:
        expected: The token that the caller expected.
        token: The queue's current token.
        attempt: Id of the fence attempt that issued the current token.
    """

    expected: int = 0
    token: int = 0
    attempt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMovedDetail(Detail):
    """Where a group is kept.

    Attributes:
        group: The group.
        offsets_set: The offsets replica set that keeps it.
        move: Number of the move that placed it there; the highest number is the newest.
    """

    group: str = ""
    offsets_set: str = ""
    move: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldEpochDetail(Detail):
    """Two epochs, or two terms, of which the second is newer.

    Attributes:
        epoch: The older one.
        current: The newest known.
    """

    epoch: int = 0
    current: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownQueueDetail(Detail):
    """What is left of a queue's progress that was deleted.

    Attributes:
        token: The last token that was issued; 0 if there was none.
        reset_epoch: The reset epoch of the next progress; None if not known.
    """

    token: int = 0
    reset_epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicNotFoundDetail(Detail):
    """The name of the topic that does not exist."""

    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetOutOfRangeDetail(Detail):
    """The offset of the call and the first offset that is kept."""

    offset: int = 0
    first_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLossDetail(Detail):
    """Position of the damaged batch in the log; None if the damage is elsewhere."""

    position: int | None = None


class BatonError(Exception):
    """Base of every deliberate error.

    Args:
        message: One sentence: what was refused, and the values that made it so.
        remedy: One sentence: what to do about it; the class's own if empty.
        retry_after_ms: Do not try again sooner; 0 for no advice.
        facts: Values behind the refusal for people, as `error.proto` lists them for the reason; the
            fields of `detail` are added.
        detail: Values that a caller's next step depends on, for the classes that have a detail.
        differences: For `SubscriptionConflict`.
    """

    reason: ClassVar[str] = "INTERNAL"
    kind: ClassVar[str] = "INTERNAL"
    retry: ClassVar[Retry] = Retry.NEVER
    remedy: str = ""
    detail_type: ClassVar[type[Detail] | None] = None

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        retry_after_ms: int = 0,
        facts: Mapping[str, str | int] | None = None,
        detail: Detail | None = None,
        differences: tuple[Difference, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy or type(self).remedy
        self.retry_after_ms = retry_after_ms
        if detail is None and self.detail_type is not None:
            self.detail: Detail | None = self.detail_type()
        else:
            self.detail = detail
        known = detail.facts() if detail is not None else {}
        self.facts = {key: str(value) for key, value in (facts or {}).items()} | known
        self.differences = differences


class InvalidArgument(BatonError):
    """A field is malformed whatever the state."""

    reason = "INVALID_ARGUMENT"
    kind = "INVALID_ARGUMENT"
    remedy = "Correct the named field."


class InvalidName(BatonError):
    """A name has a character, a length or a form that is not allowed."""

    reason = "INVALID_NAME"
    kind = "INVALID_ARGUMENT"
    remedy = "Use 1 to 127 characters of A-Z a-z 0-9 _ % - for topics and groups."


class LimitExceeded(BatonError):
    """Something exceeds its limit."""

    reason = "LIMIT_EXCEEDED"
    kind = "INVALID_ARGUMENT"
    remedy = "Send less at once."


class BadChecksum(BatonError):
    """The checksum of a batch does not match its bytes."""

    reason = "BAD_CHECKSUM"
    kind = "INVALID_ARGUMENT"
    retry = Retry.SAME_CALL
    remedy = "Send the batch again; if that fails too, check the producer's memory and network."


class BadBatch(BatonError):
    """A batch can't be read: its magic, version or lengths are wrong."""

    reason = "BAD_BATCH"
    kind = "INVALID_ARGUMENT"
    remedy = "Encode batches with this version of the client library."


class BadExpression(BatonError):
    """A subscription expression can't be parsed."""

    reason = "BAD_EXPRESSION"
    kind = "INVALID_ARGUMENT"
    remedy = "Use *, tags separated by ||, or sql: and a condition."


class NoDeadline(BatonError):
    """The call has no deadline."""

    reason = "NO_DEADLINE"
    kind = "INVALID_ARGUMENT"
    remedy = "Set a timeout on the call."


class TopicNotFound(BatonError):
    """The topic does not exist."""

    reason = "TOPIC_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Create it: baton topic create NAME."
    detail_type = TopicNotFoundDetail
    detail: TopicNotFoundDetail


class QueueNotFound(BatonError):
    """The topic exists, the queue index does not."""

    reason = "QUEUE_NOT_FOUND"
    kind = "NOT_FOUND"
    retry = Retry.REFRESH_ROUTE
    remedy = "Refresh the route of the topic."


class GroupNotFound(BatonError):
    """The group does not exist."""

    reason = "GROUP_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "A group exists once a consumer has joined it."


class TopicExists(BatonError):
    """The topic exists already with other settings."""

    reason = "TOPIC_EXISTS"
    kind = "ALREADY_EXISTS"
    remedy = "Use the topic as it is, or another name."


class NoBroker(BatonError):
    """No storage node is registered to take the queues."""

    reason = "NO_BROKER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Start a storage service, or wait until it has registered."


class WrongBroker(BatonError):
    """The named broker is not the one that answers."""

    reason = "WRONG_BROKER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Refresh the route of the topic."


class ClientIdInUse(BatonError):
    """A live client with another incarnation has this client id."""

    reason = "CLIENT_ID_IN_USE"
    kind = "ALREADY_EXISTS"
    remedy = (
        "Give each process a client id of its own; after a crash wait until the old "
        "session has expired."
    )


class NotMember(BatonError):
    """The client is not a live member of the group."""

    reason = "NOT_MEMBER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Send a heartbeat to the nameserver first."


class SubscriptionConflict(BatonError):
    """The group's subscription differs from the newcomer's."""

    reason = "SUBSCRIPTION_CONFLICT"
    kind = "FAILED_PRECONDITION"
    remedy = "Give all members of the group the same subscription, or use another group."


class NotSubscribed(BatonError):
    """The topic is not in the group's subscription."""

    reason = "NOT_SUBSCRIBED"
    kind = "FAILED_PRECONDITION"
    remedy = "Subscribe the group to the topic."


class OffsetOutOfRange(BatonError):
    """The offset is outside of what the queue holds."""

    reason = "OFFSET_OUT_OF_RANGE"
    kind = "OUT_OF_RANGE"
    retry = Retry.REDO
    remedy = "Go on from an offset between first_offset and next_offset."
    detail_type = OffsetOutOfRangeDetail
    detail: OffsetOutOfRangeDetail


class OffsetAheadOfLog(BatonError):
    """The committed offset is beyond the end of the log."""

    reason = "OFFSET_AHEAD_OF_LOG"
    kind = "OUT_OF_RANGE"
    remedy = "The log has lost messages; reset the group's offset on this queue."


class SequenceGap(BatonError):
    """A producer's sequence skips."""

    reason = "SEQUENCE_GAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Send the missing batch first."


class ProducerFenced(BatonError):
    """A newer epoch of the producer id has written."""

    reason = "PRODUCER_FENCED"
    kind = "FAILED_PRECONDITION"
    remedy = "Close this producer; a newer one has taken its id."


class DuplicateSequence(BatonError):
    """The sequence was stored so long ago that its receipt is forgotten."""

    reason = "DUPLICATE_SEQUENCE"
    kind = "FAILED_PRECONDITION"
    remedy = "The messages are stored; do not send them again."


class DataLoss(BatonError):
    """Stored bytes fail their checksum."""

    reason = "DATA_LOSS"
    kind = "DATA_LOSS"
    remedy = "Check the disk; restore the node from a replica."
    detail_type = DataLossDetail
    detail: DataLossDetail


class MessageNotFound(BatonError):
    """No message has this id, or it is no longer kept."""

    reason = "MESSAGE_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Check the id; retention may have removed the message."


class NotScheduled(BatonError):
    """Nothing is scheduled under this id."""

    reason = "NOT_SCHEDULED"
    kind = "NOT_FOUND"
    remedy = "It was delivered or cancelled already, or the id is wrong."


class NotWritable(BatonError):
    """The topic, or the queue, takes no messages."""

    reason = "NOT_WRITABLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Send to another queue; or change it: baton topic update NAME --permission."


class NotReadable(BatonError):
    """The topic, or the queue, gives no messages."""

    reason = "NOT_READABLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Change it: baton topic update NAME --permission."


class DiskFull(BatonError):
    """The disk is too full to write; reading and retention go on."""

    reason = "DISK_FULL"
    kind = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_CALL
    remedy = "Free space, or keep messages for a shorter time; writing resumes by itself."


class Fenced(BatonError):
    """The token is not the queue's current one."""

    reason = "FENCED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Acquire the queue again."
    detail_type = FencedDetail
    detail: FencedDetail


class OldEpoch(BatonError):
    """A newer epoch or term exists."""

    reason = "OLD_EPOCH"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Find the present leader and talk to it."
    detail_type = OldEpochDetail
    detail: OldEpochDetail


class DeliveryGap(BatonError):
    """A delivery would leave out undelivered offsets."""

    reason = "DELIVERY_GAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Pull from the next undelivered offset."


class BeyondDelivered(BatonError):
    """An ack names an offset that was not delivered."""

    reason = "BEYOND_DELIVERED"
    kind = "FAILED_PRECONDITION"
    remedy = "Ack only messages that were received under the token."


class AckCap(BatonError):
    """The ack window of the queue is full."""

    reason = "ACK_CAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Ack the oldest unacked message; delivery goes on by itself."


class UnknownQueue(BatonError):
    """offsets does not know the queue."""

    reason = "UNKNOWN_QUEUE"
    kind = "NOT_FOUND"
    retry = Retry.REDO
    remedy = "Acquire the queue first."
    detail_type = UnknownQueueDetail
    detail: UnknownQueueDetail


class TokenMismatch(BatonError):
    """A fence expected another token."""

    reason = "TOKEN_MISMATCH"
    kind = "ABORTED"
    retry = Retry.REDO
    remedy = "Look at the queue again."
    detail_type = TokenMismatchDetail
    detail: TokenMismatchDetail


class Superseded(BatonError):
    """The fence succeeded once, and a newer token has replaced it."""

    reason = "SUPERSEDED"
    kind = "ABORTED"
    retry = Retry.REDO
    remedy = "Look at the queue again."


class Unacked(BatonError):
    """Delivered messages are not acked yet."""

    reason = "UNACKED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait for the owner to ack, or for its lease to end."


class NotIdle(BatonError):
    """The holder was active lately."""

    reason = "NOT_IDLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait for its lease to end."


class NotHolder(BatonError):
    """The holder is another incarnation, or has closed."""

    reason = "NOT_HOLDER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Ask for the queue as a newcomer."


class DeliveryUnrecorded(BatonError):
    """The delivery could not be recorded, so no bytes left."""

    reason = "DELIVERY_UNRECORDED"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Pull again from the same offset."


class Held(BatonError):
    """The queue is owned by another member."""

    reason = "HELD"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait for the owner to release it."


class Draining(BatonError):
    """The owner is letting go."""

    reason = "DRAINING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait a moment."


class OldRequest(BatonError):
    """A newer Acquire of the same incarnation exists."""

    reason = "OLD_REQUEST"
    kind = "FAILED_PRECONDITION"
    remedy = "Drop this request."


class NotAssigned(BatonError):
    """By the newest generation the queue is not the asker's."""

    reason = "NOT_ASSIGNED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Wait for the newest generation and allocate again."


class HandoverPending(BatonError):
    """A hand-over of the queue is under way."""

    reason = "HANDOVER_PENDING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait a moment."


class ModeChanged(BatonError):
    """The group's queues are owned and the call is for one without ownership, or the other way."""

    reason = "MODE_CHANGED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Read the group anew; consume as it says."


class Paused(BatonError):
    """An operator has paused the group."""

    reason = "PAUSED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait, or resume the group: baton group resume NAME."


class SubscriptionDraining(BatonError):
    """The subscription of the group is being changed: no queue is given to anybody."""

    reason = "SUBSCRIPTION_DRAINING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait until every member has given back its queues."


class OldTopic(BatonError):
    """The start offset was read of an earlier topic of the name."""

    reason = "OLD_TOPIC"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Look up the offset again."


class GroupInUse(BatonError):
    """The group has live members."""

    reason = "GROUP_IN_USE"
    kind = "FAILED_PRECONDITION"
    remedy = "Stop its members first."


class OperationNotFound(BatonError):
    """No recorded operation has this id."""

    reason = "OPERATION_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Look at the recorded ones: baton group resets NAME."


class OperationExists(BatonError):
    """This operation id was used for something else."""

    reason = "OPERATION_EXISTS"
    kind = "ALREADY_EXISTS"
    remedy = "Choose another operation id."


class StillInSync(BatonError):
    """Somebody can be elected without a loss."""

    reason = "STILL_IN_SYNC"
    kind = "FAILED_PRECONDITION"
    remedy = "Wait until it is elected; stop it for good if it can't be."


class SetNotFound(BatonError):
    """No node of this offsets replica set is registered."""

    reason = "SET_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Name one that `baton cluster replication` shows."


class GroupMoving(BatonError):
    """The group is being moved to another offsets replica set already."""

    reason = "GROUP_MOVING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait until it has arrived: baton group describe NAME."


class GroupsApart(BatonError):
    """Two groups would have to be kept by one offsets replica set, and are not."""

    reason = "GROUPS_APART"
    kind = "FAILED_PRECONDITION"
    remedy = "Move one of them to the set of the other: baton group move NAME --to SET."


class GroupMoved(BatonError):
    """The group is kept by another offsets replica set."""

    reason = "GROUP_MOVED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Ask the set that is named."
    detail_type = GroupMovedDetail
    detail: GroupMovedDetail


class OldMove(BatonError):
    """A later move of the group is known."""

    reason = "OLD_MOVE"
    kind = "FAILED_PRECONDITION"
    remedy = "Drop this call."


class NotLeader(BatonError):
    """This node does not lead."""

    reason = "NOT_LEADER"
    kind = "UNAVAILABLE"
    retry = Retry.REFRESH_ROUTE
    remedy = "Ask the leader; it is elected within seconds."


class NotServing(BatonError):
    """The node is starting or stopping."""

    reason = "NOT_SERVING"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Try again in a moment."


class NotEnoughReplicas(BatonError):
    """Fewer replicas are in sync than a write needs."""

    reason = "NOT_ENOUGH_REPLICAS"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Bring replicas back, or lower the number that has to be in sync."


class NoQuorum(BatonError):
    """etcd can't be reached or has no quorum."""

    reason = "NO_QUORUM"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check the etcd cluster."


class OffsetsUnreachable(BatonError):
    """offsets can't be reached."""

    reason = "OFFSETS_UNREACHABLE"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check the offsets service."


class Overloaded(BatonError):
    """A bound on connections, memory or queued work is reached."""

    reason = "OVERLOADED"
    kind = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_CALL
    remedy = "Send more slowly."


class Unreachable(BatonError):
    """A peer service can't be reached."""

    reason = "UNREACHABLE"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check that the service runs, and that this is its address."


class Unauthenticated(BatonError):
    """It is not known who calls."""

    reason = "UNAUTHENTICATED"
    kind = "UNAUTHENTICATED"
    remedy = "Give a bearer token that is not revoked, or a client certificate."


class PermissionDenied(BatonError):
    """The caller is known, and nothing that is granted to it covers the call."""

    reason = "PERMISSION_DENIED"
    kind = "PERMISSION_DENIED"
    remedy = "Ask an administrator for the role: baton access grant IDENTITY ROLE RESOURCE."


class Internal(BatonError):
    """A bug; the log of the server has the rest."""

    reason = "INTERNAL"
    kind = "INTERNAL"
    remedy = "Look into the log of the server."
