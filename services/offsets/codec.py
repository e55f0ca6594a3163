"""Bytes of a queue's key and progress, of an operation and of a handover, on the disk.

A key is `group NUL topic NUL broker NUL queue_id`, all ASCII without NUL inside; keys of a group
stand together. Keys of anything but queues begin with NUL. A value begins with a checksum:

    at  size  field
     0     4  CRC-32C of the key and of the rest of the value, little-endian
     4        what is stored
"""

from __future__ import annotations

import google_crc32c
from google.protobuf.message import DecodeError

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import stored_progress_pb2
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
"""First byte of keys that are not of queues."""
_CHECKSUM_SIZE = 4


def seal(key: bytes, value: bytes) -> bytes:
    """The value as it stands on the disk."""
    return _checksum(key, value) + value


def unseal(key: bytes, stored: bytes) -> bytes:
    """Inverse of `seal`.

    Raises:
        DataLoss: the key or the value is not what was written.
    """
    value = stored[_CHECKSUM_SIZE:]
    if stored[:_CHECKSUM_SIZE] != _checksum(key, value):
        raise DataLoss(f"the checksum of what is stored under {key[:80]!r} does not match")
    return value


def _checksum(key: bytes, value: bytes) -> bytes:
    checksum: int = google_crc32c.value(key + value)
    return checksum.to_bytes(_CHECKSUM_SIZE, "little")


def encode_key(key: GroupQueue) -> bytes:
    """The key on the disk."""
    return "\0".join((key.group, key.topic, key.broker, str(key.queue_id))).encode()


def decode_key(stored: bytes) -> GroupQueue:
    """Inverse of `encode_key`.

    Raises:
        DataLoss: these bytes are not a key.
    """
    try:
        group, topic, broker, queue_id = stored.decode().split("\0")
        return GroupQueue(group, topic, broker, int(queue_id))
    except ValueError as error:
        raise DataLoss(f"stored key {stored[:80]!r} can't be read") from error


def encode_progress(progress: Progress | Tombstone) -> bytes:
    """The durable part of a queue's progress: all but D and the time of the last access."""
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
    """Inverse of `encode_progress`, with D at its upper bound.

    Raises:
        DataLoss: these bytes are not a progress, or not one that the rules can produce.
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
        access_monotonic_ms=0,
        update_unix_ms=read.update_unix_ms,
    )


def encode_token_change(handover: TokenChange) -> bytes:
    """A change of a token, all of it."""
    token, end, reach = handover.ended
    return stored_progress_pb2.StoredHandover(
        token=handover.token,
        holder=_encode_holder(handover.holder),
        unix_ms=handover.unix_ms,
        committed_offset=handover.committed_offset,
        acked=handover.acked.encoded,
        ended_token=token,
        end=end,
        ended_delivered=reach.delivered_offset,
        ended_delivered_max=reach.delivered_offset_max,
    ).SerializeToString()


def decode_token_change(stored: bytes) -> TokenChange:
    """Inverse of `encode_token_change`.

    Raises:
        DataLoss: these bytes are not a handover.
    """
    try:
        read = stored_progress_pb2.StoredHandover.FromString(stored)
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
        raise DataLoss(f"a stored handover can't be read: {error}") from error


def encode_reset(operation: RecordedReset) -> bytes:
    """A reset or clone, all of it."""
    order = operation.order
    return stored_progress_pb2.StoredReset(
        op_id=order.op_id,
        kind=order.kind,
        by=order.by,
        reason=order.reason,
        unix_ms=operation.unix_ms,
        steps=[_encode_step(step) for step in operation.steps],
        undone_op_id=order.undone_op_id,
        from_group=order.from_group,
        number=operation.number,
    ).SerializeToString()


def decode_reset(stored: bytes) -> RecordedReset:
    """Inverse of `encode_reset`.

    Raises:
        DataLoss: these bytes are not an operation.
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
        raise DataLoss(f"a stored operation can't be read: {error}") from error


def encode_placement(home: LocalPlacement) -> bytes:
    """What became of a group, on the disk."""
    return stored_progress_pb2.StoredHome(
        move=home.move,
        state=stored_progress_pb2.HomeState.ValueType(home.state),
        gone_to=home.gone_to,
        topic_ids=home.topic_ids,
    ).SerializeToString(deterministic=True)


def decode_placement(stored: bytes) -> LocalPlacement:
    """Inverse of `encode_placement`.

    Raises:
        DataLoss: these bytes are no entry of a group.
    """
    try:
        read = stored_progress_pb2.StoredHome.FromString(stored)
        return LocalPlacement(
            read.move, PlacementState(read.state), read.gone_to, dict(read.topic_ids)
        )
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"the stored home of a group can't be read: {error}") from error


def _encode_step(step: ResetStep) -> stored_progress_pb2.StoredResetStep:
    key, moved = step.key, step.moved
    queue = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return stored_progress_pb2.StoredResetStep(
        queue=queue_pb2.GroupQueue(group=key.group, queue=queue),
        from_offset=moved.before.committed_offset,
        from_acked=moved.before.acked.encoded,
        to_offset=step.to_offset,
        replayed_count=moved.replayed_count,
        skipped_count=moved.skipped_count,
        reset_epoch=moved.reset_epoch,
        token=moved.token,
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
    return queue_pb2.Incarnation(client_id=holder.client_id, incarnation_id=holder.incarnation_id)


def _decode_holder(
    read: stored_progress_pb2.StoredProgress | stored_progress_pb2.StoredHandover,
) -> Incarnation | None:
    if not read.HasField("holder"):
        return None
    return Incarnation(read.holder.client_id, read.holder.incarnation_id)
