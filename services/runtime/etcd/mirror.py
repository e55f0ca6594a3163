"""A live copy of everything under one prefix of etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from batonmq._common.backoff import Backoff
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_ms=100, delay_ms_max=2_000)


class EtcdMirror:
    """Reads a prefix once, then follows its changes; starts anew after a compaction.

    `values` maps keys, without the prefix, to what etcd had at `revision`. It is never empty
    because of a lost connection: what was known stays until etcd tells otherwise.

    Args:
        prefix: Relative to the cluster, such as "topics/".
    """

    def __init__(self, session: EtcdSession, prefix: str) -> None:
        self._session, self._prefix = session, prefix
        self.values: dict[str, KeyValue] = {}
        self.revision = 0
        self.on_change: list[Callable[[frozenset[str]], None]] = []
        self._ready = asyncio.Event()
        self._moved = asyncio.Event()
        self._pending: set[_Watcher] = set()

    async def ready(self) -> None:
        """Until the first complete read is done."""
        await self._ready.wait()

    async def reached(self, revision: int) -> None:
        """Until `revision` is no news. Callers bound it with `asyncio.timeout`.

        A revision that changed nothing under the prefix counts once a later change or etcd's
        progress report arrives; so ask for revisions of keys under the prefix.
        """
        while self.revision < revision:
            await self._moved.wait()

    async def now(self, key: str) -> KeyValue | None:
        """What etcd has at this moment, whatever has arrived here.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return await self._session.get(self._prefix + key)

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """Sets of changed keys; the first holds all. What changes meanwhile is joined."""
        await self._ready.wait()
        watcher = _Watcher(set(self.values))
        self._pending.add(watcher)
        try:
            while True:
                yield watcher.take()
                await watcher.changed.wait()
        finally:
            self._pending.discard(watcher)

    async def run(self) -> None:
        """Follow etcd for ever; to be run as one task."""
        random, failures = self._session.random, 0
        while True:
            try:
                await self._read_all()
                failures = 0
                async for answer in self._session.watch(self._prefix, self.revision + 1):
                    self._apply(answer)
                log.info("watch restarts prefix=%s revision=%d", self._prefix, self.revision)
            except NoQuorum as error:
                if failures == 0:
                    log.warning("etcd lost prefix=%s error=%s", self._prefix, error)
                await asyncio.sleep(_BACKOFF.delay_ms(failures, random) / 1000)
                failures += 1

    async def _read_all(self) -> None:
        found, revision = await self._session.get_prefix(self._prefix)
        if revision < self.revision:
            raise NoQuorum(f"etcd answers revision {revision} after {self.revision}")
        fresh = {stored.key.removeprefix(self._prefix): stored for stored in found}
        changed = {
            key
            for key in fresh.keys() | self.values.keys()
            if fresh.get(key) != self.values.get(key)
        }
        self.values = fresh
        self._ready.set()
        self._tell(changed, revision)

    def _apply(self, answer: object) -> None:
        changed = set()
        for event in answer.events:  # type: ignore[attr-defined]
            stored = self._session.stored(event.kv)
            key = stored.key.removeprefix(self._prefix)
            if event.type == event.PUT:
                self.values[key] = stored
            else:
                self.values.pop(key, None)
            changed.add(key)
        # The head of the answer that starts a watch, and of one that brings a part of many events,
        # is ahead of the events that are still to come.
        revision = max(
            (event.kv.mod_revision for event in answer.events),  # type: ignore[attr-defined]
            default=0 if answer.created else answer.header.revision,  # type: ignore[attr-defined]
        )
        self._tell(changed, revision)

    def _tell(self, changed: set[str], revision: int) -> None:
        if revision > self.revision:
            self.revision = revision
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
        if not changed:
            return
        for watcher in self._pending:
            watcher.add(changed)
        for callback in self.on_change:
            callback(frozenset(changed))


async def all_ready(*mirrors: EtcdMirror) -> bool:
    """True, once the first complete reads of all are done."""
    for mirror in mirrors:
        await mirror.ready()
    return True


class _Watcher:
    def __init__(self, keys: set[str]) -> None:
        self._keys = keys
        self.changed = asyncio.Event()

    def add(self, keys: set[str]) -> None:
        self._keys |= keys
        self.changed.set()

    def take(self) -> frozenset[str]:
        keys, self._keys = frozenset(self._keys), set()
        self.changed.clear()
        return keys
