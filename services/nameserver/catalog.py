"""Live, decoded copies of what etcd has: topics, groups, members, nodes; and watches of them.

The catalog only reads. A copy may lag behind etcd, usually by milliseconds; it never goes back. A
decision that is to be written needs etcd's own state (`topic_store`, `group_store`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common import timeouts
from batonmq.errors import Internal, NotServing, Overloaded
from batonmq_server.nameserver.core.groups import Group
from batonmq_server.nameserver.core.topics import Route, Topic, build_route
from batonmq_server.nameserver.group_proto import group_from_stored, group_to_pb
from batonmq_server.nameserver.group_store import is_owned
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.nameserver.topic_proto import topic_from_bytes
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_placements import PLACEMENTS_PREFIX as PLACES
from batonmq_server.runtime.group_records import GroupRecords

log = logging.getLogger(__name__)

CATCH_UP_MS_MAX = 5_000
REMOVED_PREFIX = "removed-broker/"
"""In the mirror of nodes: brokers that are being removed, or were."""
Value = TypeVar("Value")


class Catalog:
    """Topics, groups, live members and nodes as this replica sees them.

    Args:
        nodes: Mirror of `nodes/`; the runtime runs it.
        watchers_max: Limit of open watches; more are refused.

    Attributes:
        mirrors: To be run, each as one task.
        owned: Keys of the queues that have an owner, by group. The catalog is ready without it.
    """

    def __init__(self, etcd: EtcdSession, nodes: EtcdMirror, *, watchers_max: int) -> None:
        self.topic_mirror = EtcdMirror(etcd, "topics/")
        self.group_records = GroupRecords(etcd)
        self.live = EtcdMirror(etcd, "live/")
        self.refused = EtcdMirror(etcd, "refused/")
        self.places = EtcdMirror(etcd, PLACES)
        self.locks = EtcdMirror(etcd, "locks/")
        self._nodes, self._watchers_max = nodes, watchers_max
        self._needed = (
            self.topic_mirror,
            self.group_records.mirror,
            self.live,
            self.refused,
            self.places,
        )
        self.mirrors = (*self._needed, self.locks)
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.owned: dict[str, set[str]] = {}
        self.watcher_count = 0
        self._groups: dict[str, _CatalogGroup] = {}
        self._addresses: dict[str, str] = {}
        self.broker_leaders: dict[str, str] = {}
        """Node id of the leader, by broker."""
        self.gateways: dict[str, str] = {}
        """host:port of every live gateway, by node id."""
        self._rooms: dict[str, str] = {}
        self.removals: dict[str, pb.BrokerRemoval] = {}
        """Brokers that are being removed, or were, by name."""
        self._route_generation = 0
        self._waiting: dict[str, dict[asyncio.Event, None]] = defaultdict(dict)
        self.topic_mirror.on_change.append(self._topics_changed)
        self.group_records.on_change.append(self._groups_changed)
        self.locks.on_change.append(self._locks_changed)
        nodes.on_change.append(self._nodes_changed)
        self._nodes_changed(frozenset())

    def check_ready(self) -> None:
        """Return if the copies are complete.

        Raises:
            NotServing: etcd has not been read completely yet.
        """
        if not all(mirror.revision for mirror in (*self._needed, self._nodes)):
            raise NotServing("the nameserver has not read etcd yet", retry_after_ms=200)

    async def ready(self) -> None:
        """Wait until every copy is complete."""
        for mirror in (*self._needed, self._nodes):
            await mirror.ready()

    async def caught_up(
        self, *, topics: int = 0, groups: int = 0, live: int = 0, places: int = 0, nodes: int = 0
    ) -> None:
        """Wait until the copies have what was written at these revisions.

        Raises:
            NotServing: they do not have it within 5 s. The write stays in force.
        """
        try:
            async with timeouts.timeout(CATCH_UP_MS_MAX / 1000):
                await self.topic_mirror.reached(topics)
                await self.group_records.mirror.reached(groups)
                await self.live.reached(live)
                await self.places.reached(places)
                await self._nodes.reached(nodes)
        except TimeoutError as error:
            raise NotServing(
                "the change is stored, but this replica has not received it from etcd yet",
                retry_after_ms=500,
            ) from error

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of every live broker."""
        return self._addresses

    @property
    def rooms(self) -> dict[str, str]:
        """Machine room of every live broker; empty for none."""
        return self._rooms

    @property
    def placement_rooms(self) -> dict[str, str]:
        """Machine room of every live broker that may get queues: it is not being removed."""
        if not self.removals:
            return self._rooms
        return {name: room for name, room in self._rooms.items() if name not in self.removals}

    def message(self, name: str) -> pb.Group | None:
        """Return the group as a message; shared, so not to be changed."""
        entry = self._groups.get(name)
        return entry.message.group if entry is not None else None

    def watch_message(self, name: str) -> pb.WatchGroupResponse | None:
        """Return the message for watchers; one for all, as it may be large."""
        entry = self._groups.get(name)
        return entry.message if entry is not None else None

    def route(self, topic: Topic) -> Route:
        """Return the route of a topic; its generation rises with topics and brokers."""
        return build_route(topic, self._addresses, self._route_generation)

    def nodes(self) -> tuple[list[pb.Node], int]:
        """Return the live nodes by service and node id, and their generation."""
        decoded = (
            _decoded(key, stored.value, node_from_bytes)
            for key, stored in list(self._nodes.values.items())
            if not key.startswith(REMOVED_PREFIX)
        )
        nodes = [node for node in decoded if node is not None]
        return sorted(nodes, key=lambda n: (n.service, n.node_id)), self._nodes.revision

    @contextmanager
    def watching_topic(self, name: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the topic or of any broker."""
        with self._watching(f"topics/{name}") as changed:
            yield changed

    @contextmanager
    def watching_group(self, name: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the group."""
        with self._watching(f"groups/{name}") as changed:
            yield changed

    @contextmanager
    def _watching(self, key: str) -> Iterator[asyncio.Event]:
        if self.watcher_count >= self._watchers_max:
            raise Overloaded(
                f"{self._watchers_max} watches are open; the limit is {self._watchers_max}",
                remedy="Call another nameserver.",
                retry_after_ms=5_000,
                facts={"limit": self._watchers_max},
            )
        changed = asyncio.Event()
        self._waiting[key][changed] = None
        self.watcher_count += 1
        try:
            yield changed
        finally:
            self.watcher_count -= 1
            del self._waiting[key][changed]
            if not self._waiting[key]:
                del self._waiting[key]

    def _topics_changed(self, names: frozenset[str]) -> None:
        _update_copies(self.topic_mirror, names, self.topics, topic_from_bytes)
        self._routes_changed()
        self._wake(f"topics/{name}" for name in names)

    def _groups_changed(self, names: frozenset[str]) -> None:
        for name in names:
            entry = self._read_group(name)
            if entry is None:
                self._groups.pop(name, None)
                self.groups.pop(name, None)
            else:
                self._groups[name] = entry
                self.groups[name] = entry.group
        self._wake(f"groups/{name}" for name in names)

    def _read_group(self, name: str) -> _CatalogGroup | None:
        """Return the group; None if there is none, or it is unreadable; the log says so."""
        try:
            record = self.group_records.get(name)
            if record is None:
                return None
            message = pb.WatchGroupResponse(group=group_to_pb(record.group))
            return _CatalogGroup(message, group_from_stored(record.group))
        except (Internal, KeyError) as error:
            log.error("group is not served group=%s error=%s", name, error)
            return None

    def _locks_changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            group = key.partition("/")[0]
            stored = self.locks.values.get(key)
            if stored is not None and _decoded(key, stored.value, is_owned):
                self.owned.setdefault(group, set()).add(key)
            elif group in self.owned:
                self.owned[group].discard(key)
                if not self.owned[group]:
                    del self.owned[group]

    def _nodes_changed(self, changed: frozenset[str]) -> None:
        for key in changed:
            if key.startswith(REMOVED_PREFIX):
                self._removal_changed(key)
        nodes = self.nodes()[0]
        brokers = _broker_nodes(nodes)
        self.gateways = {
            node.node_id: node.address for node in nodes if node.service == pb.SERVICE_KIND_GATEWAY
        }
        self._rooms = {name: node.room for name, node in brokers.items()}
        self.broker_leaders = {name: node.node_id for name, node in brokers.items()}
        addresses = {name: node.address for name, node in brokers.items()}
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self._routes_changed()
        self._wake(key for key in self._waiting if key.startswith("topics/"))

    def _removal_changed(self, key: str) -> None:
        stored, broker = self._nodes.values.get(key), key.removeprefix(REMOVED_PREFIX)
        removal = _decoded(key, stored.value, pb.BrokerRemoval.FromString) if stored else None
        if removal is None:
            self.removals.pop(broker, None)
        else:
            self.removals[broker] = removal

    def _routes_changed(self) -> None:
        """Raise the generation to the revision of the change, or by one if that is higher.

        Topics and nodes arrive in two streams, so a change may arrive after one with a higher
        revision. The generations of two replicas may differ then, and so may what they know at the
        same generation.
        """
        revision = max(self.topic_mirror.revision, self._nodes.revision)
        self._route_generation = max(self._route_generation + 1, revision)

    def _wake(self, keys: Iterator[str]) -> None:
        for key in keys:
            for changed in self._waiting.get(key, ()):
                changed.set()


def _broker_nodes(nodes: list[pb.Node]) -> dict[str, pb.Node]:
    """Return a node of every live broker: its leader, or a follower while there is no leader.

    So a route keeps a broker while its next leader is not elected yet.
    """
    by_broker: dict[str, pb.Node] = {}
    for node in nodes:
        if node.service == pb.SERVICE_KIND_STORAGE:
            name = node.replica_set or node.node_id
            by_broker[name] = max(
                by_broker.get(name, node), node, key=lambda n: (n.leader, n.epoch)
            )
    return by_broker


@dataclass(frozen=True, slots=True)
class _CatalogGroup:
    """A group, and its message for watchers."""

    message: pb.WatchGroupResponse
    group: Group


def _update_copies(
    mirror: EtcdMirror,
    keys: frozenset[str],
    decoded: dict[str, Value],
    decode: Callable[[bytes], Value],
) -> None:
    """Bring `decoded` up to date with the mirror."""
    for key in keys:
        stored = mirror.values.get(key)
        value = _decoded(key, stored.value, decode) if stored is not None else None
        if value is None:
            decoded.pop(key, None)
        else:
            decoded[key] = value


def _decoded(key: str, value: bytes, decode: Callable[[bytes], Value]) -> Value | None:
    """Return the decoded value; None, with an error in the log, if it is unreadable."""
    try:
        return decode(value)
    except (DecodeError, KeyError):
        log.error("etcd has an unreadable value key=%s", key)
        return None
