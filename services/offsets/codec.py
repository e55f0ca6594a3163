"""The stored form of keys and values: progress, token changes, resets and local placements.

The key of a queue is `group NUL topic NUL broker NUL queue_id`, each part ASCII without NUL, so the
keys of a group are adjacent. All other keys begin with NUL. A value begins with a checksum:

    at  size  field
     0     4  CRC-32C of the key and of the rest of the value, little-endian
     4        the encoded message
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import stored_progress_pb2
from batonmq._core.checksum import crc32c
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import DataLoss
from batonmq_server.offsets.core.holds import DeliveryReach, EndedToken, HoldEnd, TokenChange
from batonmq_server.offsets.core.local_placements import LocalPlacement, PlacementState
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.resets import RecordedReset, ResetOrder, ResetStep
from batonmq_server.offsets.core.values import (
    AckState,
    FenceGrant,
    ProgressSource,
    ResetEffect,
    Tombstone,
)

META = b"\0"
"""First byte of the keys that do not belong to a queue."""
_CHECKSUM_SIZE = 4


def seal(key: bytes, value: bytes) -> bytes:
    """Return the stored form of a value: its checksum and the value."""
    return _checksum(key, value) + value


def unseal(key: bytes, stored: bytes) -> bytes:
    """Return the value of a stored form.

    Raises:
        DataLoss: the checksum does not match the key and the value.
    """
    value = stored[_CHECKSUM_SIZE:]
    if stored[:_CHECKSUM_SIZE] != _checksum(key, value):
        raise DataLoss(f"the checksum of the value stored under {key[:80]!r} does not match")
    return value


def _checksum(key: bytes, value: bytes) -> bytes:
    checksum: int = crc32c(key + value)
    return checksum.to_bytes(_CHECKSUM_SIZE, "little")


def encode_key(key: GroupQueue) -> bytes:
    """Return the stored form of a queue's key."""
    return "\0".join((key.group, key.topic, key.broker, str(key.queue_id))).encode()


def decode_key(stored: bytes) -> GroupQueue:
    """Return the queue of a stored key.

    Raises:
        DataLoss: the bytes are not the key of a queue.
    """
    try:
        group, topic, broker, queue_id = stored.decode().split("\0")
        return GroupQueue(group, topic, broker, int(queue_id))
    except ValueError as error:
        raise DataLoss(f"stored key {stored[:80]!r} can't be read") from error


def encode_progress(progress: Progress | Tombstone) -> bytes:
    """Return the durable part of a queue's progress: without D and the time of the last call."""
    if isinstance(progress, Tombstone):
        return stored_progress_pb2.StoredProgress(
            token=progress.token,
            reset_epoch=progress.reset_epoch,
            closed=True,
            update_unix_ms=progress.update_unix_ms,
            deleted=True,
        ).SerializeToString()
    grant, reach = progress.grant, progress.closed_reach
    return stored_progress_pb2.StoredProgress(
        token=progress.token,
        holder=_encode_holder(progress.holder),
        attempt=progress.attempt,
        committed_offset=progress.committed_offset,
        delivered_reserved=progress.delivered_reserved,
        acked=progress.acked.encoded,
        maybe_seen=progress.maybe_seen.encoded,
        reset_epoch=progress.reset_epoch,
        closed=progress.closed,
        update_unix_ms=progress.update_unix_ms,
        fenced_committed_offset=grant.committed_offset if grant else 0,
        fenced_acked=grant.acked.encoded if grant else b"",
        fenced_maybe_seen=grant.maybe_seen.encoded if grant else b"",
        subscription_generation=progress.subscription_generation,
        forced_by=progress.forced_by,
        forced_reason=progress.forced_reason,
        source=progress.source,
        first_reset_epoch=progress.first_reset_epoch,
        superseded=bool(progress.attempt) and grant is None,
        closed_delivered=reach.delivered_offset if reach else 0,
        closed_delivered_max=reach.delivered_offset_max if reach else 0,
    ).SerializeToString()


def decode_progress(key: GroupQueue, stored: bytes) -> Progress | Tombstone:
    """Return the progress of a queue, with D at its reserved bound.

    Raises:
        DataLoss: the bytes are no progress, or one that the rules can't produce.
    """
    try:
        read = stored_progress_pb2.StoredProgress.FromString(stored)
        progress = _progress(read)
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"stored progress of {key} can't be read: {error}") from error
    if read.deleted and read.token > 0 and read.reset_epoch > 0:
        return Tombstone(read.token, read.reset_epoch, read.update_unix_ms)
    lowest = progress.acked.runs[0][0] if progress.acked else progress.committed_offset + 1
    if not 0 <= progress.committed_offset <= progress.delivered_reserved or (
        read.deleted
        or progress.token < (not progress.closed)
        or lowest <= progress.committed_offset
    ):
        raise DataLoss(
            f"stored progress of {key} contradicts itself: token {progress.token}, committed "
            f"{progress.committed_offset}, reserved {progress.delivered_reserved}, acked {lowest}"
        )
    return progress


def _progress(read: stored_progress_pb2.StoredProgress) -> Progress:
    grant = None
    if read.attempt and not read.superseded:
        grant = FenceGrant(
            read.token,
            read.fenced_committed_offset,
            RangeSet.decode(read.fenced_acked),
            RangeSet.decode(read.fenced_maybe_seen),
            read.reset_epoch,
        )
    reach = None
    if read.closed_delivered_max:
        reach = DeliveryReach(read.closed_delivered, read.closed_delivered_max)
    return Progress(
        token=read.token,
        holder=_decode_holder(read),
        closed=read.closed,
        committed_offset=read.committed_offset,
        acked=RangeSet.decode(read.acked),
        delivered_offset=read.delivered_reserved,
        delivered_reserved=read.delivered_reserved,
        closed_reach=reach,
        maybe_seen=RangeSet.decode(read.maybe_seen),
        reset_epoch=read.reset_epoch,
        first_reset_epoch=read.first_reset_epoch,
        grant=grant,
        attempt=read.attempt,
        forced_by=read.forced_by,
        forced_reason=read.forced_reason,
        subscription_generation=read.subscription_generation,
        source=ProgressSource(read.source),
        last_call_monotonic_ms=0,
        update_unix_ms=read.update_unix_ms,
    )


def encode_token_change(change: TokenChange) -> bytes:
    """Return the stored form of a token change."""
    token, end, reach = change.ended
    return stored_progress_pb2.StoredTokenChange(
        token=change.token,
        holder=_encode_holder(change.holder),
        unix_ms=change.unix_ms,
        committed_offset=change.committed_offset,
        acked=change.acked.encoded,
        ended_token=token,
        end=end,
        ended_delivered=reach.delivered_offset,
        ended_delivered_max=reach.delivered_offset_max,
    ).SerializeToString()


def decode_token_change(stored: bytes) -> TokenChange:
    """Return the token change of a stored form.

    Raises:
        DataLoss: the bytes are no token change.
    """
    try:
        read = stored_progress_pb2.StoredTokenChange.FromString(stored)
        reach = DeliveryReach(read.ended_delivered, read.ended_delivered_max)
        return TokenChange(
            read.token,
            _decode_holder(read),
            read.unix_ms,
            read.committed_offset,
            RangeSet.decode(read.acked),
            EndedToken(read.ended_token, HoldEnd(read.end), reach),
        )
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"a stored token change can't be read: {error}") from error


def encode_reset(reset: RecordedReset) -> bytes:
    """Return the stored form of a reset or clone."""
    order = reset.order
    return stored_progress_pb2.StoredReset(
        op_id=order.op_id,
        kind=order.kind,
        by=order.by,
        reason=order.reason,
        unix_ms=reset.unix_ms,
        steps=[_encode_step(step) for step in reset.steps],
        undone_op_id=order.undone_op_id,
        from_group=order.from_group,
        number=reset.number,
    ).SerializeToString()


def decode_reset(stored: bytes) -> RecordedReset:
    """Return the reset or clone of a stored form.

    Raises:
        DataLoss: the bytes are no reset.
    """
    try:
        read = stored_progress_pb2.StoredReset.FromString(stored)
        return RecordedReset(
            number=read.number,
            order=ResetOrder(
                read.op_id,
                ProgressSource(read.kind),
                read.by,
                read.reason,
                read.undone_op_id,
                read.from_group,
            ),
            unix_ms=read.unix_ms,
            steps=tuple(_decode_step(step) for step in read.steps),
        )
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"a stored reset can't be read: {error}") from error


def encode_local_placement(placement: LocalPlacement) -> bytes:
    """Return the stored form of a group's local placement."""
    return stored_progress_pb2.StoredLocalPlacement(
        move=placement.move,
        state=stored_progress_pb2.LocalPlacementState.ValueType(placement.state),
        gone_to=placement.gone_to,
        topic_ids=placement.topic_ids,
    ).SerializeToString(deterministic=True)


def decode_local_placement(stored: bytes) -> LocalPlacement:
    """Return the local placement of a stored form.

    Raises:
        DataLoss: the bytes are no local placement.
    """
    try:
        read = stored_progress_pb2.StoredLocalPlacement.FromString(stored)
        return LocalPlacement(
            read.move, PlacementState(read.state), read.gone_to, dict(read.topic_ids)
        )
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"the stored placement of a group can't be read: {error}") from error


def _encode_step(step: ResetStep) -> stored_progress_pb2.StoredResetStep:
    key, effect = step.key, step.effect
    queue = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return stored_progress_pb2.StoredResetStep(
        queue=queue_pb2.GroupQueue(group=key.group, queue=queue),
        from_offset=effect.before.committed_offset,
        from_acked=effect.before.acked.encoded,
        to_offset=step.to_offset,
        replayed_count=effect.replayed_count,
        skipped_count=effect.skipped_count,
        reset_epoch=effect.reset_epoch,
        token=effect.token,
    )


def _decode_step(read: stored_progress_pb2.StoredResetStep) -> ResetStep:
    queue = read.queue.queue
    before = AckState(read.from_offset, RangeSet.decode(read.from_acked))
    return ResetStep(
        GroupQueue(read.queue.group, queue.topic, queue.broker, queue.queue_id),
        read.to_offset,
        ResetEffect(before, read.replayed_count, read.skipped_count, read.reset_epoch, read.token),
    )


def _encode_holder(holder: Incarnation | None) -> queue_pb2.Incarnation | None:
    if holder is None:
        return None
    return queue_pb2.Incarnation(
        client_id=holder.client_id, incarnation_id=holder.incarnation_id, owner=holder.owner
    )


def _decode_holder(
    read: stored_progress_pb2.StoredProgress | stored_progress_pb2.StoredTokenChange,
) -> Incarnation | None:
    if not read.HasField("holder"):
        return None
    return Incarnation(read.holder.client_id, read.holder.incarnation_id, read.holder.owner)
