"""The topics that exist and their queues on this broker, as the nameserver wrote them to etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq.errors import BatonError, NoQuorum, TopicExists, TopicNotFound, TopicNotFoundDetail
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.storage.core.checks import LocalTopic
from batonmq_server.storage.core.compaction_policy import CompactionPolicy

log = logging.getLogger(__name__)

Key = TypeVar("Key")

MISSING_MS = 1_000
"""Time for which a name, or an epoch, that etcd does not have is not looked up again."""
MISSING_MAX = 10_000
WAIT_S = 10


class TopicCache:
    """Topics from the mirror of `topics/`; a name that it does not have yet is looked up in etcd.

    Args:
        mirror: Mirror of "topics/"; the caller runs it.
        broker: Broker name of this node.
    """

    def __init__(self, mirror: EtcdMirror, session: EtcdSession, broker: str, clock: Clock) -> None:
        self._mirror, self._session, self._broker, self._clock = mirror, session, broker, clock
        self._known: dict[str, tuple[int, LocalTopic]] = {}
        self._missing: dict[str, int] = {}
        self._unfounded: dict[tuple[str, int], int] = {}
        self._lookup = asyncio.Lock()
        mirror.on_change.append(self._forget)

    @property
    def loaded(self) -> bool:
        """Whether the mirror has the topics: a name that it lacks did not exist lately."""
        return self._mirror.revision > 0

    def known(self, name: str) -> LocalTopic | None:
        """Return the topic if the mirror or an earlier lookup has it; None otherwise."""
        stored = self._mirror.values.get(name)
        cached = self._known.get(name)
        if cached is not None and (stored is None or stored.mod_revision <= cached[0]):
            return cached[1]
        return self._parsed(name, stored) if stored is not None else None

    def revision(self, name: str) -> int:
        """Return the etcd revision of the topic that `known` returns; 0 if it is not known."""
        return self._known[name][0] if self.known(name) is not None else 0

    def is_gone(self, name: str, topic_id: int) -> bool:
        """Return whether the topic was deleted; another topic may have its name now."""
        topic = self.known(name)
        if topic is None:
            return self._mirror.revision > 0 and name not in self._mirror.values
        return self._mirror.revision > 0 and topic.topic_id > topic_id

    async def wait_until_gone(self, name: str, topic_ids: Collection[int]) -> None:
        """Wait until this node knows that all topics with this name and these ids are deleted.

        Raises:
            TopicExists: one of them exists.
            NoQuorum: etcd does not answer, or this node has not heard of the deletion in time.
        """
        stored = await self._session.get(self._session.key("topics", name))
        topic = self._parsed(name, stored) if stored is not None else None
        if topic is not None and topic.topic_id in topic_ids:
            raise TopicExists(f"topic {name} exists", remedy="Delete the topic first.")
        try:
            async with timeouts.timeout(WAIT_S):
                async for _ in self._mirror.watch():
                    if all(self.is_gone(name, topic_id) for topic_id in topic_ids):
                        return
        except TimeoutError as error:
            raise NoQuorum(
                f"this node has not heard from etcd within {WAIT_S} s that topic {name} is deleted"
            ) from error

    async def find(self, name: str, epoch: int = 0) -> LocalTopic:
        """Return the topic; it is looked up in etcd, by one caller at a time, if it is not known.

        Args:
            epoch: The caller has heard of this epoch of the topic. A topic that is older here is
                looked up, too.

        Raises:
            TopicNotFound: the topic does not exist.
            NoQuorum: the topic is not known here, and etcd does not answer.
        """
        topic = self.known(name)
        if topic is not None and not self._is_older(name, topic, epoch):
            return topic
        async with self._lookup:
            topic = self.known(name)
            if topic is None:
                if self._missing.get(name, 0) <= self._clock.monotonic_ms():
                    topic = await self._look_up(name)
            elif self._is_older(name, topic, epoch):
                topic = await self._look_up(name)
                if topic is not None and topic.epoch < epoch:
                    self._note(self._unfounded, (name, epoch))
        if topic is None:
            raise _not_found(name)
        return topic

    def _is_older(self, name: str, topic: LocalTopic, epoch: int) -> bool:
        """Return whether the topic may be older than `epoch`.

        An epoch that etcd did not have a moment ago does not count: a nameserver of an earlier
        version may have reset it, or the sender is wrong.
        """
        if epoch <= topic.epoch:
            return False
        return self._unfounded.get((name, epoch), 0) <= self._clock.monotonic_ms()

    def _note(self, found: dict[Key, int], key: Key) -> None:
        """Note that etcd did not have `key`, for `MISSING_MS`."""
        if len(found) >= MISSING_MAX:
            found.clear()
        found[key] = self._clock.monotonic_ms() + MISSING_MS

    async def find_all(
        self, names: Iterable[str], epochs: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, LocalTopic | BatonError]:
        """Return, for each of `names`, the topic or the error that `find` raises.

        Args:
            epochs: Of the topics that the caller has heard of a later epoch than 0 of.
        """
        topics: dict[str, LocalTopic | BatonError] = {}
        for name in names:
            try:
                topics[name] = await self.find(name, epochs.get(name, 0))
            except BatonError as error:
                topics[name] = error
        return topics

    def with_changes(
        self, topics: Mapping[str, LocalTopic | BatonError]
    ) -> dict[str, LocalTopic | BatonError]:
        """Return the result of `find_all` with the changes since then."""
        return {name: self._changed(name, old) for name, old in topics.items()}

    def _changed(self, name: str, old: LocalTopic | BatonError) -> LocalTopic | BatonError:
        if (topic := self.known(name)) is not None:
            return topic
        deleted = not isinstance(old, BatonError) and name not in self._mirror.values
        return _not_found(name) if deleted else old

    async def _look_up(self, name: str) -> LocalTopic | None:
        stored = await self._session.get(self._session.key("topics", name))
        if stored is not None and stored.mod_revision > self._mirror.revision:
            return self._parsed(name, stored)
        if (topic := self.known(name)) is None:  # unless the mirror has received it meanwhile
            self._note(self._missing, name)
        return topic

    def _parsed(self, name: str, stored: KeyValue) -> LocalTopic | None:
        """Return the topic stored in etcd; None if it can't be decoded."""
        try:
            topic = StoredTopic.FromString(stored.value)
        except DecodeError as error:
            log.error("topic in etcd can't be decoded topic=%s error=%s", name, error)
            return None
        local = [spread for spread in topic.spread if spread.broker == self._broker]
        queues = LocalTopic(
            topic.topic_id,
            local[0].queue_count if local else 0,
            _write_queue_count(local[0]) if local else None,
            readable=topic.permission != pb.TOPIC_PERMISSION_WRITE,
            writable=topic.permission != pb.TOPIC_PERMISSION_READ,
            retention_ms=topic.retention_ms,
            retention_bytes=topic.retention_bytes,
            compaction=_compaction(topic),
            epoch=topic.epoch,
            opened_epoch=local[0].opened_epoch if local else 0,
        )
        self._known[name] = (stored.mod_revision, queues)
        return queues

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            stored, cached = self._mirror.values.get(name), self._known.get(name)
            revision = self._mirror.revision if stored is None else stored.mod_revision
            if cached is None or cached[0] <= revision:  # else a lookup was ahead of the mirror
                self._known.pop(name, None)
            self._missing.pop(name, None)


def _write_queue_count(spread: pb.QueueSpread) -> int | None:
    return 0 if spread.closed else spread.write_queue_count or None


def _compaction(topic: StoredTopic) -> CompactionPolicy | None:
    if not topic.HasField("compaction"):
        return None
    stored = topic.compaction
    return CompactionPolicy(stored.tombstone_retention_ms, stored.min_lag_ms, stored.dirty_percent)


def _not_found(name: str) -> TopicNotFound:
    return TopicNotFound(f"topic {name} does not exist", detail=TopicNotFoundDetail(topic=name))
