"""Finds in etcd whether queues exist, before a call without a token creates their progress.

With a token this is not needed: the lock manager grants queues of the group's record only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq._common import timeouts
from batonmq._core.queues import GroupQueue
from batonmq.errors import (
    BatonError,
    NoQuorum,
    NotServing,
    QueueNotFound,
    TopicNotFound,
    TopicNotFoundDetail,
)
from batonmq_server.runtime.etcd.session import EtcdSession

READ_TIMEOUT_S = 0.5


class TopicQueues:
    """Reads topics from etcd; nothing is kept, because a queue gets its progress only once."""

    def __init__(self, etcd: EtcdSession) -> None:
        self._etcd = etcd

    async def missing(
        self, keys: Iterable[GroupQueue], timeout_s: float = READ_TIMEOUT_S
    ) -> dict[GroupQueue, BatonError]:
        """Return the queues that do not exist, with the error.

        Those that could not be read in time have the error NotServing.

        Args:
            timeout_s: Limit for all of them together.
        """
        by_topic: dict[str, list[GroupQueue]] = defaultdict(list)
        for key in keys:
            by_topic[key.topic].append(key)
        not_read: BatonError = NotServing("etcd does not answer in time", retry_after_ms=500)
        errors = {key: not_read for each in by_topic.values() for key in each}
        try:
            async with timeouts.timeout(timeout_s):
                for topic, wanted in by_topic.items():
                    spread = await self._spread(topic)
                    for key in wanted:
                        if spread is not None and key.queue_id < spread.get(key.broker, 0):
                            del errors[key]
                        else:
                            errors[key] = _not_found(key, topic_exists=spread is not None)
        except (TimeoutError, NoQuorum):
            pass
        return errors

    async def _spread(self, topic: str) -> dict[str, int] | None:
        """Return the number of queues of a topic by broker; None if it does not exist."""
        stored = await self._etcd.get(self._etcd.key("topics", topic))
        if stored is None:
            return None
        try:
            spread = StoredTopic.FromString(stored.value).spread
        except DecodeError:
            return {}  # the nameserver logs it
        return {part.broker: part.queue_count for part in spread}


def _not_found(key: GroupQueue, *, topic_exists: bool) -> BatonError:
    if not topic_exists:
        return TopicNotFound(
            f"topic {key.topic} does not exist", detail=TopicNotFoundDetail(topic=key.topic)
        )
    return QueueNotFound(
        f"topic {key.topic} has no queue {key.queue_id} on {key.broker}",
        facts={"topic": key.topic, "broker": key.broker, "queue_id": key.queue_id},
    )
