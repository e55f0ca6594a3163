"""`baton cluster drain` and `baton cluster undrain`: maintenance of one node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from batonmq.admin.admin import Admin
from batonmq.admin.drains import drain_node, handover_obstacles, next_leader, undrain_node
from batonmq.admin.reports import ClusterNodes
from batonmq.cli.change_options import by_option, dry_run_option
from batonmq.cli.command_classes import argument, command
from batonmq.cli.output import Columns
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import InvalidArgument

HANDOVER_TIMEOUT_S = 30.0
_COLUMNS: Columns = {
    "SERVICE": "service",
    "SET": "replica_set",
    "NODE": "node_id",
    "STATE": "state",
    "LEADER": "leader_id",
    "MAY-LEAD": lambda item: ", ".join(item["successors"]),
}
_UNDRAIN_COLUMNS: Columns = {"SERVICE": "service", "NODE": "node_id", "STATE": "state"}

_node_argument = argument("node_id", metavar="NODE", help="Node id; see baton cluster status.")
_service_option = click.option(
    "--service",
    default="",
    metavar="SERVICE",
    help="Service of the node; needed only if two services have a node of this id.",
)


@command("drain")
@_node_argument
@_service_option
@by_option
@dry_run_option
@cluster_session
def drain(session: CommandSession, node_id: str, service: str, by: str, dry_run: bool) -> None:
    """Drain a storage or offsets node for maintenance: it hands over its leadership.

    It keeps following, and is not elected until `baton cluster undrain`, also after a restart. When
    the command is done, the process may be stopped. Rejected if no other node of its set could
    lead, or if too few would remain in sync. Exit status 1 if it still leads after 30 s; the
    hand-over continues.
    """
    session.run(_drain(session, node_id, service, "" if dry_run else by))


@command("undrain")
@_node_argument
@_service_option
@dry_run_option
@cluster_session
def undrain(session: CommandSession, node_id: str, service: str, dry_run: bool) -> None:
    """Allow a drained node to be elected again; it need not be up. No leader moves."""
    session.run(_undrain(session, node_id, service, dry_run=dry_run))


async def _drain(session: CommandSession, node_id: str, service: str, by: str) -> None:
    problems: list[str] = []
    async with session.admin() as admin:
        service = await _service_of(admin, node_id, service)
        plan = await drain_node(admin, service, node_id, by=by)
        item: dict[str, Any] = asdict(plan) | {"state": "would be drained", "leader_id": ""}
        if by:
            item["leader_id"] = await next_leader(
                admin, service, plan.replica_set, node_id, timeout_s=HANDOVER_TIMEOUT_S
            )
            item["state"] = "drained" if item["leader_id"] else "handing over"
        elif plan.already_drained:
            item["state"] = "drained"
        if by and not item["leader_id"]:
            reasons = "; ".join(await handover_obstacles(admin, service, plan))
            problems.append(
                f"{node_id} has not handed {plan.replica_set} over yet: {reasons}. It will once "
                f"another node can lead; undo the drain with `baton cluster undrain {node_id}`"
            )
    session.output.items([item], _COLUMNS)
    session.output.problems(problems)


async def _undrain(session: CommandSession, node_id: str, service: str, *, dry_run: bool) -> None:
    async with session.admin() as admin:
        service = await _service_of(admin, node_id, service)
        was_drained = await undrain_node(admin, service, node_id, dry_run=dry_run)
    state = "would be undrained" if dry_run else "undrained"
    item = {
        "service": service,
        "node_id": node_id,
        "was_drained": was_drained,
        "state": state if was_drained else "was not drained",
    }
    session.output.items([item], _UNDRAIN_COLUMNS)


async def _service_of(admin: Admin, node_id: str, service: str) -> str:
    """Return the service of a node; `service` if it is one of several.

    Raises:
        InvalidArgument: no service, or more than one, has this node.
    """
    services = services_of(await admin.cluster(), node_id)
    if service in services:
        return service
    if len(services) == 1 and not service:
        return services[0]
    if not services or service:
        raise InvalidArgument(
            f"{node_id} is not a node of {service or 'any service'}",
            remedy="Name a node that `baton cluster status` shows.",
        )
    raise InvalidArgument(
        f"{node_id} is a node of {' and '.join(services)}", remedy="Add --service."
    )


def services_of(cluster: ClusterNodes, node_id: str) -> list[str]:
    """Return the services that have this node, up or drained."""
    live = {one.service for one in cluster.nodes if one.node_id == node_id}
    return sorted(live | {one.service for one in cluster.drained if one.node_id == node_id})
