"""The topics of the system itself: created when they are missing, on every broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from batonmq._core.names import ALERTS_TOPIC, METRICS_TOPIC
from batonmq.errors import BatonError
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.topic_resize import resized_spread
from batonmq_server.nameserver.core.topics import Topic, with_rooms
from batonmq_server.nameserver.topic_store import Forget, TopicStore

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
FIRST_INTERVAL_S = 0.1
"""While no broker has come yet, to whom many have something to tell."""
ALERTS_QUEUE_COUNT = 1


class SystemTopics:
    """Every replica looks; the first one wins, the others find nothing left to do.

    Args:
        forget: Ends what is left of earlier topics of a name.
        queue_count: Of the topic of the metrics, if there are not more brokers than that.
    """

    def __init__(
        self, catalog: Catalog, store: TopicStore, forget: Forget, *, queue_count: int
    ) -> None:
        self._catalog, self._store, self._forget = catalog, store, forget
        self._wanted = {METRICS_TOPIC: queue_count, ALERTS_TOPIC: ALERTS_QUEUE_COUNT}

    async def run(self) -> None:
        """Look for ever; to be run as one task."""
        await self._catalog.ready()
        while True:
            interval_s = LOOK_INTERVAL_S
            if self._catalog.rooms:
                for name, queue_count in self._wanted.items():
                    try:
                        await self._look(name, queue_count)
                    except BatonError as error:
                        log.info("system topic not ready topic=%s error=%s", name, error)
            elif METRICS_TOPIC not in self._catalog.topics:
                interval_s = FIRST_INTERVAL_S
            await asyncio.sleep(interval_s)

    async def _look(self, name: str, queue_count: int) -> None:
        brokers, topic = self._catalog.rooms, self._catalog.topics.get(name)
        if topic is None:
            if name == METRICS_TOPIC:
                queue_count = max(queue_count, len(brokers))
            done = await self._store.create(name, queue_count, brokers, self._forget)
            if done.created:
                log.info("system topic created topic=%s queues=%d", name, queue_count)
        elif name == METRICS_TOPIC and _without(topic, brokers):
            await self._store.update(name, lambda present: _widened(present, brokers))
            log.info("system topic has come to new brokers topic=%s", name)


def _without(topic: Topic, brokers: Mapping[str, str]) -> set[str]:
    """Brokers that have no queue of the topic."""
    return brokers.keys() - {part.broker for part in topic.spread if part.writable_count}


def _widened(topic: Topic, brokers: Mapping[str, str]) -> Topic:
    """The topic with a queue more for each broker that has none."""
    count = sum(part.writable_count for part in topic.spread) + len(_without(topic, brokers))
    return replace(topic, spread=with_rooms(resized_spread(topic, count, brokers), brokers))
