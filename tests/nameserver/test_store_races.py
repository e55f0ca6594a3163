"""Races between replicas, one interleaving at a time.

Goal: no decision from an outdated read is ever written.
Method: two stores on one etcd; the session of the first store runs a call of the second store
between the first store's read and its transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

import pytest
import pytest_asyncio

from batonmq._common.clock import Clock
from batonmq.errors import (
    BatonError,
    ClientIdInUse,
    Internal,
    OffsetsUnreachable,
    Overloaded,
    SubscriptionConflict,
    TopicExists,
)
from batonmq_server.nameserver import group_store
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.core.group_transaction import GroupSettings
from batonmq_server.nameserver.core.groups import (
    Group,
    Heartbeat,
    Member,
    Subscription,
    Terms,
    hash_of,
)
from batonmq_server.nameserver.group_proto import group_to_stored
from batonmq_server.nameserver.group_requests import GroupChange
from batonmq_server.nameserver.group_store import BATCH_MAX, GroupStore
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put

BROKERS = {"broker-a": ""}


class OvertakenSession(EtcdSession):
    """A session that runs `overtake()` before each of its next `times` transactions."""

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
    """Two stores: `store` is overtaken by a write of `other`."""

    store: GroupStore
    other: GroupStore
    topics: TopicStore
    other_topics: TopicStore
    session: OvertakenSession
    etcd: EtcdSession

    @asynccontextmanager
    async def overtaken(
        self, call: Callable[[], Awaitable[object]], times: int = 1
    ) -> AsyncIterator[None]:
        self.session.overtake, self.session.times = call, times
        yield
        assert self.session.times == 0, "the call made fewer transactions than the test overtakes"

    async def die(self, client_id: str) -> None:
        """Expire the member's lease; no nameserver watches leases in these tests."""
        live = await self.etcd.get(self.etcd.key("live", "g", client_id))
        assert live is not None
        await self.etcd.revoke(live.lease_id)

    async def group(self) -> Group:
        entry = await self.other.read("g")
        assert entry is not None
        return entry[0]


@pytest_asyncio.fixture
async def race(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Race]:
    session = OvertakenSession(etcd_endpoint, cluster, Clock())
    async with session:
        swap, other_swap = CompareAndSwap(Random(1), tries_max=4), CompareAndSwap(Random(2))
        topics, other_topics = TopicStore(session, swap), TopicStore(etcd, other_swap)
        yield Race(
            store_of(session, swap, topics),
            store_of(etcd, other_swap, other_topics),
            topics,
            other_topics,
            session,
            etcd,
        )


def store_of(session: EtcdSession, swap: CompareAndSwap, topics: TopicStore) -> GroupStore:
    def check_generation(change: GroupChange) -> None:
        assert change.before is None or change.group.generation == change.before.generation + 1

    return GroupStore(session, swap, topics, member_lease_ms=30_000, on_change=check_generation)


async def delete_nothing(topic: str, topic_id: int) -> None:
    """Delete nothing: the earlier topic has no progress."""


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


async def test_only_one_of_two_first_members_sets_the_subscription(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c2", "x"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c1", "*"))
    group = await race.group()
    assert (ids(group), group.subscription_generation) == (["c2"], 1)
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []


async def test_only_one_of_two_processes_with_one_client_id_joins(race: Race) -> None:
    async with race.overtaken(lambda: race.other.join(beat("c1", incarnation_id=2))):
        with pytest.raises(ClientIdInUse):
            await race.store.join(beat("c1", incarnation_id=1))
    assert [m.incarnation_id for m in (await race.group()).members] == [2]


async def test_concurrent_joins_of_one_process_join_once(race: Race) -> None:
    joined = None

    async def join() -> None:
        nonlocal joined
        joined = (await race.other.join(beat("c1"))).group

    async with race.overtaken(join):
        outcome = await race.store.join(beat("c1"))
    assert outcome.change is None
    group = await race.group()
    assert group == joined


async def test_member_that_returns_is_not_expired_by_an_outdated_read(race: Race) -> None:
    before = (await race.other.join(beat("c1"))).group
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1"))):
        outcome = await race.store.maintain("g")
    assert outcome.change is None
    assert await race.group() == before


async def test_join_does_not_remove_a_member_that_returns(race: Race) -> None:
    await race.other.join(beat("c1", "*"))
    await race.die("c1")
    async with race.overtaken(lambda: race.other.join(beat("c1", "*"))):
        with pytest.raises(SubscriptionConflict):
            await race.store.join(beat("c2", "x"))
    assert ids(await race.group()) == ["c1"]


async def test_member_that_expires_during_its_heartbeat_joins_again(race: Race) -> None:
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


async def test_member_that_changes_its_subscription_keeps_its_lease(race: Race) -> None:
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


async def test_leave_keeps_a_member_that_joins_concurrently(race: Race) -> None:
    await race.other.join(beat("c1"))
    async with race.overtaken(lambda: race.other.join(beat("c2"))):
        outcome = await race.store.leave("g", "c1", 1)
    assert outcome.left
    assert ids(await race.group()) == ["c2"]


async def test_refusal_because_of_an_unwritten_request_is_decided_again(
    race: Race,
) -> None:
    """c2 would be refused because of c1, which is refused itself in the end."""
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


async def test_cancelled_caller_does_not_affect_requests_of_its_batch(
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


async def test_waiting_requests_are_written_in_one_transaction(race: Race) -> None:
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


async def test_join_that_is_too_large_fails_alone(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members whose requests are carried out with it join and leave."""
    monkeypatch.setattr(group_store, "RECORD_BYTES_MAX", 3_000)
    large = replace(beat("c0"), host="h" * 5_000)
    await race.store.join(beat("c1"))
    async with asyncio.TaskGroup() as tasks:
        maintaining = tasks.create_task(race.store.maintain("g"))
        joining = tasks.create_task(refused(race.store.join(large)))
        others = [tasks.create_task(race.store.join(beat(name))) for name in ("c2", "c3")]
        leaving = tasks.create_task(race.store.leave("g", "c1", 1))
    assert joining.result().reason == "LIMIT_EXCEEDED"
    assert leaving.result().left
    assert maintaining.result().group is not None
    assert all(task.result().verdict for task in others)
    assert ids(await race.group()) == ["c2", "c3"]


async def test_requests_beyond_the_batch_limit_are_all_carried_out(race: Race) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(3 * BATCH_MAX):
            tasks.create_task(race.store.join(beat(f"c{number:03}")))
    assert len(ids(await race.group())) == 3 * BATCH_MAX


async def test_many_dead_members_are_removed_by_one_change(race: Race) -> None:
    """More requests than one transaction of etcd allows."""
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


async def test_whole_record_of_an_earlier_version_is_split_by_the_next_write(race: Race) -> None:
    """500 members: more keys than one transaction of etcd may write without nesting."""
    names = [f"c{number:03}" for number in range(500)]
    terms = beat("").terms
    earlier = Group(
        name="g",
        generation=7,
        members=tuple(
            Member(name, 1, "h", 5, subscription_hash=hash_of(terms.subscriptions))
            for name in names
        ),
        terms=terms,
        subscription_generation=1,
        creator=9,
    )
    lease = await race.etcd.lease(60_000)
    live = [Put(race.etcd.key("live", "g", name), b"1", lease) for name in names]
    whole = Put("groups/g", group_to_stored(earlier).SerializeToString())
    await race.etcd.txn(compare=(), put=[whole, *live])
    assert await race.group() == earlier
    heartbeat = await race.store.join(beat("c000"))
    assert heartbeat.change is None
    assert [one.key for one in await race.etcd.get_tree("groups/g")] == ["groups/g"]
    outcome = await race.store.join(replace(beat("new"), owner=3))
    assert outcome.change is not None
    assert (outcome.change.before, outcome.change.joined) == (earlier, ("new",))
    group = await race.group()
    assert ids(group) == [*names, "new"]
    assert replace(group, generation=7, members=group.members[:-1]) == earlier
    keys = {one.key for one in await race.etcd.get_tree("groups/g")}
    assert keys == {
        "groups/g",
        "groups/g/settings",
        *(f"groups/g/members/{number}" for number in range(1, 502)),
    }


async def test_deleted_group_leaves_no_key(race: Race) -> None:
    async def delete_progress(name: str) -> int:
        return 0

    await race.other.join(beat("c1"))
    await race.other.leave("g", "c1", 1)
    await race.store.delete("g", delete_progress)
    for prefix in ("groups/", "gates/", "live/"):
        assert (await race.etcd.get_prefix(prefix))[0] == []


async def test_unreadable_record_refuses_every_change_with_the_remedy(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.other.join(beat("c2"))
    stored = await race.etcd.get_tree("groups/g")
    await race.etcd.delete("groups/g/members/1")
    damaged = await race.etcd.get_tree("groups/g")
    for change in (
        race.store.join(beat("c3")),
        race.store.leave("g", "c1", 1),
        race.store.maintain("g"),
        race.store.update("g", GroupSettings(owned=False)),
    ):
        error = await refused(change)
        assert isinstance(error, Internal)
        assert error.remedy.startswith("Restore etcd from a backup. Or stop the members")
    assert await race.etcd.get_tree("groups/g") == damaged

    await race.etcd.txn(compare=(), delete=[one.key for one in stored])
    outcome = await race.store.join(beat("c1"))
    assert ids(outcome.group) == ["c1"]


async def test_leave_after_the_lease_expired_waits_for_no_live_key(race: Race) -> None:
    await race.other.join(beat("c1"))
    await race.die("c1")
    outcome = await race.store.leave("g", "c1", 1)
    assert (outcome.left, outcome.live_revision) == (True, 0)


async def test_topic_created_concurrently_is_found_or_refused(race: Race) -> None:
    async with race.overtaken(lambda: race.other_topics.create("same", 8, BROKERS, delete_nothing)):
        result = await race.topics.create("same", 8, BROKERS, delete_nothing)
    assert not result.created
    async with race.overtaken(
        lambda: race.other_topics.create("differs", 4, BROKERS, delete_nothing)
    ):
        with pytest.raises(TopicExists):
            await race.topics.create("differs", 8, BROKERS, delete_nothing)


async def test_topic_ids_are_never_reused(race: Race) -> None:
    async with race.overtaken(lambda: race.other_topics.create("t1", 8, BROKERS, delete_nothing)):
        second = await race.topics.create("t2", 8, BROKERS, delete_nothing)
    first = await race.other_topics.read("t1")
    assert first is not None
    assert (first[0].topic_id, second.topic.topic_id) == (1, 2)
    await race.other_topics.delete("t2")
    third = await race.topics.create("t2", 8, BROKERS, delete_nothing)
    assert third.topic.topic_id == 4, "the deletion took one"


async def test_overtaken_creation_deletes_no_progress_of_the_created_topic(race: Race) -> None:
    """Its call to offsets has a topic id that is not greater than the created topic's."""
    deleted: dict[str, list[int]] = {"store": [], "other": []}

    def deleter(caller: str) -> Callable[[str, int], Awaitable[None]]:
        async def delete_progress(topic: str, topic_id: int) -> None:
            deleted[caller].append(topic_id)

        return delete_progress

    async with race.overtaken(lambda: race.other_topics.create("t", 8, BROKERS, deleter("other"))):
        result = await race.topics.create("t", 8, BROKERS, deleter("store"))
    assert not result.created
    assert deleted == {"store": [1], "other": [1]}
    await race.topics.create("t", 8, BROKERS, deleter("store"))
    assert deleted["store"] == [1], "a topic that exists is not deleted"


async def test_topic_created_between_two_reads_is_seen_or_has_no_smaller_id(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[int] = []

    async def delete_progress(topic: str, topic_id: int) -> None:
        deleted.append(topic_id)

    get = race.session.get
    reads: list[str] = []

    async def read_slowly(key: str) -> KeyValue | None:
        stored = await get(key)
        reads.append(key)
        if len(reads) == 1:
            await race.other_topics.create("t", 8, BROKERS, delete_nothing)
        return stored

    monkeypatch.setattr(race.session, "get", read_slowly)
    result = await race.topics.create("t", 8, BROKERS, delete_progress)
    assert (result.created, deleted) == (False, [])


async def test_creation_that_can_not_delete_progress_writes_nothing(race: Race) -> None:
    async def fail(topic: str, topic_id: int) -> None:
        raise OffsetsUnreachable("away")

    with pytest.raises(OffsetsUnreachable):
        await race.topics.create("t", 8, BROKERS, fail)
    assert await race.other_topics.read("t") is None
    assert (await race.etcd.get_prefix("counters/"))[0] == []


async def test_topic_recreated_concurrently_is_still_deleted(race: Race) -> None:
    await race.other_topics.create("t", 8, BROKERS, delete_nothing)

    async def recreate() -> None:
        await race.other_topics.delete("t")
        await race.other_topics.create("t", 4, BROKERS, delete_nothing)

    async with race.overtaken(recreate):
        await race.topics.delete("t")
    assert await race.other_topics.read("t") is None


async def test_call_overtaken_at_every_attempt_fails_and_writes_nothing(race: Race) -> None:
    numbers = iter(range(10))

    async def join_other_client() -> None:
        await race.other.join(beat(f"other-{next(numbers)}"))

    async with race.overtaken(join_other_client, times=4):
        with pytest.raises(Overloaded):
            await race.store.join(beat("c1"))
    assert len(ids(await race.group())) == 4
    assert (await race.etcd.get_prefix("live/g/c1"))[0] == []
