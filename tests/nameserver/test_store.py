"""Races between replicas, one interleaving at a time.

Goal: what is decided on an outdated reading is never written.
Method: two stores on one etcd; the session of the first lets the second act between the first's
reading and its transaction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio

from batonmq.common.clock import Clock
from batonmq.common.errors import (
    ClientIdInUse,
    OffsetsUnreachable,
    Overloaded,
    SubscriptionConflict,
    TopicExists,
)
from services.nameserver.core import Group, Heartbeat, Subscription, Terms
from services.nameserver.store import Store
from services.runtime.etcd import Compare, EtcdSession, Put, Stored

BROKERS = ["broker-a"]


class OvertakenSession(EtcdSession):
    """A session whose next `times` transactions are each preceded by `overtake()`."""

    def __init__(self, endpoint: str, cluster: str, clock: Clock) -> None:
        super().__init__(endpoint, cluster, clock)
        self.overtake: Callable[[], Awaitable[object]] | None = None
        self.times = 0

    async def txn(
        self,
        *,
        compare: Sequence[Compare],
        put: Sequence[Put] = (),
        delete: Sequence[str] = (),
    ) -> int | None:
        if self.overtake is not None and self.times > 0:
            self.times -= 1
            await self.overtake()
        return await super().txn(compare=compare, put=put, delete=delete)


@dataclass(frozen=True)
class Race:
    """`store` is overtaken, by what `other` does as a rule."""

    store: Store
    other: Store
    session: OvertakenSession
    etcd: EtcdSession

    @asynccontextmanager
    async def overtaken(
        self, act: Callable[[], Awaitable[object]], times: int = 1
    ) -> AsyncIterator[None]:
        self.session.overtake, self.session.times = act, times
        yield
        assert self.session.times == 0, "the call made fewer transactions than it was overtaken"

    async def die(self, client_id: str) -> None:
        """End the member's lease; no nameserver notices in these tests."""
        live = await self.etcd.get(self.etcd.key("live", "g", client_id))
        assert live is not None
        await self.etcd.revoke(live.lease_id)

    async def group(self) -> Group:
        found = await self.other.read_group("g")
        assert found is not None
        return found[0]


@pytest_asyncio.fixture
async def race(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Race]:
    session = OvertakenSession(etcd_endpoint, cluster, Clock())
    async with session:
        store = Store(session, Random(1), member_lease_ms=30_000, tries_max=4)
        other = Store(etcd, Random(2), member_lease_ms=30_000)
        yield Race(store, other, session, etcd)


async def nothing(topic: str, topic_id: int) -> None:
    """For a topic of which nothing is left."""


def beat(client_id: str, expression: str = "*", incarnation_id: int = 1) -> Heartbeat:
    terms = Terms(subscriptions=(Subscription("flights", expression),))
    return Heartbeat(
        group="g", client_id=client_id, incarnation_id=incarnation_id, host="h", terms=terms
    )


def ids(group: Group | None) -> list[str]:
    return [member.client_id for member in group.members] if group else []


async def test_two_founders_with_different_subscriptions_do_not_both_found(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c2", "x"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c1", "*"))
    group = await race.group()
    assert (ids(group), group.generation) == (["c2"], 1)
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []


async def test_two_processes_with_one_client_id_do_not_both_join(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c1", incarnation_id=2))):
        with pytest.raises(ClientIdInUse):
            await race.store.join(beat("c1", incarnation_id=1))
    assert [m.incarnation_id for m in (await race.group()).members] == [2]


async def test_joining_twice_at_once_is_joining_once(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c1"))):
        change = await race.store.join(beat("c1"))
    assert not change.changed
    group = await race.group()
    assert (ids(group), group.generation) == (["c1"], 1)


async def test_member_that_comes_back_is_not_expired_on_an_old_reading(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1"))):
        change = await race.store.expire("g")
    assert (change.changed, change.expired) == (False, ())
    group = await race.group()
    assert (ids(group), group.generation) == (["c1"], 1)


async def test_newcomer_does_not_take_out_a_member_that_comes_back(race: Race) -> None:
    await race.other.join(beat("c1", "*"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1", "*"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c2", "x"))
    assert ids(await race.group()) == ["c1"]


async def test_member_expired_meanwhile_joins_anew(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.expire("g")):
        change = await race.store.join(beat("c1"))
    assert change.changed
    group = await race.group()
    assert (ids(group), group.generation) == (["c1"], 3)
    live, _ = await race.etcd.get_prefix("live/g/")
    assert [stored.key for stored in live] == ["live/g/c1"]


async def test_member_that_renewed_its_place_has_one_lease(race: Race) -> None:
    await race.other.join(beat("c1", "*"))
    first = await race.etcd.get(race.etcd.key("live", "g", "c1"))
    await race.other.join(beat("c1", "x"))
    second = await race.etcd.get(race.etcd.key("live", "g", "c1"))
    assert first is not None
    assert second is not None
    assert not await race.other.refresh(first)
    assert await race.other.refresh(second)


async def test_two_replicas_expire_a_member_once(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.expire("g")):
        change = await race.store.expire("g")
    assert (change.changed, change.expired) == (False, ())
    assert (await race.group()).generation == 2


async def test_leave_takes_out_nobody_who_joined_meanwhile(race: Race) -> None:
    await race.other.join(beat("c1"))
    async with race.overtaken(lambda: race.other.join(beat("c2"))):
        change = await race.store.leave("g", "c1", 1)
    assert change.changed
    group = await race.group()
    assert (ids(group), group.generation) == (["c2"], 3)


async def test_topic_created_meanwhile_is_found_or_refused(race: Race) -> None:
    async with race.overtaken(lambda: race.other.create_topic("same", 8, BROKERS, nothing)):
        found = await race.store.create_topic("same", 8, BROKERS, nothing)
    assert not found.created
    async with race.overtaken(lambda: race.other.create_topic("differs", 4, BROKERS, nothing)):
        with pytest.raises(TopicExists):
            await race.store.create_topic("differs", 8, BROKERS, nothing)


async def test_topic_ids_are_never_given_away_twice(race: Race) -> None:
    async with race.overtaken(lambda: race.other.create_topic("t1", 8, BROKERS, nothing)):
        second = await race.store.create_topic("t2", 8, BROKERS, nothing)
    first = await race.other.read_topic("t1")
    assert first is not None
    assert (first[0].topic_id, second.topic.topic_id) == (1, 2)
    await race.other.delete_topic("t2")
    third = await race.store.create_topic("t2", 8, BROKERS, nothing)
    assert third.topic.topic_id == 3


async def test_an_overtaken_creation_forgets_nothing_of_the_topic_that_won(race: Race) -> None:
    """Its call to offsets carries an id that is not greater than the winner's."""
    forgotten: dict[str, list[int]] = {"store": [], "other": []}

    def forgets(who: str) -> Callable[[str, int], Awaitable[None]]:
        async def forget(topic: str, topic_id: int) -> None:
            forgotten[who].append(topic_id)

        return forget

    async with race.overtaken(lambda: race.other.create_topic("t", 8, BROKERS, forgets("other"))):
        found = await race.store.create_topic("t", 8, BROKERS, forgets("store"))
    assert not found.created
    assert forgotten == {"store": [1], "other": [1]}
    await race.store.create_topic("t", 8, BROKERS, forgets("store"))
    assert forgotten["store"] == [1], "a topic that exists is not forgotten"


async def test_a_topic_created_between_two_readings_is_seen_or_has_no_smaller_id(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []

    async def forget(topic: str, topic_id: int) -> None:
        forgotten.append(topic_id)

    read = race.session.get
    reads: list[str] = []

    async def read_slowly(key: str) -> Stored | None:
        stored = await read(key)
        reads.append(key)
        if len(reads) == 1:
            await race.other.create_topic("t", 8, BROKERS, nothing)
        return stored

    monkeypatch.setattr(race.session, "get", read_slowly)
    found = await race.store.create_topic("t", 8, BROKERS, forget)
    assert (found.created, forgotten) == (False, [])


async def test_a_creation_that_can_not_forget_writes_nothing(race: Race) -> None:
    async def fail(topic: str, topic_id: int) -> None:
        raise OffsetsUnreachable("away")

    with pytest.raises(OffsetsUnreachable):
        await race.store.create_topic("t", 8, BROKERS, fail)
    assert await race.other.read_topic("t") is None
    assert (await race.etcd.get_prefix("counters/"))[0] == []


async def test_topic_recreated_meanwhile_is_still_deleted(race: Race) -> None:
    await race.other.create_topic("t", 8, BROKERS, nothing)

    async def recreate() -> None:
        await race.other.delete_topic("t")
        await race.other.create_topic("t", 4, BROKERS, nothing)

    async with race.overtaken(recreate):
        await race.store.delete_topic("t")
    assert await race.other.read_topic("t") is None


async def test_call_that_loses_every_race_gives_up_and_has_written_nothing(race: Race) -> None:
    numbers = iter(range(10))

    async def somebody_joins() -> None:
        await race.other.join(beat(f"other-{next(numbers)}"))

    async with race.overtaken(somebody_joins, times=4):
        with pytest.raises(Overloaded):
            await race.store.join(beat("c1"))
    assert len(ids(await race.group())) == 4
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []
