"""`baton cluster …`: processes, brokers and replicas of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import click

from batonmq._common.clock import Clock
from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import Connect
from batonmq.admin.admin import Admin
from batonmq.admin.diagnostics import describe_broker
from batonmq.admin.replication import ElectionPlan, Replica, elect, replicas
from batonmq.admin.reports import ClusterNodes, Node
from batonmq.cli.change_options import by_option, check_can_ask, confirm, yes_option
from batonmq.cli.command_classes import FloatRange, LazyCommand, LazyGroup, argument
from batonmq.cli.output import Columns, Item, Minor, counted, duration, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import BatonError

commands = LazyGroup(
    "cluster",
    help="Show, check and change the nodes of the cluster.",
    no_args_is_help=True,
    lazy={
        "check": LazyCommand(
            "batonmq.cli.cluster_check:check",
            "Check the cluster, and say what to do about each finding. Changes nothing.",
        ),
        "config": LazyCommand(
            "batonmq.cli.cluster_check:config",
            "Show settings that differ between nodes of one service. Secrets are not compared.",
        ),
        "drain": LazyCommand(
            "batonmq.cli.cluster_drain:drain",
            "Drain a storage or offsets node for maintenance: it hands over its leadership.",
        ),
        "undrain": LazyCommand(
            "batonmq.cli.cluster_drain:undrain",
            "Allow a drained node to be elected again.",
        ),
        "remove-broker": LazyCommand(
            "batonmq.cli.queue_moves:remove",
            "Remove a broker for good: move its queues to the others, and wait until it holds "
            "nothing.",
        ),
        "spread-leaders": LazyCommand(
            "batonmq.cli.leader_spread:spread_leaders",
            "Move leaders of storage and offsets so that each host has about as many.",
        ),
        "spread-groups": LazyCommand(
            "batonmq.cli.group_placement:spread_groups",
            "Move each group to the offsets set that a new group of its name would get.",
        ),
    },
)

SERVICES = ("lockmgr", "nameserver", "offsets", "storage")
_HEALTH_TIMEOUT_S = 2.0
_ALARMS = {
    "NOSPACE": "it accepts no writes. Compact and defragment it, then disarm the alarm",
    "CORRUPT": "the data of a member are damaged. Replace that member",
}


def _lag_text(item: Item) -> str | None:
    """Return a lag as text: in changes for offsets, in bytes of the log for storage."""
    if item["lag"] is None:
        return None
    return f"{item['lag']}B" if item["service"] == "storage" else str(item["lag"])


def _role(item: Item) -> str:
    return f"{item['role']}, drained" if item["drained"] else str(item["role"])


def _span(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else duration(milliseconds)


_COLUMNS: Columns = {
    "SERVICE": "service",
    "NODE": "node_id",
    "ADDRESS": "address",
    "ROLE": _role,
    "EPOCH": Minor("epoch"),
    "IN-SYNC": lambda item: None if item["in_sync"] is None else _yes(item["in_sync"]),
    "LAG": _lag_text,
    "LAG-TIME": Minor(lambda item: _span(item["lag_ms"])),
    "HEALTH": "health",
    "UPTIME": Minor(lambda item: _span(item["uptime_ms"])),
    "METRICS": Minor("metrics_address"),
}
_MORE_COLUMNS: Columns = {
    "SET": "replica_set",
    "POSITION": "position",
    "STARTED": lambda item: wall_time(item["start_unix_ms"]),
}
_ELECTION_COLUMNS: Columns = {
    "NODE": "node_id",
    "EPOCH": Minor("epoch"),
    "POSITION": "position",
    "WOULD-LEAD": lambda item: _yes(item["would_lead"]),
}
_BROKER_COLUMNS: Columns = {
    "BROKER": "broker",
    "DISK": "disk_state",
    "USED": lambda item: _percent(item["disk_used_percent"]),
    "FULL-IN": lambda item: _until(item["disk_seconds_until_full"]),
    "LOG-BYTES": Minor(lambda item: _extent(item, "first_position", "next_position")),
    "QUEUES": "queue_count",
    "MSG-IN/S": lambda item: _rounded(item["appended_per_s"]),
    "LONG-POLLS": Minor("long_poll_count"),
    "SCHEDULED": Minor("scheduled_count"),
    "DAMAGED": "damaged_batch_count",
}
_MORE_BROKER_COLUMNS: Columns = {
    "ADDRESS": "address",
    "FIRST-POSITION": "first_position",
    "NEXT-POSITION": "next_position",
    "SYNCED-POSITION": "synced_position",
    "SCRUBBED-POSITION": "scrubbed_position",
    "APPENDED": "appended_count",
    "BYTES-IN/S": lambda item: _rounded(item["log_bytes_per_s"]),
}
_REPLICA_COLUMNS: Columns = {
    "SERVICE": "service",
    "SET": "replica_set",
    "NODE": "node_id",
    "ROLE": _role,
    "EPOCH": Minor("epoch"),
    "IN-SYNC": lambda item: None if item["in_sync"] is None else _yes(item["in_sync"]),
    "POSITION": "position",
    "LAG": "lag",
    "LAG-TIME": Minor(lambda item: _span(item["lag_ms"])),
}


@commands.command()
@cluster_session
def status(session: CommandSession) -> None:
    """Show every registered process, and whether it is healthy.

    For offsets and storage also whether a replica is in sync, and its lag behind the leader: LAG
    counts changes for offsets, and bytes of the log for storage. Exit status 1 if a process is not
    healthy, a service has no leader, a replica can't follow its leader, or etcd has an alarm.
    """
    session.run(_status(session))


async def _status(session: CommandSession) -> None:
    async with session.admin() as admin:
        cluster = await admin.cluster()
        copies, problems = await replicas(admin, cluster.nodes)
    connect, now_unix_ms = admin.directory.connect, Clock().unix_ms()
    async with asyncio.TaskGroup() as tasks:
        checks = [
            tasks.create_task(_check_health(node, connect, now_unix_ms)) for node in cluster.nodes
        ]
    drained = {(one.service, one.node_id) for one in cluster.drained}
    nodes = [
        task.result()
        | _copy_of(node, copies)
        | {"drained": (node.service, node.node_id) in drained}
        for node, task in zip(cluster.nodes, checks, strict=True)
    ]
    problems += _stuck(copies)
    led = {(node.service, node.replica_set) for node in cluster.nodes if node.leader}
    services = {service for service, _ in led}
    missing = [service for service in SERVICES if service not in services]
    sets = {
        (n.service, n.replica_set) for n in cluster.nodes if n.service in ("offsets", "storage")
    }
    missing += [f"{service} {name}" for service, name in sorted(sets - led) if service in services]
    session.output.detail(
        {
            "name": cluster.name,
            "generation": cluster.generation,
            "nodes": nodes,
            "missing": missing,
            "etcd_alarms": list(cluster.etcd_alarms),
            "etcd_db_bytes": cluster.etcd_db_bytes,
            "drained": [asdict(one) for one in cluster.drained],
            "removals": [asdict(one) for one in cluster.removals],
        },
        nodes,
        _COLUMNS,
        _MORE_COLUMNS,
    )
    _note_drained(session, cluster)
    session.output.problems(
        [f"etcd has the alarm {alarm}: {_ALARMS.get(alarm, '')}" for alarm in cluster.etcd_alarms]
        + [f"{service} has no leader" for service in missing]
        + [
            f"{node['service']} {node['node_id']} is {node['health']}"
            for node in nodes
            if node["health"] != SERVING
        ]
        + problems
    )


def _role_of(node: Node) -> str:
    """Return the role of a node: followers have a copy of the leader's data, standbys have none."""
    if node.leader:
        return "leader"
    return "follower" if node.service in ("offsets", "storage") else "standby"


async def _check_health(node: Node, connect: Connect, now_unix_ms: int) -> dict[str, Any]:
    async with connect(node.address) as channel:
        health = await ask_health(channel, timeout_s=_HEALTH_TIMEOUT_S)
    return asdict(node) | {
        "role": _role_of(node),
        "health": health,
        "uptime_ms": now_unix_ms - node.start_unix_ms if health == SERVING else None,
    }


@commands.command()
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=FloatRange(min=0, max=3_600),
    help="Measure rates over this time; 0: no rates.",
)
@cluster_session
def brokers(session: CommandSession, seconds: float) -> None:
    """Show the storage nodes: disk, log, rates, waiting pulls, scheduled and damaged batches.

    Exit status 1 if a node does not answer.
    """
    session.run(_brokers(session, seconds))


async def _brokers(session: CommandSession, seconds: float) -> None:
    now_s = asyncio.get_running_loop().time
    async with session.admin() as admin:
        nodes = _leaders((await admin.cluster()).nodes)
        begin_s = now_s()
        before, problems = await _described(admin, nodes)
        after = before
        if seconds and before:
            await asyncio.sleep(seconds)
            after, problems = await _described(admin, nodes)
        span_s = now_s() - begin_s
    items = [
        {"address": node.address}
        | after[node.replica_set]
        | {
            "appended_per_s": _rate(before, after, node.replica_set, "appended_count", span_s),
            "log_bytes_per_s": _rate(before, after, node.replica_set, "next_position", span_s),
        }
        for node in nodes
        if node.replica_set in after
    ]
    session.output.items(items, _BROKER_COLUMNS, _MORE_BROKER_COLUMNS)
    session.output.problems(problems)


@commands.command()
@cluster_session
def replication(session: CommandSession) -> None:
    """Show leaders, followers, epochs or terms, and the position of each replica.

    POSITION and LAG count changes for offsets, and bytes of the log for storage. LAG of a node
    without followers is what is not synced to disk yet. lockmgr and nameserver have no position,
    because their state is in etcd.
    """
    session.run(_replication(session))


async def _replication(session: CommandSession) -> None:
    async with session.admin() as admin:
        cluster = await admin.cluster()
        nodes = cluster.nodes
        brokers, problems = await _described(admin, _leaders(nodes))
        copies, unanswered = await replicas(admin, nodes)
    up = {(node.service, node.node_id) for node in nodes}
    problems += [*unanswered, *_stuck(copies)]
    problems += [f"{service} {name} is down" for service, name in sorted(copies.keys() - up)]
    drained = {(one.service, one.node_id) for one in cluster.drained}
    items = [
        {**_item(node, brokers, copies), "drained": (node.service, node.node_id) in drained}
        for node in nodes
    ]
    session.output.items(items, _REPLICA_COLUMNS)
    _note_drained(session, cluster)
    session.output.problems(problems)


def _note_drained(session: CommandSession, cluster: ClusterNodes) -> None:
    for removal in cluster.removals:
        if not removal.forgotten_unix_ms:
            session.output.note(
                f"broker {removal.broker} is being removed, since {wall_time(removal.unix_ms)} by "
                f"{removal.by}; see: baton cluster remove-broker {removal.broker} --dry-run"
            )
    for one in cluster.drained:
        session.output.note(
            f"{one.service} {one.node_id} is drained: by {one.by}, {wall_time(one.unix_ms)}; "
            f"end it with: baton cluster undrain {one.node_id}"
        )


def _leaders(nodes: Iterable[Node]) -> list[Node]:
    """Return the leader of each broker, by the newest epoch."""
    storage = [node for node in nodes if node.service == "storage"]
    newest = {
        node.replica_set: node for node in sorted(storage, key=lambda n: n.epoch) if node.leader
    }
    return sorted(newest.values(), key=lambda node: node.replica_set)


@commands.command("elect")
@argument("node_id", metavar="NODE", help="Node to elect.")
@click.option(
    "--service",
    required=True,
    type=click.Choice(["storage", "offsets"]),
    help="Service of the replica set.",
)
@click.option(
    "--set",
    "replica_set",
    required=True,
    metavar="NAME",
    help="Replica set; for storage the name of the broker.",
)
@click.option(
    "--accept-loss", is_flag=True, help="Do it; otherwise only what would be lost is printed."
)
@by_option
@yes_option
@cluster_session
def elect_node(
    session: CommandSession,
    node_id: str,
    service: str,
    replica_set: str,
    accept_loss: bool,
    by: str,
    yes: bool,
) -> None:
    """Allow the election of a node that is not in sync, after all in-sync nodes are lost for good.

    Data that only those nodes had is lost, even if they come back. Rejected while one of them is
    up, or while the replica set has a leader. The name given with --by is recorded in etcd.
    """
    if accept_loss:
        check_can_ask(yes=yes)
    candidate = service, replica_set, node_id
    done = accept_loss and yes
    plan = session.run(_elect(session, candidate, by if done else ""))
    items = [asdict(one) | {"would_lead": one.node_id == node_id} for one in plan.up]
    session.output.detail(asdict(plan) | {"done": done}, items, _ELECTION_COLUMNS)
    session.output.note(_describe_loss(plan))
    if not accept_loss:
        session.output.note("nothing was changed; do it with --accept-loss")
        return
    if not done:
        confirm(session, f"Accept this loss, and allow the election of {node_id}?")
        session.run(_elect(session, candidate, by))
    session.output.note(f"{node_id} may be elected; recorded for {by}")


async def _elect(session: CommandSession, candidate: tuple[str, str, str], by: str) -> ElectionPlan:
    async with session.admin() as admin:
        return await elect(admin, *candidate, by=by)


def _describe_loss(plan: ElectionPlan) -> str:
    """Return what may be lost, as far as the registered nodes show."""
    (chosen,) = [one for one in plan.up if one.node_id == plan.node_id]
    lines = [
        f"{', '.join(plan.lost)} had everything that {plan.replica_set} acknowledged up to epoch "
        f"{plan.served_epoch}; what {plan.node_id} lacks of it is lost"
    ]
    if chosen.epoch < plan.served_epoch:
        missing = plan.served_epoch - chosen.epoch
        lines.append(f"{plan.node_id} has nothing of the last {counted(missing, 'epoch')}")
    further = [
        one.node_id
        for one in plan.up
        if (one.epoch, one.position) > (chosen.epoch, chosen.position)
    ]
    if further:
        lines.append(f"{', '.join(further)} had more data when it registered")
    return "\n".join(lines)


def _copy_of(node: Node, copies: Mapping[tuple[str, str], Replica]) -> dict[str, Any]:
    """Return the replication state of a node; None for each value if it has none."""
    copy = copies.get((node.service, node.node_id))
    if copy is None:
        return {"in_sync": None, "position": None, "lag": None, "lag_ms": None, "problem": ""}
    return {
        "epoch": copy.epoch,
        "in_sync": copy.in_sync,
        "position": copy.position,
        "lag": copy.lag,
        "lag_ms": copy.lag_ms,
        "problem": copy.problem,
    }


def _stuck(copies: Mapping[tuple[str, str], Replica]) -> list[str]:
    return [
        f"{service} {name} can't follow its leader: {copy.problem}"
        for (service, name), copy in sorted(copies.items())
        if copy.problem
    ]


def _item(
    node: Node, brokers: Mapping[str, Any], copies: Mapping[tuple[str, str], Replica]
) -> Item:
    item: dict[str, Any] = {
        "service": node.service,
        "replica_set": node.replica_set,
        "node_id": node.node_id,
        "role": _role_of(node),
        "epoch": node.epoch,
    } | _copy_of(node, copies)
    if item["in_sync"] is not None:
        return item
    if node.service == "storage" and node.replica_set in brokers:
        log = brokers[node.replica_set]
        synced = log["synced_position"]
        return item | {"position": synced, "lag": log["next_position"] - synced}
    return item


def _yes(value: bool) -> str:
    return "yes" if value else "no"


async def _described(
    admin: Admin, nodes: list[Node]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the reports of the storage nodes by name, and which do not answer as problems."""
    descriptions: dict[str, dict[str, Any]] = {}
    problems: list[str] = []

    async def ask(name: str) -> None:
        try:
            descriptions[name] = await describe_broker(admin, name)
        except BatonError as error:
            problems.append(f"{name}: {error.reason}: {error.message}")

    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(ask(node.replica_set))
    return descriptions, problems


def _rate(
    before: dict[str, dict[str, Any]],
    after: dict[str, dict[str, Any]],
    broker: str,
    key: str,
    span_s: float,
) -> float | None:
    if before is after or broker not in before or span_s <= 0:
        return None
    growth = int(after[broker][key]) - int(before[broker][key])
    return max(growth, 0) / span_s  # it is negative if the node was restarted in between


def _extent(item: Item, first: str, end: str) -> int:
    return int(item[end]) - int(item[first])


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _until(seconds: int) -> str | None:
    return duration(seconds * 1000) if seconds else None
