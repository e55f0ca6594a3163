"""Records of groups in etcd: the group, its gate and its assignment.

Goal: no field is lost when a group is stored and read, and no record exceeds etcd's limit.
Method: round trips of groups with every field set, assignments by hand, and the largest group.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq_server.nameserver.core.assignment import AssignableQueue, AssignmentStrategy
from batonmq_server.nameserver.core.groups import (
    MEMBERS_MAX,
    BrokerAssignment,
    Group,
    Member,
    Pause,
    StagedSubscription,
    Subscription,
    SubscriptionPolicy,
    Terms,
    TopicAssignment,
    TopicBeginning,
    assign_topics,
    assigned_members,
    hash_of,
    is_fully_assigned,
)
from batonmq_server.nameserver.core.member_silence import Silence, next_check_ms, silence_of
from batonmq_server.nameserver.core.topics import QUEUES_MAX, QueueSpread, Topic
from batonmq_server.nameserver.group_proto import gate_of, group_from_stored, group_to_stored
from batonmq_server.nameserver.group_store import RECORD_BYTES_MAX
from batonmq_server.runtime.group_record import (
    HEAD,
    MEMBERS,
    QUEUES,
    record_bytes,
    split_record,
)
from tests.nameserver.transaction_scene import subscribed, terms


def topic(name: str, *spread: QueueSpread) -> Topic:
    return Topic(name=name, topic_id=1, spread=spread, create_unix_ms=1)


FULL = Group(
    name="g",
    generation=77,
    members=(Member("a", 2**64 - 1, "h", 5, "north", 2**63, differs=True), Member("b", 2, "", 6)),
    terms=terms("x", model="BROADCASTING", consume_from="FIRST", order="KEY"),
    subscription_generation=3,
    policy=SubscriptionPolicy.STAGED_LATEST,
    owned=False,
    strategy=AssignmentStrategy.MACHINE_ROOM,
    assignments=(TopicAssignment("flights", (BrokerAssignment("a", (1, 0, 2)),)),),
    staged=StagedSubscription(subscribed("y"), draining=True, since_unix_ms=9),
    pause=Pause("op", "disk", 8),
    beginnings=(TopicBeginning("flights", 7, (("a", 3), ("b", 1))),),
)


@pytest.mark.parametrize(
    "group",
    [
        FULL,
        Group(name="g", generation=1),
        *(replace(FULL, policy=policy) for policy in SubscriptionPolicy),
        *(replace(FULL, strategy=strategy) for strategy in AssignmentStrategy),
        replace(FULL, staged=StagedSubscription(subscribed("y"), draining=False, since_unix_ms=9)),
    ],
)
def test_group_survives_storing(group: Group) -> None:
    stored = group_to_stored(group).SerializeToString()
    assert group_from_stored(StoredGroup.FromString(stored)) == group


def test_record_of_an_earlier_version_has_the_default_settings() -> None:
    group = group_from_stored(StoredGroup(name="g", generation=3))
    assert (group.policy, group.owned, group.strategy) == (
        SubscriptionPolicy.REJECT,
        True,
        AssignmentStrategy.STICKY,
    )


def test_gate_has_no_member_data() -> None:
    gate = gate_of(FULL)
    assert gate == StoredGate(
        subscription_generation=3,
        model=pb.MESSAGE_MODEL_BROADCASTING,
        ownership=pb.OWNERSHIP_OFF,
        bound=True,
        draining=True,
        pause=pb.Pause(by="op", reason="disk", since_unix_ms=8),
    )
    assert gate_of(replace(FULL, members=(), assignments=(), generation=78)) == gate
    assert not gate_of(replace(FULL, policy=SubscriptionPolicy.WARN)).bound


def test_assignment_names_members_by_number() -> None:
    members = tuple(Member(client_id, 1, "", 0) for client_id in ("a", "b"))
    group = Group(name="g", members=members, terms=terms("*", "t", "u"))
    topics = [topic("u", QueueSpread("x", 1)), topic("t", QueueSpread("x", 2), QueueSpread("y", 1))]
    assignments = assign_topics(group, topics, group)
    assert [
        (a.topic, [(p.broker, len(p.member_numbers)) for p in a.brokers]) for a in assignments
    ] == [
        ("t", [("x", 2), ("y", 1)]),
        ("u", [("x", 1)]),
    ]
    assigned = replace(group, assignments=assignments)
    assert sorted(assigned_members(assigned).values()) == ["a", "a", "b", "b"]
    assert assign_topics(assigned, topics, assigned) == assignments, "the assignment stays"


def test_queues_stay_with_their_members_when_numbers_change() -> None:
    members = tuple(Member(client_id, 1, "", 0) for client_id in ("b", "c"))
    group = Group(name="g", members=members, terms=terms("*", "t"))
    topics = [topic("t", QueueSpread("x", 4))]
    before = replace(group, assignments=assign_topics(group, topics, group))
    after = replace(before, members=(Member("a", 1, "", 0), *members))
    after = replace(after, assignments=assign_topics(after, topics, before))
    old_members, new_members = assigned_members(before), assigned_members(after)
    moved = {
        queue: new_members[queue]
        for queue in old_members
        if old_members[queue] != new_members[queue]
    }
    assert list(moved.values()) == ["a"]


def test_machine_room_strategy_keeps_queues_in_the_room() -> None:
    members = (Member("a", 1, "", 0, "north"), Member("b", 1, "", 0, "south"))
    group = Group(
        name="g", members=members, terms=terms("*", "t"), strategy=AssignmentStrategy.MACHINE_ROOM
    )
    spread = (QueueSpread("x", 3, room="south"), QueueSpread("y", 1, room="north"))
    assigned = replace(group, assignments=assign_topics(group, [topic("t", *spread)], group))
    assert assigned_members(assigned) == {
        **{AssignableQueue("t", "x", queue_id): "b" for queue_id in range(3)},
        AssignableQueue("t", "y", 0): "a",
    }


def test_assignments_with_missing_or_deleted_queues_are_not_complete() -> None:
    group = Group(name="g", members=(Member("a", 1, "", 0),), terms=terms("*", "t", "gone"))
    two, three = topic("t", QueueSpread("x", 2)), topic("t", QueueSpread("x", 3))
    assigned = replace(group, assignments=assign_topics(group, [two], group))
    assert not is_fully_assigned(group, {"t": two})
    assert is_fully_assigned(assigned, {"t": two})
    assert not is_fully_assigned(assigned, {"t": three})
    assert not is_fully_assigned(assigned, {"t": two, "gone": topic("gone", QueueSpread("x", 1))})
    assert not is_fully_assigned(assigned, {})
    assert is_fully_assigned(replace(assigned, members=(), assignments=()), {"t": two})


def test_largest_group_fits_into_etcd() -> None:
    """1,000 members with names of usual length, 64 topics of 1,024 queues on 16 brokers each."""
    names = [f"topic-{number:02}-{'x' * 40}" for number in range(64)]
    subscriptions = tuple(Subscription(name, "x" * 2_048) for name in names)
    members = tuple(
        Member(
            f"client-{number:04}-{'x' * 60}",
            2**64 - 1,
            "h" * 60,
            1_800_000_000_000,
            "room-1",
            hash_of(subscriptions),
        )
        for number in range(MEMBERS_MAX)
    )
    assignments = tuple(
        TopicAssignment(
            name,
            tuple(
                BrokerAssignment(f"broker-{broker:02}", (MEMBERS_MAX,) * (QUEUES_MAX // 16))
                for broker in range(16)
            ),
        )
        for name in names
    )
    group = Group(
        name="g",
        generation=2**40,
        members=members,
        terms=Terms(subscriptions=subscriptions),
        assignments=assignments,
        staged=StagedSubscription(subscriptions, draining=True, since_unix_ms=2**40),
    )
    parts = split_record(group_to_stored(group), hash_of(subscriptions), {})
    assert record_bytes(group.name, parts) < RECORD_BYTES_MAX / 2
    assert len(parts[HEAD]) < 32
    assert max(len(parts[part]) for part in parts if part.startswith(MEMBERS)) < 200
    assert max(len(parts[part]) for part in parts if part.startswith(QUEUES)) < 520


@pytest.mark.parametrize(
    ("since_break_ms", "heartbeat_ms", "expected"),
    [
        (4_900, -10, Silence.OVER),  # too close to the break to be distinguished
        (4_900, -200, Silence.SURE),
        (4_900, -9_000, Silence.SURE),
        (4_900, 1, Silence.OVER),
        (4_900, 3_000, Silence.OVER),
        (5_300, -100, Silence.UNKNOWN),  # checked late: check again
        (5_300, -900, Silence.SURE),
        (5_300, 1_000, Silence.OVER),
    ],
)
def test_silence_is_found_from_whole_seconds_of_the_lease(
    since_break_ms: int, heartbeat_ms: int, expected: Silence
) -> None:
    left_s = (30_000 - (since_break_ms - heartbeat_ms)) // 1_000
    assert silence_of(left_s, 30, 0, since_break_ms, since_break_ms + 2) is expected
    assert silence_of(-1, 30, 0, since_break_ms, since_break_ms + 2) is Silence.OVER


def test_check_comes_after_the_grace_period_before_a_full_second() -> None:
    assert next_check_ms(0, 5_000) == 4_900
    assert next_check_ms(0, 1_200) == 1_900
    assert next_check_ms(4_903, 5_000) == 5_900
    assert next_check_ms(5_200, 5_000) == 5_900
