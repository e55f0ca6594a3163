"""Who is a member of a group and what the group subscribes to, from the groups in etcd."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.errors import NotMember, NotSubscribed
from services.lockmgr.core.locks import Asker, Incarnation, QueueKey
from services.runtime.mirror import Mirror

PREFIX = "groups/"
WAIT_S = 2.0
"""How long a request may be ahead of what has arrived here from etcd."""


@dataclass(frozen=True, slots=True)
class Group:
    """What the lock manager needs to know of a group."""

    generation: int = 0
    members: frozenset[Incarnation] = frozenset()
    topics: frozenset[str] = frozenset()


class Membership:
    """Answers from a live copy of the groups; whoever is not in it is not a member."""

    def __init__(self, groups: Mirror) -> None:
        self._groups = groups
        self._known: dict[str, tuple[int, Group]] = {}
        self._changed = asyncio.Event()
        groups.on_change.append(self._tell)

    def group(self, name: str) -> Group:
        """The group as it is here; without members if it is unknown."""
        stored = self._groups.values.get(name)
        if stored is None:
            self._known.pop(name, None)
            return Group()
        known = self._known.get(name)
        if known is None or known[0] != stored.mod_revision:
            known = self._known[name] = stored.mod_revision, _group(stored.value)
        return known[1]

    def is_member(self, name: str, incarnation: Incarnation) -> bool:
        """Whether the group has this very incarnation."""
        return incarnation in self.group(name).members

    def check(self, key: QueueKey, asker: Asker) -> None:
        """Refuse who may not ask for the queue.

        Raises:
            NotMember: the asker is none, or believes a generation that is not here.
            NotSubscribed: the group does not subscribe to the topic.
        """
        group, client_id = self.group(key.group), asker.incarnation.client_id
        facts = {"group": key.group, "client_id": client_id}
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

    async def arrive(self, name: str, generation: int) -> None:
        """Wait, but not for long, until the group's `generation` is here."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self.group(name).generation < generation:
                    await self._changed.wait()

    def _tell(self, _: frozenset[str]) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _group(value: bytes) -> Group:
    group = pb.Group.FromString(value)
    return Group(
        generation=group.generation,
        members=frozenset(
            Incarnation(member.incarnation.client_id, member.incarnation.incarnation_id)
            for member in group.members
        ),
        topics=frozenset(subscription.topic for subscription in group.subscriptions),
    )
