"""`baton cluster …`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

import typer

from batonmq.admin import Admin
from batonmq.channels import connect
from batonmq.cli.output import Columns, Item, duration, wall_time
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session
from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError
from batonmq.common.health import SERVING, ask_health
from batonmq.diagnostics import describe_broker
from batonmq.reports import Node

app = typer.Typer(help="Look at the processes of the cluster.", no_args_is_help=True)

SERVICES = ("lockmgr", "nameserver", "offsets", "storage")
_HEALTH_TIMEOUT_S = 2.0
_COLUMNS: Columns = {
    "SERVICE": "service",
    "NODE": "node_id",
    "ADDRESS": "address",
    "ROLE": "role",
    "EPOCH": "epoch",
    "HEALTH": "health",
    "UPTIME": lambda item: None if item["uptime_ms"] is None else duration(item["uptime_ms"]),
    "METRICS": "metrics_address",
}
_MORE_COLUMNS: Columns = {"STARTED": lambda item: wall_time(item["start_unix_ms"])}
_BROKER_COLUMNS: Columns = {
    "BROKER": "broker",
    "DISK": "disk_state",
    "USED": lambda item: _percent(item["disk_used_percent"]),
    "FULL-IN": lambda item: _until(item["disk_seconds_until_full"]),
    "LOG-BYTES": lambda item: _extent(item, "first_position", "next_position"),
    "QUEUES": "queue_count",
    "MSG-IN/S": lambda item: _rounded(item["appended_per_s"]),
    "PARKED-PULLS": "parked_pull_count",
    "SCHEDULED": "scheduled_count",
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
    "NODE": "node_id",
    "ROLE": "role",
    "EPOCH": "epoch",
    "COPIES": "copy_count",
    "SYNCED-POSITION": "synced_position",
    "UNSYNCED": "unsynced_bytes",
}


@app.callback()
def cluster() -> None:
    """Look at the processes of the cluster."""


@app.command()
def status(
    context: typer.Context, *, nameserver: NameserverOption = None, form: FormatOption = None
) -> None:
    """Show every process that is registered, and whether it answers at this moment.

    The exit status is 1 if one does not serve or a service has no leader.
    """
    session = open_session(context, nameserver, form)
    session.run(_status(session))


async def _status(session: Session) -> None:
    async with Admin(session.nameserver) as admin:
        found = await admin.cluster()
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_look(node, Clock().unix_ms())) for node in found.nodes]
    nodes = [task.result() for task in asked]
    led = {node.service for node in found.nodes if node.leader}
    missing = [service for service in SERVICES if service not in led]
    session.output.detail(
        {"name": found.name, "generation": found.generation, "nodes": nodes, "missing": missing},
        nodes,
        _COLUMNS,
        _MORE_COLUMNS,
    )
    session.output.problems(
        [f"no {service} node leads" for service in missing]
        + [
            f"{node['service']} {node['node_id']} is {node['health']}"
            for node in nodes
            if node["health"] != SERVING
        ]
    )


async def _look(node: Node, now_unix_ms: int) -> dict[str, Any]:
    async with connect(node.address) as channel:
        health = await ask_health(channel, timeout_s=_HEALTH_TIMEOUT_S)
    return asdict(node) | {
        "role": "leader" if node.leader else "standby",
        "health": health,
        "uptime_ms": now_unix_ms - node.start_unix_ms if health == SERVING else None,
    }


@app.command()
def brokers(
    context: typer.Context,
    *,
    seconds: Annotated[
        float,
        typer.Option(min=0, max=3_600, help="Look twice, so far apart, for the rates; 0: once."),
    ] = 1.0,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Show the storage nodes: disk, log, rates, what waits, what is damaged.

    The exit status is 1 if one does not answer.
    """
    session = open_session(context, nameserver, form)
    session.run(_brokers(session, seconds))


async def _brokers(session: Session, seconds: float) -> None:
    now_s = asyncio.get_running_loop().time
    async with Admin(session.nameserver) as admin:
        nodes = [node for node in (await admin.cluster()).nodes if node.service == "storage"]
        begin_s = now_s()
        before, problems = await _described(admin, nodes)
        after = before
        if seconds and before:
            await asyncio.sleep(seconds)
            after, problems = await _described(admin, nodes)
        span_s = now_s() - begin_s
    items = [
        {"address": node.address}
        | after[node.node_id]
        | {
            "appended_per_s": _rate(before, after, node.node_id, "appended_count", span_s),
            "log_bytes_per_s": _rate(before, after, node.node_id, "next_position", span_s),
        }
        for node in nodes
        if node.node_id in after
    ]
    session.output.items(items, _BROKER_COLUMNS, _MORE_BROKER_COLUMNS)
    session.output.problems(problems)


@app.command()
def replication(
    context: typer.Context, *, nameserver: NameserverOption = None, form: FormatOption = None
) -> None:
    """Show who leads, in which epoch or term, who stands by, and what is safe.

    lockmgr and nameserver keep nothing themselves: etcd has it, in as many copies as it has
    members. storage and offsets keep one copy each.
    """
    session = open_session(context, nameserver, form)
    session.run(_replication(session))


async def _replication(session: Session) -> None:
    async with Admin(session.nameserver) as admin:
        nodes = (await admin.cluster()).nodes
        brokers, problems = await _described(
            admin, [node for node in nodes if node.service == "storage"]
        )
    items = []
    for node in nodes:
        held = brokers.get(node.node_id, {}) if node.service == "storage" else {}
        synced = held.get("synced_position")
        items.append(
            {
                "service": node.service,
                "node_id": node.node_id,
                "role": "leader" if node.leader else "standby",
                "epoch": node.epoch,
                "copy_count": 1 if node.service in ("storage", "offsets") else None,
                "synced_position": synced,
                "unsynced_bytes": None if synced is None else held["next_position"] - synced,
            }
        )
    session.output.items(items, _REPLICA_COLUMNS)
    session.output.problems(problems)


async def _described(
    admin: Admin, nodes: list[Node]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What each storage node says of itself, by name, and who says nothing."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []

    async def ask(name: str) -> None:
        try:
            found[name] = await describe_broker(admin, name)
        except BatonError as error:
            problems.append(f"{name}: {error.reason}: {error.message}")

    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(ask(node.node_id))
    return found, problems


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
    return max(growth, 0) / span_s  # less after a restart in between


def _extent(item: Item, first: str, end: str) -> int:
    return int(item[end]) - int(item[first])


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _until(seconds: int) -> str | None:
    return duration(seconds * 1000) if seconds else None
