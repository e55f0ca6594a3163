"""The nameserver's state in etcd: read, decide, write if nothing changed meanwhile.

    topics/<name>               nameserver.v1.Topic
    counters/topic_id           the last topic id given away, decimal
    groups/<name>               nameserver.v1.Group: who is a member, on which terms
    live/<group>/<client_id>    incarnation id, decimal, under the member's own lease

A group's record changes only together with the live keys it is about, in one transaction that
compares them all. So a live key always belongs to a recorded member, and a recorded member
without live key has died: any replica may take it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar
from weakref import WeakValueDictionary

from batonmq.common.backoff import Backoff
from batonmq.common.errors import NoQuorum, Overloaded, TopicExists, TopicNotFound
from services.nameserver.convert import (
    group_from_bytes,
    group_to_pb,
    topic_from_bytes,
    topic_to_pb,
)
from services.nameserver.core import (
    Group,
    Heartbeat,
    Member,
    SubscriptionLedger,
    Topic,
    spread_queues,
)
from services.runtime.etcd import Compare, EtcdSession, Lease, Put, Stored

TRIES_MAX = 20
_BACKOFF = Backoff(first_ms=5, delay_ms_max=250)
_TOPIC_ID = "counters/topic_id"
Outcome = TypeVar("Outcome")
Forget = Callable[[str, int], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic, the revision at which it was written, and whether that was now."""

    topic: Topic
    revision: int
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """What a call did to a group.

    Attributes:
        group: The record now; None if there is none.
        group_revision: At which it was written.
        live_revision: At which the caller's live key was written or deleted; 0 if it was not.
        changed: Whether the call wrote the record.
        expired: Members it took out because they had died.
    """

    group: Group | None
    group_revision: int
    live_revision: int = 0
    changed: bool = False
    expired: tuple[Member, ...] = ()


class Store:
    """Reads and compare-and-set writes; a lost race is tried again, a bounded number of times.

    All methods raise `NoQuorum` if etcd does not answer, and `Overloaded` if every try lost.

    Args:
        member_lease_ms: Length of a member's lease.
        tries_max: So many lost races end a call.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        random: Random,
        *,
        member_lease_ms: int,
        tries_max: int = TRIES_MAX,
    ) -> None:
        self._etcd, self._random, self._member_lease_ms = etcd, random, member_lease_ms
        self._tries_max = tries_max
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read_topic(self, name: str) -> tuple[Topic, int] | None:
        """The topic as etcd has it now, and its revision."""
        stored = await self._etcd.get(self._etcd.key("topics", name))
        return (topic_from_bytes(stored.value), stored.mod_revision) if stored else None

    async def create_topic(
        self, name: str, queue_count: int, brokers: Collection[str], forget: Forget
    ) -> CreatedTopic:
        """Create the topic, or find it as it should be.

        Args:
            forget: Called with the new topic's name and id before anything is written, to end
                what is left of earlier topics of the name; if it raises, nothing is written.

        Raises:
            TopicExists: it has another number of queues.
            NoBroker: `brokers` is empty.
        """

        async def attempt() -> CreatedTopic | None:
            # The counter first: a topic of this name that is created from here on has an id that
            # is not smaller than ours, so that what we have forgotten can't be its progress.
            counter = await self._etcd.get(_TOPIC_ID)
            if found := await self.read_topic(name):
                return _found(*found, queue_count)
            topic_id = int(counter.value) + 1 if counter else 1
            topic = Topic(
                name=name,
                topic_id=topic_id,
                spread=spread_queues(queue_count, brokers, first=topic_id),
                create_unix_ms=self._etcd.clock.unix_ms(),
            )
            await forget(name, topic_id)
            key = self._etcd.key("topics", name)
            revision = await self._etcd.txn(
                compare=[Compare(key, mod_revision=0), _as_read(_TOPIC_ID, counter)],
                put=[
                    Put(_TOPIC_ID, str(topic_id).encode()),
                    Put(key, topic_to_pb(topic).SerializeToString()),
                ],
            )
            return CreatedTopic(topic, revision, created=True) if revision else None

        return await self._retried(_TOPIC_ID, attempt)

    async def update_topic(self, name: str, change: Callable[[Topic], Topic]) -> tuple[Topic, int]:
        """Change the topic; it and its revision. Nothing is written if it stays the same.

        Args:
            change: Called again, with the newest topic, after each lost race; may raise.

        Raises:
            TopicNotFound: there is none.
        """
        key = self._etcd.key("topics", name)

        async def attempt() -> tuple[Topic, int] | None:
            stored = await self._etcd.get(key)
            if stored is None:
                raise topic_not_found(name)
            before = topic_from_bytes(stored.value)
            after = change(before)
            if after == before:
                return before, stored.mod_revision
            revision = await self._etcd.txn(
                compare=[_as_read(key, stored)],
                put=[Put(key, topic_to_pb(after).SerializeToString())],
            )
            return (after, revision) if revision else None

        return await self._retried(key, attempt)

    async def replace_topic(self, topic: Topic, revision: int) -> bool:
        """Write `topic` if it has not changed since `revision`; False if it has."""
        key = self._etcd.key("topics", topic.name)
        written = await self._etcd.txn(
            compare=[Compare(key, mod_revision=revision)],
            put=[Put(key, topic_to_pb(topic).SerializeToString())],
        )
        return written is not None

    async def delete_topic(self, name: str) -> int:
        """Delete the topic; the revision of the deletion.

        Raises:
            TopicNotFound: there is none.
        """
        key = self._etcd.key("topics", name)

        async def attempt() -> int | None:
            stored = await self._etcd.get(key)
            if stored is None:
                raise topic_not_found(name)
            return await self._etcd.txn(compare=[_as_read(key, stored)], delete=[key])

        return await self._retried(key, attempt)

    async def read_group(self, name: str) -> tuple[Group, int] | None:
        """The group as etcd has it now, and its revision."""
        stored = await self._etcd.get(self._etcd.key("groups", name))
        return (group_from_bytes(stored.value), stored.mod_revision) if stored else None

    async def refresh(self, live: Stored) -> bool:
        """Start the lease of a live key anew; False if it has ended."""
        return await self._etcd.attach(live.lease_id).refresh()

    async def join(self, heartbeat: Heartbeat) -> GroupChange:
        """Make the sender a live member of its group, if the ledger agrees.

        Raises:
            ClientIdInUse, SubscriptionConflict, Overloaded: see `SubscriptionLedger.judge`.
        """
        return await self._retried(f"groups/{heartbeat.group}", lambda: self._try_join(heartbeat))

    async def leave(self, group: str, client_id: str, incarnation_id: int) -> GroupChange:
        """Take the process out of the group, if it is in."""

        async def attempt() -> GroupChange | None:
            view = await self._read(group)
            after = view.ledger.leave(client_id, incarnation_id)
            if after is view.group:
                return view.unchanged()
            revision = await self._write(view, after, (client_id,), delete=(client_id,))
            if revision is None:
                return None
            await self._revoke(view.live.get(client_id))
            return GroupChange(
                group=after, group_revision=revision, live_revision=revision, changed=True
            )

        return await self._retried(f"groups/{group}", attempt)

    async def expire(self, group: str) -> GroupChange:
        """Take out the members that have died."""

        async def attempt() -> GroupChange | None:
            view = await self._read(group)
            dead = view.ledger.dead()
            if not dead:
                return view.unchanged()
            after = view.ledger.expire()
            revision = await self._write(view, after, (m.client_id for m in dead))
            if revision is None:
                return None
            return GroupChange(group=after, group_revision=revision, changed=True, expired=dead)

        return await self._retried(f"groups/{group}", attempt)

    async def _try_join(self, heartbeat: Heartbeat) -> GroupChange | None:
        view = await self._read(heartbeat.group)
        after = view.ledger.judge(heartbeat, self._etcd.clock.unix_ms())
        mine = view.live.get(heartbeat.client_id)
        changed = after is not view.group
        if not changed and mine is not None and await self.refresh(mine):
            return view.unchanged()
        dead = tuple(m for m in view.ledger.dead() if not heartbeat.is_from(m)) if changed else ()
        lease = await self._etcd.lease(self._member_lease_ms)
        put = Put(
            self._etcd.key("live", heartbeat.group, heartbeat.client_id),
            str(heartbeat.incarnation_id).encode(),
            lease,
        )
        about = (heartbeat.client_id, *(m.client_id for m in dead))
        revision = await self._write(view, after, about, put=(put,))
        if revision is None:
            await self._revoke(lease)
            return None
        await self._revoke(mine)
        return GroupChange(
            group=after,
            group_revision=revision if changed else view.revision,
            live_revision=revision,
            changed=changed,
            expired=dead,
        )

    async def _read(self, name: str) -> _View:
        """The record first, then the live keys: these are at least as new."""
        stored = await self._etcd.get(self._etcd.key("groups", name))
        prefix = f"live/{name}/"
        live, _ = await self._etcd.get_prefix(prefix)
        by_client = {key.key.removeprefix(prefix): key for key in live}
        group = group_from_bytes(stored.value) if stored else None
        ledger = SubscriptionLedger(
            group,
            {client_id: int(key.value) for client_id, key in by_client.items()},
            lease_ms=self._member_lease_ms,
        )
        return _View(name, stored, group, by_client, ledger)

    async def _write(
        self,
        view: _View,
        after: Group | None,
        about: Iterable[str],
        *,
        put: tuple[Put, ...] = (),
        delete: Iterable[str] = (),
    ) -> int | None:
        """Write the record, if it and the live keys of the clients `about` are as they were."""
        key = self._etcd.key("groups", view.name)

        def live_key(client_id: str) -> str:
            return self._etcd.key("live", view.name, client_id)

        compare = [_as_read(key, view.stored)]
        compare += [
            _as_read(live_key(client_id), view.live.get(client_id)) for client_id in {*about}
        ]
        if after is not None and after is not view.group:
            put = (*put, Put(key, group_to_pb(after).SerializeToString()))
        return await self._etcd.txn(
            compare=compare, put=put, delete=[live_key(client_id) for client_id in delete]
        )

    async def _revoke(self, lease: Lease | Stored | None) -> None:
        """End a lease nobody needs any more. If that fails it ends by itself."""
        if lease is not None and lease.lease_id:
            with contextlib.suppress(NoQuorum):
                await self._etcd.attach(lease.lease_id).revoke()

    async def _retried(self, key: str, attempt: Callable[[], Awaitable[Outcome | None]]) -> Outcome:
        """The first outcome of `attempt` that is not None: a lost race.

        Calls about one key take turns, so only other replicas can win a race.
        """
        async with self._turn(key):
            for failures in range(self._tries_max):
                outcome = await attempt()
                if outcome is not None:
                    return outcome
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
        raise Overloaded(
            f"{key} is changed by others all the time",
            retry_after_ms=500,
            facts={"limit": self._tries_max},
        )

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            yield


@dataclass(frozen=True, slots=True)
class _View:
    """A group and its live keys by client id, as read for one decision."""

    name: str
    stored: Stored | None
    group: Group | None
    live: Mapping[str, Stored]
    ledger: SubscriptionLedger

    @property
    def revision(self) -> int:
        return self.stored.mod_revision if self.stored else 0

    def unchanged(self) -> GroupChange:
        return GroupChange(group=self.group, group_revision=self.revision)


def topic_not_found(name: str) -> TopicNotFound:
    """The error for a topic that does not exist."""
    return TopicNotFound(f"topic {name} does not exist", facts={"topic": name})


def _found(topic: Topic, revision: int, queue_count: int) -> CreatedTopic:
    if topic.queue_count != queue_count:
        raise TopicExists(
            f"topic {topic.name} exists with {topic.queue_count} queues, not {queue_count}",
            facts={"topic": topic.name},
        )
    return CreatedTopic(topic, revision, created=False)


def _as_read(key: str, stored: Stored | None) -> Compare:
    return Compare(key, mod_revision=stored.mod_revision if stored else 0)
