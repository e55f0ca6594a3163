"""One pull: ask storage, check the answer, queue what is to be handled."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np
from baton.storage.v1 import storage_service_pb2 as pb

from batonmq.common.rpc import from_rpc_error
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.session import ranges_from_pb
from batonmq.core.inflight import QueueProgress
from batonmq.core.records import check_batch, decode_records, tag_hashes
from batonmq.directory import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from batonmq.consuming.runner import QueueRunner

log = logging.getLogger(__name__)


async def pull(runner: QueueRunner) -> None:
    """Pull once for `runner`. What arrives after its ownership ended is dropped.

    Raises:
        BatonError: as storage refused, or the answer is damaged.
    """
    session, progress = runner.session, runner.progress
    assert progress is not None
    settings = session.settings
    request = pb.PullRequest(
        queue=runner.key,
        offset=progress.next_offset,
        token=runner.token,
        pull_id=session.random.getrandbits(63),
        expression=runner.filter.canonical(),
        bytes_max=settings.pull_bytes_max,
        messages_max=min(settings.pull_messages_max, settings.span_max - progress.span),
        hold_ms=settings.pull_hold_ms,
        offsets_epoch=session.offsets_epoch,
    )
    stub = await session.directory.storage(runner.queue.broker)
    sent_ms = session.clock.monotonic_ms()
    try:
        answer = await stub.Pull(request, timeout=settings.pull_hold_ms / 1000 + CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    stale = runner.progress is not progress or answer.pull_id != request.pull_id
    if stale or answer.next_offset <= progress.next_offset or not runner.may_start():
        return
    if not session.saw_epoch(answer.offsets_epoch):
        return
    if answer.lost_count:
        log.warning(
            "messages lost to retention before they were read queue=%s first_offset=%d count=%d",
            runner.queue,
            progress.next_offset,
            answer.lost_count,
        )
    progress.note_maybe_seen(ranges_from_pb(answer.redelivered))
    messages = list(_decode(runner, progress, answer))
    runner.renew(sent_ms, runner.lease_ms)
    progress.receive(answer.next_offset, [message.offset for message in messages])
    if messages:
        runner.buffer.extend(messages)
        runner.arrived.set()
        session.available.set()
    elif 4 * progress.unconfirmed_count >= settings.span_max:
        session.commit_soon.set()


def _decode(
    runner: QueueRunner, progress: QueueProgress, answer: pb.PullResponse
) -> Iterator[ReceivedMessage]:
    first, end, wanted = progress.next_offset, answer.next_offset, runner.filter
    codes = None if wanted.hashes is None else np.fromiter(wanted.hashes, np.int64)
    for raw in answer.batches:
        header = check_batch(raw, stamped=True)
        begin = max(first - header.first_offset, 0)
        stop = min(end - header.first_offset, header.count)
        indexes: Sequence[int] = range(begin, stop)
        if codes is not None:
            hits = np.flatnonzero(np.isin(tag_hashes(raw, header)[begin:stop], codes))
            indexes = (hits + begin).tolist()
        for record in decode_records(raw, header, indexes):
            if progress.is_done(record.offset) or not wanted.accepts(record.tag):
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
