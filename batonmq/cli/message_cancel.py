"""`baton message cancel`."""

from __future__ import annotations

from typing import Annotated

import click

from batonmq._producer.producer import Producer
from batonmq._producer.settings import ProducerSettings
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session


@click.command("cancel")
@argument("schedule_id", metavar="SCHEDULE_ID", help="Id of the receipt.")
@cluster_session
def cancel(session: CommandSession, schedule_id: str) -> None:
    """Take back a message that was sent for later and is not delivered yet."""
    session.run(_cancel(session, schedule_id))


async def _cancel(session: CommandSession, schedule_id: str) -> None:
    settings = ProducerSettings(security=session.security)
    async with Producer(session.nameserver, settings) as producer:
        await producer.cancel(schedule_id)
    session.output.line({"schedule_id": schedule_id}, f"{schedule_id} cancelled")
