"""`baton group …`: the columns are named as Kafka's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from batonmq.admin import Admin
from batonmq.cli.output import Columns
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session

app = typer.Typer(help="List and describe consumer groups.", no_args_is_help=True)

_COLUMNS: Columns = {
    "GROUP": "name",
    "STATE": lambda item: "Stable" if item["members"] else "Empty",
    "MEMBERS": lambda item: len(item["members"]),
    "GENERATION": "generation",
    "TOPICS": lambda item: ",".join(s["topic"] for s in item["subscriptions"]),
}
_QUEUE_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "PARTITION": "queue_id",
    "CURRENT-OFFSET": "committed_offset",
    "LOG-END-OFFSET": "log_end_offset",
    "LAG": "lag",
    "UNACKED": "unacked_count",
    "CONSUMER-ID": "consumer_id",
    "HOST": "host",
    "CLIENT-ID": "client_id",
}


@app.command("list")
def list_(
    context: typer.Context, *, nameserver: NameserverOption = None, form: FormatOption = None
) -> None:
    """List the groups."""
    session = open_session(context, nameserver, form)
    session.run(_list(session))


async def _list(session: Session) -> None:
    async with Admin(session.nameserver) as admin:
        groups = await admin.list_groups()
    session.output.items([asdict(group) for group in groups], _COLUMNS)


@app.command()
def describe(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")],
    *,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Show how far a group is on every queue, and who owns the queue."""
    session = open_session(context, nameserver, form)
    session.run(_describe(session, name))


async def _describe(session: Session, name: str) -> None:
    async with Admin(session.nameserver) as admin:
        progress = await admin.group_progress(name)
    ids = {m.client_id: f"{m.incarnation_id:016x}" for m in progress.group.members}
    queues = [
        asdict(queue) | {"consumer_id": ids.get(queue.client_id or "")} for queue in progress.queues
    ]
    group = asdict(progress.group)
    session.output.detail(group | {"queues": queues}, queues, _QUEUE_COLUMNS)
    session.output.problems(progress.problems)
