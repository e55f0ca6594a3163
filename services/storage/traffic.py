"""Messages that come and go, by topic and group, under the names that users of RocketMQ know.

Only of topics and groups that exist: what is deleted has no series any more.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from batonmq._core.dead_letters import DEAD_LETTER_PREFIX as DEAD_LETTERS_PREFIX

_TOPIC, _GROUP = "topic", "consumer_group"


class Traffic:
    """Counters of one node.

    Source: RocketMQ BrokerMetricsConstant, the names and the labels `topic` and `consumer_group`;
    cluster, node_type and node_id are labels of the target.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._messages_in = Counter(
            "rocketmq_messages_in", "Messages stored.", (_TOPIC,), registry=registry
        )
        self._bytes_in = Counter(
            "rocketmq_throughput_in", "Bytes of batches stored.", (_TOPIC,), registry=registry
        )
        self._messages_out = Counter(
            "rocketmq_messages_out",
            "Messages delivered; once more if they are delivered again.",
            (_TOPIC, _GROUP),
            registry=registry,
        )
        self._bytes_out = Counter(
            "rocketmq_throughput_out",
            "Bytes of batches delivered.",
            (_TOPIC, _GROUP),
            registry=registry,
        )
        self._dead = Counter(
            "rocketmq_send_to_dlq_messages",
            "Messages that a group has given up.",
            (_GROUP,),
            registry=registry,
        )
        self._lost = Counter(
            "baton_storage_lost_messages",
            "Messages that retention removed before a group had read them.",
            ("group", _TOPIC),
            registry=registry,
        )
        self._topics: set[str] = set()
        self._groups: set[str] = set()

    def stored(self, topic: str, count: int, size: int) -> None:
        """Messages were appended, batches of so many bytes."""
        self._topics.add(topic)
        self._messages_in.labels(topic).inc(count)
        self._bytes_in.labels(topic).inc(size)
        if topic.startswith(DEAD_LETTERS_PREFIX):
            group = topic.removeprefix(DEAD_LETTERS_PREFIX)
            self._groups.add(group)
            self._dead.labels(group).inc(count)

    def delivered(self, topic: str, group: str, count: int, size: int) -> None:
        """Messages have left to a group, batches of so many bytes."""
        self._topics.add(topic)
        self._groups.add(group)
        self._messages_out.labels(topic, group).inc(count)
        self._bytes_out.labels(topic, group).inc(size)

    def lost(self, topic: str, group: str, count: int) -> None:
        """A group was told of a hole."""
        self._topics.add(topic)
        self._groups.add(group)
        self._lost.labels(group, topic).inc(count)

    def keep_topics(self, exists: Callable[[str], bool]) -> None:
        """Forget the topics that are gone."""
        gone = {topic for topic in self._topics if not exists(topic)}
        self._topics -= gone
        for topic in gone:
            for counter in (self._messages_in, self._bytes_in):
                counter.remove(topic)
            for counter in (self._messages_out, self._bytes_out, self._lost):
                counter.remove_by_labels({_TOPIC: topic})

    def keep_groups(self, exists: Callable[[str], bool]) -> None:
        """Forget the groups that are gone."""
        gone = {group for group in self._groups if not exists(group)}
        self._groups -= gone
        for group in gone:
            for counter in (self._messages_out, self._bytes_out, self._dead):
                counter.remove_by_labels({_GROUP: group})
            self._lost.remove_by_labels({"group": group})
