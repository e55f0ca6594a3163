"""Goal: a message that was rejected or requeued just before its channel closes is not in flight.

Method: a channel of Kombu and a real cluster.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from time import monotonic  # noqa: TID251  a thread of the test has no event loop
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

import batonmq.kombu  # noqa: F401  makes the URL scheme known
from batonmq import Admin
from batonmq.admin.dead_letters import DeadLetters
from tests.support.cluster import local_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
REQUEUED, REJECTED = ["a", "b", "c"], ["d", "e", "f"]


def received(connection: Connection, count: int, quiet_s: float) -> list[str]:
    """Receive messages until `count` have come and none has followed for a time.

    They are acknowledged, unless all of them are expected: then they are requeued or rejected, and
    the channel closes at once.
    """
    found: list[tuple[str, Any]] = []
    with closing(connection.channel()) as channel:
        queue = Queue("jobs", channel=channel)
        consumer = Consumer(channel, [queue], callbacks=[lambda *one: found.append(one)])
        consumer.consume()
        end_s = monotonic() + 60
        while monotonic() < end_s:
            try:
                connection.drain_events(timeout=quiet_s)
            except TimeoutError:
                if len(found) >= count:
                    break
        for body, message in found:
            if count == len(REQUEUED):
                message.ack()
            elif body in REQUEUED:
                message.requeue()
            else:
                message.reject()
    return sorted(body for body, _ in found)


def play(nameserver: str) -> list[list[str]]:
    """Send messages, receive them, and receive what is left."""
    options = {"queue_count": 1}
    with Connection(f"batonmq://{nameserver}", transport_options=options) as connection:
        queue = connection.SimpleQueue("jobs")
        for body in REQUEUED + REJECTED:
            queue.put(body)
        queue.close()
        return [received(connection, 6, 0.5), received(connection, 3, 3)]


@pytest.mark.long
async def test_messages_given_back_before_the_close_are_delivered_or_dead_and_not_both(
    tmp_path: Path,
) -> None:
    async with local_cluster(tmp_path) as cluster, Admin(cluster.nameserver) as admin:
        first, second = await asyncio.to_thread(play, cluster.nameserver)
        assert first == REQUEUED + REJECTED
        assert second == REQUEUED
        dead = [letter async for letter in DeadLetters(admin).read("jobs")]
        assert len(dead) == len(REJECTED)
