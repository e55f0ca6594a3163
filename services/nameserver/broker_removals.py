"""Removals of brokers for good.

nodes/removed-broker/<broker>    nameserver.v1.BrokerRemoval

Every nameserver has the marks in its mirror of nodes, and gives a marked broker no queues.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.names import check_broker
from batonmq.errors import InvalidArgument, NoBroker, NotServing, TopicNotFound
from batonmq_server.nameserver.catalog import REMOVED_PREFIX, Catalog
from batonmq_server.nameserver.core.queue_moves import gains, spread_off
from batonmq_server.nameserver.core.removal_obstacle import RemovalObstacle, compacted_obstacle
from batonmq_server.nameserver.core.topics import QueueSpread, Topic, with_rooms
from batonmq_server.nameserver.node_drains import check_by
from batonmq_server.nameserver.queue_move_calls import check_closing, check_contracts
from batonmq_server.nameserver.removal_proto import obstacle_to_pb
from batonmq_server.nameserver.retirement import RetirementReader
from batonmq_server.nameserver.topic_proto import spread_to_pb, topic_from_bytes
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from batonmq_server.runtime.replication.replica_set import decode_record

log = logging.getLogger(__name__)

MOVES_MAX = 200
"""Topics that one call moves; the caller repeats the call."""


class BrokerRemovals:
    """Carries out RemoveBroker."""

    def __init__(
        self, etcd: EtcdSession, catalog: Catalog, store: TopicStore, reader: RetirementReader
    ) -> None:
        self._etcd, self._catalog, self._store, self._reader = etcd, catalog, store, reader

    async def remove(self, request: pb.RemoveBrokerRequest) -> pb.RemoveBrokerResponse:
        """See the proto."""
        broker = check_broker(request.broker)
        check_by(request)
        self._catalog.check_ready()
        if request.cancel:
            return await self._cancel(request)
        removal = self._catalog.removals.get(broker)
        forgotten = removal is not None and bool(removal.forgotten_unix_ms)
        if forgotten and not self._topics_on(broker):
            return pb.RemoveBrokerResponse(removal=removal)
        self._check(broker)
        if request.execute and removal is None:
            await self._mark(request)
        moves = await self._move_off(request)
        nodes_up = self._nodes_up(broker)
        obstacles = await self._obstacles(broker, up=bool(nodes_up))
        if request.execute and not obstacles and not nodes_up and not forgotten:
            await self._forget(broker)
        return pb.RemoveBrokerResponse(
            moves=moves,
            obstacles=[obstacle_to_pb(one) for one in obstacles],
            nodes_up=nodes_up,
            removal=self._catalog.removals.get(broker),
        )

    def _check(self, broker: str) -> None:
        """Return if the broker exists, and others can take its queues.

        Raises:
            InvalidArgument: there is no such broker, or a node is of an earlier version.
            NoBroker: no other broker takes queues.
        """
        known = self._nodes_up(broker) or self._topics_on(broker)
        if not known and broker not in self._catalog.removals:
            raise InvalidArgument(
                f"{broker} is not a broker of this cluster",
                remedy="Name a broker that `baton cluster status` shows.",
                facts={"field": "broker"},
            )
        others = self._catalog.placement_rooms.keys() - {broker}
        if not others:
            raise NoBroker(
                f"no broker would be left to take queues without {broker}",
                remedy="Start another broker first.",
                facts={"broker": broker},
            )
        check_contracts(self._catalog)
        for topic in self._topics_on(broker):
            if topic.compaction is None:
                check_closing(self._catalog, topic, spread_off(topic, broker, others))

    async def _mark(self, request: pb.RemoveBrokerRequest) -> None:
        """Write the mark, unless the last brokers are being removed at the same time.

        Raises:
            NoBroker: no other broker takes queues any more.
        """
        key = self._etcd.key("nodes", REMOVED_PREFIX.rstrip("/"), request.broker)
        unix_ms = self._etcd.clock.unix_ms()
        mark = pb.BrokerRemoval(broker=request.broker, unix_ms=unix_ms, by=request.by)
        revision = await self._etcd.txn(
            compare=[Compare(key, create_revision=0)], put=[Put(key, mark.SerializeToString())]
        )
        if revision is None:
            raise NotServing(f"{request.broker} was changed by another call", retry_after_ms=500)
        await self._catalog.caught_up(nodes=revision)
        if not self._catalog.placement_rooms:
            await self._etcd.txn(compare=[Compare(key, mod_revision=revision)], delete=[key])
            raise NoBroker(
                f"every other broker is being removed, so {request.broker} is needed",
                remedy="Start another broker, or cancel the removal of another one.",
                facts={"broker": request.broker},
            )
        log.info("broker is being removed broker=%s by=%s", request.broker, request.by)

    async def _move_off(self, request: pb.RemoveBrokerRequest) -> list[pb.QueueMove]:
        """Move the writable queues of the broker, or only return the moves."""
        moves: list[pb.QueueMove] = []
        broker, revision = request.broker, 0

        def change(topic: Topic) -> Topic:
            before[0] = topic
            spread = spread_off(topic, broker, self._catalog.placement_rooms)
            return replace(topic, spread=with_rooms(spread, self._catalog.rooms))

        for topic in self._topics_on(broker):
            if not _part(topic, broker).writable_count or topic.compaction is not None:
                continue
            before = [topic]
            if not request.execute:
                after = change(topic)
            elif len(moves) < MOVES_MAX:
                try:
                    after, revision = await self._store.update(topic.name, change)
                except TopicNotFound:  # deleted meanwhile
                    continue
            else:
                break
            lost = _part(before[0], broker).writable_count
            to = [
                QueueSpread(name, count) for name, count in gains(before[0], after.spread).items()
            ]
            moves.append(
                pb.QueueMove(
                    topic=topic.name, queue_count=lost, to=[spread_to_pb(one) for one in to]
                )
            )
        if revision:
            await self._catalog.caught_up(topics=revision)
            log.info("queues moved off broker=%s topics=%d by=%s", broker, len(moves), request.by)
        return moves

    async def _obstacles(self, broker: str, *, up: bool) -> list[RemovalObstacle]:
        topics = self._topics_on(broker)
        if not up and not topics:
            return []
        compacted = [compacted_obstacle(one, broker) for one in topics if one.compaction]
        return compacted + await self._reader.obstacles_on(broker)

    async def _forget(self, broker: str) -> None:
        """Remove the records of a broker without queues and live nodes; note it in the mark.

        Raises:
            NotServing: the records are still in use.
        """
        etcd = self._etcd
        key = etcd.key("nodes", REMOVED_PREFIX.rstrip("/"), broker)
        record_key = etcd.key("replicas", "storage", broker)
        election = etcd.key("elections", "storage", broker)
        mark, record = await etcd.get(key), decode_record(await etcd.get(record_key))
        drains, _ = await etcd.get_prefix(f"{election}/")
        if mark is None:
            return
        await self._check_no_queues(broker)
        removal = pb.BrokerRemoval.FromString(mark.value)
        removal.forgotten_unix_ms = etcd.clock.unix_ms()
        absent = [
            election,
            *(etcd.key("nodes", "storage", one) for one in {broker, *record.in_sync}),
        ]
        revision = await etcd.txn(
            compare=[
                Compare(key, mod_revision=mark.mod_revision),
                *(Compare(one, create_revision=0) for one in absent),
            ],
            put=[Put(key, removal.SerializeToString())],
            delete=[record_key, *(one.key for one in drains)],
        )
        if revision is None:
            raise NotServing(
                f"the records of {broker} can't be removed yet: a node of it is up, or the lease "
                "of its last leader has not expired",
                remedy="Stop its processes, and try again in some seconds.",
                retry_after_ms=1_000,
            )
        await self._catalog.caught_up(nodes=revision)
        log.info("broker removed broker=%s", broker)

    async def _check_no_queues(self, broker: str) -> None:
        """Return if etcd has no topic with queues on the broker; the mirror may lag.

        Raises:
            NotServing: a nameserver that did not have the mark yet has given it some.
        """
        entries, _ = await self._etcd.get_prefix("topics/")
        for entry in entries:
            topic = topic_from_bytes(entry.value)
            if any(part.broker == broker for part in topic.spread):
                raise NotServing(
                    f"{broker} was given queues of topic {topic.name} by another call",
                    retry_after_ms=500,
                )

    async def _cancel(self, request: pb.RemoveBrokerRequest) -> pb.RemoveBrokerResponse:
        broker = request.broker
        key = self._etcd.key("nodes", REMOVED_PREFIX.rstrip("/"), broker)
        stored = await self._etcd.get(key)
        removal = pb.BrokerRemoval.FromString(stored.value) if stored is not None else None
        if stored is None or removal is None or removal.forgotten_unix_ms:
            state = "was removed for good" if stored is not None else "is not being removed"
            raise InvalidArgument(
                f"{broker} {state}",
                remedy="Use another name for a new broker: groups keep progress on the old queues."
                if stored is not None
                else "",
                facts={"field": "broker"},
            )
        if request.execute:
            revision = await self._etcd.txn(
                compare=[Compare(key, mod_revision=stored.mod_revision)], delete=[key]
            )
            if revision is None:
                raise NotServing(f"{broker} was changed by another call", retry_after_ms=500)
            await self._catalog.caught_up(nodes=revision)
            log.info("removal of a broker cancelled broker=%s by=%s", broker, request.by)
        return pb.RemoveBrokerResponse(
            nodes_up=self._nodes_up(broker), removal=self._catalog.removals.get(broker)
        )

    def _nodes_up(self, broker: str) -> list[str]:
        return sorted(
            node.node_id
            for node in self._catalog.nodes()[0]
            if node.service == pb.SERVICE_KIND_STORAGE
            and (node.replica_set or node.node_id) == broker
        )

    def _topics_on(self, broker: str) -> list[Topic]:
        return [
            topic
            for _, topic in sorted(self._catalog.topics.items())
            if any(part.broker == broker for part in topic.spread)
        ]


def _part(topic: Topic, broker: str) -> QueueSpread:
    """Return the queues of a topic on a broker; none if it has none there any more."""
    return next((one for one in topic.spread if one.broker == broker), QueueSpread(broker, 0))
