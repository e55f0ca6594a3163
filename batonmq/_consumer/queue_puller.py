"""Pulls: when to ask storage, what to ask, and what to make of the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import unless
from batonmq._common.rpc import answered
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import restore_original
from batonmq._consumer.session import ranges_from_pb, ranges_to_pb
from batonmq._core.flow_control import blocking_limit
from batonmq._core.queue_progress import Acks, QueueProgress
from batonmq._core.records import check_batch, decode_records, tag_hashes
from batonmq._core.retries import retry_topic
from batonmq._core.subscription import Filter
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupNotFound,
    ModeChanged,
    NotLeader,
    NotReadable,
    NotServing,
    Paused,
    Retry,
    UnknownQueue,
    Unreachable,
)

if TYPE_CHECKING:
    from batonmq._consumer.assigned_queue import AssignedQueue

log = logging.getLogger(__name__)

OWNERSHIP_LOST = (Fenced, UnknownQueue, ModeChanged)
"""Refusals after which nothing is to be had under the same token."""
NODE_UNAVAILABLE = (NotLeader, NotServing, Unreachable)
"""Errors after which another node of the broker is asked."""


async def pull_forever(runner: AssignedQueue) -> None:
    """Fill the buffer until stopped; fence on a refused token."""
    failures, unreadable = 0, False
    while await _due(runner):
        runner.interrupted.clear()
        try:
            await unless(runner.interrupted, pull(runner))
            failures, unreadable = 0, _tell_unreadable(runner, None, unreadable)
        except OWNERSHIP_LOST as error:
            runner.refused(error)
        except BatonError as error:
            if isinstance(error, GroupNotFound):
                runner.session.heartbeat_soon.set()  # it is new, and storage will hear of it
            elif error.retry is Retry.NEVER:
                log.error("queue can't be read queue=%s error=%s", runner.queue, error)
            unreadable = _tell_unreadable(runner, error, unreadable)
            if isinstance(error, NODE_UNAVAILABLE):
                directory, broker = runner.session.directory, runner.queue.broker
                runner.reads_from = directory.next_reader(broker, runner.reads_from)
            await runner.session.directory.pause(error, failures)
            failures = 0 if isinstance(error, Paused) else failures + 1


async def _due(runner: AssignedQueue) -> bool:
    """Wait for room, for the end of a pause, and for the subscription that the grant is for.

    Returns:
        False once no message may be started any more.
    """
    session = runner.session
    while runner.may_start() and (progress := runner.progress) is not None:
        view = session.view
        runner.flow = (
            "paused"
            if runner.paused
            else blocking_limit(
                session.limits,
                runner.waiting_bytes,
                waiting_count=len(runner.buffer),
                span=progress.span,
            )
        )
        old = view.subscription_generation < runner.bound_generation
        old = old or runner.queue.topic not in view.filters
        if not (runner.flow or old or view.paused):
            return True
        if runner.flow == "span":
            session.commit_soon.set()
        if old:
            session.heartbeat_soon.set()
        runner.changed.clear()
        if runner.flow == "bytes":
            session.wait_for_room[runner.changed] = None
        await runner.changed.wait()
    return False


async def pull(runner: AssignedQueue) -> None:
    """Pull once for `runner`. What arrives after its ownership ended is dropped.

    Acks that are not confirmed ride along (protocol 6.6); the answer says if they were taken.

    Raises:
        BatonError: as storage refused, or the answer is damaged.
    """
    session, progress = runner.session, runner.progress
    assert progress is not None
    settings, view = session.settings, session.view
    runner.filter = view.filters[runner.queue.topic]
    riding = _riding(runner, progress)
    request = pb.PullRequest(
        queue=runner.key,
        offset=progress.next_offset,
        token=runner.token,
        pull_id=session.random.getrandbits(63),
        expression=runner.filter.canonical(),
        subscription_generation=view.subscription_generation,
        bytes_max=min(settings.pull_bytes_max, session.budget.share()),
        messages_max=min(settings.pull_messages_max, settings.span_max - progress.span),
        hold_ms=settings.pull_hold_ms,
        offsets_epoch=session.epochs.of(session.epochs.newest_set),
        offsets_set=session.epochs.newest_set,
        progress=None if riding is None else _acks_to_pb(progress, riding),
        client_id=session.incarnation.client_id,
    )
    wanted = runner.filter
    stub = await session.directory.reader(runner.queue.broker, runner.reads_from)
    sent_ms, limit_s = session.clock.monotonic_ms(), settings.pull_hold_ms / 1000 + CALL_TIMEOUT_S
    answer = await answered(stub.Pull(request, timeout=limit_s))
    runner.reads_from = answer.next_node_id
    if runner.progress is not progress or answer.pull_id != request.pull_id:
        return
    if runner.owned and not session.epochs.saw(answer.offsets_set, answer.offsets_epoch):
        return  # of an older epoch, or nothing was found and nothing recorded
    if riding is not None and answer.progress_taken:
        runner.committed(progress, riding, sent_ms)
    if answer.next_offset <= progress.next_offset or not runner.may_start():
        return
    if answer.lost_count:
        log.warning(
            "messages lost to retention before they were read queue=%s first_offset=%d count=%d",
            runner.queue,
            progress.next_offset,
            answer.lost_count,
        )
    runner.pulled(sent_ms)
    progress.note_maybe_seen(ranges_from_pb(answer.redelivered))
    messages = list(_decode(runner, progress, answer, wanted))
    if runner.queue.topic == retry_topic(session.group):
        for message in messages:
            restore_original(message, session.group)
    progress.receive(answer.next_offset, [message.offset for message in messages])
    if messages:
        runner.buffer.extend(messages)
        runner.waiting_bytes.add(sum(len(message.body) for message in messages))
        runner.tell_arrived()
    else:
        session.note_unconfirmed(progress.unconfirmed_count)


def _riding(runner: AssignedQueue, progress: QueueProgress) -> Acks | None:
    wished = runner.owned and runner.session.settings.commit_on_pull
    return progress.acks() if wished and progress.dirty else None


def _acks_to_pb(progress: QueueProgress, acks: Acks) -> offsets_pb.Acks:
    return offsets_pb.Acks(
        reset_epoch=progress.reset_epoch,
        committed_offset=acks.committed,
        acked=ranges_to_pb(acks.ranges),
    )


def _decode(
    runner: AssignedQueue, progress: QueueProgress, answer: pb.PullResponse, wanted: Filter
) -> Iterator[ReceivedMessage]:
    first, end = progress.next_offset, answer.next_offset
    for raw in answer.batches:
        header = check_batch(raw, stamped=True)
        begin = max(first - header.first_offset, 0)
        stop = min(end - header.first_offset, header.count)
        indexes: Sequence[int] = range(begin, stop)
        if wanted.hashes is not None:
            hashes = tag_hashes(raw, header)
            indexes = [index for index in indexes if hashes[index] in wanted.hashes]
        for record in decode_records(raw, header, indexes):
            if progress.is_done(record.offset):
                continue
            if not wanted.accepts(record.tag, record.keys, record.properties):
                continue
            message = ReceivedMessage(
                runner.queue,
                runner.token,
                header,
                record,
                redelivered=progress.is_redelivered(record.offset),
            )
            message.lineage = runner.lineage
            yield message


def _tell_unreadable(runner: AssignedQueue, error: BatonError | None, unreadable: bool) -> bool:
    """Log when the topic stops giving messages, and when it begins again; which it is now."""
    if isinstance(error, NotReadable) and not unreadable:
        log.warning("queue waits, its topic gives no messages queue=%s", runner.queue)
    if error is None and unreadable:
        log.info("queue goes on, its topic gives messages again queue=%s", runner.queue)
    return isinstance(error, NotReadable) or (unreadable and error is not None)
