"""`baton cluster …`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import typer

from batonmq.admin import Admin
from batonmq.channels import connect
from batonmq.cli.output import Columns, duration
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session
from batonmq.common.clock import Clock
from batonmq.common.health import SERVING, ask_health
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
