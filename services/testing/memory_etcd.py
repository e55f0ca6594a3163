"""An etcd in memory: it never loses what it has stored, but its network may lose messages.

`MemoryEtcd` is the server; `MemoryEtcdSession` replaces the connection of a process. Leases run on
the time of the event loop. Watches deliver etcd's own messages, so `Mirror` and `Election` are the
production classes. As with a real etcd, a call without an answer may have been carried out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import kv_pb2
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.runtime.etcd.session import (
    Compare,
    EtcdSession,
    EtcdSpace,
    KeyValue,
    Lease,
    Put,
)
from batonmq_server.testing.memory_network import MemoryNetwork
from batonmq_server.testing.virtual_time import VirtualHost

NAME = "etcd"
TIMEOUT_S = 3.0
T = TypeVar("T")


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    end_s: float
    keys: dict[str, None]
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    revision: int
    key: str
    stored: KeyValue | None


class MemoryEtcd:
    """The etcd server. Keys are relative to the prefix of the cluster.

    Attributes:
        on_put: Functions that are called with each key that is written.
        on_change: Functions that are called with the changed keys after each transaction.
    """

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.revision = 1
        self.on_put: list[Callable[[KeyValue], None]] = []
        self.on_change: list[Callable[[frozenset[str]], None]] = []
        self._kept: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_count = 0
        self._changes: list[_Change] = []
        self._watches: dict[_EtcdWatch, None] = {}

    def get(self, key: str) -> KeyValue | None:
        """Return the current value of a key."""
        return self._kept.get(key)

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return all keys under `prefix`, and the revision."""
        entries = [self._kept[key] for key in sorted(self._kept) if key.startswith(prefix)]
        return entries, self.revision

    def get_tree(self, key: str) -> list[KeyValue]:
        """Return the key and every key below it."""
        below = self.get_prefix(f"{key}/")[0]
        return [self._kept[key], *below] if key in self._kept else below

    def txn(self, compare: Sequence[Compare], put: Sequence[Put], delete: Sequence[str]) -> int:
        """Return the new revision; 0 if a condition is false, -1 if a lease has expired."""
        if not all(self._holds(condition) for condition in compare):
            return 0
        if any(one.lease is not None and one.lease.lease_id not in self._leases for one in put):
            return -1
        self._change({one.key: one for one in put}, delete)
        return self.revision

    def grant(self, ttl_ms: int) -> int:
        """Return the id of a new lease."""
        self._lease_count += 1
        ttl_s = float(max(1, -(-ttl_ms // 1000)))
        self._leases[self._lease_count] = _Lease(ttl_s, self._now_s() + ttl_s, {})
        self._expire_later(self._lease_count)
        return self._lease_count

    def keep_alive(self, lease_id: int) -> bool:
        """Renew a lease; return False if it has expired."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.end_s = self._now_s() + lease.ttl_s
        return True

    def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """Return the remaining and the granted seconds of a lease; -1 and 0 if it has expired."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return -1, 0
        return int(lease.end_s - self._now_s()), int(lease.ttl_s)

    def revoke(self, lease_id: int) -> None:
        """Revoke a lease, and delete its keys."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.keys:
            self._change({}, list(lease.keys))

    def watch(self, watch: _EtcdWatch, prefix: str, revision: int) -> None:
        """Send the changes since `revision` to a watch, and all later ones."""
        watch.prefix = prefix
        self._watches[watch] = None
        watch.push(pb.WatchResponse(header=self._header(), created=True))
        past = [c for c in self._changes if c.revision >= revision]
        for number in sorted({change.revision for change in past}):
            self._show(watch, [c for c in past if c.revision == number])

    def unwatch(self, watch: _EtcdWatch) -> None:
        """Stop a watch."""
        self._watches.pop(watch, None)

    def close(self) -> None:
        """Cancel the timers of all leases."""
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()

    def _change(self, put: dict[str, Put], delete: Sequence[str]) -> None:
        gone = [key for key in delete if key in self._kept]
        if not put and not gone:
            return
        self.revision += 1
        changes = [self._put(one) for one in put.values()]
        for key in gone:
            lease = self._leases.get(self._kept.pop(key).lease_id)
            if lease is not None:
                lease.keys.pop(key, None)
            changes.append(_Change(self.revision, key, None))
        self._changes += changes
        for observe in self.on_change:
            observe(frozenset(change.key for change in changes))
        for watch in list(self._watches):
            self._show(watch, changes)

    def _put(self, put: Put) -> _Change:
        before = self._kept.get(put.key)
        lease_id = put.lease.lease_id if put.lease else 0
        if before is not None and before.lease_id in self._leases:
            self._leases[before.lease_id].keys.pop(put.key, None)
        if lease_id:
            self._leases[lease_id].keys[put.key] = None
        created = before.create_revision if before else self.revision
        stored = KeyValue(put.key, put.value, created, self.revision, lease_id)
        self._kept[put.key] = stored
        for tell in self.on_put:
            tell(stored)
        return _Change(self.revision, put.key, stored)

    def _show(self, watch: _EtcdWatch, changes: Sequence[_Change]) -> None:
        """Send the changes of one revision, each in a fragment of its own."""
        events = [_event(c, watch.absolute) for c in changes if c.key.startswith(watch.prefix)]
        header = self._header()
        parts = [pb.WatchResponse(header=header, events=[one], fragment=True) for one in events]
        if parts:
            parts[-1].fragment = False
            watch.push(*parts)

    def _header(self) -> Any:
        return pb.ResponseHeader(revision=self.revision)

    def _holds(self, condition: Compare) -> bool:
        stored = self._kept.get(condition.key)
        modified = stored.mod_revision if stored else 0
        created = stored.create_revision if stored else 0
        return condition.mod_revision in (None, modified) and (
            condition.create_revision in (None, created)
        )

    def _expire_later(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        left_s = lease.end_s - self._now_s()
        if left_s <= 0:
            self.revoke(lease_id)
        else:
            lease.timer = self.network.later(left_s, lambda: self._expire_later(lease_id))

    def _now_s(self) -> float:
        return self.network.loop.time()


class _EtcdWatch:
    """A watch: its events arrive in order; a lost event breaks the connection."""

    def __init__(self, network: MemoryNetwork, name: str, absolute: Callable[[str], bytes]) -> None:
        self._network, self._name, self.absolute = network, name, absolute
        self.prefix = ""
        self.over = False
        self._last_s = 0.0
        self._travelling: deque[tuple[Any, ...]] = deque()
        self._arrived: deque[Any] = deque()
        self._woken = asyncio.Event()

    def push(self, *answers: Any) -> None:
        if self.over:
            return
        now_s = self._network.loop.time()
        self._last_s = max(now_s + self._network.delay_s(), self._last_s)
        if self._network.lost(NAME, self._name):
            self.over, answers = True, (None,)
        self._travelling.append(answers)
        self._network.later(self._last_s - now_s, self._arrive)

    async def next(self) -> Any:
        """Return the next message of etcd; None if the connection is broken."""
        while not self._arrived:
            self._woken.clear()
            await self._woken.wait()
        return self._arrived.popleft()

    def _arrive(self) -> None:
        self._arrived += self._travelling.popleft()
        self._woken.set()


class MemoryEtcdSession(EtcdSession):
    """The etcd session of a simulated process; see `EtcdSession` for the calls."""

    def __init__(self, server: MemoryEtcd, host: VirtualHost, clock: Clock, random: Random) -> None:
        self._server, self._host = server, host
        self.clock, self.random = clock, random
        self.prefix = "/baton/memory/"

    async def __aenter__(self) -> MemoryEtcdSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def space(self) -> EtcdSpace:
        """See base; the space is not simulated."""
        return EtcdSpace()

    async def get(self, key: str) -> KeyValue | None:
        """See EtcdSession."""
        return await self._call(lambda: self._server.get(key))

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """See EtcdSession."""
        return await self._call(lambda: self._server.get_prefix(prefix))

    async def get_tree(self, key: str) -> list[KeyValue]:
        """See EtcdSession."""
        return await self._call(lambda: self._server.get_tree(key))

    async def delete(self, key: str) -> bool:
        """See EtcdSession."""
        return await self.txn(compare=(), delete=(key,)) is not None

    async def txn(
        self, *, compare: Sequence[Compare], put: Sequence[Put] = (), delete: Sequence[str] = ()
    ) -> int | None:
        """See EtcdSession."""
        revision = await self._call(lambda: self._server.txn(compare, put, delete))
        if revision < 0:
            raise NoQuorum("etcd: requested lease not found")
        return revision or None

    async def lease(self, ttl_ms: int) -> Lease:
        """See EtcdSession."""
        return Lease(self, await self._call(lambda: self._server.grant(ttl_ms)))

    async def keep_alive(self, lease_id: int) -> bool:
        """See EtcdSession."""
        return await self._call(lambda: self._server.keep_alive(lease_id))

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """See EtcdSession."""
        return await self._call(lambda: self._server.time_to_live(lease_id))

    async def revoke(self, lease_id: int) -> None:
        """See EtcdSession."""
        await self._call(lambda: self._server.revoke(lease_id))

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Any]:
        """See EtcdSession."""
        server, network = self._server, self._server.network
        watch = _EtcdWatch(network, self._host.name, self._absolute)

        def begin() -> None:
            if not watch.over:
                server.watch(watch, prefix, revision)

        if not network.send(self._host.name, NAME, begin):
            await asyncio.sleep(TIMEOUT_S)
            raise NoQuorum("etcd: no answer to a watch")
        try:
            while (answer := await watch.next()) is not None:
                yield answer
        finally:
            watch.over = True
            server.unwatch(watch)
        raise NoQuorum("etcd ended a watch")

    async def _call(self, carry_out: Callable[[], T]) -> T:
        """Run a call at the server if it arrives there, and return its result if that arrives."""
        network, name = self._server.network, self._host.name
        if self._host in network.gone:
            raise NoQuorum("etcd: the connection is closed")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            result = carry_out()
            network.send(NAME, name, lambda: _settle(answer, result))

        network.send(name, NAME, arrive)
        try:
            async with timeouts.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise NoQuorum("etcd: no answer") from error


def _settle(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _event(change: _Change, absolute: Callable[[str], bytes]) -> Any:
    stored = change.stored
    if stored is None:
        kv = kv_pb2.KeyValue(key=absolute(change.key), mod_revision=change.revision)
        return kv_pb2.Event(type=kv_pb2.Event.DELETE, kv=kv)
    kv = kv_pb2.KeyValue(
        key=absolute(change.key),
        value=stored.value,
        create_revision=stored.create_revision,
        mod_revision=stored.mod_revision,
        lease=stored.lease_id,
    )
    return kv_pb2.Event(type=kv_pb2.Event.PUT, kv=kv)
