"""Records of groups as etcd has them, for tests that write them."""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq_server.runtime.group_record import HEAD, changed_parts, read_record, split_record

MINE, OTHER = 2**63, 7
"""Hashes of the group's subscription and of another one."""


def member(client_id: str, subscription_hash: int = MINE, incarnation_id: int = 1) -> pb.Member:
    return pb.Member(
        incarnation=queue_pb2.Incarnation(client_id=client_id, incarnation_id=incarnation_id),
        host=f"host-of-{client_id}",
        join_unix_ms=5,
        room="north",
        subscription_hash=subscription_hash,
        differs=subscription_hash != MINE,
    )


def group(
    members: Iterable[pb.Member], assigned: Iterable[int] = (), generation: int = 1
) -> StoredGroup:
    """Return a group with two topics: the first queue is of the one, the others of the other."""
    first, *others = [*assigned, 0]
    return StoredGroup(
        name="g",
        generation=generation,
        members=members,
        subscriptions=[pb.Subscription(topic=topic, expression="*") for topic in ("a", "b")],
        subscription_generation=3,
        policy=pb.SUBSCRIPTION_POLICY_WARN,
        pause=pb.Pause(by="op", reason="disk", since_unix_ms=8),
        assignments=[
            assignment("a", {"x": [first]}),
            assignment("b", {"x": others[:100], "y": others[100:]}),
        ],
        beginnings=[pb.TopicBeginning(topic="a", topic_id=7)],
        creator=9,
    )


def assignment(topic: str, brokers: dict[str, list[int]]) -> pb.TopicAssignment:
    return pb.TopicAssignment(
        topic=topic,
        brokers=[
            pb.BrokerAssignment(broker=name, member_numbers=numbers)
            for name, numbers in brokers.items()
        ],
    )


class Stored:
    """The keys of a record, as etcd has them."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}

    def write(self, written: StoredGroup) -> tuple[set[str], set[str]]:
        """Write a record; return the keys that were written, without the head, and deleted."""
        numbers = read_record("g", self.parts).numbers if self.parts else {}
        put, delete = changed_parts(self.parts, split_record(written, MINE, numbers))
        self.parts |= put
        for part in delete:
            del self.parts[part]
        assert read_record("g", self.parts).group == written
        return put.keys() - {HEAD}, {*delete}


def ids(count: int) -> list[str]:
    return [f"member-{number:04}" for number in range(count)]
