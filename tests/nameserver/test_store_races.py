"""Races between replicas, one interleaving at a time.

Goal: what is decided on an outdated reading is never written.
Method: two stores on one etcd; the session of the first lets the second act between the first's
reading and its transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio

from batonmq._common.clock import Clock
from batonmq.errors import (
    BatonError,
    ClientIdInUse,
    OffsetsUnreachable,
    Overloaded,
    SubscriptionConflict,
    TopicExists,
)
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.core.groups import Group, Heartbeat, Subscription, Terms
from batonmq_server.nameserver.group_requests import GroupChange
from batonmq_server.nameserver.group_store import BATCH_MAX, GroupStore
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put

BROKERS = {"broker-a": ""}


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

    store: GroupStore
    other: GroupStore
    topics: TopicStore
    other_topics: TopicStore
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
        found = await self.other.read("g")
        assert found is not None
        return found[0]


@pytest_asyncio.fixture
async def race(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Race]:
    session = OvertakenSession(etcd_endpoint, cluster, Clock())
    async with session:
        turns, other_turns = CompareAndSwap(Random(1), tries_max=4), CompareAndSwap(Random(2))
        topics, other_topics = TopicStore(session, turns), TopicStore(etcd, other_turns)
        yield Race(
            store_of(session, turns, topics),
            store_of(etcd, other_turns, other_topics),
            topics,
            other_topics,
            session,
            etcd,
        )


def store_of(session: EtcdSession, turns: CompareAndSwap, topics: TopicStore) -> GroupStore:
    def told(change: GroupChange) -> None:
        assert change.before is None or change.group.generation == change.before.generation + 1

    return GroupStore(session, turns, topics, member_lease_ms=30_000, on_change=told)


async def nothing(topic: str, topic_id: int) -> None:
    """For a topic of which nothing is left."""


def beat(client_id: str, expression: str = "*", incarnation_id: int = 1) -> Heartbeat:
    terms = Terms(subscriptions=(Subscription("flights", expression),))
    return Heartbeat(
        group="g", client_id=client_id, incarnation_id=incarnation_id, host="h", terms=terms
    )


def ids(group: Group | None) -> list[str]:
    return [member.client_id for member in group.members] if group else []


async def refused(call: Awaitable[object]) -> BatonError:
    try:
        await call
    except BatonError as error:
        return error
    raise AssertionError("not refused")


async def test_two_founders_with_different_subscriptions_do_not_both_found(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c2", "x"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c1", "*"))
    group = await race.group()
    assert (ids(group), group.subscription_generation) == (["c2"], 1)
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []


async def test_two_processes_with_one_client_id_do_not_both_join(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c1", incarnation_id=2))):
        with pytest.raises(ClientIdInUse):
            await race.store.join(beat("c1", incarnation_id=1))
    assert [m.incarnation_id for m in (await race.group()).members] == [2]


async def test_joining_twice_at_once_is_joining_once(race: Race) -> None:
    joined = None

    async def join() -> None:
        nonlocal joined
        joined = (await race.other.join(beat("c1"))).group

    async with race.overtaken(join):
        outcome = await race.store.join(beat("c1"))
    assert outcome.change is None
    group = await race.group()
    assert group == joined


async def test_member_that_comes_back_is_not_expired_on_an_old_reading(race: Race) -> None:
    before = (await race.other.join(beat("c1"))).group
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1"))):
        outcome = await race.store.maintain("g")
    assert outcome.change is None
    assert await race.group() == before


async def test_newcomer_does_not_take_out_a_member_that_comes_back(race: Race) -> None:
    await race.other.join(beat("c1", "*"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1", "*"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c2", "x"))
    assert ids(await race.group()) == ["c1"]


async def test_member_expired_meanwhile_joins_anew(race: Race) -> None:
    before = (await race.other.join(beat("c1"))).group
    assert before is not None
    await race.die("c1")
    async with race.overtaken(lambda: race.other.maintain("g")):
        outcome = await race.store.join(beat("c1"))
    assert outcome.change is not None
    group = await race.group()
    assert (ids(group), group.generation) == (["c1"], before.generation + 2)
    live, _ = await race.etcd.get_prefix("live/g/")
    assert [stored.key for stored in live] == ["live/g/c1"]


async def test_member_that_changes_what_it_asks_for_keeps_its_lease(race: Race) -> None:
    await race.other.join(beat("c1", "*"))
    first = await race.etcd.get(race.etcd.key("live", "g", "c1"))
    await race.other.join(beat("c1", "x"))
    assert await race.etcd.get(race.etcd.key("live", "g", "c1")) == first
    assert first is not None
    assert await race.other.renew(first)


async def test_two_replicas_expire_a_member_once(race: Race) -> None:
    before = (await race.other.join(beat("c1"))).group
    assert before is not None
    await race.die("c1")
    async with race.overtaken(lambda: race.other.maintain("g")):
        outcome = await race.store.maintain("g")
    assert outcome.change is None
    assert (await race.group()).generation == before.generation + 1


async def test_leave_takes_out_nobody_who_joined_meanwhile(race: Race) -> None:
    await race.other.join(beat("c1"))
    async with race.overtaken(lambda: race.other.join(beat("c2"))):
        outcome = await race.store.leave("g", "c1", 1)
    assert outcome.left
    assert ids(await race.group()) == ["c2"]


async def test_refusal_for_the_sake_of_a_call_that_lost_its_race_is_decided_anew(
    race: Race,
) -> None:
    """c2 would be refused because of c1, who is refused itself in the end."""
    async with (
        race.overtaken(lambda: race.other.join(beat("c3", "y"))),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(race.store.maintain("g"))
        first = tasks.create_task(refused(race.store.join(beat("c1", "x"))))
        second = tasks.create_task(race.store.join(beat("c2", "y")))
    assert isinstance(first.result(), SubscriptionConflict)
    assert ids(second.result().group) == ["c2", "c3"]
    live, _ = await race.etcd.get_prefix("live/g/")
    assert [stored.key for stored in live] == ["live/g/c2", "live/g/c3"]


async def test_caller_that_goes_away_leaves_those_that_rode_with_it_to_themselves(
    race: Race,
) -> None:
    running: list[asyncio.Task[object]] = []

    async def go_away() -> None:
        running[0].cancel()

    async with race.overtaken(go_away), asyncio.TaskGroup() as tasks:
        tasks.create_task(race.store.maintain("g"))
        running.append(tasks.create_task(race.store.join(beat("c1"))))
        second = tasks.create_task(race.store.join(beat("c2")))
    assert running[0].cancelled()
    assert ids(second.result().group) == ["c2"]


async def test_calls_that_wait_for_one_turn_are_written_together(race: Race) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(race.store.maintain("g"))
        joining = [tasks.create_task(race.store.join(beat(f"c{n}"))) for n in range(20)]
        leaving = tasks.create_task(race.store.leave("g", "c7", 1))
    groups = [task.result().group for task in joining]
    assert all(group == groups[0] for group in groups)
    assert leaving.result().left
    assert len(ids(groups[0])) == 19
    live, _ = await race.etcd.get_prefix("live/g/")
    assert [stored.key for stored in live] == [f"live/g/{name}" for name in ids(groups[0])]


async def test_more_calls_than_one_transaction_takes_are_all_carried_out(race: Race) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(3 * BATCH_MAX):
            tasks.create_task(race.store.join(beat(f"c{number:03}")))
    assert len(ids(await race.group())) == 3 * BATCH_MAX


async def test_many_that_die_at_once_are_taken_out_by_one_change(race: Race) -> None:
    """More than etcd lets one transaction compare."""
    names = [f"c{number:03}" for number in range(150)]
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(race.store.join(beat(name)))
    for name in names[1:]:
        await race.die(name)
    outcome = await race.store.maintain("g")
    assert outcome.change is not None
    assert len(outcome.change.expired) == 149
    assert ids(await race.group()) == ["c000"]


async def test_who_leaves_after_its_lease_has_ended_waits_for_no_live_key(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.die("c1")
    outcome = await race.store.leave("g", "c1", 1)
    assert (outcome.left, outcome.live_revision) == (True, 0)


async def test_topic_created_meanwhile_is_found_or_refused(race: Race) -> None:
    async with race.overtaken(lambda: race.other_topics.create("same", 8, BROKERS, nothing)):
        found = await race.topics.create("same", 8, BROKERS, nothing)
    assert not found.created
    async with race.overtaken(lambda: race.other_topics.create("differs", 4, BROKERS, nothing)):
        with pytest.raises(TopicExists):
            await race.topics.create("differs", 8, BROKERS, nothing)


async def test_topic_ids_are_never_given_away_twice(race: Race) -> None:
    async with race.overtaken(lambda: race.other_topics.create("t1", 8, BROKERS, nothing)):
        second = await race.topics.create("t2", 8, BROKERS, nothing)
    first = await race.other_topics.read("t1")
    assert first is not None
    assert (first[0].topic_id, second.topic.topic_id) == (1, 2)
    await race.other_topics.delete("t2")
    third = await race.topics.create("t2", 8, BROKERS, nothing)
    assert third.topic.topic_id == 3


async def test_an_overtaken_creation_forgets_nothing_of_the_topic_that_won(race: Race) -> None:
    """Its call to offsets carries an id that is not greater than the winner's."""
    forgotten: dict[str, list[int]] = {"store": [], "other": []}

    def forgets(who: str) -> Callable[[str, int], Awaitable[None]]:
        async def forget(topic: str, topic_id: int) -> None:
            forgotten[who].append(topic_id)

        return forget

    async with race.overtaken(lambda: race.other_topics.create("t", 8, BROKERS, forgets("other"))):
        found = await race.topics.create("t", 8, BROKERS, forgets("store"))
    assert not found.created
    assert forgotten == {"store": [1], "other": [1]}
    await race.topics.create("t", 8, BROKERS, forgets("store"))
    assert forgotten["store"] == [1], "a topic that exists is not forgotten"


async def test_a_topic_created_between_two_readings_is_seen_or_has_no_smaller_id(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []

    async def forget(topic: str, topic_id: int) -> None:
        forgotten.append(topic_id)

    read = race.session.get
    reads: list[str] = []

    async def read_slowly(key: str) -> KeyValue | None:
        stored = await read(key)
        reads.append(key)
        if len(reads) == 1:
            await race.other_topics.create("t", 8, BROKERS, nothing)
        return stored

    monkeypatch.setattr(race.session, "get", read_slowly)
    found = await race.topics.create("t", 8, BROKERS, forget)
    assert (found.created, forgotten) == (False, [])


async def test_a_creation_that_can_not_forget_writes_nothing(race: Race) -> None:
    async def fail(topic: str, topic_id: int) -> None:
        raise OffsetsUnreachable("away")

    with pytest.raises(OffsetsUnreachable):
        await race.topics.create("t", 8, BROKERS, fail)
    assert await race.other_topics.read("t") is None
    assert (await race.etcd.get_prefix("counters/"))[0] == []


async def test_topic_recreated_meanwhile_is_still_deleted(race: Race) -> None:
    await race.other_topics.create("t", 8, BROKERS, nothing)

    async def recreate() -> None:
        await race.other_topics.delete("t")
        await race.other_topics.create("t", 4, BROKERS, nothing)

    async with race.overtaken(recreate):
        await race.topics.delete("t")
    assert await race.other_topics.read("t") is None


async def test_call_that_loses_every_race_gives_up_and_has_written_nothing(race: Race) -> None:
    numbers = iter(range(10))

    async def somebody_joins() -> None:
        await race.other.join(beat(f"other-{next(numbers)}"))

    async with race.overtaken(somebody_joins, times=4):
        with pytest.raises(Overloaded):
            await race.store.join(beat("c1"))
    assert len(ids(await race.group())) == 4
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []
