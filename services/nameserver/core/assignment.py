"""Which member of a group gets which queues.

A function of the members, the queues and who has them now: it remembers nothing, and neither the
order nor a repetition of its input matters. All topics of a group are dealt together, so shares
are equal for the group as a whole and not only per topic.

Source: RocketMQ's AllocateMessageQueue strategies, which assign each topic by itself
(deviation).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import md5

VIRTUAL_NODES = 10
"""Places of one member on the hash ring, as in RocketMQ."""


class AssignmentStrategy(Enum):
    """How queues are dealt out. All but CONSISTENT_HASH give shares that differ by one at most."""

    STICKY = "STICKY"
    """Whoever has a queue keeps it, as far as the shares allow: as few moves as possible."""
    AVERAGE = "AVERAGE"
    """Consecutive queues to one member: 8 queues, 3 members: 0-2, 3-5, 6-7."""
    AVERAGE_BY_CIRCLE = "AVERAGE_BY_CIRCLE"
    """In turn, like cards: 8 queues, 3 members: 0 3 6, 1 4 7, 2 5."""
    CONSISTENT_HASH = "CONSISTENT_HASH"
    """By a hash ring: who comes only takes, who goes only leaves; shares are only about equal."""
    MACHINE_ROOM = "MACHINE_ROOM"
    """Sticky among the members of the broker's room; equal shares of each room."""


@dataclass(frozen=True, slots=True)
class AssignableMember:
    """A member that may get queues.

    Attributes:
        room: Machine room; empty for none.
    """

    client_id: str
    room: str = ""


@dataclass(frozen=True, slots=True)
class AssignableQueue:
    """A queue to be dealt; the same queue whatever its room.

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
    """The client id that each queue goes to.

    Args:
        before: Present owners. Members and queues that are gone may be among them.

    Returns:
        Every queue, ascending by topic, broker and index; nothing if there is no member.
    """
    if not members:
        return {}
    rooms = {member.client_id: member.room for member in members}
    names, dealt = sorted(rooms), sorted(set(queues), key=_place)
    match strategy:
        case AssignmentStrategy.STICKY:
            owners = _sticky(names, dealt, before)
        case AssignmentStrategy.AVERAGE:
            owners = _average(names, dealt)
        case AssignmentStrategy.AVERAGE_BY_CIRCLE:
            owners = {queue: names[i % len(names)] for i, queue in enumerate(dealt)}
        case AssignmentStrategy.CONSISTENT_HASH:
            owners = _by_ring(names, dealt)
        case AssignmentStrategy.MACHINE_ROOM:
            owners = _by_room(rooms, dealt, before)
    return {queue: owners[queue] for queue in dealt}


def _average(names: list[str], queues: list[AssignableQueue]) -> dict[AssignableQueue, str]:
    """Source: RocketMQ AllocateMessageQueueAveragely."""
    each, odd = divmod(len(queues), len(names))
    turns = [name for rank, name in enumerate(names) for _ in range(each + (rank < odd))]
    return dict(zip(queues, turns, strict=True))


def _sticky(
    names: list[str], queues: list[AssignableQueue], before: Mapping[AssignableQueue, str]
) -> dict[AssignableQueue, str]:
    """Equal shares, larger by one for those who have most: no other choice keeps more in place.

    Who has too many gives up some of each topic; what is free goes round like cards. So topics
    stay spread over the members.
    """
    held: dict[str, list[AssignableQueue]] = {name: [] for name in names}
    free: list[AssignableQueue] = []
    for queue in queues:
        held.get(before.get(queue, ""), free).append(queue)
    each, odd = divmod(len(queues), len(names))
    by_wealth = sorted(names, key=lambda name: -len(held[name]))
    share = {name: each + (rank < odd) for rank, name in enumerate(by_wealth)}
    owners: dict[AssignableQueue, str] = {}
    for name, has in held.items():
        keeps = min(len(has), share[name])
        for index, queue in enumerate(has):
            if (index + 1) * keeps // len(has) > index * keeps // len(has):
                owners[queue] = name
            else:
                free.append(queue)
        share[name] -= keeps
    takers = [name for turn in range(each + 1) for name in names if turn < share[name]]
    owners.update(zip(sorted(free, key=_place), takers, strict=True))
    return owners


def _by_room(
    rooms: Mapping[str, str], queues: list[AssignableQueue], before: Mapping[AssignableQueue, str]
) -> dict[AssignableQueue, str]:
    """Each room by itself; queues of rooms without members, or of no room, to all members.

    Source: RocketMQ AllocateMachineRoomNearby, over the sticky strategy.
    """
    inhabitants: dict[str, list[str]] = defaultdict(list)
    for name in sorted(rooms):
        if rooms[name]:
            inhabitants[rooms[name]].append(name)
    by_room: dict[str, list[AssignableQueue]] = defaultdict(list)
    for queue in queues:
        by_room[queue.room if queue.room in inhabitants else ""].append(queue)
    owners: dict[AssignableQueue, str] = {}
    for room, part in by_room.items():
        owners |= _sticky(inhabitants[room] if room else sorted(rooms), part, before)
    return owners


def _by_ring(names: list[str], queues: list[AssignableQueue]) -> dict[AssignableQueue, str]:
    """Each queue to the next place on the ring.

    Source: RocketMQ AllocateMessageQueueConsistentHash and ConsistentHashRouter, to the letter.
    """
    ring = {_hash(f"{name}-{node}"): name for name in names for node in range(VIRTUAL_NODES)}
    places = sorted(ring)
    return {
        queue: ring[places[bisect_left(places, _hash(_java_name(queue))) % len(places)]]
        for queue in queues
    }


def _hash(key: str) -> int:
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_name(queue: AssignableQueue) -> str:
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"
    )


def _place(queue: AssignableQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker, queue.queue_id
