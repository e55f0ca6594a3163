"""Groups in etcd: read, decide, write if nothing changed meanwhile.

    groups/<name>                   nameserver.v1.StoredGroup: members, terms, settings, assignments
    gates/<name>                    nameserver.v1.StoredGate: what the other services need to know
    live/<group>/<client_id>        incarnation id, decimal, under the member's own lease
    refused/<group>/<client_id>     nameserver.v1.StoredRefusedClient, with a lease

The record is the lock: whoever writes a gate or a live key writes the record too, and every write
compares the record. So what was decided by a record and live keys read after it is written only
if no live key has come since. Live keys that vanish belong to members that die, and a recorded
member without live key is dead: any replica may take it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from google.protobuf.message import DecodeError

from baton.lockmgr.v1 import stored_lock_pb2
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq.errors import (
    BatonError,
    GroupNotFound,
    Internal,
    LimitExceeded,
    NoQuorum,
    Overloaded,
)
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, run_concurrently, unchanged
from batonmq_server.nameserver.core.group_transaction import (
    GroupSettings,
    GroupTransaction,
    verdict_of,
)
from batonmq_server.nameserver.core.groups import Group, Heartbeat
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

BATCH_MAX = 32
"""Calls about one group that one transaction answers. Each may need three of etcd's 128 steps."""
RECORD_BYTES_MAX = 1_400_000
"""Largest record of a group: etcd takes requests of 1.5 MiB."""
DEALT_IN_LOOP_MAX = 2_048
"""Queues that are dealt out within the event loop: about 15 ms."""


class GroupStore:
    """Reads and compare-and-swap writes of groups.

    Calls about one group that arrive while one is under way are decided in turn on one reading
    and written by one transaction: a crowd that joins makes a few generations, not one each.

    All methods raise `NoQuorum` if etcd does not answer, `Overloaded` if every try lost, and
    `LimitExceeded` if the record would become too large.

    Args:
        on_change: Told of every record that is written here.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        swap: CompareAndSwap,
        topics: TopicStore,
        *,
        member_lease_ms: int,
        on_change: Callable[[GroupChange], None],
    ) -> None:
        self._etcd, self._swap, self._topics = etcd, swap, topics
        self._member_lease_ms, self._on_change = member_lease_ms, on_change
        self._waiting: dict[str, list[GroupRequest]] = defaultdict(list)

    async def read(self, name: str) -> tuple[Group, int] | None:
        """The group as etcd has it now, and its revision."""
        stored = await self._etcd.get(self._etcd.key("groups", name))
        return (_decoded(stored), stored.mod_revision) if stored else None

    async def refresh(self, live: KeyValue) -> bool:
        """Start the lease of a live key anew; False if it has ended."""
        return await self._etcd.attach(live.lease_id).refresh()

    async def join(self, heartbeat: Heartbeat) -> GroupOutcome:
        """Make the sender a live member of its group, if the ledger agrees.

        If that decides a change of the subscription and no queue has an owner, it is made too.

        Raises:
            ClientIdInUse, SubscriptionConflict, Overloaded: see `GroupTransaction.join`.
        """
        ask = GroupRequest(lambda ledger: ledger.join(heartbeat), heartbeat=heartbeat)
        outcome = await self._asked(heartbeat.group, ask)
        if outcome.change is None or not outcome.change.group.draining:
            return outcome
        with contextlib.suppress(NoQuorum, Overloaded):  # it is a member, whatever comes now
            tended = await self.maintain(heartbeat.group)
            if tended.group is not None and tended.group.member(heartbeat.client_id):
                return replace(
                    outcome,
                    group=tended.group,
                    group_revision=tended.group_revision,
                    verdict=verdict_of(tended.group, heartbeat),
                )
        return outcome

    async def leave(self, group: str, client_id: str, incarnation_id: int) -> GroupOutcome:
        """Take the process out of the group, if it is in."""
        return await self._asked(
            group, GroupRequest(lambda ledger: ledger.leave(client_id, incarnation_id))
        )

    async def update(self, group: str, settings: GroupSettings) -> GroupOutcome:
        """Change settings of the group, and create it if it does not exist.

        Raises:
            GroupInUse: see `GroupTransaction.update`.
        """
        return await self._asked(group, GroupRequest(lambda ledger: ledger.update(settings)))

    async def maintain(self, group: str) -> GroupOutcome:
        """Do what is due: take out the dead, end a drain that is done, deal out queues anew."""
        return await self._asked(group, GroupRequest(lambda _: None, tends=True))

    async def delete(self, name: str, forget: Callable[[str], Awaitable[int]]) -> tuple[int, int]:
        """Delete a group without members; the revision, and what `forget` returned.

        The record goes first: from then on nobody can join, and nobody who has joined loses
        progress. Repeating it finishes what was begun.

        Args:
            forget: Ends the progress of a group that does not exist.

        Raises:
            GroupNotFound: there is none, and no progress of one.
            GroupInUse: a member lives.
        """

        async def attempt() -> int | None:
            view = await self._read(name)
            if view.stored is None:
                return 0
            view.ledger.check_unused("it can't be deleted")
            key = self._etcd.key("groups", name)
            return await self._etcd.txn(
                compare=[unchanged(key, view.stored)], delete=[key, self._etcd.key("gates", name)]
            )

        revision = await self._swap.run(f"groups/{name}", attempt)
        count = await forget(name)
        if not revision and not count:
            raise group_not_found(name)
        return revision, count

    async def _asked(self, name: str, ask: GroupRequest) -> GroupOutcome:
        """The outcome of `ask`, which may ride in somebody else's turn."""
        waiting = self._waiting[name]
        waiting.append(ask)
        try:
            await self._swap.run(f"groups/{name}", partial(self._attempt, name, ask))
        finally:
            waiting.remove(ask)
            if not waiting:
                del self._waiting[name]
        if ask.error is not None:
            raise ask.error
        assert ask.outcome is not None
        return ask.outcome

    async def _attempt(self, name: str, mine: GroupRequest) -> bool | None:
        """Settle this call and those that wait; None if the race was lost."""
        if mine.is_settled:
            return True
        others = (ask for ask in self._waiting[name] if ask is not mine and not ask.is_settled)
        batch = [mine, *islice(others, BATCH_MAX - 1)]
        error, done = None, False
        try:
            done = await self._carry_out(name, batch)
        except BatonError as failure:
            error = failure
        finally:
            # A refusal may have been for the sake of a call that was not written in the end.
            for ask in batch if not done else ():
                ask.error = error
        return True if done or error else None

    async def _carry_out(self, name: str, batch: list[GroupRequest]) -> bool:
        """Decide over the calls in turn and write what becomes of it; False for a lost race."""
        view = await self._read(name)
        ledger = view.ledger
        tends = any(ask.tends for ask in batch)
        drains = tends and view.group is not None and view.group.draining
        # Owners are read after the record: what was granted before it said "draining" is seen,
        # and nothing has been granted since.
        if drains and not await self._has_owner(name):
            ledger.finish_draining()
        for ask in batch:
            ask.put_to(ledger)
        await _let_others_run()
        if not await self._refreshed(view, batch):
            return False
        after = view.group
        if tends or not ledger.is_unchanged():
            after = await _dealt(ledger, await self._topics_of(ledger.settled()))
        written = GroupWrite(after, view.revision)
        if after is not None and (after is not view.group or ledger.joined):
            accepted = [a.heartbeat.client_id for a in batch if a.heartbeat and not a.error]
            await _let_others_run()
            written = await self._write(view, after, accepted)
            if not written.revision:
                return False
        for ask in batch:
            ask.settle(ledger, written)
        return True

    async def _write(self, view: _View, after: Group, accepted: list[str]) -> GroupWrite:
        """Write the record, and the keys that change with it, if the record is as it was read."""
        ledger, name, key = view.ledger, view.name, self._etcd.key
        value = group_to_stored(after).SerializeToString()
        if len(value) > RECORD_BYTES_MAX:
            raise LimitExceeded(
                f"the record of group {name} would have {len(value)} bytes; "
                f"the limit is {RECORD_BYTES_MAX}",
                remedy="Use shorter client ids and host names, fewer topics, or more groups.",
                facts={"field": "group", "limit": RECORD_BYTES_MAX, "actual": len(value)},
            )
        put = [Put(key("groups", name), value)]
        gate = gate_of(after)
        if view.group is None or gate != gate_of(view.group):
            put.append(Put(key("gates", name), gate.SerializeToString()))
        leases = await run_concurrently(
            [partial(self._etcd.lease, self._member_lease_ms) for _ in ledger.joined]
        )
        for (client_id, incarnation_id), lease in zip(ledger.joined.items(), leases, strict=True):
            put.append(Put(key("live", name, client_id), str(incarnation_id).encode(), lease))
        delete = [key("live", name, client_id) for client_id in sorted(ledger.left)]
        delete += [key("refused", name, client_id) for client_id in sorted({*accepted})]
        revision = await self._etcd.txn(
            compare=[unchanged(key("groups", name), view.stored)], put=put, delete=delete
        )
        if revision is None:
            await self._revoke([lease.lease_id for lease in leases])
            return GroupWrite(view.group, 0)
        gone = sorted(ledger.left & view.live.keys())
        await self._revoke([view.live[client_id].lease_id for client_id in gone])
        written = GroupWrite(after, revision, revision if ledger.joined or gone else 0)
        if after is view.group:
            return written
        change = GroupChange(
            before=view.group,
            group=after,
            revision=revision,
            expired=ledger.expired(),
            joined=tuple(sorted(ledger.joined)),
            left=tuple(sorted(ledger.left)),
            replaced=ledger.replaced,
        )
        self._on_change(change)
        return replace(written, change=change)

    async def _refreshed(self, view: _View, batch: list[GroupRequest]) -> bool:
        """Renew the leases of senders that are live members; False if one has just ended."""
        staying = {ask.heartbeat.client_id for ask in batch if ask.heartbeat and not ask.error}
        live = [view.live[c] for c in sorted(staying - view.ledger.joined.keys()) if c in view.live]
        return all(await run_concurrently([partial(self.refresh, stored) for stored in live]))

    async def _read(self, name: str) -> _View:
        """The record first, then the live keys: these are at least as new."""
        stored = await self._etcd.get(self._etcd.key("groups", name))
        group = _decoded(stored) if stored else None
        prefix = f"live/{name}/"
        live, revision = await self._etcd.get_prefix(prefix)
        await _let_others_run()
        by_client = {key.key.removeprefix(prefix): key for key in live}
        ledger = GroupTransaction(
            name,
            group,
            {client_id: int(key.value) for client_id, key in by_client.items()},
            now_unix_ms=self._etcd.clock.unix_ms(),
            lease_ms=self._member_lease_ms,
            # A generation never exceeds the revision of its record. So this is above that of
            # every group of the name that was deleted.
            first_generation=revision + 1,
        )
        return _View(name, stored, group, by_client, ledger)

    async def _topics_of(self, group: Group) -> list[Topic]:
        """What the group subscribes to, as far as it exists, as etcd has it now."""
        if group.terms.broadcasting or not group.members:
            return []
        names = [subscription.topic for subscription in group.terms.subscriptions]
        found = await run_concurrently([partial(self._topics.read, name) for name in names])
        return [topic for topic, _ in filter(None, found)]

    async def _has_owner(self, name: str) -> bool:
        """Whether a queue of the group is granted to anybody."""
        locks, _ = await self._etcd.get_prefix(f"locks/{name}/")
        return any(is_owned(lock.value) for lock in locks)

    async def _revoke(self, lease_ids: list[int]) -> None:
        """End leases nobody needs any more. If that fails they end by themselves."""
        with contextlib.suppress(NoQuorum):
            await run_concurrently([self._etcd.attach(one).revoke for one in lease_ids if one])


async def _let_others_run() -> None:
    """Between two steps that take milliseconds each in a group of 1,000 members."""
    await asyncio.sleep(0)


async def _dealt(ledger: GroupTransaction, topics: Sequence[Topic]) -> Group | None:
    """See `GroupTransaction.dealt`. 65,536 queues take 0.3 s, so many are dealt in a thread."""
    count = sum(part.queue_count for topic in topics for part in topic.spread)
    if count <= DEALT_IN_LOOP_MAX:
        return ledger.dealt(topics)
    return await asyncio.to_thread(ledger.dealt, topics)


def is_owned(lock: bytes) -> bool:
    """Whether a stored lock has an owner."""
    return stored_lock_pb2.StoredLock.FromString(lock).HasField("owner")


def group_not_found(name: str) -> GroupNotFound:
    """The error for a group that does not exist."""
    return GroupNotFound(f"group {name} does not exist", facts={"group": name})


@dataclass(frozen=True, slots=True)
class _View:
    """A group and its live keys by client id, as read for one decision."""

    name: str
    stored: KeyValue | None
    group: Group | None
    live: Mapping[str, KeyValue]
    ledger: GroupTransaction

    @property
    def revision(self) -> int:
        return self.stored.mod_revision if self.stored else 0


def _decoded(stored: KeyValue) -> Group:
    try:
        return group_from_stored(StoredGroup.FromString(stored.value))
    except (DecodeError, KeyError) as error:
        raise Internal(f"etcd has an unreadable value of {stored.key}") from error
