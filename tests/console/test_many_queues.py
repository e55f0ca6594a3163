"""Goal: 1,000 topics with 10,000 queues are searched and paged, and no page grows with them.

Method: a console on a cluster in memory, a member that owns the queues of as many topics as a group
may have, and the pages as a browser gets them.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from batonmq import Consumer, ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from tests.console.scene import Scene, scene, words_of
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(120)
TOPICS, QUEUES, SUBSCRIBED = 1_000, 10, 60
PAGE_BYTES_MAX = 64 * 1024


def name_of(number: int) -> str:
    return f"topic-{number:04}"


async def rows(shown: Scene, path: str) -> list[str]:
    """Return the words of each row of a page, which must be small."""
    text = await shown.page(path)
    assert len(text.encode()) < PAGE_BYTES_MAX, path
    return [words_of(row) for row in re.findall(r"<tr\b.*?</tr>", text, re.DOTALL)[1:]]


async def handle(_: ReceivedMessage) -> None:
    return None


async def test_ten_thousand_queues_are_searched_and_paged() -> None:
    async with scene() as shown:
        for number in range(TOPICS):
            await shown.broker.create_topic(name_of(number), QUEUES)
        assert "1,000 topics, page 1 of 20" in words_of(await shown.page("/topics"))
        assert len(await rows(shown, "/topics")) == 50
        (found,) = await rows(shown, "/topics?q=topic+0777")
        assert "topic-0777" in found
        assert len(await rows(shown, "/topics/topic-0777")) >= QUEUES
        await rows(shown, "/")
        topics = {name_of(number): "*" for number in range(SUBSCRIBED)}
        async with (
            asyncio.TaskGroup() as tasks,
            Consumer(
                shown.broker.nameserver,
                "billing",
                topics,
                ConsumerSettings(consume_from="first"),
                environment=shown.broker.environment,
            ) as consumer,
        ):
            tasks.create_task(consumer.run(handle))
            await until(lambda: len(consumer.assignment) >= SUBSCRIBED * QUEUES)
            seen: set[str] = set()
            for page in range(1, 13):
                for row in await rows(shown, f"/groups/billing?page={page}"):
                    if queue := re.match(r"topic-\d{4} \S+ \d+", row.strip()):
                        seen.add(queue[0])
            assert len(seen) == SUBSCRIBED * QUEUES
            consumer.stop()
