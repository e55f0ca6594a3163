"""The record of a consumer group in etcd: one key for each part that changes by itself.

A large group changes by one member at a time, so a change writes the keys of the members that it
changes, and not the whole record. Every change writes the head, `groups/<name>`, so a writer that
compares the revision of the head compares the whole record. The head has a digest of the other
keys: a record with a key that is missing, outdated or superfluous is refused. `stored_group.proto`
has the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, count

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_group_pb2 import (
    StoredAssignedQueues,
    StoredGroup,
    StoredGroupHead,
    StoredGroupSettings,
    StoredTopicQueues,
)
from batonmq.errors import Internal

GROUPS_PREFIX = "groups/"
HEAD, SETTINGS, MEMBERS, QUEUES = "", "settings", "members/", "queues/"
QUEUES_PER_KEY = 256
_REMEDY = (
    "Restore etcd from a backup. Or stop the members of the group, and delete groups/{name} and "
    "all keys below it from etcd: the members join again, and the group has the default settings."
)

Parts = Mapping[str, bytes]
"""The values of a record by key, relative to its head, which is the empty string."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A record, read from its keys.

    Attributes:
        group: The whole record.
        numbers: Number of each member's key, by client id.
    """

    group: StoredGroup
    numbers: Mapping[str, int] = field(default_factory=dict)


def split_key(key: str) -> tuple[str, str]:
    """Return the group's name and the part of a key, relative to `GROUPS_PREFIX`."""
    name, _, part = key.partition("/")
    return name, part


def record_key(name: str, part: str) -> str:
    """Return the key of a part of the record, relative to the cluster."""
    return f"{GROUPS_PREFIX}{name}/{part}" if part else f"{GROUPS_PREFIX}{name}"


def split_record(
    group: StoredGroup, subscription_hash: int, numbers: Mapping[str, int]
) -> dict[str, bytes]:
    """Return the parts of a record.

    Args:
        subscription_hash: Hash of the group's subscription. A member with another one differs.
        numbers: Numbers of the members' keys before the change: members keep theirs.
    """
    client_ids = [member.incarnation.client_id for member in group.members]
    numbers = _numbered(client_ids, numbers)
    parts = {SETTINGS: _settings(group, subscription_hash).SerializeToString()}
    for client_id, member in zip(client_ids, group.members, strict=True):
        parts[f"{MEMBERS}{numbers[client_id]}"] = _without_verdict(member).SerializeToString()
    number_at = [0, *(numbers[client_id] for client_id in client_ids)]
    assigned = [
        number_at[position]
        for topic in group.assignments
        for part in topic.brokers
        for position in part.member_numbers
    ]
    for index, start in enumerate(range(0, len(assigned), QUEUES_PER_KEY)):
        queues = StoredAssignedQueues(members=assigned[start : start + QUEUES_PER_KEY])
        parts[f"{QUEUES}{index}"] = queues.SerializeToString()
    head = StoredGroupHead(name=group.name, generation=group.generation, digest=_digest(parts))
    parts[HEAD] = head.SerializeToString()
    return parts


def read_record(name: str, parts: Parts) -> GroupRecord:
    """Return the record of these parts, whichever version wrote them.

    Raises:
        Internal: the parts are not those of one record.
    """
    try:
        if HEAD not in parts:
            raise ValueError(f"groups/{name} does not exist, and {min(parts)} below it does")
        head = StoredGroupHead.FromString(parts[HEAD])
        if not head.HasField("digest"):
            return GroupRecord(StoredGroup.FromString(parts[HEAD]))
        if head.digest != _digest(parts):
            raise ValueError("the digest of its keys is not that of groups/" + name)
        return _joined(head, parts)
    except (DecodeError, KeyError, IndexError, ValueError) as error:
        raise Internal(
            f"etcd has an unreadable record of group {name}: {error}",
            remedy=_REMEDY.format(name=name),
            facts={"group": name},
        ) from error


def changed_parts(before: Parts, after: Parts) -> tuple[dict[str, bytes], list[str]]:
    """Return the parts to write, always with the head, and the parts to delete."""
    put = {part: value for part, value in after.items() if before.get(part) != value}
    put[HEAD] = after[HEAD]
    return put, sorted(before.keys() - after.keys())


def record_bytes(name: str, parts: Parts) -> int:
    """Return the size of a transaction that writes all parts, with 32 bytes of framing for each."""
    return sum(len(record_key(name, part)) + len(value) + 32 for part, value in parts.items())


def _joined(head: StoredGroupHead, parts: Parts) -> GroupRecord:
    settings = StoredGroupSettings.FromString(parts[SETTINGS])
    group = settings.group
    group.generation = head.generation
    by_number = {
        int(part.removeprefix(MEMBERS)): pb.Member.FromString(value)
        for part, value in parts.items()
        if part.startswith(MEMBERS)
    }
    numbers = {member.incarnation.client_id: number for number, member in by_number.items()}
    ascending = sorted(numbers)
    broadcasting = group.model == pb.MESSAGE_MODEL_BROADCASTING
    for client_id in ascending:
        member = by_number[numbers[client_id]]
        if not broadcasting and member.subscription_hash != settings.subscription_hash:
            member.differs = True
        group.members.append(member)
    position_of = {numbers[client_id]: place for place, client_id in enumerate(ascending, 1)}
    position_of[0] = 0
    queues = (part for part in parts if part.startswith(QUEUES))
    assigned = chain.from_iterable(
        StoredAssignedQueues.FromString(parts[f"{QUEUES}{index}"]).members
        for index, _ in enumerate(queues)
    )
    positions = [position_of[number] for number in assigned]
    start = 0
    for topic in settings.queues:
        brokers = []
        for part in topic.spread:
            end = start + part.queue_count
            brokers.append(
                pb.BrokerAssignment(broker=part.broker, member_numbers=positions[start:end])
            )
            start = end
        group.assignments.append(pb.TopicAssignment(topic=topic.topic, brokers=brokers))
    return GroupRecord(group, numbers)


def _settings(group: StoredGroup, subscription_hash: int) -> StoredGroupSettings:
    settings = StoredGroupSettings(
        group=group,
        subscription_hash=subscription_hash,
        queues=[
            StoredTopicQueues(
                topic=topic.topic,
                spread=[
                    pb.QueueSpread(broker=part.broker, queue_count=len(part.member_numbers))
                    for part in topic.brokers
                ],
            )
            for topic in group.assignments
        ],
    )
    for elsewhere in ("generation", "members", "assignments"):
        settings.group.ClearField(elsewhere)
    return settings


def _without_verdict(member: pb.Member) -> pb.Member:
    """Return the member without what the group's subscription says of it."""
    if not member.differs:
        return member
    plain = pb.Member()
    plain.CopyFrom(member)
    plain.ClearField("differs")
    return plain


def _numbered(client_ids: Iterable[str], before: Mapping[str, int]) -> dict[str, int]:
    """Return the number of each member: the one it had, or the lowest free one."""
    numbers = {client_id: before.get(client_id, 0) for client_id in client_ids}
    taken = set(numbers.values())
    free = (number for number in count(1) if number not in taken)
    return {client_id: number or next(free) for client_id, number in numbers.items()}


def _digest(parts: Parts) -> int:
    """Return the digest of all parts but the head."""
    digest = blake2b(digest_size=8)
    for part in sorted(parts.keys() - {HEAD}):
        value = parts[part]
        digest.update(b"%d %d %s %s" % (len(part), len(value), part.encode(), value))
    return int.from_bytes(digest.digest(), "big")
