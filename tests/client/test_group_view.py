"""The view that a member has of its group's record.

Goal: each queue is in the view of the member that the record assigns it to, and in no other;
filters, mode and pause are those of the record.
Method: hand-made records; with Hypothesis, the views of all members together are the assignment.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._consumer.group_view import GroupView, assigned_queues
from batonmq._core.queues import QueueRef
from batonmq._core.subscription import TagFilter

TOPICS = ("flights", "orders")
BROKERS = ("broker-a", "broker-b")
QUEUES = [QueueRef(t, b, q) for t in TOPICS for b in BROKERS for q in range(3)]


def incarnation(client_id: str, number: int = 1) -> queue_pb2.Incarnation:
    return queue_pb2.Incarnation(client_id=client_id, incarnation_id=number)


def record(members: list[str], owners: dict[QueueRef, str]) -> pb.Group:
    """Return a record that assigns queues by `owners`; other names than members get no queue."""
    member_numbers = {client_id: number for number, client_id in enumerate(members, 1)}

    def assignment_of(topic: str, broker: str) -> pb.BrokerAssignment:
        mine = [q for q in QUEUES if (q.topic, q.broker) == (topic, broker)]
        return pb.BrokerAssignment(
            broker=broker,
            member_numbers=[member_numbers.get(owners.get(queue, ""), 0) for queue in mine],
        )

    return pb.Group(
        name="g",
        generation=7,
        members=[pb.Member(incarnation=incarnation(client_id)) for client_id in members],
        subscriptions=[pb.Subscription(topic=topic, expression="*") for topic in TOPICS],
        subscription_generation=3,
        assignments=[
            pb.TopicAssignment(topic=t, brokers=[assignment_of(t, b) for b in BROKERS])
            for t in TOPICS
        ],
    )


@given(st.dictionaries(st.sampled_from(QUEUES), st.sampled_from(["a", "b", "c"])))
def test_every_member_finds_exactly_its_assigned_queues(owners: dict[QueueRef, str]) -> None:
    group = record(["a", "b", "c"], owners)
    for me in ("a", "b", "c"):
        mine = {queue for queue, owner in owners.items() if owner == me}
        assert set(assigned_queues(group, incarnation(me))) == mine
        assert GroupView.of(group, incarnation(me)).assigned == mine


def test_unassigned_queues_belong_to_no_member() -> None:
    group = record(["a"], {})
    assert list(assigned_queues(group, incarnation("a"))) == []
    assert list(assigned_queues(group, incarnation("stranger"))) == []


def test_another_incarnation_of_the_client_id_has_no_queues() -> None:
    group = record(["a"], dict.fromkeys(QUEUES, "a"))
    other = GroupView.of(group, incarnation("a", 2))
    assert not other.member
    assert other.assigned == frozenset()
    assert GroupView.of(group, incarnation("a")).member


def test_queue_of_a_topic_outside_of_the_subscription_is_ignored() -> None:
    group = record(["a"], dict.fromkeys(QUEUES, "a"))
    del group.subscriptions[1]
    view = GroupView.of(group, incarnation("a"))
    assert {queue.topic for queue in view.assigned} == {"flights"}


def test_filters_mode_and_pause_are_those_of_the_record() -> None:
    group = record(["a"], {})
    group.subscriptions[0].expression = "paid||sent"
    seen = GroupView.of(group, incarnation("a"))
    assert (seen.generation, seen.subscription_generation) == (7, 3)
    assert seen.filters == {
        "flights": TagFilter(frozenset({"paid", "sent"})),
        "orders": TagFilter(None),
    }
    assert (seen.owned, seen.paused) == (True, ())
    group.ownership = pb.OWNERSHIP_OFF
    group.pause.by, group.pause.reason = "ann", "deploy"
    seen = GroupView.of(group, incarnation("a"))
    assert (seen.owned, seen.paused) == (False, ("ann", "deploy"))
