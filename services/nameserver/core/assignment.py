"""Assignment of a group's queues to its members.

A pure function of the members, the queues and the present assignment. The order of the input and
duplicates in it do not matter. All topics of a group are assigned together, so the shares are equal
over the group as a whole and not only per topic.

Source: RocketMQ's AllocateMessageQueue strategies, which assign each topic by itself (deviation).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import md5

VIRTUAL_NODES = 10
"""Points of one member on the hash ring, as in RocketMQ."""


class AssignmentStrategy(Enum):
    """How queues are assigned. All but CONSISTENT_HASH give shares that differ by at most one."""

    STICKY = "STICKY"
    """A member keeps its queues as far as equal shares allow: as few moves as possible."""
    AVERAGE = "AVERAGE"
    """Consecutive queues to one member: 8 queues, 3 members: 0-2, 3-5, 6-7."""
    AVERAGE_BY_CIRCLE = "AVERAGE_BY_CIRCLE"
    """One queue to each member in turn: 8 queues, 3 members: 0 3 6, 1 4 7, 2 5."""
    CONSISTENT_HASH = "CONSISTENT_HASH"
    """By a hash ring: a join or a leave moves only the queues of that member; shares are roughly
    equal."""
    MACHINE_ROOM = "MACHINE_ROOM"
    """Sticky among the members in the broker's machine room; equal shares of each room."""


@dataclass(frozen=True, slots=True)
class AssignableMember:
    """A member that queues can be assigned to.

    Attributes:
        room: Machine room; empty for none.
    """

    client_id: str
    room: str = ""


@dataclass(frozen=True, slots=True)
class AssignableQueue:
    """A queue that can be assigned; the room takes no part in comparisons.

    Attributes:
        room: Machine room of the broker; empty for none.
    """

    topic: str
    broker: str
    queue_id: int
    room: str = field(default="", compare=False)


def assign_queues(
    strategy: AssignmentStrategy,
    members: Sequence[AssignableMember],
    queues: Sequence[AssignableQueue],
    before: Mapping[AssignableQueue, str],
) -> dict[AssignableQueue, str]:
    """Return the client id of the member that each queue is assigned to.

    Args:
        before: Client ids of the present assignment; members and queues in it may be gone.

    Returns:
        Every queue, ascending by topic, broker and queue id; empty if there is no member.
    """
    if not members:
        return {}
    rooms = {member.client_id: member.room for member in members}
    names, ordered = sorted(rooms), sorted(set(queues), key=_order)
    match strategy:
        case AssignmentStrategy.STICKY:
            assigned = _sticky(names, ordered, before)
        case AssignmentStrategy.AVERAGE:
            assigned = _average(names, ordered)
        case AssignmentStrategy.AVERAGE_BY_CIRCLE:
            assigned = {queue: names[i % len(names)] for i, queue in enumerate(ordered)}
        case AssignmentStrategy.CONSISTENT_HASH:
            assigned = _by_hash_ring(names, ordered)
        case AssignmentStrategy.MACHINE_ROOM:
            assigned = _by_room(rooms, ordered, before)
    return {queue: assigned[queue] for queue in ordered}


def _average(names: list[str], queues: list[AssignableQueue]) -> dict[AssignableQueue, str]:
    """Assign consecutive queues to one member.

    Source: RocketMQ AllocateMessageQueueAveragely.
    """
    each, odd = divmod(len(queues), len(names))
    repeated = [name for rank, name in enumerate(names) for _ in range(each + (rank < odd))]
    return dict(zip(queues, repeated, strict=True))


def _sticky(
    names: list[str], queues: list[AssignableQueue], before: Mapping[AssignableQueue, str]
) -> dict[AssignableQueue, str]:
    """Assign equal shares with the fewest moves.

    The members with most queues get the larger shares: no other choice moves fewer queues. A member
    with too many queues gives up some of each topic, and free queues are assigned in turn, so the
    queues of each topic stay spread over the members.
    """
    held: dict[str, list[AssignableQueue]] = {name: [] for name in names}
    free: list[AssignableQueue] = []
    for queue in queues:
        held.get(before.get(queue, ""), free).append(queue)
    each, odd = divmod(len(queues), len(names))
    most_first = sorted(names, key=lambda name: -len(held[name]))
    share = {name: each + (rank < odd) for rank, name in enumerate(most_first)}
    assigned: dict[AssignableQueue, str] = {}
    for name, present in held.items():
        keep_count = min(len(present), share[name])
        for index, queue in enumerate(present):
            # Evenly over the present queues, and so over the topics.
            if (index + 1) * keep_count // len(present) > index * keep_count // len(present):
                assigned[queue] = name
            else:
                free.append(queue)
        share[name] -= keep_count
    takers = [name for turn in range(each + 1) for name in names if turn < share[name]]
    assigned.update(zip(sorted(free, key=_order), takers, strict=True))
    return assigned


def _by_room(
    rooms: Mapping[str, str],
    queues: list[AssignableQueue],
    before: Mapping[AssignableQueue, str],
) -> dict[AssignableQueue, str]:
    """Assign the queues of each room to the members there.

    Queues of no room, and of rooms without members, are assigned to all members.

    Source: RocketMQ AllocateMachineRoomNearby, over the sticky strategy.
    """
    members_by_room: dict[str, list[str]] = defaultdict(list)
    for name in sorted(rooms):
        if rooms[name]:
            members_by_room[rooms[name]].append(name)
    queues_by_room: dict[str, list[AssignableQueue]] = defaultdict(list)
    for queue in queues:
        queues_by_room[queue.room if queue.room in members_by_room else ""].append(queue)
    assigned: dict[AssignableQueue, str] = {}
    for room, part in queues_by_room.items():
        assigned |= _sticky(members_by_room[room] if room else sorted(rooms), part, before)
    return assigned


def _by_hash_ring(names: list[str], queues: list[AssignableQueue]) -> dict[AssignableQueue, str]:
    """Assign each queue to the member of the next point on the ring.

    Source: RocketMQ AllocateMessageQueueConsistentHash and ConsistentHashRouter, bit for bit.
    """
    ring = {_hash(f"{name}-{node}"): name for name in names for node in range(VIRTUAL_NODES)}
    points = sorted(ring)
    return {
        queue: ring[points[bisect_left(points, _hash(_java_name(queue))) % len(points)]]
        for queue in queues
    }


def _hash(key: str) -> int:
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_name(queue: AssignableQueue) -> str:
    """Return what Java's MessageQueue.toString() returns."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"
    )


def _order(queue: AssignableQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker, queue.queue_id
