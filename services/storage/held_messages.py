"""What a broker holds beside the messages of its queues: QueryHeld."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._core.outputs import OutputSource
from batonmq._core.records import read_header
from batonmq.errors import BatonError, DataLoss
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.outputs import SourceOutputs
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX
from batonmq_server.storage.core.schedule import read_scheduled_topic
from batonmq_server.storage.core.transactions import read_half_head

SCHEDULED_MAX = 10_000
"""Scheduled batches of a page: each takes a short read of the log. The search for a page looks at
the position of every scheduled batch, so a page has many.
"""
TRANSACTIONS_MAX = 100
READS_MAX = 100
"""Reads of the log without a pause for others."""


async def held_messages(appender: Appender, position: int) -> pb.QueryHeldResponse:
    """Return a page of what the broker holds.

    Args:
        position: `next_position` of the page before; 0 for the first page.

    Raises:
        NotLeader, NotServing: this node does not know.
    """
    appender.flusher.check()
    appender.role.rejection()  # raises on a follower
    by_topic: dict[str, pb.HeldMessages] = defaultdict(pb.HeldMessages)
    answer = pb.QueryHeldResponse(
        next_position=await _count_scheduled(appender, position, by_topic)
    )
    if not position:
        await _count_transactions(appender, by_topic)
        for source, state in appender.store.outputs.sources():
            answer.outputs.extend(await _outputs(appender, source, state))
            await asyncio.sleep(0)
    for topic, held in sorted(by_topic.items()):
        held.topic = topic
        answer.held.append(held)
    # What was delivered meanwhile, and so is not counted, is visible once the log is safe up to
    # here: a caller that reads the ends of the queues afterwards misses no message.
    await appender.flusher.wait_until_safe(appender.store.log.next_position)
    return answer


async def _count_scheduled(
    appender: Appender, position: int, by_topic: dict[str, pb.HeldMessages]
) -> int:
    """Count a page of the scheduled batches; return where the next page begins, 0 for none.

    A batch that the log moves to its end meanwhile may be counted twice.
    """
    store = appender.store
    waiting = store.schedule.waiting.by_position(position, SCHEDULED_MAX)
    for number, one in enumerate(waiting, 1):
        if not number % READS_MAX:
            await asyncio.sleep(0)
        present = store.schedule.waiting.position(one.key)
        if present is None:
            continue  # delivered meanwhile
        try:
            topic = read_scheduled_topic(store.log, present)
        except DataLoss:
            topic = ""  # it is withdrawn when it is due
        held = by_topic[topic]
        held.scheduled_count += 1
        first = held.first_deliver_unix_ms or one.deliver_unix_ms
        held.first_deliver_unix_ms = min(first, one.deliver_unix_ms)
        held.last_deliver_unix_ms = max(held.last_deliver_unix_ms, one.deliver_unix_ms)
    return waiting[-1].position + 1 if len(waiting) == SCHEDULED_MAX else 0


async def _count_transactions(appender: Appender, by_topic: dict[str, pb.HeldMessages]) -> None:
    """Count the open transactions; those that end meanwhile may count."""
    after_id = -1
    while page := appender.store.transactions.open.page(after_id, TRANSACTIONS_MAX):
        for one in page:
            try:
                topic, begin_unix_ms = read_half_head(appender.store.log, one.position)
            except DataLoss:
                topic, begin_unix_ms = "", 0
            held = by_topic[topic]
            held.transaction_count += 1
            if begin_unix_ms:
                first = held.first_begin_unix_ms or begin_unix_ms
                held.first_begin_unix_ms = min(first, begin_unix_ms)
        after_id = page[-1].transaction_id
        await asyncio.sleep(0)


async def _outputs(
    appender: Appender, source: OutputSource, state: SourceOutputs
) -> list[pb.HeldOutputs]:
    """Return the outputs of a source by topic."""
    last: dict[int, int] = {}
    async for one in in_steps(state.stored()):
        last[one.position] = max(one.offset, last.get(one.position, 0))
    by_topic: dict[str, int] = {}
    for number, (position, offset) in enumerate(last.items(), 1):
        if not number % READS_MAX:
            await asyncio.sleep(0)
        try:
            topic = read_header(appender.store.log.read(position, HEAD_BYTES_MAX)).topic
        except BatonError:
            topic = ""
        by_topic[topic] = max(offset, by_topic.get(topic, 0))
    return [
        pb.HeldOutputs(
            topic=topic,
            group=source.group,
            topic_id=source.topic_id,
            broker=source.broker,
            queue_id=source.queue_id,
            last_offset=offset,
        )
        for topic, offset in sorted(by_topic.items())
    ]
