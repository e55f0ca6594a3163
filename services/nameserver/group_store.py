"""Groups in etcd, read and written by compare-and-swap.

    groups/<name>, groups/<name>/*  the record: members, terms, settings, assignments, in several
                                    keys (`group_record`); a change writes those that it changes
    gates/<name>                    nameserver.v1.StoredGate: what the other services need to know
    live/<group>/<client_id>        incarnation id, decimal, with the member's lease
    refused/<group>/<client_id>     nameserver.v1.StoredRefusedClient, with a lease

The record is the lock: every write of a gate or of a live key also writes the head of the record,
and every write compares the head. So a decision from a record, and from live keys that were read
after it, is written only if no live key was added since. Live keys that vanish belong to members
that are dead. Any replica may remove a recorded member without live key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from baton.lockmgr.v1 import stored_lock_pb2
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq.errors import (
    BatonError,
    GroupInUse,
    GroupNotFound,
    Internal,
    LimitExceeded,
    NoQuorum,
    Overloaded,
)
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, run_concurrently, unchanged
from batonmq_server.nameserver.core.change_budget import WritePace
from batonmq_server.nameserver.core.group_transaction import (
    GroupSettings,
    GroupTransaction,
    verdict_of,
)
from batonmq_server.nameserver.core.groups import MEMBERS_MAX, Group, Heartbeat, hash_of
from batonmq_server.nameserver.core.topics import Topic
from batonmq_server.nameserver.group_proto import gate_of, group_from_stored, group_to_stored
from batonmq_server.nameserver.group_requests import (
    GroupChange,
    GroupOutcome,
    GroupRequest,
    GroupWrite,
)
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Put
from batonmq_server.runtime.group_record import (
    GROUPS_PREFIX,
    HEAD,
    Parts,
    changed_parts,
    read_record,
    record_bytes,
    record_key,
    split_key,
    split_record,
)

UNUSED_RULE = "a group can only be deleted without live members"
BATCH_MAX = 32
"""Requests about one group in one transaction."""
RECORD_BYTES_MAX = 1_400_000
"""Largest record of a group, so that one transaction can write all of it: etcd accepts requests of
1.5 MiB."""
WRITE_BYTES_PER_S = 262_144
ASSIGNED_IN_LOOP_MAX = 2_048
"""Queues that are assigned within the event loop, which takes about 15 ms; more in a thread."""


class GroupStore:
    """Reads and compare-and-swap writes of groups.

    Requests about one group that arrive while another one is being written are decided together,
    one after the other, on one read, and written by one transaction. So when many members join at
    once, the group gets a few generations, not one per member.

    All methods raise `NoQuorum` if etcd does not answer, `Overloaded` if every attempt was
    overtaken by another writer, and `LimitExceeded` if the record would become too large.

    Args:
        on_change: Called with every change of a record that this replica writes.
        members_max: Limit of the live members of a group.
        write_bytes_per_s: Limit of the bytes of changed records of one group per second; each
            counts whole.
    """

    def __init__(  # noqa: PLR0913  keyword-only from the lease on
        self,
        etcd: EtcdSession,
        swap: CompareAndSwap,
        topics: TopicStore,
        *,
        member_lease_ms: int,
        on_change: Callable[[GroupChange], None],
        members_max: int = MEMBERS_MAX,
        write_bytes_per_s: int = WRITE_BYTES_PER_S,
    ) -> None:
        self._etcd, self._swap, self._topics = etcd, swap, topics
        self._members_max, self._pace = members_max, WritePace(write_bytes_per_s)
        self._member_lease_ms, self._on_change = member_lease_ms, on_change
        self._waiting: dict[str, list[GroupRequest]] = defaultdict(list)

    async def read(self, name: str) -> tuple[Group, int] | None:
        """Return the present group in etcd and its revision; None if there is none.

        Raises:
            Internal: its record is not readable.
        """
        stored = await self._read_record(name)
        return (stored.group, stored.head.mod_revision) if stored else None

    async def renew(self, live: KeyValue) -> bool:
        """Renew the lease of a live key; return False if it has expired."""
        return await self._etcd.attach(live.lease_id).refresh()

    async def join(self, heartbeat: Heartbeat) -> GroupOutcome:
        """Make the sender a live member of its group, if the group's policy accepts it.

        If that decides a change of the subscription and no queue has an owner, the change is
        finished, too.

        Raises:
            ClientIdInUse, SubscriptionConflict, Overloaded: see `GroupTransaction.join`.
        """
        request = GroupRequest(lambda group: group.join(heartbeat), heartbeat=heartbeat)
        outcome = await self._carry_out(heartbeat.group, request)
        if outcome.change is None or not outcome.change.group.draining:
            return outcome
        with contextlib.suppress(NoQuorum, Overloaded):  # The sender is a member already.
            maintained = await self.maintain(heartbeat.group)
            if maintained.group is not None and maintained.group.member(heartbeat.client_id):
                return replace(
                    outcome,
                    group=maintained.group,
                    group_revision=maintained.group_revision,
                    verdict=verdict_of(maintained.group, heartbeat),
                )
        return outcome

    async def leave(
        self, group: str, client_id: str, incarnation_id: int, owner: int = 0
    ) -> GroupOutcome:
        """Remove the process from the group, if it is a member."""
        request = GroupRequest(lambda record: record.leave(client_id, incarnation_id, owner))
        return await self._carry_out(group, request)

    async def update(self, group: str, settings: GroupSettings) -> GroupOutcome:
        """Change settings of the group; create the group if it does not exist.

        Raises:
            GroupInUse: see `GroupTransaction.update`.
        """
        return await self._carry_out(group, GroupRequest(lambda record: record.update(settings)))

    async def maintain(self, group: str) -> GroupOutcome:
        """Remove dead members, end a finished drain, and assign queues anew, as far as needed."""
        return await self._carry_out(group, GroupRequest(lambda _: None, maintains=True))

    async def delete(
        self, name: str, delete_progress: Callable[[str], Awaitable[int]]
    ) -> tuple[int, int]:
        """Delete a group without members, then its progress.

        The record is deleted first, so that no member joins a group that loses its progress. After
        a failure, a repeated call deletes the rest. A record that can't be read is deleted too.

        Args:
            delete_progress: Deletes the progress of a group that does not exist; returns the number
                of queues.

        Returns:
            The revision of the deletion, and the result of `delete_progress`.

        Raises:
            GroupNotFound: neither the group nor progress of it exists.
            GroupInUse: a member is live.
        """

        async def attempt() -> int | None:
            try:
                snapshot = await self._read(name)
            except Internal:
                return await self._delete_unreadable(name)
            if snapshot.stored is None:
                return 0
            snapshot.transaction.check_unused(UNUSED_RULE)
            keys = [record_key(name, part) for part in snapshot.stored.parts]
            return await self._etcd.txn(
                compare=[unchanged(keys[0], snapshot.stored.head)],
                delete=[*keys, self._etcd.key("gates", name)],
            )

        revision = await self._swap.run(f"groups/{name}", attempt)
        count = await delete_progress(name)
        if not revision and not count:
            raise group_not_found(name)
        return revision, count

    async def _delete_unreadable(self, name: str) -> int | None:
        """Delete all keys of a record that can't be read; None if another writer was faster.

        Raises:
            GroupInUse: a member is live.
        """
        head = record_key(name, HEAD)
        stored = {one.key: one for one in await self._etcd.get_tree(record_key(name, HEAD))}
        live, _ = await self._etcd.get_prefix(f"live/{name}/")
        if live:
            raise GroupInUse(
                f"group {name} has {len(live)} live members: {UNUSED_RULE}",
                facts={"group": name, "members": len(live)},
            )
        return await self._etcd.txn(
            compare=[unchanged(head, stored.get(head))],
            delete=[*stored, self._etcd.key("gates", name)],
        )

    async def _carry_out(self, name: str, request: GroupRequest) -> GroupOutcome:
        """Return the outcome of `request`, which another request's transaction may carry out."""
        waiting = self._waiting[name]
        waiting.append(request)
        try:
            await self._swap.run(f"groups/{name}", partial(self._attempt, name, request))
        finally:
            waiting.remove(request)
            if not waiting:
                del self._waiting[name]
        if request.error is not None:
            raise request.error
        assert request.outcome is not None
        return request.outcome

    async def _attempt(self, name: str, mine: GroupRequest) -> bool | None:
        """Carry out this request and those that wait; None if another writer was faster."""
        if mine.is_done:
            return True
        if wait_ms := self._pace.wait_ms(name, self._etcd.clock.monotonic_ms()):
            await asyncio.sleep(wait_ms / 1000)
        others = (one for one in self._waiting[name] if one is not mine and not one.is_done)
        batch = [mine, *islice(others, BATCH_MAX - 1)]
        try:
            return await self._carry_out_together(name, batch) or None
        except LimitExceeded:
            if len(batch) == 1:
                raise
        # One of them makes the record too large: it must not fail the others.
        return await self._carry_out_together(name, [mine]) or None

    async def _carry_out_together(self, name: str, batch: list[GroupRequest]) -> bool:
        """Carry out the requests of a batch; False if another writer was faster.

        Raises:
            LimitExceeded: the record would become too large; no request has an outcome.
        """
        error, done = None, False
        try:
            done = await self._carry_out_batch(name, batch)
        except LimitExceeded:
            raise
        except BatonError as failure:
            error = failure
        finally:
            # A request may have been refused because of another one that was not written.
            for request in batch if not done else ():
                request.error = error
        return done or error is not None

    async def _carry_out_batch(self, name: str, batch: list[GroupRequest]) -> bool:
        """Decide the requests in order and write the result; False if another writer was faster."""
        snapshot = await self._read(name)
        transaction = snapshot.transaction
        maintains = any(request.maintains for request in batch)
        drains = maintains and snapshot.group is not None and snapshot.group.draining
        # Owners are read after the record: grants from before it said "draining" are seen, and no
        # queue was granted since.
        if drains and not await self._has_owner(name):
            transaction.finish_draining()
        for request in batch:
            request.apply_to(transaction)
        await _let_other_tasks_run()
        if not await self._renew_leases(snapshot, batch):
            return False
        after = snapshot.group
        if maintains or not transaction.is_unchanged():
            after = await _assigned(transaction, await self._topics_of(transaction.settled()))
        written = GroupWrite(after, snapshot.revision)
        if after is not None and (after is not snapshot.group or transaction.joined):
            accepted = [a.heartbeat.client_id for a in batch if a.heartbeat and not a.error]
            await _let_other_tasks_run()
            written = await self._write(snapshot, after, accepted)
            if not written.revision:
                return False
        for request in batch:
            request.finish(transaction, written)
        return True

    async def _write(
        self, snapshot: _GroupSnapshot, after: Group, accepted: list[str]
    ) -> GroupWrite:
        """Write what changes of the record and with it, if the record is unchanged since."""
        transaction, name, key = snapshot.transaction, snapshot.name, self._etcd.key
        before = snapshot.stored.parts if snapshot.stored else {}
        whole = group_to_stored(after)
        parts = _checked_parts(whole, hash_of(after.terms.subscriptions), snapshot)
        changed, vanished = changed_parts(before, parts)
        put = [Put(record_key(name, part), value) for part, value in changed.items()]
        gate = gate_of(after)
        if snapshot.group is None or gate != gate_of(snapshot.group):
            put.append(Put(key("gates", name), gate.SerializeToString()))
        leases = await run_concurrently(
            [partial(self._etcd.lease, self._member_lease_ms) for _ in transaction.joined]
        )
        for (client_id, incarnation_id), lease in zip(
            transaction.joined.items(), leases, strict=True
        ):
            put.append(Put(key("live", name, client_id), str(incarnation_id).encode(), lease))
        delete = [record_key(name, part) for part in vanished]
        delete += [key("live", name, client_id) for client_id in sorted(transaction.left)]
        delete += [key("refused", name, client_id) for client_id in sorted({*accepted})]
        revision = await self._etcd.txn(
            compare=[
                unchanged(record_key(name, HEAD), snapshot.stored.head if snapshot.stored else None)
            ],
            put=put,
            delete=delete,
        )
        # A change costs what its readers do: they decode the whole record, and each member gets it.
        self._pace.written(name, whole.ByteSize(), self._etcd.clock.monotonic_ms())
        if revision is None:
            await self._revoke([lease.lease_id for lease in leases])
            return GroupWrite(snapshot.group, 0)
        gone = sorted(transaction.left & snapshot.live.keys())
        await self._revoke([snapshot.live[client_id].lease_id for client_id in gone])
        written = GroupWrite(after, revision, revision if transaction.joined or gone else 0)
        if after is snapshot.group:
            return written
        change = GroupChange(
            before=snapshot.group,
            group=after,
            revision=revision,
            expired=transaction.expired(),
            joined=tuple(sorted(transaction.joined)),
            left=tuple(sorted(transaction.left)),
            replaced=transaction.replaced,
        )
        self._on_change(change)
        return replace(written, change=change)

    async def _renew_leases(self, snapshot: _GroupSnapshot, batch: list[GroupRequest]) -> bool:
        """Renew the leases of senders that are live members; False if one has just expired."""
        staying = {r.heartbeat.client_id for r in batch if r.heartbeat and not r.error}
        live = [
            snapshot.live[c]
            for c in sorted(staying - snapshot.transaction.joined.keys())
            if c in snapshot.live
        ]
        return all(await run_concurrently([partial(self.renew, stored) for stored in live]))

    async def _read(self, name: str) -> _GroupSnapshot:
        """Read the record first, then the live keys, so that these are at least as new."""
        stored = await self._read_record(name)
        group = stored.group if stored else None
        prefix = f"live/{name}/"
        live, revision = await self._etcd.get_prefix(prefix)
        await _let_other_tasks_run()
        by_client = {key.key.removeprefix(prefix): key for key in live}
        transaction = GroupTransaction(
            name,
            group,
            {client_id: int(key.value) for client_id, key in by_client.items()},
            now_unix_ms=self._etcd.clock.unix_ms(),
            lease_ms=self._member_lease_ms,
            # A generation never exceeds the revision of its record, so this one is above those of
            # all deleted groups of the name.
            first_generation=revision + 1,
            members_max=self._members_max,
        )
        return _GroupSnapshot(name, stored, group, by_client, transaction)

    async def _read_record(self, name: str) -> _StoredRecord | None:
        """Return the record of a group in etcd; None if there is none."""
        keys = {
            split_key(one.key.removeprefix(GROUPS_PREFIX))[1]: one
            for one in await self._etcd.get_tree(record_key(name, HEAD))
        }
        if not keys:
            return None
        parts = {part: one.value for part, one in keys.items()}
        record = read_record(name, parts)
        try:
            group = group_from_stored(record.group)
        except KeyError as error:
            raise Internal(f"the record of group {name} has an unknown value: {error}") from error
        return _StoredRecord(group, keys[HEAD], parts, record.numbers)

    async def _topics_of(self, group: Group) -> list[Topic]:
        """Return the existing topics that the group subscribes to, as etcd has them now."""
        if group.terms.broadcasting or not group.members:
            return []
        names = [subscription.topic for subscription in group.terms.subscriptions]
        entries = await run_concurrently([partial(self._topics.read, name) for name in names])
        return [topic for topic, _ in filter(None, entries)]

    async def _has_owner(self, name: str) -> bool:
        """Return whether a queue of the group has an owner."""
        locks, _ = await self._etcd.get_prefix(f"locks/{name}/")
        return any(is_owned(lock.value) for lock in locks)

    async def _revoke(self, lease_ids: list[int]) -> None:
        """Revoke unused leases; if that fails, they expire."""
        with contextlib.suppress(NoQuorum):
            await run_concurrently([self._etcd.attach(one).revoke for one in lease_ids if one])


def _checked_parts(
    whole: StoredGroup, subscription_hash: int, snapshot: _GroupSnapshot
) -> dict[str, bytes]:
    """Return the parts of a record that is to be written.

    Raises:
        LimitExceeded: it is too large.
    """
    numbers = snapshot.stored.numbers if snapshot.stored else {}
    parts = split_record(whole, subscription_hash, numbers)
    size = record_bytes(whole.name, parts)
    if size > RECORD_BYTES_MAX:
        raise LimitExceeded(
            f"the record of group {whole.name} would have {size} bytes; "
            f"the limit is {RECORD_BYTES_MAX}",
            remedy="Use shorter client ids and host names, fewer topics, or more groups.",
            facts={"field": "group", "limit": RECORD_BYTES_MAX, "actual": size},
        )
    return parts


async def _let_other_tasks_run() -> None:
    """Yield to the event loop between steps that take milliseconds for 1,000 members."""
    await asyncio.sleep(0)


async def _assigned(transaction: GroupTransaction, topics: Sequence[Topic]) -> Group | None:
    """See `GroupTransaction.assigned`; many queues are assigned in a thread: 65,536 take 0.3 s."""
    count = sum(part.queue_count for topic in topics for part in topic.spread)
    if count <= ASSIGNED_IN_LOOP_MAX:
        return transaction.assigned(topics)
    return await asyncio.to_thread(transaction.assigned, topics)


def is_owned(lock: bytes) -> bool:
    """Return whether a stored lock has an owner."""
    return stored_lock_pb2.StoredLock.FromString(lock).HasField("owner")


def group_not_found(name: str) -> GroupNotFound:
    """Return the error for a group that does not exist."""
    return GroupNotFound(f"group {name} does not exist", facts={"group": name})


@dataclass(frozen=True, slots=True)
class _StoredRecord:
    """The record of a group in etcd.

    Attributes:
        head: Its first key; its revision is that of the record.
        parts: Values of all its keys; the head is the first one.
        numbers: Number of each member's key, by client id.
    """

    group: Group
    head: KeyValue
    parts: Parts
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _GroupSnapshot:
    """A group and its live keys by client id, as read for one batch of requests."""

    name: str
    stored: _StoredRecord | None
    group: Group | None
    live: Mapping[str, KeyValue]
    transaction: GroupTransaction

    @property
    def revision(self) -> int:
        return self.stored.head.mod_revision if self.stored else 0
