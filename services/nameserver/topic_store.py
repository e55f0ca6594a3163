"""Topics in etcd.

topics/<name>        nameserver.v1.StoredTopic
counters/topic_id    the newest topic id, decimal
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from batonmq._core.names import is_system_topic
from batonmq.errors import TopicExists, TopicNotFound, TopicNotFoundDetail
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, unchanged
from batonmq_server.nameserver.core.topic_epochs import with_epochs
from batonmq_server.nameserver.core.topics import Compaction, Topic, spread_queues, with_rooms
from batonmq_server.nameserver.topic_proto import topic_from_bytes, topic_to_bytes
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put

_TOPIC_ID = "counters/topic_id"
DeleteProgress = Callable[[str, int], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic, its revision in etcd, and whether this call created it."""

    topic: Topic
    revision: int
    created: bool


class TopicFeatures(NamedTuple):
    """What a new topic is, beside its queues; see `Topic`.

    None for retention means any. `compaction` has the given settings of a compacted topic.
    """

    permission: str = "READ_WRITE"
    owner: str = ""
    message_type: str = "UNSPECIFIED"
    retention_ms: int | None = None
    retention_bytes: int | None = None
    compaction: Mapping[str, int] | None = None


class TopicStore:
    """Reads and compare-and-swap writes of topics.

    All methods raise `NoQuorum` if etcd does not answer, and `Overloaded` if every attempt was
    overtaken by another writer.
    """

    def __init__(self, etcd: EtcdSession, swap: CompareAndSwap) -> None:
        self._etcd, self._swap = etcd, swap

    async def read(self, name: str) -> tuple[Topic, int] | None:
        """Return the present topic in etcd and its revision; None if there is none."""
        stored = await self._etcd.get(self._etcd.key("topics", name))
        return (topic_from_bytes(stored.value), stored.mod_revision) if stored else None

    async def create(
        self,
        name: str,
        queue_count: int,
        brokers: Mapping[str, str],
        delete_progress: DeleteProgress,
        features: TopicFeatures | None = None,
    ) -> CreatedTopic:
        """Create the topic, or return the existing one if it has the same number of queues.

        Args:
            features: Of the new topic. A message type of `UNSPECIFIED` also accepts an existing
                topic of another type, and a retention of None one with another retention.
            brokers: Machine room, empty for none, of each broker that may get queues.
            delete_progress: Called with the new topic's name and id before anything is written, to
                delete the progress on earlier topics of the name; if it raises, nothing is written.

        Raises:
            TopicExists: the topic has another number of queues, takes other messages, or has
                another retention.
            NoBroker: `brokers` is empty.
        """
        wanted = features or TopicFeatures()

        async def attempt() -> CreatedTopic | None:
            # Read the counter first: a topic of this name that is created from here on has an id
            # of at least ours, so the progress that is deleted can't be that topic's.
            counter = await self._etcd.get(_TOPIC_ID)
            if entry := await self.read(name):
                return _found(*entry, queue_count, wanted)
            topic_id = int(counter.value) + 1 if counter else 1
            topic = Topic(
                name=name,
                topic_id=topic_id,
                spread=with_rooms(spread_queues(queue_count, brokers, first=topic_id), brokers),
                create_unix_ms=self._etcd.clock.unix_ms(),
                permission=wanted.permission,
                owner=wanted.owner,
                message_type=wanted.message_type,
                retention_ms=wanted.retention_ms or 0,
                retention_bytes=wanted.retention_bytes or 0,
                compaction=(None if wanted.compaction is None else Compaction(**wanted.compaction)),
            )
            await delete_progress(name, topic_id)
            key = self._etcd.key("topics", name)
            revision = await self._etcd.txn(
                compare=[Compare(key, mod_revision=0), unchanged(_TOPIC_ID, counter)],
                put=[
                    Put(_TOPIC_ID, str(topic_id).encode()),
                    Put(key, topic_to_bytes(topic)),
                ],
            )
            return CreatedTopic(topic, revision, created=True) if revision else None

        return await self._swap.run(_TOPIC_ID, attempt)

    async def update(self, name: str, change: Callable[[Topic], Topic]) -> tuple[Topic, int]:
        """Change the topic; return it and its revision. An unchanged topic is not written.

        Args:
            change: Called with the present topic, again after each overtaken attempt; may raise.

        Raises:
            TopicNotFound: the topic does not exist.
        """
        key = self._etcd.key("topics", name)

        async def attempt() -> tuple[Topic, int] | None:
            stored = await self._etcd.get(key)
            if stored is None:
                raise topic_not_found(name)
            before = topic_from_bytes(stored.value)
            after = with_epochs(before, change(before))
            if after == before:
                return before, stored.mod_revision
            revision = await self._etcd.txn(
                compare=[unchanged(key, stored)],
                put=[Put(key, topic_to_bytes(after))],
            )
            return (after, revision) if revision else None

        return await self._swap.run(key, attempt)

    async def replace(self, topic: Topic, revision: int) -> bool:
        """Write `topic` if it has not changed since `revision`; return False if it has."""
        key = self._etcd.key("topics", topic.name)
        written = await self._etcd.txn(
            compare=[Compare(key, mod_revision=revision)],
            put=[Put(key, topic_to_bytes(topic))],
        )
        return written is not None

    async def delete(self, name: str) -> tuple[int, int]:
        """Delete the topic.

        Returns:
            The revision of the deletion, and an id that is greater than that of the topic and
            smaller than that of every later one: up to it the progress may be deleted.

        Raises:
            TopicNotFound: the topic does not exist.
        """
        key = self._etcd.key("topics", name)

        async def attempt() -> tuple[int, int] | None:
            counter, stored = await self._etcd.get(_TOPIC_ID), await self._etcd.get(key)
            if stored is None:
                raise topic_not_found(name)
            topic_id = int(counter.value) + 1 if counter else 1
            revision = await self._etcd.txn(
                compare=[unchanged(key, stored), unchanged(_TOPIC_ID, counter)],
                put=[Put(_TOPIC_ID, str(topic_id).encode())],
                delete=[key],
            )
            return (revision, topic_id) if revision else None

        return await self._swap.run(_TOPIC_ID, attempt)


def topic_not_found(name: str) -> TopicNotFound:
    """Return the error for a topic that does not exist."""
    return TopicNotFound(
        f"topic {name} does not exist",
        remedy="The services create it when they need it." if is_system_topic(name) else "",
        detail=TopicNotFoundDetail(topic=name),
    )


def _found(topic: Topic, revision: int, queue_count: int, wanted: TopicFeatures) -> CreatedTopic:
    message_type = wanted.message_type
    if topic.queue_count != queue_count:
        raise TopicExists(
            f"topic {topic.name} exists with {topic.queue_count} queues, not {queue_count}",
            remedy="Use the topic as it is, or change the number of queues: "
            f"baton topic update {topic.name} --queues {queue_count}.",
            facts={"topic": topic.name},
        )
    if message_type not in ("UNSPECIFIED", topic.message_type):
        raise TopicExists(
            f"topic {topic.name} exists with the message type {topic.message_type.lower()}, not "
            f"{message_type.lower()}",
            facts={"topic": topic.name},
        )
    for field, asked, present in (
        ("retention_ms", wanted.retention_ms, topic.retention_ms),
        ("retention_bytes", wanted.retention_bytes, topic.retention_bytes),
    ):
        if asked not in (None, present):
            raise TopicExists(
                f"topic {topic.name} exists with {field} {present}, not {asked}",
                remedy="Change it: baton topic update.",
                facts={"topic": topic.name},
            )
    _check_compaction(topic, wanted.compaction)
    return CreatedTopic(topic, revision, created=False)


def _check_compaction(topic: Topic, wanted: Mapping[str, int] | None) -> None:
    """Check that an existing topic is compacted as wanted.

    Raises:
        TopicExists: it is not.
    """
    if (topic.compaction is None) != (wanted is None):
        state = "is not compacted" if topic.compaction is None else "is compacted"
        raise TopicExists(
            f"topic {topic.name} exists and {state}",
            remedy="Whether a topic is compacted is fixed: use another name, or delete the topic.",
            facts={"topic": topic.name},
        )
    for field, asked in (wanted or {}).items():
        if (present := getattr(topic.compaction, field)) != asked:
            raise TopicExists(
                f"topic {topic.name} exists with {field} {present}, not {asked}",
                remedy="Change it: baton topic update.",
                facts={"topic": topic.name},
            )
