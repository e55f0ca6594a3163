"""The nameserver's rules as plain functions of plain values.

Goal: a group is served under one subscription at a time, and only the living have a say.
Method: stories told to the ledger, then properties over arbitrary histories of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.common.errors import (
    ClientIdInUse,
    Difference,
    NoBroker,
    Overloaded,
    SubscriptionConflict,
)
from services.nameserver.core import (
    MEMBERS_MAX,
    Group,
    Heartbeat,
    Member,
    QueueSpread,
    Subscription,
    SubscriptionLedger,
    Terms,
    Topic,
    build_route,
    spread_queues,
)

LEASE_MS = 30_000


def terms(expression: str = "*", *topics: str, **settings: str | bool) -> Terms:
    subscriptions = tuple(Subscription(topic, expression) for topic in topics or ("flights",))
    return Terms(subscriptions=subscriptions, **settings)  # type: ignore[arg-type]


def beat(client_id: str, agreed: Terms | None = None, incarnation_id: int = 1) -> Heartbeat:
    return Heartbeat(
        group="g",
        client_id=client_id,
        incarnation_id=incarnation_id,
        host=f"host-of-{client_id}",
        terms=agreed or terms(),
    )


def judged(
    group: Group | None, heartbeat: Heartbeat, live: Sequence[str] = (), now_unix_ms: int = 5
) -> Group:
    """The verdict while the clients `live` live in the incarnation that the record has."""
    known = {m.client_id: m.incarnation_id for m in group.members} if group else {}
    alive = {client_id: known[client_id] for client_id in live}
    return SubscriptionLedger(group, alive, lease_ms=LEASE_MS).judge(heartbeat, now_unix_ms)


def ids(group: Group | None) -> list[str]:
    return [member.client_id for member in group.members] if group else []


def test_first_member_sets_the_subscription() -> None:
    group = judged(None, beat("c1", terms("AA||DL")))
    assert group == Group(
        name="g",
        generation=1,
        members=(Member("c1", 1, "host-of-c1", 5),),
        terms=terms("AA||DL"),
        subscription_generation=1,
    )


def test_second_member_with_other_tags_is_refused_with_both_clients_named() -> None:
    """The story that made RocketMQ lose messages: c1 wants tag1, c2 wants tag2."""
    group = judged(None, beat("c1", terms("tag1")))
    with pytest.raises(SubscriptionConflict) as refused:
        judged(group, beat("c2", terms("tag2")), live=["c1"])
    assert refused.value.differences == (
        Difference("flights", "expression", "c2", "tag2", "c1", "tag1"),
    )
    assert "c2 wants 'tag2'" in refused.value.message
    assert "c1 has 'tag1'" in refused.value.message


def test_every_difference_is_listed() -> None:
    group = judged(None, beat("c1", terms("*", "both", "only-group", "same")))
    newcomer = Terms(
        subscriptions=(
            Subscription("both", "x"),
            Subscription("only-newcomer", "*"),
            Subscription("same", "*"),
        ),
        model="BROADCASTING",
        consume_from="FIRST",
        orderly=True,
    )
    with pytest.raises(SubscriptionConflict) as refused:
        judged(group, beat("c2", newcomer), live=["c1"])
    assert [
        (d.topic, d.setting, d.newcomer_value, d.member_value) for d in refused.value.differences
    ] == [
        ("both", "expression", "x", "*"),
        ("only-group", "expression", "", "*"),
        ("only-newcomer", "expression", "*", ""),
        ("", "model", "BROADCASTING", "CLUSTERING"),
        ("", "orderly", "true", "false"),
        ("", "consume_from", "FIRST", "LAST"),
    ]


def test_conflict_names_the_longest_standing_live_member() -> None:
    group = judged(None, beat("c2"), now_unix_ms=1)
    group = judged(group, beat("c1"), live=["c2"], now_unix_ms=2)
    group = judged(group, beat("c0"), live=["c1", "c2"], now_unix_ms=3)
    for live, named in ((["c0", "c1", "c2"], "c2"), (["c0", "c1"], "c1")):
        with pytest.raises(SubscriptionConflict) as refused:
            judged(group, beat("c9", terms("x")), live=live)
        assert {d.member_client_id for d in refused.value.differences} == {named}


def test_agreeing_member_joins_and_members_stay_sorted() -> None:
    group = judged(None, beat("c2"))
    group = judged(group, beat("c10"), live=["c2"])
    assert ids(group) == ["c10", "c2"]
    assert (group.generation, group.subscription_generation) == (2, 1)


def test_repeated_heartbeat_changes_nothing() -> None:
    group = judged(None, beat("c1"))
    assert judged(group, beat("c1"), live=["c1"], now_unix_ms=99) is group


def test_member_whose_lease_ended_unnoticed_stays_one() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c2"), live=["c1"])
    assert judged(group, beat("c1"), live=["c2"]) is group


def test_only_member_may_change_its_subscription() -> None:
    group = judged(None, beat("c1", terms("tag1")))
    group = judged(group, beat("c1", terms("tag2")), live=["c1"])
    assert group.terms == terms("tag2")
    assert (group.generation, group.subscription_generation) == (2, 2)
    assert ids(group) == ["c1"]


def test_settings_change_without_the_subscription_generation() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c1", terms(orderly=True)), live=["c1"])
    assert (group.generation, group.subscription_generation) == (2, 1)


def test_member_with_a_changed_subscription_is_refused_while_others_live() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c2"), live=["c1"])
    with pytest.raises(SubscriptionConflict) as refused:
        judged(group, beat("c2", terms("x")), live=["c1", "c2"])
    assert refused.value.differences == (Difference("flights", "expression", "c2", "x", "c1", "*"),)


def test_group_whose_members_have_all_died_takes_a_new_subscription() -> None:
    group = judged(None, beat("c1", terms("tag1")))
    group = judged(group, beat("c2", terms("tag2")), live=[])
    assert ids(group) == ["c2"]
    assert (group.generation, group.subscription_generation) == (2, 2)


def test_group_that_all_have_left_keeps_its_generations() -> None:
    group: Group | None = judged(None, beat("c1"))
    group = SubscriptionLedger(group, {"c1": 1}, lease_ms=LEASE_MS).leave("c1", 1)
    assert group is not None
    assert (ids(group), group.generation) == ([], 2)
    group = judged(group, beat("c1", incarnation_id=7))
    assert (group.generation, group.subscription_generation) == (3, 1)


def test_dead_members_are_taken_out_by_the_change_that_notices() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c2"), live=["c1"])
    group = judged(group, beat("c3"), live=["c2"])
    assert ids(group) == ["c2", "c3"]
    assert group.generation == 3


def test_client_id_of_a_live_process_is_refused_with_its_host() -> None:
    group = judged(None, beat("c1"))
    with pytest.raises(ClientIdInUse) as refused:
        judged(group, beat("c1", incarnation_id=2), live=["c1"])
    assert refused.value.facts == {"client_id": "c1", "host": "host-of-c1"}
    assert refused.value.retry_after_ms == LEASE_MS
    assert f"{LEASE_MS} ms" in refused.value.remedy


def test_client_id_in_use_is_told_before_a_conflict() -> None:
    group = judged(None, beat("c1"))
    with pytest.raises(ClientIdInUse):
        judged(group, beat("c1", terms("x"), incarnation_id=2), live=["c1"])


def test_client_id_of_a_dead_process_passes_on() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c1", incarnation_id=2), live=[])
    assert [m.incarnation_id for m in group.members] == [2]
    assert group.generation == 2


def test_leave_of_another_incarnation_changes_nothing() -> None:
    group = judged(None, beat("c1"))
    ledger = SubscriptionLedger(group, {"c1": 1}, lease_ms=LEASE_MS)
    assert ledger.leave("c1", 2) is group
    assert ledger.leave("c2", 1) is group
    assert SubscriptionLedger(None, {}, lease_ms=LEASE_MS).leave("c1", 1) is None


def test_expire_takes_out_the_dead_only() -> None:
    group = judged(None, beat("c1"))
    group = judged(group, beat("c2"), live=["c1"])
    ledger = SubscriptionLedger(group, {"c1": 1}, lease_ms=LEASE_MS)
    assert [m.client_id for m in ledger.dead()] == ["c2"]
    after = ledger.expire()
    assert after is not None
    assert (ids(after), after.generation) == (["c1"], 3)
    everybody = SubscriptionLedger(group, {"c1": 1, "c2": 1}, lease_ms=LEASE_MS)
    assert everybody.expire() is group


def test_group_takes_no_more_members_than_its_limit() -> None:
    members = tuple(Member(f"c{i:04}", 1, "h", i) for i in range(MEMBERS_MAX))
    group = Group(name="g", generation=9, members=members, terms=terms(), subscription_generation=1)
    live = [m.client_id for m in members]
    with pytest.raises(Overloaded):
        judged(group, beat("one-more"), live=live)
    assert judged(group, beat("c0000"), live=live) is group
    assert len(judged(group, beat("one-more"), live=live[1:]).members) == MEMBERS_MAX


CLIENTS = st.sampled_from(["c1", "c2", "c3"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), CLIENTS, st.integers(1, 2), st.sampled_from(["*", "x"])),
        st.tuples(st.just("leave"), CLIENTS, st.integers(1, 2), st.just("")),
        st.tuples(st.just("die"), CLIENTS, st.just(0), st.just("")),
        st.tuples(st.just("expire"), CLIENTS, st.just(0), st.just("")),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_living_agree_and_generations_rise_by_one(
    steps: list[tuple[str, str, int, str]],
) -> None:
    group: Group | None = None
    live: dict[str, int] = {}
    wanted: dict[str, str] = {}
    for what, client_id, incarnation_id, expression in steps:
        before, ledger = group, SubscriptionLedger(group, live, lease_ms=LEASE_MS)
        if what == "die":
            live.pop(client_id, None)
        elif what == "expire":
            group = ledger.expire()
        elif what == "leave":
            group = ledger.leave(client_id, incarnation_id)
            if group is not before:
                live.pop(client_id, None)
        else:
            try:
                group = ledger.judge(beat(client_id, terms(expression), incarnation_id), 5)
            except (ClientIdInUse, SubscriptionConflict):
                pass
            else:
                live[client_id], wanted[client_id] = incarnation_id, expression
        if group is None:
            continue
        rise = 0 if group is before else 1
        assert group.generation == (before.generation if before else 0) + rise
        assert ids(group) == sorted(set(ids(group)))
        assert live.keys() <= set(ids(group))
        assert {wanted[c] for c in live} <= {group.terms.subscriptions[0].expression}


def test_queues_are_spread_evenly_and_start_where_told() -> None:
    assert spread_queues(8, ["b", "a", "c"]) == (
        QueueSpread("a", 3),
        QueueSpread("b", 3),
        QueueSpread("c", 2),
    )
    assert spread_queues(1, ["b", "a", "c"], first=4) == (QueueSpread("b", 1),)
    assert spread_queues(2, ["b", "a", "c"], first=2) == (QueueSpread("a", 1), QueueSpread("c", 1))


def test_no_broker_takes_no_queues() -> None:
    with pytest.raises(NoBroker):
        spread_queues(8, [])


@given(st.integers(1, 1024), st.sets(st.text("abc-", min_size=1), min_size=1), st.integers(0, 99))
def test_spread_is_complete_and_differs_by_one(
    queue_count: int, brokers: set[str], first: int
) -> None:
    spread = spread_queues(queue_count, brokers, first=first)
    counts = [part.queue_count for part in spread]
    assert sum(counts) == queue_count
    assert max(counts) - min(counts) <= 1
    assert len(spread) == min(queue_count, len(brokers))
    assert [part.broker for part in spread] == sorted({part.broker for part in spread})
    assert spread == spread_queues(queue_count, sorted(brokers), first=first)


def test_route_leaves_out_brokers_that_are_away() -> None:
    topic = Topic(
        name="t",
        topic_id=1,
        spread=(QueueSpread("a", 1), QueueSpread("b", 1)),
        create_unix_ms=5,
    )
    route = build_route(topic, {"b": "host:1", "c": "host:2"}, 7)
    assert [(b.name, b.address) for b in route.brokers] == [("b", "host:1")]
    assert route.generation == 7
    assert route.same_way(build_route(topic, {"b": "host:1"}, 8))
    assert not route.same_way(build_route(topic, {"b": "host:3"}, 8))
    assert not route.same_way(None)
