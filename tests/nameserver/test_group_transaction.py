"""Decisions of `GroupTransaction`, without a server (protocol section 14).

Goal: a group has one subscription in force at a time, and only live members decide about it.
Method: scenarios for each policy, then properties over arbitrary histories of a group.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.errors import (
    ClientIdInUse,
    Difference,
    GroupInUse,
    Overloaded,
    SubscriptionConflict,
)
from batonmq_server.nameserver.core.group_transaction import (
    GroupTransaction,
    SubscriptionVerdictKind,
    target_of,
)
from batonmq_server.nameserver.core.groups import (
    MEMBERS_MAX,
    Group,
    Member,
    Pause,
    Subscription,
    SubscriptionPolicy,
    Terms,
    TopicBeginning,
    hash_of,
)
from batonmq_server.nameserver.core.topics import QueueSpread
from tests.nameserver.transaction_scene import TOPIC, Scene, beat, scene, subscribed, terms

ACCEPTED, STAGED, REPLACED, OVERRULED = SubscriptionVerdictKind
BOUND = (SubscriptionPolicy.REJECT, SubscriptionPolicy.STAGED, SubscriptionPolicy.STAGED_LATEST)


def test_first_member_sets_the_subscription() -> None:
    group = Scene()
    assert group.beat("c1", "AA||DL").kind is ACCEPTED
    (member,) = group.record.members
    assert member == Member(
        "c1", 1, "host-of-c1", 101, subscription_hash=hash_of(subscribed("AA||DL"))
    )
    assert group.record.terms == terms("AA||DL")
    assert (group.record.generation, group.record.subscription_generation) == (1, 1)
    assert group.owners == {"c1"}


def test_second_member_with_other_tags_is_refused_with_both_clients_named() -> None:
    """The case in which RocketMQ loses messages: c1 subscribes to tag1, c2 to tag2."""
    group = Scene()
    group.beat("c1", "tag1")
    before = group.record
    with pytest.raises(SubscriptionConflict) as refused:
        group.beat("c2", "tag2")
    assert refused.value.differences == (
        Difference("flights", "expression", "c2", "tag2", "c1", "tag1"),
    )
    assert "c2 wants 'tag2'" in refused.value.message
    assert "c1 has 'tag1'" in refused.value.message
    assert group.record is before


def test_every_difference_is_listed() -> None:
    group = Scene()
    group.beat("c1", terms("*", "both", "only-group", "same"))
    newcomer = Terms(
        subscriptions=(
            Subscription("both", "x"),
            Subscription("only-newcomer", "*"),
            Subscription("same", "*"),
        ),
        model="BROADCASTING",
        consume_from="FIRST",
        order="QUEUE",
    )
    with pytest.raises(SubscriptionConflict) as refused:
        group.beat("c2", newcomer)
    assert [
        (d.topic, d.setting, d.newcomer_value, d.member_value) for d in refused.value.differences
    ] == [
        ("both", "expression", "x", "*"),
        ("only-group", "expression", "", "*"),
        ("only-newcomer", "expression", "*", ""),
        ("", "model", "BROADCASTING", "CLUSTERING"),
        ("", "order", "QUEUE", "NONE"),
        ("", "consume_from", "FIRST", "LAST"),
    ]


def test_conflict_names_the_longest_live_member() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c2", "c1", "c0")
    for client_id, member_id in (("", "c2"), ("c2", "c1")):
        group.die(client_id)
        with pytest.raises(SubscriptionConflict) as refused:
            group.beat("c9", "x")
        assert {d.member_client_id for d in refused.value.differences} == {member_id}


def test_agreeing_member_joins_and_members_stay_sorted() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c2", "c10")
    assert group.ids == ["c10", "c2"]
    assert group.record.subscription_generation == 1


def test_repeated_heartbeat_changes_nothing() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    before = group.record
    group.beat("c1")
    assert group.record is before


def test_recorded_member_with_an_expired_lease_stays_a_member() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1", "c2")
    before = group.record
    group.die("c1")
    group.beat("c1")
    assert group.record is before
    assert group.live.keys() == {"c1", "c2"}


@pytest.mark.parametrize("policy", BOUND)
def test_change_without_other_members_waits_only_for_owners(
    policy: SubscriptionPolicy,
) -> None:
    group = scene(policy)
    group.beat("c1", "tag1")
    verdict = group.beat("c1", "tag2")
    assert (verdict.kind, len(verdict.differences)) == (STAGED, 1)
    assert group.record.draining
    assert group.record.terms == terms("tag1")
    assert group.owners == set()
    group.maintain()
    assert group.record.draining, "a queue has an owner still"
    group.maintain(drained=True)
    assert (group.record.terms, group.record.subscription_generation) == (terms("tag2"), 2)
    assert (group.record.staged, group.owners, group.waiting) == (None, {"c1"}, set())


@pytest.mark.parametrize("policy", BOUND)
def test_group_with_only_dead_members_changes_its_subscription_once_it_has_no_owner(
    policy: SubscriptionPolicy,
) -> None:
    """They may be alive and own queues, although they reach no nameserver."""
    group = scene(policy, "c1")
    group.die("c1")
    assert group.beat("c2", "tag2").kind is STAGED
    assert group.ids == ["c2"]
    assert group.record.draining


def test_settings_change_without_the_subscription_generation() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    group.beat("c1", terms(order="KEY"))
    assert group.record.terms.order == "KEY"
    assert group.record.subscription_generation == 1


@pytest.mark.parametrize("policy", SubscriptionPolicy)
@pytest.mark.parametrize(
    "other_terms", [terms(model="BROADCASTING"), terms(consume_from="FIRST"), terms(order="KEY")]
)
def test_settings_never_differ_whatever_the_policy(
    policy: SubscriptionPolicy, other_terms: Terms
) -> None:
    group = scene(policy, "c1")
    before = group.record
    with pytest.raises(SubscriptionConflict) as refused:
        group.beat("c2", other_terms)
    (difference,) = refused.value.differences
    assert getattr(other_terms, difference.setting) != getattr(terms(), difference.setting)
    assert group.record is before


def test_rejected_member_is_not_changed() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1", "c2")
    before = group.record
    with pytest.raises(SubscriptionConflict):
        group.beat("c2", "x")
    assert group.record is before


def test_reject_refuses_the_old_subscription_while_draining() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    group.beat("c1", "x")
    with pytest.raises(SubscriptionConflict) as refused:
        group.beat("c2", "*")
    assert [(d.newcomer_value, d.member_value) for d in refused.value.differences] == [("*", "x")]
    assert refused.value.retry_after_ms > 0
    assert group.beat("c2", "x").kind is STAGED


def test_staged_subscription_waits_until_every_live_member_has_it() -> None:
    group = scene(SubscriptionPolicy.STAGED, "c1", "c2", "c3")
    verdict = group.beat("c1", "x")
    assert verdict.kind is STAGED
    assert verdict.differences == (Difference("flights", "expression", "c1", "x", "c2", "*"),)
    assert group.record.staged is not None
    assert group.record.staged.subscriptions == subscribed("x")
    assert (group.waiting, group.owners) == ({"c1"}, {"c2", "c3"})
    assert group.beat("c2", "x").kind is STAGED
    assert (group.record.draining, group.owners) == (False, {"c3"})
    assert group.record.subscription_generation == 1
    group.beat("c3", "x")
    assert (group.record.draining, group.owners) == (True, set())
    group.maintain(drained=True)
    assert (group.owners, group.waiting) == ({"c1", "c2", "c3"}, set())
    assert (group.record.terms, group.record.subscription_generation) == (terms("x"), 2)


@pytest.mark.parametrize("cause", ["leave", "die"])
def test_staged_subscription_drains_when_the_last_old_member_is_gone(cause: str) -> None:
    group = scene(SubscriptionPolicy.STAGED, "c1", "c2")
    group.beat("c1", "x")
    if cause == "leave":
        group.leave("c2")
    else:
        group.die("c2")
        group.maintain()
    assert group.record.draining


def test_staged_subscription_is_dropped_when_no_member_has_it() -> None:
    for cause in ("leave", "die", "back"):
        group = scene(SubscriptionPolicy.STAGED, "c1", "c2")
        group.beat("c1", "x")
        if cause == "back":
            assert group.beat("c1", "*").kind is ACCEPTED
        elif cause == "leave":
            group.leave("c1")
        else:
            group.die("c1")
            group.maintain()
        assert (group.record.staged, group.waiting) == (None, set())


def test_third_subscription_is_refused_with_the_difference_to_the_staged_one() -> None:
    group = scene(SubscriptionPolicy.STAGED, "c1", "c2")
    group.beat("c1", "x")
    before = group.record
    with pytest.raises(SubscriptionConflict) as refused:
        group.beat("c3", "y")
    assert refused.value.differences == (Difference("flights", "expression", "c3", "y", "c1", "x"),)
    assert group.record is before


def test_only_member_with_a_staged_subscription_may_stage_another() -> None:
    group = scene(SubscriptionPolicy.STAGED, "c1", "c2")
    group.beat("c1", "x")
    assert group.beat("c1", "y").kind is STAGED
    assert group.record.staged is not None
    assert group.record.staged.subscriptions == subscribed("y")


@pytest.mark.parametrize("policy", [SubscriptionPolicy.STAGED, SubscriptionPolicy.STAGED_LATEST])
def test_decided_change_is_finished_whichever_members_join(policy: SubscriptionPolicy) -> None:
    group = scene(policy, "c1")
    group.beat("c1", "x")
    assert group.beat("old", "*").kind is OVERRULED
    with pytest.raises(SubscriptionConflict):
        group.beat("third", "y")
    group.leave("c1")
    assert group.record.draining
    group.maintain(drained=True)
    assert (group.record.terms, group.waiting, group.owners) == (terms("x"), {"old"}, set())
    assert group.beat("old", "*").kind is STAGED, "the only member decides the subscription"


def test_staged_latest_waits_only_for_owners_and_old_members_get_no_queue() -> None:
    group = scene(SubscriptionPolicy.STAGED_LATEST, "c1", "c2")
    assert group.beat("c3", "x").kind is STAGED
    assert (group.record.draining, group.owners) == (True, set())
    group.maintain(drained=True)
    assert (group.waiting, group.owners) == ({"c1", "c2"}, {"c3"})
    before = group.record
    assert group.beat("c1", "*").kind is OVERRULED
    assert group.record is before, "a repeated heartbeat is no new request"
    group.leave("c3")
    assert group.beat("c1", "*").kind is STAGED, "no member has the newest subscription any more"
    group.maintain(drained=True)
    assert group.owners == {"c1", "c2"}


def test_warn_applies_the_newest_subscription_and_names_the_others() -> None:
    group = scene(SubscriptionPolicy.WARN, "c1", "c2")
    verdict = group.beat("c2", "x")
    assert verdict.kind is REPLACED
    assert verdict.differences == (Difference("flights", "expression", "c2", "x", "c1", "*"),)
    assert (group.record.terms, group.record.subscription_generation) == (terms("x"), 2)
    assert group.waiting == {"c1"}
    assert group.owners == {"c1", "c2"}, "overruled members keep their queues"
    before = group.record
    verdict = group.beat("c1", "*")
    assert verdict.kind is OVERRULED
    assert verdict.differences == (Difference("flights", "expression", "c1", "*", "c2", "x"),)
    assert group.record is before
    assert group.beat("c1", "y").kind is REPLACED
    assert group.record.subscription_generation == 3


def test_warn_restores_the_old_subscription_when_the_replacing_member_leaves() -> None:
    group = scene(SubscriptionPolicy.WARN, "c1")
    group.beat("c2", "x")
    group.leave("c2")
    assert group.beat("c1", "*").kind is ACCEPTED
    assert group.record.terms == terms("*")


def test_first_of_two_concurrent_replacements_is_overruled() -> None:
    group = scene(SubscriptionPolicy.WARN, "c0")
    first, second = beat("c1", "x"), beat("c2", "y")
    transaction = group.apply(lambda t: t.join(first), lambda t: t.join(second))
    assert transaction.verdict(first, group.record).kind is OVERRULED
    assert transaction.verdict(second, group.record).kind is REPLACED


def test_broadcasting_members_have_their_own_filters() -> None:
    group = Scene()
    group.beat("c1", terms("x", model="BROADCASTING"))
    assert group.beat("c2", terms("y", model="BROADCASTING")).kind is ACCEPTED
    assert (group.waiting, group.record.assignments) == (set(), ())
    before = group.record
    group.beat("c2", terms("y", model="BROADCASTING"))
    assert group.record is before


def test_change_of_policy_drops_a_staged_and_finishes_a_decided_subscription() -> None:
    group = scene(SubscriptionPolicy.STAGED, "c1", "c2")
    group.beat("c1", "x")
    group.update(policy=SubscriptionPolicy.REJECT)
    assert (group.record.staged, group.waiting, group.owners) == (None, {"c1"}, {"c2"})
    group = scene(SubscriptionPolicy.STAGED_LATEST, "c1", "c2")
    group.beat("c1", "x")
    group.update(policy=SubscriptionPolicy.REJECT)
    assert group.record.draining


def test_group_without_members_keeps_its_terms_and_generations() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    before = group.record
    group.leave("c1")
    assert (group.ids, group.record.assignments) == ([], ())
    group.beat("c1", incarnation_id=7)
    assert group.record.generation == before.generation + 2
    assert group.record.subscription_generation == 1


def test_dead_members_are_removed_by_the_next_change() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1", "c2")
    group.die("c1")
    group.beat("c3")
    assert group.ids == ["c2", "c3"]
    assert group.owners == {"c2", "c3"}


def test_client_id_of_a_live_process_is_refused_with_its_host() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    with pytest.raises(ClientIdInUse) as refused:
        group.beat("c1", "x", incarnation_id=2)
    assert refused.value.facts == {"client_id": "c1", "host": "host-of-c1"}
    assert refused.value.retry_after_ms == 1_000
    assert "30000 ms" in refused.value.remedy


def test_client_id_of_a_dead_process_is_reused_with_its_queues() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1", "c2")
    before = group.record.assignments
    group.die("c1")
    group.beat("c1", incarnation_id=2)
    assert [m.incarnation_id for m in group.record.members] == [2, 1]
    assert group.record.assignments == before


def test_leave_of_another_incarnation_changes_nothing() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    before = group.record
    group.leave("c1", 2)
    group.leave("c2", 1)
    assert group.record is before
    empty = Scene()
    empty.leave("c1")
    assert empty.group is None


def test_refused_client_creates_no_group() -> None:
    group = Scene()
    transaction = group.apply(lambda t: t.leave("c1", 1))
    assert (group.group, transaction.joined, transaction.is_unchanged()) == (None, {}, True)


def test_join_beyond_the_limit_of_members_is_refused() -> None:
    group = Scene()
    members = tuple(
        Member(f"c{i:04}", 1, "host-of-" + f"c{i:04}", i, "", hash_of(subscribed()))
        for i in range(MEMBERS_MAX)
    )
    group.group = Group(name="g", generation=9, members=members, terms=terms())
    group.live = {member.client_id: 1 for member in members}
    with pytest.raises(Overloaded):
        group.beat("one-more")
    assert group.beat("c0000").kind is ACCEPTED
    group.die("c0000")
    group.beat("one-more")
    assert len(group.record.members) == MEMBERS_MAX


def test_settings_create_a_group_and_ownership_changes_only_without_members() -> None:
    group = Scene(owned=False, policy=SubscriptionPolicy.STAGED)
    assert (group.record.generation, group.record.owned) == (1, False)
    group.update(owned=True)
    group.beat("c1")
    with pytest.raises(GroupInUse) as refused:
        group.update(owned=False)
    assert refused.value.facts == {"group": "g", "members": "1"}
    before = group.record
    group.update(owned=True)
    assert group.record is before, "an update to the present value is allowed"
    group.die("c1")
    group.update(owned=False)
    assert (group.ids, group.record.owned, group.record.policy) == (
        [],
        False,
        SubscriptionPolicy.STAGED,
    )


def test_pause_lasts_until_it_is_resumed() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    group.update(paused=True, pause=Pause("op", "disk", 5))
    group.update(paused=True, pause=Pause("op", "disk", 9))
    assert group.record.pause == Pause("op", "disk", 5)
    group.beat("c2")
    assert group.record.pause == Pause("op", "disk", 5)
    group.update(paused=False)
    assert group.record.pause is None


CLIENTS = ["c1", "c2", "c3", "c4"]
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("beat"),
            st.sampled_from(CLIENTS),
            st.integers(1, 2),
            st.sampled_from(["*", "x", "y"]),
        ),
        st.tuples(st.just("leave"), st.sampled_from(CLIENTS), st.integers(1, 2), st.just("")),
        st.tuples(st.just("die"), st.sampled_from(CLIENTS), st.just(0), st.just("")),
        st.tuples(st.just("maintain"), st.just(""), st.integers(0, 1), st.just("")),
        st.tuples(
            st.just("policy"), st.just(""), st.just(0), st.sampled_from([*SubscriptionPolicy])
        ),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(st.sampled_from(SubscriptionPolicy), STEPS)
def test_one_subscription_is_in_force_and_every_queue_is_assigned(
    policy: SubscriptionPolicy, steps: list[tuple[str, str, int, str | SubscriptionPolicy]]
) -> None:
    group = scene(policy)
    expressions: dict[str, str] = {}
    for kind, client_id, number, value in steps:
        before = group.record
        if kind == "policy":
            group.update(policy=value)
        elif kind == "die":
            group.die(client_id)
        elif kind == "leave":
            group.leave(client_id, number)
        elif kind == "maintain":
            group.maintain(drained=bool(number))
        else:
            try:
                group.beat(client_id, str(value), number)
            except (ClientIdInUse, SubscriptionConflict):
                continue
            expressions[client_id] = str(value)
        _check(group, before, expressions, drained=kind == "maintain" and bool(number))


def _check(scene: Scene, before: Group, expressions: dict[str, str], *, drained: bool) -> None:
    record = scene.record
    assert record.generation == before.generation + (record is not before)
    assert scene.ids == sorted(set(scene.ids))
    assert scene.live.keys() <= set(scene.ids)
    if record is not before:
        assert scene.live.keys() == set(scene.ids), "a change removes members whose lease expired"
    if record.draining and not before.draining and record.policy is SubscriptionPolicy.STAGED:
        assert {subscribed(expressions[c]) for c in scene.ids} == {target_of(record)}, (
            "all members have the new subscription"
        )
    current = record.terms.subscriptions
    assert scene.waiting == {c for c in scene.ids if subscribed(expressions[c]) != current}
    changed = record.subscription_generation - before.subscription_generation
    assert changed == (current != before.terms.subscriptions) or (drained and changed == 1)
    if changed and before.subscription_generation and record.policy is not SubscriptionPolicy.WARN:
        assert before.draining, "the change was decided before"
        assert drained, "no queue had an owner"
    excluded = set() if record.policy is SubscriptionPolicy.WARN else scene.waiting
    may_own = set() if record.draining else set(scene.ids) - excluded
    owners = [o for t in record.assignments for part in t.brokers for o in part.member_numbers]
    assert len(owners) == (5 if record.members else 0)
    assert all(owners) if may_own else not any(owners)
    assert scene.owners == may_own
    counts = [owners.count(owner) for owner in {*owners} - {0}]
    assert not counts or max(counts) - min(counts) <= 1


# ---- the state of a topic when the group subscribed to it


def test_queues_added_later_are_not_part_of_the_beginning() -> None:
    began = (TopicBeginning("flights", 1, (("a", 3), ("b", 2))),)
    group = Scene()
    group.beat("c1")
    assert group.record.beginnings == began
    group.topics = (replace(TOPIC, spread=(QueueSpread("a", 8), QueueSpread("c", 1))),)
    group.leave("c1")
    assert group.record.beginnings == began
    group.beat("c2")
    assert group.record.beginnings == began


def test_recreated_topic_gets_a_new_beginning() -> None:
    group = Scene()
    group.beat("c1")
    group.topics = ()
    group.leave("c1")
    group.topics = (replace(TOPIC, topic_id=2, spread=(QueueSpread("a", 5),)),)
    group.beat("c1", incarnation_id=2)
    assert group.record.beginnings == (TopicBeginning("flights", 2, (("a", 5),)),)


def test_topic_subscribed_later_gets_its_own_beginning() -> None:
    other = replace(TOPIC, name="weather", topic_id=7, spread=(QueueSpread("b", 1),))
    group = Scene((TOPIC, other))
    group.beat("c1")
    group.leave("c1")
    group.beat("c2", terms("*", "flights", "weather"))
    group.maintain(drained=True)
    assert group.record.beginnings == (
        TopicBeginning("flights", 1, (("a", 3), ("b", 2))),
        TopicBeginning("weather", 7, (("b", 1),)),
    )


def test_broadcasting_group_has_no_beginnings() -> None:
    group = Scene()
    group.beat("c1", terms(model="BROADCASTING"))
    assert group.record.beginnings == ()


def test_incarnation_of_another_identity_can_neither_join_as_a_member_nor_leave_for_it() -> None:
    group = scene(SubscriptionPolicy.REJECT)
    member = replace(beat("c1"), owner=11)
    group.apply(lambda transaction: transaction.join(member))
    with pytest.raises(ClientIdInUse):
        group.apply(lambda transaction: transaction.join(replace(member, owner=12)))
    leave = partial(GroupTransaction.leave, client_id="c1", incarnation_id=1, owner=12)
    assert not group.apply(leave).left
    assert [(one.client_id, one.owner) for one in group.record.members] == [("c1", 11)]
    assert group.apply(lambda transaction: transaction.leave("c1", 1, 11)).left == {"c1"}


def test_member_from_before_access_control_gets_its_owner_by_its_next_heartbeat() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    group.apply(lambda transaction: transaction.join(replace(beat("c1"), owner=11)))
    assert [one.owner for one in group.record.members] == [11]


def test_nameserver_without_access_control_keeps_the_recorded_owner_of_a_member() -> None:
    group = scene(SubscriptionPolicy.REJECT)
    group.apply(lambda transaction: transaction.join(replace(beat("c1"), owner=11)))
    changed = replace(beat("c1"), host="another")
    group.apply(lambda transaction: transaction.join(changed))
    assert [(one.host, one.owner) for one in group.record.members] == [("another", 11)]
    assert group.apply(lambda transaction: transaction.leave("c1", 1)).left == {"c1"}


def test_member_with_an_unknown_owner_can_leave_as_its_owner() -> None:
    group = scene(SubscriptionPolicy.REJECT, "c1")
    assert group.apply(lambda transaction: transaction.leave("c1", 1, 11)).left == {"c1"}
