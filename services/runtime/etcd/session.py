"""What services ask of etcd: reads, compare-and-set transactions, leases.

Every key is relative to `/baton/<cluster>/`, so clusters can share an etcd. "Lost" and "not
known" are different answers: a transaction returns None when a comparison failed, and raises
`NoQuorum` when its outcome is not known.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Self

import grpc
import grpc.aio
from aetcd import rpc, utils

from batonmq._common.clock import Clock
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd.members import TRY_S, EtcdMember, EtcdMembers

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Largest answer: a whole prefix is read at once; 100,000 lock entries are about 20 MiB."""
_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # as batonmq._connection.channels
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # left alone a minute, whatever the line above says
)
_WITH_A_LEADER = (("hasleader", "true"),)
"""Lets a member end a watch when it has no leader: what it is not told it can't tell, and it would
say that it lives for as long as it is cut off from the others."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as etcd has it; `key` is relative to the cluster's prefix, `lease_id` 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


class Lease:
    """A lease in etcd. Keys put under it vanish when it ends."""

    def __init__(self, session: EtcdSession, lease_id: int) -> None:
        self._session = session
        self.lease_id = lease_id

    async def refresh(self) -> bool:
        """Start the lease's time anew; False if it has ended.

        Raises:
            NoQuorum: not known.
        """
        return await self._session.keep_alive(self.lease_id)

    async def revoke(self) -> None:
        """End the lease now; its keys vanish. Revoking an ended lease has no effect.

        Raises:
            NoQuorum: not known.
        """
        await self._session.revoke(self.lease_id)


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition on one key; revision 0 means that the key must not exist."""

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """One write of a transaction."""

    key: str
    value: bytes
    lease: Lease | None = None


class EtcdSession:
    """Connections to the members of etcd, for one cluster.

    Args:
        endpoint: host:port; of several members separated by commas.
        cluster: Cluster name, part of every key.
        timeout_ms: Bound of every call.
        security: How to use TLS; None for none.
        random: Jitter of those who wait for etcd.
    """

    def __init__(
        self,
        endpoint: str,
        cluster: str,
        clock: Clock,
        *,
        timeout_ms: int = 3_000,
        security: Security | None = None,
        random: Random | None = None,
    ) -> None:
        self.clock = clock
        self.random = random or Random()
        self.prefix = f"/baton/{cluster}/"
        self._endpoint, self._timeout_s = endpoint, timeout_ms / 1000
        self._security = security

    async def __aenter__(self) -> Self:
        connect = connector(self._security, _OPTIONS)
        self._members = EtcdMembers(self._endpoint.split(","), self.random, connect)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._members.close()

    async def run(self) -> None:
        """Notice members that stand still; to be run as one task.

        Without it what must not be asked twice, and watches, wait for them until their bound.
        """
        await self._members.run()

    @staticmethod
    def key(*parts: str) -> str:
        """The key of `parts`; no part may be empty or hold a slash."""
        assert all(part and "/" not in part for part in parts), parts
        return "/".join(parts)

    async def get(self, key: str) -> KeyValue | None:
        """The key as it is now (linearizable), or None.

        Raises:
            NoQuorum: etcd does not answer.
        """
        async with self._translated():
            answer = await self._members.ask(
                lambda member: member.kv.Range(rpc.RangeRequest(key=self._absolute(key))),
                self._timeout_s,
                TRY_S,
            )
        return self.stored(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Every key under `prefix`, ascending, and the revision at which that was so.

        Raises:
            NoQuorum: etcd does not answer.
        """
        start = self._absolute(prefix)
        async with self._translated():
            # However long it takes: there may be much of it.
            answer = await self._members.ask(
                lambda member: member.kv.Range(
                    rpc.RangeRequest(key=start, range_end=utils.prefix_range_end(start))
                ),
                self._timeout_s,
            )
        return [self.stored(kv) for kv in answer.kvs], answer.header.revision

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write unconditionally; the revision of the write.

        Raises:
            NoQuorum: not known.
        """
        revision = await self.txn(compare=(), put=[Put(key, value, lease)])
        assert revision is not None
        return revision

    async def delete(self, key: str) -> bool:
        """Delete a key; False if there was none.

        Raises:
            NoQuorum: not known.
        """
        async with self._translated():
            answer = await self._members.ask_once(
                lambda member: member.kv.DeleteRange(
                    rpc.DeleteRangeRequest(key=self._absolute(key))
                ),
                self._timeout_s,
            )
        return bool(answer.deleted)

    async def txn(
        self,
        *,
        compare: Sequence[Compare],
        put: Sequence[Put] = (),
        delete: Sequence[str] = (),
    ) -> int | None:
        """All writes at once if all conditions hold.

        Returns:
            The revision of the writes, or None if a condition does not hold.

        Raises:
            NoQuorum: not known; read back before acting on either outcome.
        """
        writes = [
            rpc.RequestOp(
                request_put=rpc.PutRequest(
                    key=self._absolute(p.key),
                    value=p.value,
                    lease=p.lease.lease_id if p.lease else 0,
                )
            )
            for p in put
        ]
        writes += [
            rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._absolute(key)))
            for key in delete
        ]
        request = rpc.TxnRequest(
            compare=[c for condition in compare for c in self._compares(condition)], success=writes
        )
        async with self._translated():
            answer = await self._members.ask_once(
                lambda member: member.kv.Txn(request), self._timeout_s
            )
        return answer.header.revision if answer.succeeded else None

    async def lease(self, ttl_ms: int) -> Lease:
        """A new lease. etcd counts in whole seconds and rounds small values up.

        One that was granted, and nobody heard of, ends by itself.

        Raises:
            NoQuorum: not known.
        """
        async with self._translated():
            request = rpc.LeaseGrantRequest(TTL=max(1, -(-ttl_ms // 1000)), ID=0)
            answer = await self._members.ask(
                lambda member: member.leases.LeaseGrant(request), self._timeout_s, TRY_S
            )
        return Lease(self, answer.ID)

    def attach(self, lease_id: int) -> Lease:
        """A lease that somebody else was granted."""
        return Lease(self, lease_id)

    async def keep_alive(self, lease_id: int) -> bool:
        """See `Lease.refresh`."""

        async def refresh(member: EtcdMember) -> Any:
            call = member.leases.LeaseKeepAlive(iter([rpc.LeaseKeepAliveRequest(ID=lease_id)]))
            try:
                return await call.read()
            finally:
                call.cancel()

        async with self._translated():
            answer = await self._members.ask(refresh, self._timeout_s, TRY_S)
        if answer is grpc.aio.EOF:
            raise NoQuorum("etcd ended a keep-alive without an answer")
        return bool(answer.TTL > 0)

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """Whole seconds, rounded down, that a lease has left, and had at first; -1 if it ended.

        Raises:
            NoQuorum: etcd does not answer.
        """
        async with self._translated():
            request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
            answer = await self._members.ask(
                lambda member: member.leases.LeaseTimeToLive(request), self._timeout_s, TRY_S
            )
        return answer.TTL, answer.grantedTTL

    async def revoke(self, lease_id: int) -> None:
        """See `Lease.revoke`."""
        try:
            async with self._translated():
                request = rpc.LeaseRevokeRequest(ID=lease_id)
                await self._members.ask(
                    lambda member: member.leases.LeaseRevoke(request), self._timeout_s, TRY_S
                )
        except _LeaseNotFound:
            return

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Any]:
        """etcd's own watch responses for `prefix`, from `revision` on, progress ones included.

        Ends when etcd cancels the watch (as after a compaction beyond `revision`).

        Raises:
            NoQuorum: the connection broke, or the member stands still, or has lost the others;
                watch again.
        """
        start = self._absolute(prefix)
        create = rpc.WatchCreateRequest(
            key=start,
            range_end=utils.prefix_range_end(start),
            start_revision=revision,
            progress_notify=True,
        )
        member = self._members.first
        call = member.watches.Watch(metadata=_WITH_A_LEADER)
        try:
            async with self._translated(), member.waited_for(self._timeout_s):
                await call.write(rpc.WatchRequest(create_request=create))
            while True:
                async with self._translated(), member.waited_for():
                    answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise NoQuorum("etcd ended a watch")
                if answer.canceled or answer.compact_revision:
                    return
                yield answer
        except NoQuorum:
            self._members.later(member)
            raise
        finally:
            call.cancel()

    def stored(self, kv: Any) -> KeyValue:
        """A key-value of etcd as `KeyValue`."""
        key = kv.key.decode().removeprefix(self.prefix)
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)

    def _absolute(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _compares(self, condition: Compare) -> list[Any]:
        key = self._absolute(condition.key)
        wanted = {
            rpc.Compare.MOD: ("mod_revision", condition.mod_revision),
            rpc.Compare.CREATE: ("create_revision", condition.create_revision),
        }
        return [
            rpc.Compare(key=key, target=target, result=rpc.Compare.EQUAL, **{name: value})
            for target, (name, value) in wanted.items()
            if value is not None
        ]

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if error.code() is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
                raise _LeaseNotFound(f"etcd: {details}") from error
            raise NoQuorum(f"etcd: {error.code().name}: {details}") from error
        except TimeoutError as error:
            raise NoQuorum("etcd does not answer") from error


class _LeaseNotFound(NoQuorum):
    pass
