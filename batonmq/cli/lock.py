"""`baton lock …`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from batonmq.admin import Admin
from batonmq.cli.output import Columns, duration
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session

app = typer.Typer(help="Look at the locks on queues.", no_args_is_help=True)

_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "STATE": "state",
    "TOKEN": "token",
    "OWNER": "client_id",
    "HELD": lambda item: item["client_id"] and duration(item["held_ms"]),
    "LEASE-AGE": lambda item: item["client_id"] and duration(item["lease_age_ms"]),
    "WAITERS": lambda item: ",".join(item["waiters"]),
}


@app.callback()
def lock() -> None:
    """Look at the locks on queues."""


@app.command("list")
def list_(
    context: typer.Context,
    *,
    group: Annotated[str, typer.Option(help="Only of this group.")] = "",
    topic: Annotated[str, typer.Option(help="Only of this topic.")] = "",
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """List who owns which queue, and who waits for it."""
    session = open_session(context, nameserver, form)
    session.run(_list(session, group, topic))


async def _list(session: Session, group: str, topic: str) -> None:
    async with Admin(session.nameserver) as admin:
        locks = await admin.list_locks(group, topic)
    session.output.items([asdict(lock) for lock in locks], _COLUMNS)
