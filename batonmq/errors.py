"""Errors of BatonMQ, in the client library and in the services.

Every deliberate error is a `BatonError`. Its class has a `reason` (the name of a
`baton.common.v1.Reason` without its prefix), a `kind` (the name of a gRPC status) and a `retry`,
which says what the caller may do next. `batonmq._common.rpc` converts an error to a gRPC status and
back to the same class. Callers decide by `retry`, not by lists of classes.

Values on which the caller's next step depends are typed: `error.detail`, for the classes that have
one. `error.facts` is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar


class Retry(Enum):
    """What the caller may do after an error."""

    NEVER = "NEVER"
    """Nothing: the same call fails until something else is changed."""
    SAME_CALL = "SAME_CALL"
    """Repeat the call unchanged; it may succeed later."""
    REDO = "REDO"
    """Repeat the larger step that the call is a part of, such as acquiring the queue."""
    REFRESH_ROUTE = "REFRESH_ROUTE"
    """Refresh the route, then repeat the call, possibly at another node."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the subscriptions of a rejected client and of a live member.

    Attributes:
        topic: The topic; empty if the setting holds for all topics.
        setting: `expression`, `model`, `order` or `consume_from`.
        newcomer_client_id: The rejected client.
        newcomer_value: Its value; empty if it does not subscribe to the topic.
        member_client_id: A live member with the group's current subscription.
        member_value: The group's value; empty if the group does not subscribe to the topic.
    """

    topic: str
    setting: str
    newcomer_client_id: str
    newcomer_value: str
    member_client_id: str
    member_value: str


class FenceCause(Enum):
    """What made a fencing token invalid."""

    UNSPECIFIED = "UNSPECIFIED"
    """Not known."""
    TAKEN = "TAKEN"
    """The queue was granted to another owner."""
    CLOSED = "CLOSED"
    """The owner had released the queue."""
    FORCED = "FORCED"
    """An operator took the queue from its owner."""
    RESET = "RESET"
    """The group's offset on the queue was reset, or its progress was deleted."""
    SUBSCRIPTION = "SUBSCRIPTION"
    """The group's subscription changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Base of the typed details. Their fields are those of the messages in `error.proto`."""

    def facts(self) -> dict[str, str]:
        """Return the fields that are not None, as text for people."""
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
        floor_token: The next token is greater than this; 0 if not known.
    """

    token: int = 0
    reset_epoch: int | None = None
    floor_token: int = 0


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
        message: One sentence: what was wrong with which value.
        remedy: One sentence: what to do about it; the remedy of the class if empty.
        retry_after_ms: Earliest time of a retry, in milliseconds from now; 0 for no advice.
        facts: The values behind the error, for people, as `error.proto` lists them for the reason;
            the fields of `detail` are added.
        detail: The values on which the caller's next step depends, for the classes that have them.
        differences: The differences of a `SubscriptionConflict`.
    """

    reason: ClassVar[str] = "INTERNAL"
    """Name of the `baton.common.v1.Reason`, without its prefix."""
    kind: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status."""
    retry: ClassVar[Retry] = Retry.NEVER
    """What the caller may do next."""
    remedy: str = ""
    """One sentence: what to do about the error."""
    detail_type: ClassVar[type[Detail] | None] = None
    """Class of `detail`; None if errors of this class have no detail."""

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
    """A field is invalid, whatever the state of the cluster."""

    reason = "INVALID_ARGUMENT"
    kind = "INVALID_ARGUMENT"
    remedy = "Correct the field that the error names."


class InvalidName(BatonError):
    """A name has a character, a length or a form that is not allowed."""

    reason = "INVALID_NAME"
    kind = "INVALID_ARGUMENT"
    remedy = "Use 1 to 127 characters of A-Z a-z 0-9 _ % - for topics and groups."


class LimitExceeded(BatonError):
    """A value exceeds its limit."""

    reason = "LIMIT_EXCEEDED"
    kind = "INVALID_ARGUMENT"
    remedy = "Stay within the limit that the error names."


class BadChecksum(BatonError):
    """The checksum of a batch does not match its bytes."""

    reason = "BAD_CHECKSUM"
    kind = "INVALID_ARGUMENT"
    retry = Retry.SAME_CALL
    remedy = (
        "Send the batch again; if that fails too, check the memory and the network of the producer."
    )


class BadBatch(BatonError):
    """A batch can't be decoded: its magic, version or lengths are wrong."""

    reason = "BAD_BATCH"
    kind = "INVALID_ARGUMENT"
    remedy = "Encode batches with the client library, in the version of the servers."


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
    remedy = "Check the name (baton topic list), or create the topic: baton topic create NAME."
    detail_type = TopicNotFoundDetail
    detail: TopicNotFoundDetail


class QueueNotFound(BatonError):
    """The topic exists, but has no queue with this id."""

    reason = "QUEUE_NOT_FOUND"
    kind = "NOT_FOUND"
    retry = Retry.REFRESH_ROUTE
    remedy = "Refresh the route of the topic."


class GroupNotFound(BatonError):
    """The group does not exist."""

    reason = "GROUP_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Check the name (baton group list), or start a consumer, which creates the group."


class TopicExists(BatonError):
    """The topic exists already, with other settings."""

    reason = "TOPIC_EXISTS"
    kind = "ALREADY_EXISTS"
    remedy = "Use the topic as it is, or choose another name."


class NoBroker(BatonError):
    """No storage node is registered."""

    reason = "NO_BROKER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Start a storage service, or wait until it has registered."


class WrongBroker(BatonError):
    """The call names another broker than the one it reached."""

    reason = "WRONG_BROKER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Refresh the route of the topic."


class ClientIdInUse(BatonError):
    """A live client with another incarnation uses this client id."""

    reason = "CLIENT_ID_IN_USE"
    kind = "ALREADY_EXISTS"
    remedy = (
        "Give each process a client id of its own; after a crash wait until the old "
        "session expires."
    )


class NotMember(BatonError):
    """The client is not a live member of the group."""

    reason = "NOT_MEMBER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Send a heartbeat to the nameserver first."


class SubscriptionConflict(BatonError):
    """The client's subscription differs from the subscription of its group."""

    reason = "SUBSCRIPTION_CONFLICT"
    kind = "FAILED_PRECONDITION"
    remedy = "Give all members of the group the same subscription, or use another group."


class NotSubscribed(BatonError):
    """The group does not subscribe to the topic."""

    reason = "NOT_SUBSCRIBED"
    kind = "FAILED_PRECONDITION"
    remedy = "Subscribe the group to the topic."


class OffsetOutOfRange(BatonError):
    """The queue no longer has the offset, or does not have it yet."""

    reason = "OFFSET_OUT_OF_RANGE"
    kind = "OUT_OF_RANGE"
    retry = Retry.REDO
    remedy = "Continue at an offset between first_offset and next_offset."
    detail_type = OffsetOutOfRangeDetail
    detail: OffsetOutOfRangeDetail


class OffsetAheadOfLog(BatonError):
    """The committed offset is beyond the end of the log."""

    reason = "OFFSET_AHEAD_OF_LOG"
    kind = "OUT_OF_RANGE"
    remedy = (
        "The log has lost messages: reset the group's offset on this queue with "
        "baton group reset-offsets."
    )


class SequenceGap(BatonError):
    """A sequence number of the producer is missing."""

    reason = "SEQUENCE_GAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Send the missing batch first."


class ProducerFenced(BatonError):
    """A newer producer with this id has written; for outputs, the input queue has a newer owner."""

    reason = "PRODUCER_FENCED"
    kind = "FAILED_PRECONDITION"
    remedy = "Close this producer: a newer one uses its id."


class DuplicateSequence(BatonError):
    """The sequence number is stored already: its receipt is not kept, or its content is different.

    If the content is different, the fact `content` is `other`, and this batch is not stored. For
    outputs, `content` is `some`: some of the batch were stored before, and nothing is stored now.
    """

    reason = "DUPLICATE_SEQUENCE"
    kind = "FAILED_PRECONDITION"
    remedy = "Do not send the messages again: they are stored."


class OutputMismatch(BatonError):
    """The output that a transformer made of an input differs from the stored output."""

    reason = "OUTPUT_MISMATCH"
    kind = "FAILED_PRECONDITION"
    remedy = (
        "Make the handler deterministic: the same input must give the same outputs, in the same "
        "order. The stored output stays."
    )


class OutputsForgotten(BatonError):
    """Storage does not know any more whether an input has outputs, so it rejects its outputs."""

    reason = "OUTPUTS_FORGOTTEN"
    kind = "FAILED_PRECONDITION"
    remedy = (
        "Check whether the outputs of the input are stored. Then reset the group's offset on the "
        "queue: after the input to skip it, or to the input to produce its outputs again."
    )


class DataLoss(BatonError):
    """Stored bytes do not match their checksum."""

    reason = "DATA_LOSS"
    kind = "DATA_LOSS"
    remedy = "Check the disk; restore the node from a replica."
    detail_type = DataLossDetail
    detail: DataLossDetail


class MessageNotFound(BatonError):
    """No message has this id, or the message is no longer kept."""

    reason = "MESSAGE_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Check the id; retention may have removed the message."


class NotScheduled(BatonError):
    """No message is scheduled under this id."""

    reason = "NOT_SCHEDULED"
    kind = "NOT_FOUND"
    remedy = "Check the id; the message may have been delivered or cancelled already."


class TransactionNotFound(BatonError):
    """No transaction has this id, or it ended so long ago that its outcome is forgotten."""

    reason = "TRANSACTION_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Check the id; look for the message in its topic."


class TransactionEnded(BatonError):
    """The transaction has ended with the other outcome."""

    reason = "TRANSACTION_ENDED"
    kind = "FAILED_PRECONDITION"
    remedy = "Nothing can change the outcome; send a new message if one is needed."


class NotWritable(BatonError):
    """The topic or the queue accepts no messages, or none that were sent with an older route."""

    reason = "NOT_WRITABLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Send to another queue, or allow writing: baton topic update NAME --permission rw."


class NotReadable(BatonError):
    """The topic, or the queue, does not allow reading."""

    reason = "NOT_READABLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Allow reading: baton topic update NAME --permission rw."


class DiskFull(BatonError):
    """The disk is too full to write. Reading and retention continue."""

    reason = "DISK_FULL"
    kind = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_CALL
    remedy = "Free space, or keep messages for a shorter time; writing then resumes by itself."


class Fenced(BatonError):
    """The fencing token of the call is not the queue's current one."""

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
    remedy = "Find the current leader and repeat the call there."
    detail_type = OldEpochDetail
    detail: OldEpochDetail


class DeliveryGap(BatonError):
    """A delivery would skip offsets that were not delivered."""

    reason = "DELIVERY_GAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Pull from the next offset that was not delivered."


class BeyondDelivered(BatonError):
    """An acknowledgement names an offset that was not delivered."""

    reason = "BEYOND_DELIVERED"
    kind = "FAILED_PRECONDITION"
    remedy = "Acknowledge only messages that were received under the token."


class AckCap(BatonError):
    """The ack window of the queue is full."""

    reason = "ACK_CAP"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Acknowledge the oldest message in flight; delivery then continues by itself."


class UnknownQueue(BatonError):
    """The offsets service has no progress of the queue."""

    reason = "UNKNOWN_QUEUE"
    kind = "NOT_FOUND"
    retry = Retry.REDO
    remedy = "Acquire the queue first."
    detail_type = UnknownQueueDetail
    detail: UnknownQueueDetail


class TokenMismatch(BatonError):
    """The queue's token is not the one that a fence expected."""

    reason = "TOKEN_MISMATCH"
    kind = "ABORTED"
    retry = Retry.REDO
    remedy = "Read the state of the queue again."
    detail_type = TokenMismatchDetail
    detail: TokenMismatchDetail


class Superseded(BatonError):
    """The fence succeeded, and a newer token has replaced its token."""

    reason = "SUPERSEDED"
    kind = "ABORTED"
    retry = Retry.REDO
    remedy = "Read the state of the queue again."


class Unacked(BatonError):
    """Delivered messages are not acknowledged yet."""

    reason = "UNACKED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait until the owner has acknowledged them, or until its lease expires."


class NotIdle(BatonError):
    """The owner was active a short time ago."""

    reason = "NOT_IDLE"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait until the lease of the owner expires."


class NotHolder(BatonError):
    """Another incarnation owns the queue, or the owner has released it."""

    reason = "NOT_HOLDER"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Acquire the queue as a new owner."


class DeliveryUnrecorded(BatonError):
    """The delivery could not be recorded, so no messages were sent."""

    reason = "DELIVERY_UNRECORDED"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Pull again from the same offset."


class Held(BatonError):
    """Another member owns the queue."""

    reason = "HELD"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait until the owner releases the queue."


class Draining(BatonError):
    """The owner is draining the queue before it releases it."""

    reason = "DRAINING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Try again in a moment."


class OldRequest(BatonError):
    """A newer Acquire of the same incarnation was granted."""

    reason = "OLD_REQUEST"
    kind = "FAILED_PRECONDITION"
    remedy = "Nothing needs to be done: a newer Acquire of the same incarnation was granted."


class NotAssigned(BatonError):
    """The member's generation of the group is too old, or another member has the queue in it.

    Or the record of the group does not have the queue at all.
    """

    reason = "NOT_ASSIGNED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = (
        "Read the record of the group again, and acquire the queues that it assigns to this member."
    )


class HandoverPending(BatonError):
    """A hand-over of the queue is in progress."""

    reason = "HANDOVER_PENDING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Try again in a moment."


class ModeChanged(BatonError):
    """The call is for groups with ownership of queues and this group has none, or the reverse."""

    reason = "MODE_CHANGED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Read the settings of the group again, and use the calls for its kind of ownership."


class Paused(BatonError):
    """An operator has paused the group."""

    reason = "PAUSED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.SAME_CALL
    remedy = "Wait, or resume the group: baton group resume NAME."


class SubscriptionDraining(BatonError):
    """The group's subscription is changing: no queue is granted until all are released."""

    reason = "SUBSCRIPTION_DRAINING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait until every member has released its queues."


class OldTopic(BatonError):
    """The start offset belongs to an earlier topic of the same name."""

    reason = "OLD_TOPIC"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REDO
    remedy = "Look up the offset again, in the current topic."


class GroupInUse(BatonError):
    """The group has live members."""

    reason = "GROUP_IN_USE"
    kind = "FAILED_PRECONDITION"
    remedy = "Stop the members of the group first."


class OperationNotFound(BatonError):
    """No recorded reset or clone of the group has this operation id."""

    reason = "OPERATION_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "List the resets and clones of the group: baton group resets NAME."


class OperationExists(BatonError):
    """The operation id was used for another operation."""

    reason = "OPERATION_EXISTS"
    kind = "ALREADY_EXISTS"
    remedy = "Choose another operation id."


class RemoteClientNotFound(BatonError):
    """The gateway has no telemetry stream of this remote client."""

    reason = "REMOTE_CLIENT_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "List the clients of the gateways: baton gateway clients."


class RemoteClientSilent(BatonError):
    """A remote client has not answered a command in time, or its telemetry stream has ended.

    It may have carried out the command.
    """

    reason = "REMOTE_CLIENT_SILENT"
    kind = "DEADLINE_EXCEEDED"
    remedy = "See the log of the client: it may have run the command, or may still be running it."


class RemoteCommandUnsupported(BatonError):
    """A remote client can't carry out a command."""

    reason = "REMOTE_COMMAND_UNSUPPORTED"
    kind = "FAILED_PRECONDITION"
    remedy = (
        "Send the command to a client of another library or kind: baton gateway clients --format "
        "wide shows both."
    )


class StillInSync(BatonError):
    """A leader or an in-sync node is up, so no message has to be lost."""

    reason = "STILL_IN_SYNC"
    kind = "FAILED_PRECONDITION"
    remedy = (
        "Wait until the in-sync node is elected. If it can't be elected, stop it for good, then "
        "repeat the call."
    )


class NotDrainable(BatonError):
    """Without this node its replica set would have no leader, or reject writes."""

    reason = "NOT_DRAINABLE"
    kind = "FAILED_PRECONDITION"
    remedy = (
        "Start another node of the set and wait until it is in sync: baton cluster replication."
    )


class SetNotFound(BatonError):
    """No node of this offsets replica set is registered."""

    reason = "SET_NOT_FOUND"
    kind = "NOT_FOUND"
    remedy = "Name a set that `baton cluster replication` shows."


class GroupMoving(BatonError):
    """Another move of the group is in progress."""

    reason = "GROUP_MOVING"
    kind = "ABORTED"
    retry = Retry.SAME_CALL
    remedy = "Wait until that move is complete: baton group describe NAME."


class GroupsApart(BatonError):
    """The call needs both groups in one offsets replica set, and they are in two."""

    reason = "GROUPS_APART"
    kind = "FAILED_PRECONDITION"
    remedy = "Move one group to the set of the other: baton group move NAME --to SET."


class GroupMoved(BatonError):
    """Another offsets replica set keeps the group."""

    reason = "GROUP_MOVED"
    kind = "FAILED_PRECONDITION"
    retry = Retry.REFRESH_ROUTE
    remedy = "Repeat the call at the set that the error names."
    detail_type = GroupMovedDetail
    detail: GroupMovedDetail


class OldMove(BatonError):
    """A later move of the group is known."""

    reason = "OLD_MOVE"
    kind = "FAILED_PRECONDITION"
    remedy = "Nothing needs to be done: a later move of the group exists."


class NotLeader(BatonError):
    """The node is not the leader."""

    reason = "NOT_LEADER"
    kind = "UNAVAILABLE"
    retry = Retry.REFRESH_ROUTE
    remedy = "Repeat the call at the leader; a new one is elected within seconds."


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
    remedy = (
        "Restart the replicas that are not in sync (baton cluster replication), or lower the "
        "number that must be in sync."
    )


class NoQuorum(BatonError):
    """etcd can't be reached or has no quorum."""

    reason = "NO_QUORUM"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check the etcd cluster, then the services: baton cluster status."


class OffsetsUnreachable(BatonError):
    """The offsets service can't be reached."""

    reason = "OFFSETS_UNREACHABLE"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check the offsets service: baton cluster status."


class Overloaded(BatonError):
    """A limit on connections, memory or queued work is reached."""

    reason = "OVERLOADED"
    kind = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_CALL
    remedy = (
        "Repeat the call after a pause. If the error persists, make fewer calls at a time, or "
        "raise the limit that it names."
    )


class Throttled(BatonError):
    """The identity of the caller has reached its quota. Nothing was done.

    Producers and consumers wait as long as `retry_after_ms` says, within their timeouts.
    """

    reason = "THROTTLED"
    kind = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_CALL
    remedy = "Send less, or ask an administrator for a higher quota: baton quota set IDENTITY."


class Unreachable(BatonError):
    """A service can't be reached."""

    reason = "UNREACHABLE"
    kind = "UNAVAILABLE"
    retry = Retry.SAME_CALL
    remedy = "Check that the service runs (baton cluster status) and that its address is right."


class Unauthenticated(BatonError):
    """The call has no valid credentials."""

    reason = "UNAUTHENTICATED"
    kind = "UNAUTHENTICATED"
    remedy = "Give a bearer token that is not revoked, or a client certificate."


class PermissionDenied(BatonError):
    """No grant of the authenticated caller covers the call."""

    reason = "PERMISSION_DENIED"
    kind = "PERMISSION_DENIED"
    remedy = "Ask an administrator for the role: baton access grant IDENTITY ROLE RESOURCE."


class Internal(BatonError):
    """A bug; the log of the server has the details."""

    reason = "INTERNAL"
    kind = "INTERNAL"
    remedy = "Read the log of the server."
