"""Removal of retiring queues, once every group has read them.

Every replica checks at intervals. A topic is written only if it is unchanged since it was read: if
queues were added in between, the addition wins, and a repeated removal does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from batonmq.errors import BatonError
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.topic_resize import without_retiring_queues
from batonmq_server.nameserver.core.topics import Topic
from batonmq_server.nameserver.retirement import RetirementReader, SharedHeld
from batonmq_server.nameserver.topic_store import TopicStore

log = logging.getLogger(__name__)

PAUSE_FACTOR = 10
"""The pause after a round of checks is this many times as long as the round: offsets is asked for
the progress of every group."""
PAUSE_S_MAX = 60.0
"""Longest such pause, after a round that took long because a service did not answer."""


class TopicShrinker:
    """Removes the retiring queues of topics."""

    def __init__(
        self, catalog: Catalog, store: TopicStore, reader: RetirementReader, *, interval_ms: int
    ) -> None:
        self._catalog, self._store, self._reader = catalog, store, reader
        self._interval_ms = interval_ms
        self._logged: dict[str, str] = {}

    async def run(self) -> None:
        """Check until cancelled; to be run as one task."""
        await self._catalog.ready()
        now_s = asyncio.get_running_loop().time
        while True:
            shrinking = [topic.name for topic in self._catalog.topics.values() if topic.shrinking]
            self._logged = {
                name: reason for name, reason in self._logged.items() if name in shrinking
            }
            begin_s = now_s()
            if shrinking:
                await self._check(shrinking)
            pause_s = min(PAUSE_FACTOR * (now_s() - begin_s), PAUSE_S_MAX)
            await asyncio.sleep(max(self._interval_ms / 1000, pause_s))

    async def _check(self, names: Sequence[str]) -> None:
        """Remove the retiring queues of each topic, if nothing in them or for them is needed.

        Every queue is looked at first; a broker is asked once what else it holds, and only if a
        topic waits for nothing but that.
        """
        shared = SharedHeld()
        read: list[tuple[Topic, int]] = []
        for name in names:
            try:
                entry = await self._store.read(name)
                if entry is None or not entry[0].shrinking:
                    continue
                obstacle = await self._reader.first_unread(*entry, shared)
                if obstacle is not None:
                    self._log_reason(name, obstacle.message)
                elif any(part.closed for part in entry[0].spread):
                    read.append(entry)
                else:
                    await self._remove(*entry)
            except BatonError as error:
                self._log_reason(name, f"{error.reason}: {error.message}")
        for topic, revision in read:
            try:
                obstacle = await self._reader.first_obstacle(topic, revision, shared)
                if obstacle is not None:
                    self._log_reason(topic.name, obstacle.message)
                else:
                    await self._remove(topic, revision)
            except BatonError as error:
                self._log_reason(topic.name, f"{error.reason}: {error.message}")

    async def _remove(self, topic: Topic, revision: int) -> None:
        if await self._store.replace(without_retiring_queues(topic), revision):
            log.info("retiring queues removed topic=%s queues=%d", topic.name, topic.queue_count)

    def _log_reason(self, name: str, reason: str) -> None:
        """Log why retiring queues are not removed yet, each time the reason changes."""
        if self._logged.get(name) != reason:
            self._logged[name] = reason
            log.info("retiring queues not removed yet topic=%s reason=%r", name, reason)
