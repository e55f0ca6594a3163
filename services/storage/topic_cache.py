"""Which topics exist and how many of their queues are here, as the nameserver wrote it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq.errors import BatonError, TopicNotFound, TopicNotFoundDetail
from batonmq_server.runtime.etcd import EtcdSession, Stored
from batonmq_server.runtime.mirror import Mirror
from batonmq_server.storage.core.store import TopicQueues

log = logging.getLogger(__name__)

MISSING_MS = 1_000
"""A name that etcd did not have is not asked for again so soon."""
MISSING_MAX = 10_000


class TopicCache:
    """The `topics/` mirror, and a look into etcd for names it does not have yet.

    Args:
        mirror: Of "topics/"; the caller runs it.
        broker: Name of this node.
    """

    def __init__(self, mirror: Mirror, session: EtcdSession, broker: str, clock: Clock) -> None:
        self._mirror, self._session, self._broker, self._clock = mirror, session, broker, clock
        self._known: dict[str, tuple[int, TopicQueues]] = {}
        self._missing: dict[str, int] = {}
        self._asking = asyncio.Lock()
        mirror.on_change.append(self._forget)

    def known(self, name: str) -> TopicQueues | None:
        """The topic, if the mirror has it or a look into etcd has found it."""
        stored = self._mirror.values.get(name)
        found = self._known.get(name)
        if found is not None and (stored is None or stored.mod_revision <= found[0]):
            return found[1]
        return self._parsed(name, stored) if stored is not None else None

    def revision(self, name: str) -> int:
        """Revision of the topic that `known` tells of; 0 if it is not known."""
        return self._known[name][0] if self.known(name) is not None else 0

    def is_gone(self, name: str, topic_id: int) -> bool:
        """Whether the topic is known to exist no more, perhaps with another of its name."""
        topic = self.known(name)
        if topic is None:
            return self._mirror.revision > 0 and name not in self._mirror.values
        return self._mirror.revision > 0 and topic.topic_id > topic_id

    async def find(self, name: str) -> TopicQueues:
        """The topic; etcd is asked once if it is not known, by one caller at a time.

        Raises:
            TopicNotFound: it does not exist.
            NoQuorum: not known here, and etcd does not answer.
        """
        if (topic := self.known(name)) is not None:
            return topic
        async with self._asking:
            topic = self.known(name)
            if topic is None and self._missing.get(name, 0) <= self._clock.monotonic_ms():
                topic = await self._ask(name)
        if topic is None:
            raise TopicNotFound(
                f"topic {name} does not exist", detail=TopicNotFoundDetail(topic=name)
            )
        return topic

    async def find_all(self, names: Iterable[str]) -> dict[str, TopicQueues | BatonError]:
        """As `find`, for each of `names`: the topic, or why it can't be used."""
        found: dict[str, TopicQueues | BatonError] = {}
        for name in names:
            try:
                found[name] = await self.find(name)
            except BatonError as error:
                found[name] = error
        return found

    def as_of_now(
        self, found: Mapping[str, TopicQueues | BatonError]
    ) -> dict[str, TopicQueues | BatonError]:
        """What `find_all` gave, with what has changed since."""
        return {name: self.known(name) or old for name, old in found.items()}

    async def _ask(self, name: str) -> TopicQueues | None:
        stored = await self._session.get(self._session.key("topics", name))
        if stored is not None and stored.mod_revision > self._mirror.revision:
            return self._parsed(name, stored)
        if (topic := self.known(name)) is None:  # deleted, or the mirror has it by now
            if len(self._missing) >= MISSING_MAX:
                self._missing.clear()
            self._missing[name] = self._clock.monotonic_ms() + MISSING_MS
        return topic

    def _parsed(self, name: str, stored: Stored) -> TopicQueues | None:
        """What etcd has; nothing if nobody can read it."""
        try:
            topic = pb.Topic.FromString(stored.value)
        except DecodeError as error:
            log.error("topic can't be read topic=%s error=%s", name, error)
            return None
        here = [spread for spread in topic.spread if spread.broker == self._broker]
        queues = TopicQueues(
            topic.topic_id,
            here[0].queue_count if here else 0,
            here[0].write_queue_count or None if here else None,
            readable=topic.permission != pb.TOPIC_PERMISSION_WRITE,
            writable=topic.permission != pb.TOPIC_PERMISSION_READ,
        )
        self._known[name] = (stored.mod_revision, queues)
        return queues

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._missing.pop(name, None)
