"""Members and subscriptions of groups, from the group records and gates in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq._common import timeouts
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import (
    Internal,
    NotAssigned,
    NotMember,
    NotSubscribed,
    SubscriptionDraining,
)
from batonmq_server.lockmgr.core.lock_entry import Requester
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.group_gates import GroupGate, GroupGates
from batonmq_server.runtime.group_records import GroupRecords

log = logging.getLogger(__name__)

Assignees: TypeAlias = tuple[Incarnation | None, ...]

WAIT_S = 2.0
"""A request waits this long for a group record or gate that etcd has not sent yet."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """A group record, as far as the lock manager needs it.

    Attributes:
        assigned: By topic and broker, for each queue: the member to which it is assigned, or None.
        damage: Why the newest record is not readable; None if it is. Then the others are those of
            the last readable record.
    """

    generation: int = 0
    members: frozenset[Incarnation] = frozenset()
    topics: frozenset[str] = frozenset()
    assigned: Mapping[tuple[str, str], Assignees] = field(default_factory=dict)
    damage: Internal | None = None

    def has(self, incarnation: Incarnation) -> bool:
        """Return whether the incarnation is a member; an unknown owner matches every owner."""
        if incarnation in self.members or incarnation._replace(owner=0) in self.members:
            return True
        return not incarnation.owner and any(map(incarnation.matches, self.members))

    def has_queue(self, key: GroupQueue) -> bool:
        """Return whether the queue can be assigned: it exists."""
        return key.queue_id < len(self.assigned.get((key.topic, key.broker), ()))

    def assignee(self, key: GroupQueue) -> Incarnation | None:
        """Return the member to which the queue is assigned."""
        return self.assigned[key.topic, key.broker][key.queue_id] if self.has_queue(key) else None


class GroupMembership:
    """Answers from live copies of the group records and gates. An unknown group has no members.

    While the record of a group is not readable, no queue is granted; present owners keep theirs.

    Args:
        groups, gates: Live copies; the caller runs them.
    """

    def __init__(self, groups: GroupRecords, gates: EtcdMirror) -> None:
        self._groups, self._gates, self._group_gates = groups, gates, GroupGates(gates)
        self._known: dict[str, GroupMembers] = {}
        self._outdated: set[str] = set()
        self._changed = asyncio.Event()
        groups.on_change.append(self._outdated.update)
        groups.on_change.append(self._wake)
        gates.on_change.append(self._wake)

    async def ready(self) -> None:
        """Return once both copies are complete."""
        await self._groups.mirror.ready()
        await self._gates.ready()

    def group(self, name: str) -> GroupMembers:
        """Return the members and topics of a group; none if it is unknown."""
        if name in self._outdated:
            self._outdated.discard(name)
            self._update(name)
        return self._known.get(name, GroupMembers())

    def is_member(self, name: str, incarnation: Incarnation) -> bool:
        """Return whether this incarnation is a member of the group."""
        return self.group(name).has(incarnation)

    def assigns_to_none(self, key: GroupQueue) -> bool:
        """Return whether the newest record of the group assigns the queue to no member."""
        group = self.group(key.group)
        return group.damage is None and group.assignee(key) is None

    def is_draining(self, name: str) -> bool:
        """Return whether the subscription of the group is being changed."""
        gate = self._group_gates.get(name)
        return gate is not None and gate.draining

    def admit(self, key: GroupQueue, requester: Requester) -> GroupGate:
        """Return the group's gate, which must be unchanged when the grant is persisted.

        Raises:
            Internal: the record of the group is not readable.
            NotMember: the requester is not a member, or its generation is not known here.
            ModeChanged: queues of the group have no owners.
            NotSubscribed: the group does not subscribe to the topic.
            SubscriptionDraining: the subscription of the group is being changed.
            NotAssigned: the group can't be assigned the queue: it does not exist.
        """
        group, gate = self.group(key.group), self._group_gates.get(key.group)
        client_id = requester.incarnation.client_id
        facts = {"group": key.group, "client_id": client_id}
        if gate is None:
            raise NotMember(f"group {key.group} is not known", facts=facts)
        self._group_gates.check_owned(key.group)
        if group.damage is not None:
            raise group.damage.with_traceback(None)
        if not group.has(requester.incarnation):
            raise NotMember(f"{client_id} is not a member of {key.group}", facts=facts)
        if requester.generation > group.generation:
            raise NotMember(
                f"generation {requester.generation} of {key.group} is not known, the newest is "
                f"{group.generation}",
                facts=facts,
            )
        if key.topic not in group.topics:
            raise NotSubscribed(
                f"{key.group} does not subscribe to {key.topic}",
                facts={"group": key.group, "topic": key.topic},
            )
        if gate.draining:
            raise SubscriptionDraining(
                f"the subscription of {key.group} is being changed",
                retry_after_ms=500,
                facts={
                    "group": key.group,
                    "subscription_generation": gate.subscription_generation,
                },
            )
        if not group.has_queue(key):
            raise _not_assigned(key, requester, group, "does not have it")
        return gate

    def check_assigned(self, key: GroupQueue, requester: Requester) -> None:
        """Return if the newest record of the group assigns the queue to the requester.

        Raises:
            NotAssigned: it assigns the queue to another member, or to none.
        """
        group = self.group(key.group)
        if not requester.incarnation.matches(assignee := group.assignee(key)):
            name = assignee.client_id if assignee is not None else "no member"
            raise _not_assigned(key, requester, group, f"assigns it to {name}")

    async def wait_for_generation(self, name: str, generation: int) -> None:
        """Return once the group's `generation` and its gate are known, or after `WAIT_S`."""
        await self._until(
            lambda: (
                self.group(name).generation >= generation
                and self._group_gates.get(name) is not None
            )
        )

    async def wait_for_new_gate(self, name: str, gate: GroupGate) -> bool:
        """Return whether the group has another gate than `gate`; wait up to `WAIT_S` for it."""
        await self._until(lambda: self._group_gates.get(name) != gate)
        return self._group_gates.get(name) != gate

    def changed_groups(self) -> AsyncIterator[frozenset[str]]:
        """Yield the names of groups with a changed record; first, all."""
        return self._groups.watch()

    def changed_gates(self) -> AsyncIterator[frozenset[str]]:
        """Yield the names of groups with a changed gate; first, all."""
        return self._gates.watch()

    async def _until(self, holds: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with timeouts.timeout(WAIT_S):
                while not holds():
                    await self._changed.wait()

    def _update(self, name: str) -> None:
        try:
            record = self._groups.get(name)
        except Internal as error:
            log.error("no queue is granted group=%s error=%s", name, error)
            self._known[name] = replace(self._known.get(name, GroupMembers()), damage=error)
            return
        if record is None:
            self._known.pop(name, None)
        else:
            self._known[name] = _members_of(record.group)

    def _wake(self, _: frozenset[str]) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _not_assigned(
    key: GroupQueue, requester: Requester, group: GroupMembers, why: str
) -> NotAssigned:
    return NotAssigned(
        f"{requester.incarnation.client_id} can't own {key}: generation {group.generation} of "
        f"{key.group} {why}",
        retry_after_ms=100,
        facts={"generation": requester.generation, "current": group.generation},
    )


def _members_of(group: StoredGroup) -> GroupMembers:
    members = [
        Incarnation(one.client_id, one.incarnation_id, one.owner)
        for one in (member.incarnation for member in group.members)
    ]
    by_position: Assignees = (None, *members)
    return GroupMembers(
        generation=group.generation,
        members=frozenset(members),
        topics=frozenset(subscription.topic for subscription in group.subscriptions),
        assigned={
            (topic.topic, part.broker): tuple(by_position[at] for at in part.member_numbers)
            for topic in group.assignments
            for part in topic.brokers
        },
    )
