"""The retention that the messages of each queue have: that of their topic, or of the broker.

Messages of compacted topics have none: a compaction removes them, or writes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from batonmq.errors import DataLoss
from batonmq_server.storage.core.checks import LocalTopic
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.schedule import TOPIC_ID as SYSTEM_TOPIC_ID
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.topic_cache import TopicCache


class QueueLimits(NamedTuple):
    """Limits by which a queue is trimmed; 0 for none."""

    age_ms_max: int
    bytes_max: int


class TopicLimits:
    """Tells by which limits queues are trimmed, and which part of the log they still need.

    A topic with a longer retention than the broker holds the log. Then the queues of topics without
    a retention time of their own are trimmed by that of the broker, as the log no longer does it.

    Args:
        age_ms_max: Retention time of the broker; 0 for unlimited.
    """

    def __init__(self, store: MessageStore, topics: TopicCache, age_ms_max: int) -> None:
        self._store, self._topics, self._age_ms_max = store, topics, age_ms_max
        self._holding = False

    @property
    def loaded(self) -> bool:
        """Whether the topics are known."""
        return self._topics.loaded

    def refresh(self) -> None:
        """Find out again whether a topic with messages holds the log."""
        self._holding = any(True for _ in self._longer())

    def of(self, key: QueueKey, queue: ConsumeQueue) -> QueueLimits | None:
        """Return the limits of a queue, as of the last `refresh`; None if it has none."""
        topic = self._topic(key, queue)
        if topic is None or topic.compaction is not None:
            return None
        age_ms_max = topic.retention_ms or (self._age_ms_max if self._holding else 0)
        limits = QueueLimits(age_ms_max, topic.retention_bytes)
        return limits if any(limits) else None

    def held_from(self) -> int:
        """Return the position from which topics with a longer retention need the log.

        While the topics are not known yet, they need all of it.
        """
        log = self._store.log
        if not self._topics.loaded:
            return log.first_position
        return min((queue.first_position for queue in self._longer()), default=log.next_position)

    def compaction_of(self, key: QueueKey, queue: ConsumeQueue) -> CompactionPolicy | None:
        """Return how a queue is compacted; None if it is not."""
        topic = self._topic(key, queue)
        return topic.compaction if topic is not None else None

    def compacted_from(self) -> int | None:
        """Return the position from which compacted topics need the log; None if they do not.

        While the topics are not known yet, they need all of it.
        """
        store, log = self._store, self._store.log
        if not self._topics.loaded:
            return log.first_position
        positions = (
            oldest_position(store, key)
            for key, queue in store.queues.items()
            if self.compaction_of(key, queue) is not None
        )
        return min((one for one in positions if one is not None), default=None)

    def _longer(self) -> Iterator[ConsumeQueue]:
        """Yield the queues with messages of topics with a longer retention than the broker."""
        if not self._age_ms_max:
            return
        for key, queue in self._store.queues.items():
            if queue.first_offset < queue.next_offset:
                topic = self._topic(key, queue)
                if topic is not None and topic.retention_ms > self._age_ms_max:
                    yield queue

    def _topic(self, key: QueueKey, queue: ConsumeQueue) -> LocalTopic | None:
        """Return the topic of a queue; None if it is deleted, not known, or of the system."""
        if key[0] == SYSTEM_TOPIC_ID:
            return None
        topic = self._topics.known(topic_of(queue.folder))
        return topic if topic is not None and topic.topic_id == key[0] else None


def oldest_position(store: MessageStore, key: QueueKey) -> int | None:
    """Return the position from which a compacted queue needs the log; None without messages."""
    queue, part = store.queues[key], store.compacted.get(key)
    positions = [part.first_position] if part is not None else []
    if queue.first_offset < queue.visible_offset:
        with suppress(DataLoss):  # repaired elsewhere; until then the lower bound holds
            first = queue.read(queue.first_offset, queue.first_offset + 1)
            return min([*positions, int(first.positions[0])])
    if queue.first_offset < queue.next_offset:
        positions.append(max(queue.first_position, store.log.first_position))
    return min(positions, default=None)
