"""Who is a member of a group and what the group allows, from the groups and gates in etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import NotMember, NotSubscribed, SubscriptionDraining
from batonmq_server.lockmgr.core.lock_entry import Requester
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.group_gates import GroupGate, GroupGates

PREFIX = "groups/"
WAIT_S = 2.0
"""How long a request may be ahead of what has arrived here from etcd."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """What the lock manager needs to know of a group."""

    generation: int = 0
    members: frozenset[Incarnation] = frozenset()
    topics: frozenset[str] = frozenset()


class Membership:
    """Answers from live copies of the groups and their gates; whoever is not there is no member.

    Args:
        groups, gates: Run by somebody else.
    """

    def __init__(self, groups: EtcdMirror, gates: EtcdMirror) -> None:
        self._groups, self._gates, self._open = groups, gates, GroupGates(gates)
        self._known: dict[str, tuple[int, GroupMembers]] = {}
        self._changed = asyncio.Event()
        groups.on_change.append(self._tell)
        gates.on_change.append(self._tell)

    async def ready(self) -> None:
        """Until everything that is in etcd is here."""
        await self._groups.ready()
        await self._gates.ready()

    def group(self, name: str) -> GroupMembers:
        """The group as it is here; without members if it is unknown."""
        stored = self._groups.values.get(name)
        if stored is None:
            self._known.pop(name, None)
            return GroupMembers()
        known = self._known.get(name)
        if known is None or known[0] != stored.mod_revision:
            known = self._known[name] = stored.mod_revision, _group(stored.value)
        return known[1]

    def is_member(self, name: str, incarnation: Incarnation) -> bool:
        """Whether the group has this very incarnation."""
        return incarnation in self.group(name).members

    def is_draining(self, name: str) -> bool:
        """Whether the subscription of the group is being changed."""
        gate = self._open.get(name)
        return gate is not None and gate.draining

    def admit(self, key: GroupQueue, asker: Requester) -> GroupGate:
        """The gate that a grant to the asker has to find unchanged.

        Raises:
            NotMember: the asker is none, or believes a generation that is not here.
            ModeChanged: nobody owns queues of the group.
            NotSubscribed: the group does not subscribe to the topic.
            SubscriptionDraining: what the group subscribes to is being changed.
        """
        group, gate = self.group(key.group), self._open.get(key.group)
        client_id = asker.incarnation.client_id
        facts = {"group": key.group, "client_id": client_id}
        if gate is None:
            raise NotMember(f"group {key.group} is not known", facts=facts)
        self._open.check_owned(key.group)
        if asker.incarnation not in group.members:
            raise NotMember(f"{client_id} is not a member of {key.group}", facts=facts)
        if asker.generation > group.generation:
            raise NotMember(
                f"generation {asker.generation} of {key.group} is not known, the newest is "
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
        return gate

    async def arrive(self, name: str, generation: int) -> None:
        """Wait, but not for long, until the group's `generation` and its gate are here."""
        await self._until(
            lambda: self.group(name).generation >= generation and self._open.get(name) is not None
        )

    async def passed(self, name: str, gate: GroupGate) -> bool:
        """Wait, but not for long, until the group has another gate here; whether it has."""
        await self._until(lambda: self._open.get(name) != gate)
        return self._open.get(name) != gate

    def changed_groups(self) -> AsyncIterator[frozenset[str]]:
        """Names of groups whose record changes; first, all."""
        return self._groups.watch()

    def changed_gates(self) -> AsyncIterator[frozenset[str]]:
        """Names of groups whose gate changes; first, all."""
        return self._gates.watch()

    async def _until(self, holds: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    await self._changed.wait()

    def _tell(self, _: frozenset[str]) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _group(value: bytes) -> GroupMembers:
    group = pb.Group.FromString(value)
    return GroupMembers(
        generation=group.generation,
        members=frozenset(
            Incarnation(member.incarnation.client_id, member.incarnation.incarnation_id)
            for member in group.members
        ),
        topics=frozenset(subscription.topic for subscription in group.subscriptions),
    )
