"""`baton gateway …`: the remote clients of the gateways, the messages that they hold, commands."""

from __future__ import annotations

from dataclasses import asdict

import click

from batonmq.admin.remote_clients import RemoteClients
from batonmq.cli.arguments import group_argument
from batonmq.cli.command_classes import LazyCommand, LazyGroup
from batonmq.cli.output import Columns, Item, Minor, duration
from batonmq.cli.session import CommandSession, cluster_session

commands = LazyGroup(
    "gateway",
    help="Show the clients of the gateways and the messages that they hold. Ask a client.",
    no_args_is_help=True,
    lazy={
        "threads": LazyCommand(
            "batonmq.cli.gateway_commands:threads", "Show the stack traces of a client."
        ),
        "verify": LazyCommand(
            "batonmq.cli.gateway_commands:verify",
            "Let one push consumer consume a message once more, and show the result.",
        ),
    },
)


def _library(item: Item) -> str:
    """Return the language and the version of a client's library."""
    return f"{item['language']} {item['version']}".strip()


def _span(item: Item, name: str) -> str | None:
    return None if item[name] is None else duration(item[name])


CLIENT_COLUMNS: Columns = {
    "GATEWAY": "gateway",
    "CLIENT-ID": "client_id",
    "LIBRARY": _library,
    "HOST": "host",
    "KIND": Minor("kind"),
    "IN-FLIGHT": "in_flight_count",
    "OLDEST": lambda item: _span(item, "oldest_lease_ms"),
    "SILENT": Minor(lambda item: _span(item, "silent_ms")),
}
MORE_CLIENT_COLUMNS: Columns = {
    "OPEN-CALLS": "open_call_count",
    "NAMESPACE": "namespace",
    "IDENTITY": "identity",
    "GROUPS": lambda item: ",".join(item["group_names"]),
}
_MESSAGE_COLUMNS: Columns = {
    "GATEWAY": Minor("gateway"),
    "TOPIC": "topic",
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "OFFSET": "offset",
    "STATE": "state",
    "ATTEMPT": "attempt",
    "CLIENT-ID": "client_id",
    "HELD": Minor(lambda item: _span(item, "held_ms")),
    "LEASE-LEFT": lambda item: _span(item, "lease_left_ms"),
    "MESSAGE-GROUP": Minor("message_group"),
}
_MORE_MESSAGE_COLUMNS: Columns = {
    "LIBRARY": _library,
    "HOST": "host",
    "RENEWED": lambda item: "yes" if item["renewed"] else "no",
}


@commands.command()
@click.option("--group", default="", help="Only clients that consume for this group.")
@cluster_session
def clients(session: CommandSession, group: str) -> None:
    """List the remote clients of each gateway, with what they hold.

    A client calls every gateway of its route, so it is listed once for each. Without --group, it
    needs the role admin of the cluster.
    """
    session.run(_clients(session, group))


async def _clients(session: CommandSession, group: str) -> None:
    async with session.admin() as admin:
        report = await RemoteClients(admin).clients(group)
    session.output.items(
        [asdict(client) for client in report.clients], CLIENT_COLUMNS, MORE_CLIENT_COLUMNS
    )
    session.output.problems(report.problems)


@commands.command()
@group_argument("name")
@click.option("--client-id", default="", help="Only messages that this client holds.")
@cluster_session
def messages(session: CommandSession, name: str, client_id: str) -> None:
    """List the messages of a group that gateways hold, and which client has each.

    A leased message was delivered to a client; it is redelivered when its lease expires.
    """
    session.run(_messages(session, name, client_id))


async def _messages(session: CommandSession, name: str, client_id: str) -> None:
    async with session.admin() as admin:
        report = await RemoteClients(admin).held_messages(name, client_id=client_id)
    session.output.items(
        [asdict(message) | asdict(message.queue) for message in report.messages],
        _MESSAGE_COLUMNS,
        _MORE_MESSAGE_COLUMNS,
    )
    session.output.problems(report.problems)
