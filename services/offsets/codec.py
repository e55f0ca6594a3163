"""Bytes of a queue's key and progress on the disk.

A key is `group NUL topic NUL broker NUL queue_id`, all ASCII without NUL inside; keys of a group
stand together. Keys of anything but queues begin with NUL.
"""

from __future__ import annotations

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import stored_progress_pb2
from google.protobuf.message import DecodeError

from batonmq.common.errors import DataLoss
from services.offsets.core.calls import Grant, Holder, QueueKey, Tombstone
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import RangeSet

META = b"\0"
"""First byte of keys that are not of queues."""


def encode_key(key: QueueKey) -> bytes:
    """The key on the disk."""
    return "\0".join((key.group, key.topic, key.broker, str(key.queue_id))).encode()


def decode_key(stored: bytes) -> QueueKey:
    """Inverse of `encode_key`.

    Raises:
        DataLoss: these bytes are not a key.
    """
    try:
        group, topic, broker, queue_id = stored.decode().split("\0")
        return QueueKey(group, topic, broker, int(queue_id))
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
    grant, holder = progress.grant, progress.holder
    return stored_progress_pb2.StoredProgress(
        token=progress.token,
        holder=holder
        and queue_pb2.Incarnation(client_id=holder.client_id, incarnation_id=holder.incarnation_id),
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
    ).SerializeToString()


def decode_progress(key: QueueKey, stored: bytes) -> Progress | Tombstone:
    """Inverse of `encode_progress`, with D at its upper bound.

    Raises:
        DataLoss: these bytes are not a progress, or not one that the rules can produce.
    """
    try:
        read = stored_progress_pb2.StoredProgress.FromString(stored)
        progress = _progress(read)
    except (DecodeError, ValueError) as error:
        raise DataLoss(f"stored progress of {key} can't be read: {error}") from error
    if read.deleted and read.token > 1 and read.reset_epoch > 0:
        return Tombstone(read.token, read.reset_epoch, read.update_unix_ms)
    lowest = progress.acked.runs[0][0] if progress.acked else progress.committed_offset + 1
    if not 0 <= progress.committed_offset <= progress.delivered_reserved or (
        read.deleted or progress.token < 1 or lowest <= progress.committed_offset
    ):
        raise DataLoss(
            f"stored progress of {key} contradicts itself: token {progress.token}, committed "
            f"{progress.committed_offset}, reserved {progress.delivered_reserved}, acked {lowest}"
        )
    return progress


def _progress(read: stored_progress_pb2.StoredProgress) -> Progress:
    holder = None
    if read.HasField("holder"):
        holder = Holder(read.holder.client_id, read.holder.incarnation_id)
    grant = None
    if read.attempt:
        grant = Grant(
            read.token,
            read.fenced_committed_offset,
            RangeSet.decode(read.fenced_acked),
            RangeSet.decode(read.fenced_maybe_seen),
            read.reset_epoch,
        )
    return Progress(
        token=read.token,
        holder=holder,
        closed=read.closed,
        committed_offset=read.committed_offset,
        acked=RangeSet.decode(read.acked),
        delivered_offset=read.delivered_reserved,
        delivered_reserved=read.delivered_reserved,
        maybe_seen=RangeSet.decode(read.maybe_seen),
        reset_epoch=read.reset_epoch,
        grant=grant,
        attempt=read.attempt,
        access_monotonic_ms=0,
        update_unix_ms=read.update_unix_ms,
    )
