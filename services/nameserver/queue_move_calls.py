"""Carries out MoveQueues and QueryRetiring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.contract import CLOSED_QUEUES_CONTRACT
from batonmq._core.names import check_broker, check_topic, check_user_topic
from batonmq.errors import InvalidArgument
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.queue_moves import even_spread, gains, moved_spread
from batonmq_server.nameserver.core.topics import QueueSpread, Topic, with_rooms
from batonmq_server.nameserver.node_drains import check_by
from batonmq_server.nameserver.removal_proto import obstacle_to_pb
from batonmq_server.nameserver.retirement import RetirementReader
from batonmq_server.nameserver.topic_proto import topic_to_pb
from batonmq_server.nameserver.topic_store import TopicStore, topic_not_found

log = logging.getLogger(__name__)


class QueueMoveCalls:
    """Moves queues of one topic, and says what retiring queues wait for."""

    def __init__(self, catalog: Catalog, store: TopicStore, reader: RetirementReader) -> None:
        self._catalog, self._store, self._reader = catalog, store, reader

    async def move(self, request: pb.MoveQueuesRequest) -> pb.MoveQueuesResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        check_by(request)
        self._catalog.check_ready()
        entry = await self._store.read(name)
        if entry is None:
            raise topic_not_found(name)
        before = [entry[0]]
        change = self._change(request, before)
        after = change(before[0])
        if request.execute:
            after, revision = await self._store.update(name, change)
            await self._catalog.caught_up(topics=revision)
        moved = sum(gains(before[0], after.spread).values())
        if request.execute:
            log.info("queues moved topic=%s queues=%d by=%s", name, moved, request.by)
        return pb.MoveQueuesResponse(
            before=topic_to_pb(before[0]), topic=topic_to_pb(after), moved_count=moved
        )

    async def query_retiring(self, request: pb.QueryRetiringRequest) -> pb.QueryRetiringResponse:
        """See the proto."""
        name = check_topic(request.topic)
        self._catalog.check_ready()
        entry = await self._store.read(name)
        if entry is None:
            raise topic_not_found(name)
        topic, revision = entry
        obstacles = await self._reader.obstacles_of(topic, revision) if topic.shrinking else ()
        return pb.QueryRetiringResponse(obstacles=[obstacle_to_pb(one) for one in obstacles])

    def _change(
        self, request: pb.MoveQueuesRequest, before: list[Topic]
    ) -> Callable[[Topic], Topic]:
        """Return the change of the topic; it puts the topic that it was called with in `before`."""

        def change(topic: Topic) -> Topic:
            before[0] = topic
            brokers = self._catalog.placement_rooms
            if request.from_broker or request.to_broker:
                source = check_broker(request.from_broker)
                target = self._target(request.to_broker, brokers)
                spread = moved_spread(topic, source, target, request.queue_count)
            else:
                spread = even_spread(topic, brokers)
            check_closing(self._catalog, topic, spread)
            return replace(topic, spread=with_rooms(spread, self._catalog.rooms))

        return change

    def _target(self, broker: str, brokers: Collection[str]) -> str:
        """Return the broker if it may get queues.

        Raises:
            InvalidArgument: it is not registered, or is being removed.
        """
        if check_broker(broker) not in brokers:
            state = "being removed" if broker in self._catalog.removals else "not registered"
            raise InvalidArgument(
                f"broker {broker} can't get queues: it is {state}",
                remedy="Name a broker that `baton cluster status` shows.",
                facts={"field": "to_broker"},
            )
        return broker


def check_closing(catalog: Catalog, before: Topic, spread: Collection[QueueSpread]) -> None:
    """Return if every node that has to know brokers without writable queues does.

    Raises:
        InvalidArgument: a node of an earlier version would go on storing messages there.
    """
    closed = {part.broker for part in before.spread if part.closed}
    closing = {part.broker for part in spread if part.closed} - closed
    if not closing:
        return
    check_contracts(catalog, closing)


def check_contracts(catalog: Catalog, closing: Collection[str] = ()) -> None:
    """Return if every node knows what it has to know of brokers that get no more messages.

    These are nameservers; if brokers are closed in a topic, also gateways, which are producers, and
    the nodes of these brokers.

    Raises:
        InvalidArgument: a node is of an earlier version.
    """
    for node in catalog.nodes()[0]:
        concerned = (
            node.service == pb.SERVICE_KIND_NAMESERVER
            or (bool(closing) and node.service == pb.SERVICE_KIND_GATEWAY)
            or (
                node.service == pb.SERVICE_KIND_STORAGE
                and (node.replica_set or node.node_id) in closing
            )
        )
        if concerned and node.contract < CLOSED_QUEUES_CONTRACT:
            raise InvalidArgument(
                f"{node.node_id} is of an earlier version, which does not know brokers that get no "
                "more messages",
                remedy="Upgrade all nameservers, all gateways and all nodes of the broker first.",
                facts={"field": "from_broker"},
            )
