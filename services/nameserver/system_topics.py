"""Topics of the system itself: created if missing, with a queue on every broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from batonmq._core.names import ALERTS_TOPIC, METRICS_TOPIC, UNRESOLVED_TOPIC
from batonmq.errors import BatonError
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.topic_resize import spread_with, writable_counts
from batonmq_server.nameserver.core.topics import Topic, with_rooms
from batonmq_server.nameserver.topic_store import DeleteProgress, TopicStore

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
FIRST_INTERVAL_S = 0.1
"""While no broker is registered: publishers are waiting for the topic of the metrics."""
ALERTS_QUEUE_COUNT = 1
ON_EVERY_BROKER = METRICS_TOPIC, UNRESOLVED_TOPIC
"""Topics with a queue on every broker: each publishes events, or discards transactions."""


class SystemTopics:
    """Creates the system topics, and adds queues on new brokers.

    Every replica checks; the first one writes, the others find nothing left to do.

    Args:
        delete_progress: Deletes the progress on earlier topics of a name.
        queue_count: Queues of the topic of the metrics; it gets more if there are more brokers.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: TopicStore,
        delete_progress: DeleteProgress,
        *,
        queue_count: int,
    ) -> None:
        self._catalog, self._store, self._delete_progress = catalog, store, delete_progress
        self._queue_counts = {METRICS_TOPIC: queue_count, ALERTS_TOPIC: ALERTS_QUEUE_COUNT}

    async def run(self) -> None:
        """Check until cancelled; to be run as one task."""
        await self._catalog.ready()
        while True:
            interval_s = CHECK_INTERVAL_S
            if self._catalog.rooms:
                for name, queue_count in self._queue_counts.items():
                    try:
                        await self._check(name, queue_count)
                    except BatonError as error:
                        log.info("system topic not ready topic=%s error=%s", name, error)
            elif METRICS_TOPIC not in self._catalog.topics:
                interval_s = FIRST_INTERVAL_S
            await asyncio.sleep(interval_s)

    async def ensure_unresolved(self, broker: str = "") -> None:
        """Create the topic of unresolved messages, or extend it to every broker.

        It exists only in clusters that have discarded a transaction.

        Args:
            broker: The broker that asks; it gets a queue also while it is being removed, as its
                last transactions may be discarded then.

        Raises:
            NoBroker, NoQuorum, Overloaded, OffsetsUnreachable: it is not created.
        """
        await self._check(UNRESOLVED_TOPIC, 1, broker)

    async def _check(self, name: str, queue_count: int, asker: str = "") -> None:
        brokers, topic = self._catalog.placement_rooms, self._catalog.topics.get(name)
        removal = self._catalog.removals.get(asker)
        if removal is not None and not removal.forgotten_unix_ms and asker in self._catalog.rooms:
            brokers = brokers | {asker: self._catalog.rooms[asker]}
        if topic is None:
            if name in ON_EVERY_BROKER:
                queue_count = max(queue_count, len(brokers))
            done = await self._store.create(name, queue_count, brokers, self._delete_progress)
            if done.created:
                log.info("system topic created topic=%s queues=%d", name, queue_count)
        elif name in ON_EVERY_BROKER and _brokers_without_queue(topic, brokers):
            rooms = self._catalog.rooms
            await self._store.update(
                name, lambda present: _with_queue_on_every_broker(present, brokers, rooms)
            )
            log.info("system topic extended to new brokers topic=%s", name)


def _brokers_without_queue(topic: Topic, brokers: Mapping[str, str]) -> set[str]:
    """Return the brokers that have no queue of the topic.

    A broker discards transactions to a queue that takes no other messages, too.
    """
    retiring = topic.name == UNRESOLVED_TOPIC
    return brokers.keys() - {
        part.broker for part in topic.spread if part.writable_count or (retiring and part.closed)
    }


def _with_queue_on_every_broker(
    topic: Topic, brokers: Mapping[str, str], rooms: Mapping[str, str]
) -> Topic:
    """Return the topic with one more queue for each of `brokers` that has none."""
    counts = writable_counts(topic) | dict.fromkeys(_brokers_without_queue(topic, brokers), 1)
    return replace(topic, spread=with_rooms(spread_with(topic, counts), rooms))
