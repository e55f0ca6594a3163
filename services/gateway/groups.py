"""The groups that a gateway is a member of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from batonmq.errors import NotServing
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.group_consumer import GroupConsumer


class Groups:
    """Joins a group when a client consumes for it, and leaves it when no client does any more."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._groups: dict[str, GroupConsumer] = {}
        self._stopping = False

    def __iter__(self) -> Iterator[GroupConsumer]:
        return iter(self._groups.values())

    def find(self, group: str) -> GroupConsumer | None:
        """Return a group that the gateway is a member of."""
        return self._groups.get(group)

    def subscribe(
        self, group: str, subscriptions: Iterable[tuple[str, str]], client_id: str
    ) -> GroupConsumer:
        """Return the group, with these topics and expressions in its subscription.

        Raises:
            NotServing: The gateway stops.
            Refused: An expression is not valid, or another client uses another one.
        """
        if self._stopping:
            raise NotServing("the gateway is stopping", retry_after_ms=500)
        known = self._groups.get(group)
        found = GroupConsumer(group, self._parts) if known is None else known
        for topic, expression in subscriptions:
            found.subscribe(topic, expression, client_id)
        if known is None:
            self._parts.spawn(self._run(found))  # before it is known: the gateway may be starting
            self._groups[group] = found
        return found

    async def stop(self) -> None:
        """Leave all groups when clients have ended what they hold, or it takes too long."""
        self._stopping = True
        leaving = list(self._groups.values())
        for group in leaving:
            group.stop()
        async with asyncio.TaskGroup() as tasks:
            for group in leaving:
                tasks.create_task(group.over.wait())

    async def _run(self, group: GroupConsumer) -> None:
        try:
            await group.run()
        finally:
            del self._groups[group.group]
