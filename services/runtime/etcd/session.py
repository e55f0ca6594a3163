"""Client of etcd: reads, compare-and-swap transactions, leases and watches.

Every key is relative to `/baton/<cluster>/`, so clusters can share an etcd. A transaction returns
None if a condition does not hold, and raises `NoQuorum` if its outcome is not known.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Self

import grpc
import grpc.aio

from batonmq._common.clock import Clock
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import kv_pb2
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.runtime.etcd.members import TRY_S, EtcdMember, EtcdMembers

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of an answer."""
PAGE_KEYS = 2_000
"""Keys of a prefix that one call reads; all its calls read at one revision. A lock has 200 bytes,
the settings of a group with many topics some 10 KB."""
_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # as batonmq._connection.channels
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # default: a minute, which overrides the line above
)
_OPERATIONS_MAX = 128
"""etcd's limit on the way from the outermost transaction to the innermost one: at each level the
conditions or the operations count, whichever are more."""
_NESTED_MAX = 32
"""Operations at each level of a larger transaction: four levels, so a million operations."""
_NO_SPACE = "database space exceeded"
NO_SPACE_REMEDY = (
    "Compact and defragment etcd, then disarm its alarm: docs/how-to/runbooks/BatonEtcdAlarm.md"
)
_WITH_A_LEADER = (("hasleader", "true"),)
"""Metadata that make a member end a watch when it has no leader.

A member that is cut off from the others still answers life checks, and gets no changes to send."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key in etcd; `key` is relative to the cluster's prefix, `lease_id` is 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class EtcdSpace:
    """The space that etcd uses.

    Attributes:
        db_bytes: Size of the file of the asked member; its quota counts this.
        in_use_bytes: Part of it that is in use; defragmentation frees the rest.
        alarms: Names of the alarms of all members, such as NOSPACE, ascending.
    """

    db_bytes: int = 0
    in_use_bytes: int = 0
    alarms: tuple[str, ...] = ()


class Lease:
    """A lease in etcd. Keys that are put under it are deleted when it ends."""

    def __init__(self, session: EtcdSession, lease_id: int) -> None:
        self._session = session
        self.lease_id = lease_id

    async def refresh(self) -> bool:
        """Restart the time of the lease; return False if it has ended.

        Raises:
            NoQuorum: the outcome is not known.
        """
        return await self._session.keep_alive(self.lease_id)

    async def revoke(self) -> None:
        """End the lease now, which deletes its keys. Revoking an ended lease has no effect.

        Raises:
            NoQuorum: the outcome is not known.
        """
        await self._session.revoke(self.lease_id)


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction on one key; revision 0 means that the key must not exist."""

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
        timeout_ms: Timeout of every call.
        security: TLS settings; None for plain connections.
        random: Source of jitter and of the order of members.
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
        """Detect members that do not respond; run as one task.

        Without it, watches and calls that must not be repeated wait for such a member until their
        timeout.
        """
        await self._members.run()

    @staticmethod
    def key(*parts: str) -> str:
        """Return the key of `parts`; no part may be empty or contain a slash."""
        assert all(part and "/" not in part for part in parts), parts
        return "/".join(parts)

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now (linearizable), or None if it does not exist.

        Raises:
            NoQuorum: etcd does not answer.
        """
        async with self._translated():
            answer = await self._members.call(
                lambda member: member.kv.Range(pb.RangeRequest(key=self._absolute(key))),
                self._timeout_s,
                TRY_S,
            )
        return self.key_value(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return every key under `prefix`, ascending, and the revision at which they were read.

        Raises:
            NoQuorum: etcd does not answer, or has compacted the revision meanwhile.
        """
        start = self._absolute(prefix)
        request = pb.RangeRequest(key=start, range_end=_prefix_end(start), limit=PAGE_KEYS)
        found: list[KeyValue] = []
        while True:
            async with self._translated():
                # No shorter timeout for one try: the answer may be large.
                answer = await self._members.call(
                    lambda member: member.kv.Range(request), self._timeout_s
                )
            found += map(self.key_value, answer.kvs)
            request.revision = request.revision or answer.header.revision
            if not answer.more:
                return found, request.revision
            request.key = answer.kvs[-1].key + b"\0"

    async def get_tree(self, key: str) -> list[KeyValue]:
        """Return the key and every key below it (`key/...`), ascending, as of one revision.

        Raises:
            NoQuorum: etcd does not answer.
        """
        below = self._absolute(key + "/")
        ranges = (
            pb.RangeRequest(key=self._absolute(key)),
            pb.RangeRequest(key=below, range_end=_prefix_end(below)),
        )
        request = pb.TxnRequest(success=[pb.RequestOp(request_range=one) for one in ranges])
        async with self._translated():
            answer = await self._members.call(
                lambda member: member.kv.Txn(request), self._timeout_s
            )
        return [self.key_value(kv) for one in answer.responses for kv in one.response_range.kvs]

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write a key unconditionally, and return the revision of the write.

        Raises:
            NoQuorum: the outcome is not known.
        """
        revision = await self.txn(compare=(), put=[Put(key, value, lease)])
        assert revision is not None
        return revision

    async def delete(self, key: str) -> bool:
        """Delete a key, and return whether it existed.

        Raises:
            NoQuorum: the outcome is not known.
        """
        async with self._translated():
            answer = await self._members.call_once(
                lambda member: member.kv.DeleteRange(
                    pb.DeleteRangeRequest(key=self._absolute(key))
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
        """Carry out all writes at one revision if all conditions hold.

        128 writes may have as many conditions. More writes may have 32, and their number is not
        limited; etcd limits the size of a request to 1.5 MiB.

        Returns:
            The revision of the writes, or None if a condition does not hold.

        Raises:
            NoQuorum: the outcome is not known; read back before acting on either.
        """
        writes = [
            pb.RequestOp(
                request_put=pb.PutRequest(
                    key=self._absolute(p.key),
                    value=p.value,
                    lease=p.lease.lease_id if p.lease else 0,
                )
            )
            for p in put
        ]
        writes += [
            pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self._absolute(key)))
            for key in delete
        ]
        request = pb.TxnRequest(
            compare=[c for condition in compare for c in self._compares(condition)],
            success=_nested(writes),
        )
        async with self._translated():
            answer = await self._members.call_once(
                lambda member: member.kv.Txn(request), self._timeout_s
            )
        return answer.header.revision if answer.succeeded else None

    async def lease(self, ttl_ms: int) -> Lease:
        """Return a new lease; etcd counts whole seconds, so `ttl_ms` is rounded up.

        If the answer is lost, the granted lease expires by itself.

        Raises:
            NoQuorum: the outcome is not known.
        """
        async with self._translated():
            request = pb.LeaseGrantRequest(TTL=max(1, -(-ttl_ms // 1000)), ID=0)
            answer = await self._members.call(
                lambda member: member.leases.LeaseGrant(request), self._timeout_s, TRY_S
            )
        return Lease(self, answer.ID)

    def attach(self, lease_id: int) -> Lease:
        """Return a lease that was granted elsewhere."""
        return Lease(self, lease_id)

    async def keep_alive(self, lease_id: int) -> bool:
        """See `Lease.refresh`."""

        async def refresh(member: EtcdMember) -> Any:
            call = member.leases.LeaseKeepAlive(iter([pb.LeaseKeepAliveRequest(ID=lease_id)]))
            try:
                return await call.read()
            finally:
                call.cancel()

        async with self._translated():
            answer = await self._members.call(refresh, self._timeout_s, TRY_S)
        if answer is grpc.aio.EOF:
            raise NoQuorum("etcd ended a keep-alive without an answer")
        return bool(answer.TTL > 0)

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """Return the whole seconds that a lease has left (-1 if it has ended) and its length.

        Raises:
            NoQuorum: etcd does not answer.
        """
        async with self._translated():
            request = pb.LeaseTimeToLiveRequest(ID=lease_id)
            answer = await self._members.call(
                lambda member: member.leases.LeaseTimeToLive(request), self._timeout_s, TRY_S
            )
        return answer.TTL, answer.grantedTTL

    async def revoke(self, lease_id: int) -> None:
        """See `Lease.revoke`."""
        try:
            async with self._translated():
                request = pb.LeaseRevokeRequest(ID=lease_id)
                await self._members.call(
                    lambda member: member.leases.LeaseRevoke(request), self._timeout_s, TRY_S
                )
        except _LeaseNotFound:
            return

    async def space(self) -> EtcdSpace:
        """Return the space that etcd uses, and its alarms.

        Raises:
            NoQuorum: etcd does not answer.
        """
        async with self._translated():
            status = await self._members.call(
                lambda member: member.maintenance.Status(pb.StatusRequest()), self._timeout_s, TRY_S
            )
            request = pb.AlarmRequest(action=pb.AlarmRequest.GET)
            answer = await self._members.call(
                lambda member: member.maintenance.Alarm(request), self._timeout_s, TRY_S
            )
        alarms = sorted({pb.AlarmType.Name(one.alarm) for one in answer.alarms})
        return EtcdSpace(status.dbSize, status.dbSizeInUse, tuple(alarms))

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[pb.WatchResponse]:
        """Yield etcd's watch responses for `prefix` from `revision` on, progress reports included.

        A response above 1.5 MiB arrives in several, of which all but the last have `fragment` set.

        Ends when etcd cancels the watch, as after a compaction beyond `revision`.

        Raises:
            NoQuorum: the connection broke, or the member does not respond or has no leader; watch
                again.
        """
        start = self._absolute(prefix)
        create = pb.WatchCreateRequest(
            key=start,
            range_end=_prefix_end(start),
            start_revision=revision,
            progress_notify=True,
            fragment=True,
        )
        member = self._members.first
        call = member.watches.Watch(metadata=_WITH_A_LEADER)
        try:
            async with self._translated(), member.waited_for(self._timeout_s):
                await call.write(pb.WatchRequest(create_request=create))
            while True:
                async with self._translated(), member.waited_for():
                    answer = await call.read()
                if not isinstance(answer, pb.WatchResponse):  # the end of the stream
                    raise NoQuorum("etcd ended a watch")
                if answer.canceled or answer.compact_revision:
                    return
                yield answer
        except NoQuorum:
            self._members.demote(member)
            raise
        finally:
            call.cancel()

    def key_value(self, kv: kv_pb2.KeyValue) -> KeyValue:
        """Return etcd's message as a `KeyValue`."""
        key = kv.key.decode().removeprefix(self.prefix)
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)

    def _absolute(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _compares(self, condition: Compare) -> list[pb.Compare]:
        key = self._absolute(condition.key)
        wanted = {
            pb.Compare.MOD: ("mod_revision", condition.mod_revision),
            pb.Compare.CREATE: ("create_revision", condition.create_revision),
        }
        return [
            pb.Compare(key=key, target=target, result=pb.Compare.EQUAL, **{name: value})
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
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _NO_SPACE in details:
                raise NoQuorum(
                    "etcd accepts no writes: its space quota is used up",
                    remedy=NO_SPACE_REMEDY,
                    retry_after_ms=5_000,
                    facts={"alarm": "NOSPACE"},
                ) from error
            raise NoQuorum(f"etcd: {error.code().name}: {details}") from error
        except TimeoutError as error:
            raise NoQuorum("etcd does not answer") from error


class _LeaseNotFound(NoQuorum):
    pass


def _nested(operations: list[pb.RequestOp]) -> list[pb.RequestOp]:
    """Return operations for one transaction; many are put into transactions within it."""
    if len(operations) <= _OPERATIONS_MAX:
        return operations
    while len(operations) > _NESTED_MAX:
        operations = [
            pb.RequestOp(request_txn=pb.TxnRequest(success=operations[start : start + _NESTED_MAX]))
            for start in range(0, len(operations), _NESTED_MAX)
        ]
    return operations


def _prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with `prefix`."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])
