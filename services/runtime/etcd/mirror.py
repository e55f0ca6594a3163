"""A live copy of all keys under one prefix of etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from batonmq._common.backoff import Backoff
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import kv_pb2
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_ms=100, delay_ms_max=2_000)


class EtcdMirror:
    """Reads a prefix once, then follows its changes; reads again after a compaction.

    While etcd does not answer, the last known values stay. `values` change by whole revisions: all
    writes of a transaction appear at once.

    Args:
        prefix: Relative to the cluster, such as "topics/".

    Attributes:
        values: Keys, without the prefix, to what etcd had at `revision`.
        revision: Revision of `values`; 0 before the first read.
        on_change: Called with the keys that have changed.
    """

    def __init__(self, session: EtcdSession, prefix: str) -> None:
        self._session, self._prefix = session, prefix
        self.values: dict[str, KeyValue] = {}
        self.revision = 0
        self.on_change: list[Callable[[frozenset[str]], None]] = []
        self._ready = asyncio.Event()
        self._advanced = asyncio.Event()
        # Ordered by arrival: a set would wake the watchers in an order of addresses.
        self._pending: dict[_Watcher, None] = {}
        self._fragments: list[kv_pb2.Event] = []

    async def ready(self) -> None:
        """Wait until the first complete read is done."""
        await self._ready.wait()

    async def reached(self, revision: int) -> None:
        """Wait until `values` are of `revision` or later. Callers bound it with `asyncio.timeout`.

        Use the revision of a key under the prefix: for another one it waits for the next change
        under the prefix, or for etcd's next progress report.
        """
        while self.revision < revision:
            await self._advanced.wait()

    async def caught_up(self) -> None:
        """Wait until `values` have each key that etcd has now, as it is now or later.

        Deletions may come later. Callers bound it with `asyncio.timeout`.

        Raises:
            NoQuorum: etcd does not answer.
        """
        entries, _ = await self._session.get_prefix(self._prefix)
        await self.reached(max((stored.mod_revision for stored in entries), default=0))

    async def read(self, key: str) -> KeyValue | None:
        """Return the key as etcd has it now, bypassing this copy.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return await self._session.get(self._prefix + key)

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """Yield sets of changed keys; the first has all keys.

        Changes while the caller does not read are merged into one set.
        """
        await self._ready.wait()
        watcher = _Watcher(set(self.values))
        self._pending[watcher] = None
        try:
            while True:
                yield watcher.take()
                await watcher.changed.wait()
        finally:
            self._pending.pop(watcher, None)

    async def run(self) -> None:
        """Follow etcd until cancelled; run as one task."""
        random, failures = self._session.random, 0
        while True:
            self._fragments.clear()
            try:
                await self._read_all()
                failures = 0
                async for answer in self._session.watch(self._prefix, self.revision + 1):
                    self._apply(answer)
                log.info("watch restarts prefix=%s revision=%d", self._prefix, self.revision)
            except NoQuorum as error:
                if failures == 0:
                    log.warning(
                        "etcd does not answer, its values may be old prefix=%s error=%s",
                        self._prefix,
                        error,
                    )
                await asyncio.sleep(_BACKOFF.delay_ms(failures, random) / 1000)
                failures += 1

    async def _read_all(self) -> None:
        entries, revision = await self._session.get_prefix(self._prefix)
        if revision < self.revision:
            raise NoQuorum(f"etcd went back from revision {self.revision} to {revision}")
        fresh = {stored.key.removeprefix(self._prefix): stored for stored in entries}
        changed = {
            key
            for key in fresh.keys() | self.values.keys()
            if fresh.get(key) != self.values.get(key)
        }
        self.values = fresh
        self._ready.set()
        self._notify(changed, revision)

    def _apply(self, answer: pb.WatchResponse) -> None:
        # A fragment may end within a revision.
        self._fragments += answer.events
        if answer.fragment:
            return
        events, self._fragments = self._fragments, []
        changed = set()
        for event in events:
            stored = self._session.key_value(event.kv)
            key = stored.key.removeprefix(self._prefix)
            if event.type == event.PUT:
                self.values[key] = stored
            else:
                self.values.pop(key, None)
            changed.add(key)
        # The header of the first answer of a watch, and of one with only a part of many events, is
        # ahead of events that are still to come: so the events count, and then the header.
        revision = max(
            (event.kv.mod_revision for event in events),
            default=0 if answer.created else answer.header.revision,
        )
        self._notify(changed, revision)

    def _notify(self, changed: set[str], revision: int) -> None:
        if revision > self.revision:
            self.revision = revision
            advanced, self._advanced = self._advanced, asyncio.Event()
            advanced.set()
        if not changed:
            return
        for watcher in self._pending:
            watcher.add(changed)
        for callback in self.on_change:
            callback(frozenset(changed))


async def all_ready(*mirrors: EtcdMirror) -> bool:
    """Wait until the first complete read of each mirror is done; return True."""
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
