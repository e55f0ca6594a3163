"""Builds the messages of answers from plain values."""

from __future__ import annotations

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError
from batonmq_server.offsets.core.holds import TokenHold
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.resets import RecordedReset, ResetStep
from batonmq_server.offsets.core.values import (
    CommitResult,
    FenceGrant,
    Instant,
    ProgressSource,
    QueueLimits,
    Tombstone,
)

ACKED_MAX = 1_000
"""Maximum number of acked ranges in the answer for one queue."""


def ranges_pb(ranges: RangeSet) -> list[queue_pb2.OffsetRange]:
    """Return the runs of a range set."""
    return [
        queue_pb2.OffsetRange(first_offset=first, next_offset=next_) for first, next_ in ranges.runs
    ]


def queue_pb(key: GroupQueue) -> queue_pb2.GroupQueue:
    """Return a group and queue."""
    queue = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=queue)


def fenced_pb(grant: FenceGrant) -> pb.Fenced:
    """Return the state from which the new holder starts."""
    return pb.Fenced(
        token=grant.token,
        committed_offset=grant.committed_offset,
        acked=ranges_pb(grant.acked),
        maybe_seen=ranges_pb(grant.maybe_seen),
        reset_epoch=grant.reset_epoch,
    )


def token_pb(key: GroupQueue, progress: Progress | Tombstone) -> pb.QueueToken:
    """Return the token and the holder of a queue."""
    if isinstance(progress, Tombstone):
        return pb.QueueToken(queue=queue_pb(key), token=progress.token, closed=True)
    return pb.QueueToken(
        queue=queue_pb(key),
        token=progress.token,
        holder=_holder_pb(progress.holder),
        closed=progress.closed,
    )


def progress_pb(
    key: GroupQueue, progress: Progress, limits: QueueLimits, now: Instant
) -> pb.Progress:
    """Return the progress of a queue."""
    lowest = progress.lowest_unacked()
    return pb.Progress(
        queue=queue_pb(key),
        token=progress.token,
        holder=_holder_pb(progress.holder),
        closed=progress.closed,
        committed_offset=progress.committed_offset,
        delivered_offset=progress.delivered_without_advance,
        acked_count=progress.acked.count,
        unacked_count=progress.in_flight_without_advance().count,
        maybe_seen_count=progress.maybe_seen.count,
        reset_epoch=progress.reset_epoch,
        idle_ms=progress.idle_ms(now),
        update_unix_ms=progress.update_unix_ms,
        lowest_unacked_offset=-1 if lowest is None else lowest,
        acked_range_count=len(progress.acked.runs),
        ack_capped=progress.ack_window_full(limits),
        subscription_generation=progress.subscription_generation,
        forced_by=progress.forced_by,
        forced_reason=progress.forced_reason,
        source=_source_pb(progress.source),
        acked=ranges_pb(RangeSet(progress.acked.runs[:ACKED_MAX])),
        waiting_at=progress.waiting_at,
        unacked_count_min=progress.known_in_flight().count,
        advance_to=progress.advance.end_offset if progress.advance is not None else 0,
    )


def committed_pb(committed: CommitResult) -> pb.Committed:
    """Return the progress after a commit."""
    return pb.Committed(committed_offset=committed.committed_offset, noop=not committed.changed)


def reset_step_pb(step: ResetStep) -> pb.ResetStep:
    """Return the effect of a reset on one queue."""
    effect = step.effect
    return pb.ResetStep(
        queue=queue_pb(step.key),
        from_offset=effect.before.committed_offset,
        to_offset=step.to_offset,
        replayed_count=effect.replayed_count,
        skipped_count=effect.skipped_count,
        reset_epoch=effect.reset_epoch,
        token=effect.token,
    )


def reset_outcome_pb(result: ResetStep | BatonError) -> pb.ResetOutcome:
    """Return the outcome of a reset for one queue."""
    if isinstance(result, BatonError):
        return pb.ResetOutcome(error=error_to_pb(result))
    return pb.ResetOutcome(step=reset_step_pb(result))


def recorded_reset_pb(reset: RecordedReset) -> pb.RecordedReset:
    """Return a recorded reset."""
    order = reset.order
    return pb.RecordedReset(
        op_id=order.op_id,
        kind=_source_pb(order.kind),
        by=order.by,
        reason=order.reason,
        unix_ms=reset.unix_ms,
        steps=[reset_step_pb(step) for step in reset.steps],
        undone_op_id=order.undone_op_id,
        from_group=order.from_group,
    )


def hold_pb(hold: TokenHold) -> pb.Hold:
    """Return one hold of a queue."""
    began, end, end_unix_ms, reach = hold
    return pb.Hold(
        token=began.token,
        holder=_holder_pb(began.holder),
        begin_unix_ms=began.unix_ms,
        end_unix_ms=end_unix_ms,
        end=pb.HoldEnd.ValueType(end),
        committed_offset=began.committed_offset,
        acked=ranges_pb(began.acked),
        delivered_offset=reach.delivered_offset,
        delivered_offset_max=reach.delivered_offset_max,
    )


def _source_pb(source: ProgressSource) -> pb.ProgressSource.ValueType:
    return pb.ProgressSource.ValueType(source)


def _holder_pb(holder: Incarnation | None) -> queue_pb2.Incarnation | None:
    if holder is None:
        return None
    return queue_pb2.Incarnation(client_id=holder.client_id, incarnation_id=holder.incarnation_id)
