"""View of the cluster page: services, replica sets with their followers, and disks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batonmq.admin.replication import Replica
from batonmq.admin.reports import ClusterNodes, DrainedNode, Node

SERVICES = ("nameserver", "lockmgr", "offsets", "storage", "gateway")
_REQUIRED = ("nameserver", "lockmgr", "offsets", "storage")
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 46, 90, 14, 12


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A process, and its copy if it has one.

    Attributes:
        role: leader, follower or standby.
        in_sync: Whether its copy is complete; None for a node without copies.
        lag: Distance to the leader: changes at offsets, bytes at storage.
    """

    node: Node
    role: str
    in_sync: bool | None
    lag: int | None
    lag_ms: int | None
    problem: str
    uptime_ms: int


@dataclass(frozen=True, slots=True)
class DiskRow:
    """The disk and the log of a broker's leader; values of `describe_broker`."""

    broker: str
    state: str
    used_percent: float
    full_in_s: int
    log_bytes: int
    queue_count: int
    scheduled_count: int
    damaged_count: int

    @property
    def level(self) -> str:
        """How bad the state is: good, warn or bad."""
        if self.damaged_count or self.state in ("clean_forcibly", "full"):
            return "bad"
        return "good" if self.state == "ok" else "warn"


@dataclass(frozen=True, slots=True)
class Box:
    """A node in the drawing; `kind` is leader, in-sync or behind."""

    name: str
    text: str
    kind: str
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Arrow:
    """A copy stream in the drawing, from the leader to a follower."""

    x1: int
    y1: int
    x2: int
    y2: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class SetDrawing:
    """Drawing of one replica set: the leader and its followers."""

    service: str
    name: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    width: int
    height: int
    words: str


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the cluster page shows.

    Attributes:
        missing: Services and sets without a leader.
        drained: Nodes that are not elected until an operator brings them back.
        contracts: Contracts of the nodes, oldest first; several while an upgrade is under way.
        notes: What the person may not see, with the permission that is missing.
    """

    name: str
    generation: int
    nodes: tuple[NodeRow, ...]
    sets: tuple[SetDrawing, ...]
    disks: tuple[DiskRow, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    etcd_db_bytes: int
    drained: tuple[DrainedNode, ...]
    contracts: tuple[int, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing needs attention."""
        bad = any(disk.level == "bad" for disk in self.disks)
        behind = any(row.in_sync is False for row in self.nodes)
        return not (self.missing or self.problems or bad or behind)


def cluster_view(
    cluster: ClusterNodes,
    copies: Mapping[tuple[str, str], Replica],
    brokers: Iterable[Mapping[str, Any]],
    problems: Iterable[str],
    notes: Iterable[str],
    *,
    now_unix_ms: int,
) -> ClusterView:
    """Return the view of a cluster.

    Args:
        copies: Replicas by service and node id.
        brokers: Answers of `describe_broker`.
        problems: Errors of services that did not answer.
    """
    rows = [_node_row(node, copies, now_unix_ms) for node in cluster.nodes]
    rows.sort(key=lambda row: (_rank(row.node.service), row.node.replica_set, row.node.node_id))
    led = {(node.service, node.replica_set) for node in cluster.nodes if node.leader}
    services = {service for service, _ in led}
    missing = [service for service in _REQUIRED if service not in services]
    sets = sorted({(n.service, n.replica_set) for n in cluster.nodes if _has_copies(n)})
    missing += [f"{service} {name}" for service, name in sets if (service, name) not in led]
    alarms = [f"etcd has the alarm {alarm}" for alarm in cluster.etcd_alarms]
    stopped = [
        f"{row.node.service} {row.node.node_id}: {row.problem}" for row in rows if row.problem
    ]
    return ClusterView(
        name=cluster.name,
        generation=cluster.generation,
        nodes=tuple(rows),
        sets=tuple(drawing(service, name, rows) for service, name in sets),
        disks=tuple(map(_disk_row, sorted(brokers, key=lambda one: str(one["broker"])))),
        missing=tuple(missing),
        problems=(*alarms, *stopped, *_refused(cluster.nodes), *problems),
        notes=tuple(notes),
        etcd_db_bytes=cluster.etcd_db_bytes,
        drained=cluster.drained,
        contracts=tuple(sorted({node.contract for node in cluster.nodes})),
    )


def _refused(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the nodes whose contract is too old for another one."""
    needed = max(nodes, key=lambda node: node.contract_min, default=None)
    for node in nodes:
        if needed is not None and node.contract < needed.contract_min:
            yield (
                f"{node.service} {node.node_id} has contract {node.contract}, and "
                f"{needed.service} {needed.node_id} works with {needed.contract_min} or later: "
                "upgrade it"
            )


def drawing(service: str, name: str, rows: Sequence[NodeRow]) -> SetDrawing:
    """Return the drawing of one replica set: the leader at the left, its followers at the right."""
    own = [r for r in rows if (r.node.service, r.node.replica_set) == (service, name)]
    leader = next((row for row in own if row.role == "leader"), None)
    followers = [row for row in own if row is not leader]
    lines = max(1, len(followers))
    height = lines * (_BOX_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _MARGIN
    boxes, arrows = list[Box](), list[Arrow]()
    middle = (height - _BOX_HEIGHT) // 2
    if leader is not None:
        boxes.append(_box(leader, _MARGIN, middle))
    for number, row in enumerate(followers):
        box = _box(row, _MARGIN + _BOX_WIDTH + _GAP_X, _MARGIN + number * (_BOX_HEIGHT + _GAP_Y))
        boxes.append(box)
        if leader is not None:
            start_x, end_y = _MARGIN + _BOX_WIDTH, box.y + _BOX_HEIGHT // 2
            start_y = middle + _BOX_HEIGHT // 2
            arrows.append(Arrow(start_x, start_y, box.x, end_y, box.kind, box.text))
    columns = 2 if followers else 1
    width = 2 * _MARGIN + columns * _BOX_WIDTH + (columns - 1) * _GAP_X
    words = _words(leader, followers)
    return SetDrawing(service, name, tuple(boxes), tuple(arrows), width, height, words)


def _words(leader: NodeRow | None, followers: Sequence[NodeRow]) -> str:
    """Return the drawing in words, for viewers that can't see it."""
    if leader is None:
        return "no leader; nodes: " + (", ".join(row.node.node_id for row in followers) or "none")
    if not followers:
        return f"{leader.node.node_id} leads; it has no follower"
    parts = [f"{row.node.node_id} ({'in sync' if row.in_sync else 'behind'})" for row in followers]
    return f"{leader.node.node_id} leads; followers: {', '.join(parts)}"


def _box(row: NodeRow, x: int, y: int) -> Box:
    kind = "leader" if row.role == "leader" else "in-sync" if row.in_sync else "behind"
    text = f"epoch {row.node.epoch}" if kind == "leader" else kind.replace("-", " ")
    if kind == "behind" and row.lag:
        text = f"behind by {row.lag:,}"
    return Box(row.node.node_id, text, kind, x, y, _BOX_WIDTH, _BOX_HEIGHT)


def _node_row(node: Node, copies: Mapping[tuple[str, str], Replica], now_unix_ms: int) -> NodeRow:
    copy = copies.get((node.service, node.node_id))
    role = "leader" if node.leader else "follower" if _has_copies(node) else "standby"
    if node.service in ("nameserver", "gateway"):
        role = "serves"
    return NodeRow(
        node=node,
        role=role,
        in_sync=copy.in_sync if copy else None,
        lag=copy.lag if copy else None,
        lag_ms=copy.lag_ms if copy else None,
        problem=copy.problem if copy else "",
        uptime_ms=max(0, now_unix_ms - node.start_unix_ms),
    )


def _disk_row(broker: Mapping[str, Any]) -> DiskRow:
    return DiskRow(
        broker=broker["broker"],
        state=broker["disk_state"],
        used_percent=broker["disk_used_percent"],
        full_in_s=broker["disk_seconds_until_full"],
        log_bytes=broker["next_position"] - broker["first_position"],
        queue_count=broker["queue_count"],
        scheduled_count=broker["scheduled_count"],
        damaged_count=broker["damaged_batch_count"],
    )


def _has_copies(node: Node) -> bool:
    return node.service in ("offsets", "storage")


def _rank(service: str) -> int:
    return SERVICES.index(service) if service in SERVICES else len(SERVICES)
