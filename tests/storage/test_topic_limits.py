"""Goal: a topic with a longer retention than the broker holds the log from its first message on,
and no other topic is kept longer by that.

Method: a store in memory; the topics are a dictionary.
"""

from __future__ import annotations

from typing import cast

from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.purge import QueueTrim
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_limits import QueueLimits, TopicLimits
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, batch, open_store, sync

BROKER_MS = 1_000


class KnownTopics:
    """The part of TopicCache with the topics."""

    def __init__(self, **topics: LocalTopic) -> None:
        self.topics, self.loaded = topics, True

    def known(self, name: str) -> LocalTopic | None:
        return self.topics.get(name)


def opened(*names: str) -> tuple[MessageStore, KnownTopics, TopicLimits]:
    """Return a store with one message of each of `names` in turn, topic ids from 1 on."""
    store = open_store(MemoryDisk()).store
    topics = KnownTopics(
        **{name: LocalTopic(at, 1) for at, name in enumerate(sorted(set(names)), 1)}
    )
    for name in names:
        store.append([check(batch(b"m", topic=name))], topics.topics, NOW)
    sync(store)
    return store, topics, TopicLimits(store, cast(TopicCache, topics), BROKER_MS)


def limits_of(store: MessageStore, limits: TopicLimits) -> list[QueueLimits | None]:
    limits.refresh()
    return [limits.of(key, queue) for key, queue in store.queues.items()]


def test_topic_without_own_retention_has_no_limits_and_holds_nothing() -> None:
    store, topics, limits = opened("a", "b")
    assert limits_of(store, limits) == [None, None]
    assert limits.held_from() == store.log.next_position
    topics.topics["b"] = LocalTopic(2, 1, retention_ms=BROKER_MS - 1, retention_bytes=7)
    assert limits_of(store, limits) == [None, (BROKER_MS - 1, 7)]
    assert limits.held_from() == store.log.next_position, "a shorter one holds nothing"


def test_longer_retention_holds_the_log_and_trims_the_other_topics_by_the_broker() -> None:
    store, topics, limits = opened("a", "b", "a", "b")
    topics.topics["b"] = LocalTopic(2, 1, retention_ms=5_000)
    assert limits_of(store, limits) == [(BROKER_MS, 0), (5_000, 0)]
    queue = store.queues[2, 0]
    assert limits.held_from() == queue.first_position > 0
    store.trim([QueueTrim(2, 0, 1, queue.last_position)])
    assert limits.held_from() == queue.last_position
    store.trim([QueueTrim(2, 0, 2, store.log.next_position)])
    assert limits.held_from() == store.log.next_position, "it has no messages any more"
    assert limits_of(store, limits) == [None, (5_000, 0)]
    store.append([check(batch(b"m", topic=name)) for name in "ab"], topics.topics, NOW)
    assert limits.held_from() == queue.last_position, "the first of the new messages"


def test_deleted_topic_holds_nothing() -> None:
    store, topics, limits = opened("a")
    topics.topics["a"] = LocalTopic(1, 1, retention_ms=5_000)
    assert limits.held_from() == 0
    topics.topics["a"] = LocalTopic(9, 1, retention_ms=5_000)
    assert limits.held_from() == store.log.next_position
    del topics.topics["a"]
    assert limits.held_from() == store.log.next_position


def test_topics_that_are_not_known_yet_hold_all_of_the_log() -> None:
    store, topics, limits = opened("a")
    topics.loaded = False
    assert limits.held_from() == store.log.first_position


def test_broker_without_an_age_limit_is_held_by_no_topic() -> None:
    store, topics, _ = opened("a")
    topics.topics["a"] = LocalTopic(1, 1, retention_ms=5_000)
    limits = TopicLimits(store, cast(TopicCache, topics), 0)
    assert limits.held_from() == store.log.next_position
    assert limits_of(store, limits) == [(5_000, 0)]
