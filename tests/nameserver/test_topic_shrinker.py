"""Goal: retiring queues that have to wait do not load offsets, however many groups there are.

Method: a shrinker on a reader whose answers take some time, and that notes when it is asked.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.removal_obstacle import ObstacleKind, RemovalObstacle
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.retirement import RetirementReader
from batonmq_server.nameserver.topic_shrinker import TopicShrinker
from batonmq_server.nameserver.topic_store import TopicStore

CHECK_S = 0.02
TOPIC = Topic(name="news", topic_id=1, spread=(QueueSpread("broker-a", 4, 2),), create_unix_ms=0)
OBSTACLE = RemovalObstacle(kind=ObstacleKind.UNREAD, topic="news", broker="broker-a", message="")


class SlowReader:
    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.pauses_s: list[float] = []
        self.checked = asyncio.Event()

    async def first_unread(self, *_: object) -> RemovalObstacle:
        now_s = asyncio.get_running_loop().time
        self.pauses_s += [now_s() - end_s for end_s in self.ends_s[-1:]]
        await asyncio.sleep(CHECK_S)
        self.ends_s.append(now_s())
        if len(self.pauses_s) == 3:
            self.checked.set()
        return OBSTACLE


class Store:
    async def read(self, name: str) -> tuple[Topic, int]:
        return TOPIC, 1


async def ready() -> None:
    return


async def test_topic_that_waits_is_checked_for_a_small_part_of_the_time() -> None:
    reader: Any = SlowReader()
    shrinker = TopicShrinker(
        cast("Catalog", SimpleNamespace(ready=ready, topics={"news": TOPIC})),
        cast("TopicStore", Store()),
        cast("RetirementReader", reader),
        interval_ms=1,
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(shrinker.run())
        await reader.checked.wait()
        running.cancel()
    assert min(reader.pauses_s) >= 10 * CHECK_S
