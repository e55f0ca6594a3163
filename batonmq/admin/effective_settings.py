"""The settings with which a node of the cluster runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.settings.v1 import settings_service_pb2 as pb
from baton.settings.v1 import settings_service_pb2_grpc as pb_grpc
from batonmq.admin.admin import Admin
from batonmq.admin.reports import Node
from batonmq.errors import InvalidArgument, Unreachable


@dataclass(frozen=True, slots=True)
class NodeSetting:
    """One setting of a node.

    Attributes:
        variable: The environment variable that sets it.
        unit: Unit, or the kind of the value.
        default: The default as a user types it; None if the setting is required.
        allowed: Allowed values, in Markdown; empty for any.
        value: The value at the start of the process; that of a secret is masked.
        source: `default`, `environment`, or the path of the file.
    """

    name: str
    variable: str
    unit: str
    default: str | None
    allowed: str
    meaning: str
    value: str
    source: str


async def node_settings(admin: Admin, node: str, service: str = "") -> tuple[NodeSetting, ...]:
    """Return the settings that a node was started with. Needs the role admin on the cluster.

    Args:
        node: Node id, or service/node id.
        service: Service of the node; empty if the node id is unique.

    Raises:
        InvalidArgument: No node has this name, or several services have such a node.
        Unreachable: The node does not answer.
    """
    chosen = choose_node((await admin.cluster()).nodes, node, service)
    return settings_from_pb(await describe_process(admin, chosen))


async def describe_process(
    admin: Admin, chosen: Node, *, timeout_s: float | None = None
) -> pb.DescribeResponse:
    """Return what a node tells of itself. Needs the role admin on the cluster.

    Args:
        timeout_s: Timeout with retries; None for that of `admin`.

    Raises:
        Unreachable: The node does not answer, or another one has its address.
    """

    async def ask(limit_s: float) -> pb.DescribeResponse:
        channel = admin.directory.connect(chosen.address)
        try:
            stub: pb_grpc.SettingsServiceAsyncStub = pb_grpc.SettingsServiceStub(channel)
            return await stub.Describe(pb.DescribeRequest(), timeout=limit_s)
        finally:
            await channel.close()

    answer = await admin.ask(ask, timeout_s=timeout_s)
    if (answer.service, answer.node_id) != (chosen.service, chosen.node_id):
        raise Unreachable(
            f"{chosen.address} is {answer.service}/{answer.node_id}, not "
            f"{chosen.service}/{chosen.node_id}: the address has changed",
            remedy="Repeat the command.",
        )
    return answer


def settings_from_pb(answer: pb.DescribeResponse) -> tuple[NodeSetting, ...]:
    """Return the settings of an answer."""
    return tuple(
        NodeSetting(
            name=one.name,
            variable=one.variable,
            unit=one.unit,
            default=one.default_value if one.HasField("default_value") else None,
            allowed=one.allowed,
            meaning=one.meaning,
            value=one.value,
            source=one.source,
        )
        for one in answer.settings
    )


def choose_node(nodes: Sequence[Node], node: str, service: str) -> Node:
    """Return the node with a name.

    Raises:
        InvalidArgument: No node has this name, or several services have such a node.
    """
    kind, slash, node_id = node.rpartition("/")
    if slash and service and kind != service:
        raise InvalidArgument(f"node {node} is not a node of the service {service}")
    kind = kind or service
    matches = [one for one in nodes if one.node_id == node_id and kind in ("", one.service)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise InvalidArgument(
            f"no node {node} is registered",
            remedy="See: baton cluster status.",
            facts={"node": node},
        )
    names = ", ".join(f"{one.service}/{one.node_id}" for one in matches)
    raise InvalidArgument(
        f"node id {node} is not unique: {names}", remedy="Give one of these names."
    )
